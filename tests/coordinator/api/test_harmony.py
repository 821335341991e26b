"""gpt-oss' channels: as text comes in pieces, and as the openai package sees them.

Run: `.venv/bin/pytest tests/coordinator/api/test_harmony.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fixtures.api_server import RunningApi
from fixtures.scripted import ScriptedEngine

from titan.coordinator.api.harmony import FINAL, MAX_HEADER, HarmonyState

THOUGHT = "<|channel|>analysis<|message|>Is it raining?<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I shall look.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"town": "Rome"}<|call|>'
ROLE_CALL = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"town": "Rome"}<|call|>'
CALLED = [("call", "weather", '{"town": "Rome"}'), ("called", "weather", "")]
TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": TOWN}}


def read(text: str, step: int, prompt: str = "<|start|>assistant") -> list[tuple[str, str, str]]:
    """What a text means that comes `step` characters at a time; pieces of one kind joined."""
    state = HarmonyState(prompt)
    found = [p for at in range(0, len(text), step) for p in state.split(text[at : at + step])] + state.finish()
    return [
        (*key, "".join(text for *_, text in pieces))
        for key, pieces in itertools.groupby(found, key=lambda piece: piece[:2])
    ]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (THOUGHT + ANSWER, [("reasoning", "", "Is it raining?"), ("said", "", "Yes.")]),
        (THOUGHT + PREAMBLE + CALL, [("reasoning", "", "Is it raining?"), ("said", "", "I shall look."), *CALLED]),
        (ROLE_CALL, CALLED),
        (CALL.removesuffix("<|call|>"), CALLED),
        ("<|channel|>final<|message|>a < b <| c <|en", [("said", "", "a < b <| c <|en")]),
        ("<|channel|>analysis to=browser.open code<|message|>{}<|call|>", [("reasoning", "", "{}")]),
        ("Yes, without any channel.", [("said", "", "Yes, without any channel.")]),
        ("x" * (MAX_HEADER + 50), [("said", "", "x" * (MAX_HEADER + 50))]),
        ("<|channel|>anal", []),
        ("<|channel|>final<|message|>One<|channel|>final<|message|>Two", [("said", "", "OneTwo")]),
    ],
)
def test_a_text_means_the_same_in_any_pieces(text: str, meant: list[tuple[str, str, str]], step: int) -> None:
    assert read(text, step) == meant


def test_a_prompt_may_have_opened_the_message() -> None:
    assert read('{"a": 1}', 2, f"<|end|><|start|>assistant{FINAL}") == [("said", "", '{"a": 1}')]
    assert read("Hm.<|end|>", 2, "<|start|>assistant<|channel|>analysis<|message|>") == [("reasoning", "", "Hm.")]


@pytest.fixture(scope="module")
def harmony() -> Iterator[RunningApi]:
    with ScriptedEngine(harmony=True) as engine, RunningApi(engine) as api:
        yield api


def ask(api: RunningApi, text: str, **values: Any) -> Any:
    assert isinstance(api.probed, ScriptedEngine)
    api.probed.say(text)
    messages = values.pop("messages", [{"role": "user", "content": "Rain?"}])
    return api.openai.chat.completions.create(
        model="scripted", temperature=0, max_tokens=300, messages=messages, **values
    )


def test_reasoning_and_answer_are_told_apart(harmony: RunningApi) -> None:
    message = ask(harmony, THOUGHT + ANSWER.removesuffix("<|return|>")).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "Is it raining?")
    chunks = list(ask(harmony, THOUGHT + ANSWER.removesuffix("<|return|>"), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Yes."


def test_calls_are_read_and_what_is_none_is_text(harmony: RunningApi) -> None:
    choice = ask(harmony, THOUGHT + "<|start|>assistant" + CALL, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"town": "Rome"}]
    for broken in (CALL.replace('"Rome"}', ""), CALL.replace("weather", "tides")):
        answer = ask(harmony, broken, tools=[WEATHER])
        assert answer.choices[0].message.tool_calls is None
        assert "could not be read" in answer.model_extra["warnings"][0]
        assert answer.choices[0].message.content.startswith("<|channel|>commentary to=functions.")


def test_a_call_and_a_form_can_be_made_certain(harmony: RunningApi) -> None:
    choice = ask(harmony, "No. " * 40, tools=[WEATHER], tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "weather"
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert json.loads(ask(harmony, "No. " * 40, response_format=form).choices[0].message.content) == {"n": 1}


def test_effort_goes_to_the_template_that_knows_it(harmony: RunningApi, api: RunningApi) -> None:
    tokens = [ask(harmony, "Hm.", reasoning_effort=effort).usage.prompt_tokens for effort in ("low", "minimal")]
    assert tokens[0] != tokens[1]
    with pytest.raises(openai.BadRequestError, match="knows no reasoning_effort"):
        api.openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Rain?"}], reasoning_effort="low"
        )


def test_the_model_sees_why_it_made_a_call(harmony: RunningApi) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "user", "content": "Rain?"}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    lengths = []
    for thought in ({}, {"reasoning_content": "I need the weather for that."}):
        called = {"role": "assistant", "content": None, "tool_calls": [call], **thought}
        lengths.append(ask(harmony, "Hm.", messages=[asked, called, answered]).usage.prompt_tokens)
    assert lengths[1] > lengths[0] + 4
