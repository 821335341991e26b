"""Tools, reasoning, forms of answers, several answers, as the openai package sees them.

Run: `.venv/bin/pytest tests/coordinator/api/test_tools.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.api_server import RunningApi
from fixtures.scripted import ScriptedEngine, call

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
ASK: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "Rain in Elsinore?"}],
    "temperature": 0,
    "max_tokens": 300,
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningApi]:
    with ScriptedEngine() as engine, RunningApi(engine) as api:
        yield api


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningApi]:
    with ScriptedEngine(thinking=True) as engine, RunningApi(engine) as api:
        yield api


def chat(api: RunningApi) -> Any:
    return api.openai.chat.completions


def say(api: RunningApi, text: str) -> None:
    assert isinstance(api.probed, ScriptedEngine)
    api.probed.say(text)


def whole(api: RunningApi, **values: Any) -> Any:
    return chat(api).create(**(ASK | values))


def streamed(api: RunningApi, **values: Any) -> tuple[str, dict[int, list[str]], str | None, list[Any]]:
    text, calls, reason, chunks = "", {}, None, list(whole(api, stream=True, **values))
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                entry = calls.setdefault(piece.index, ["", ""])
                entry[0] += piece.function.name or ""
                entry[1] += piece.function.arguments or ""
            reason = choice.finish_reason or reason
    return text, calls, reason, chunks


def test_calls_come_back_whole_and_streamed(scripted: RunningApi) -> None:
    say(scripted, f"I shall look.\n{call('weather', town='Elsinore')}{call('weather', town='Dunsinane')}")
    choice = whole(scripted, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.startswith("I shall look.")
    assert "<tool_call>" not in choice.message.content
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [
        {"town": "Elsinore"},
        {"town": "Dunsinane"},
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    text, calls, reason, _ = streamed(scripted, tools=[WEATHER])
    assert text == choice.message.content
    assert {i: (name, json.loads(arguments)) for i, (name, arguments) in calls.items()} == {
        0: ("weather", {"town": "Elsinore"}),
        1: ("weather", {"town": "Dunsinane"}),
    }
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        call("unknown", town="Elsinore"),
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "weather"',
        "<tool_call>\nnull\n</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_a_warning(scripted: RunningApi, written: str) -> None:
    say(scripted, f"Well. {written}")
    answer = whole(scripted, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.message.content == f"Well. {written}"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "could not be read" in answer.model_extra["warnings"][0]
    text, calls, _, chunks = streamed(scripted, tools=[WEATHER])
    assert (text, calls) == (f"Well. {written}", {})
    assert any("warnings" in (chunk.model_extra or {}) for chunk in chunks)


def test_without_tools_marks_are_text(scripted: RunningApi) -> None:
    say(scripted, call("weather", town="x"))
    assert whole(scripted).choices[0].message.content == call("weather", town="x")
    assert whole(scripted, tools=[WEATHER], tool_choice="none").choices[0].message.content == call("weather", town="x")


def test_a_call_can_be_made_certain(scripted: RunningApi) -> None:
    say(scripted, "No, I will only talk, talk and talk. " * 4)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        schema = {"type": "object", "properties": {"town": {"enum": ["Elsinore", "Rome"]}}, "required": ["town"]}
        tool = {
            "type": "function",
            "function": {"name": "weather", "parameters": schema | {"additionalProperties": False}},
        }
        answer = whole(scripted, tools=[tool], tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert json.loads(answer.message.tool_calls[0].function.arguments)["town"] in ("Elsinore", "Rome")


def test_a_conversation_with_calls_and_results_is_rendered(scripted: RunningApi) -> None:
    say(scripted, "Rain.")
    messages = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Elsinore"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    assert whole(scripted, messages=messages, tools=[WEATHER]).choices[0].message.content == "Rain."


def test_reasoning_is_told_from_the_answer(thinking: RunningApi) -> None:
    say(thinking, "Is it raining? It is.</think>Yes.")
    answer = whole(thinking)
    assert answer.choices[0].message.content == "Yes."
    assert answer.choices[0].message.model_extra["reasoning_content"] == "Is it raining? It is."
    chunks = list(whole(thinking, stream=True))
    reasoning = "".join((c.choices[0].delta.model_extra or {}).get("reasoning_content", "") for c in chunks)
    assert reasoning == "Is it raining? It is."
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Yes."
    say(thinking, "Yes.")
    plain = whole(thinking, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert plain.choices[0].message.content == "Yes."


def test_an_answer_has_the_form_that_is_asked_for(api: RunningApi) -> None:
    schema = {
        "type": "object",
        "properties": {"who": {"enum": ["Hamlet", "Ophelia"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["who", "age"],
        "additionalProperties": False,
    }
    ask = {"model": "demo", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60, "seed": 5}
    for temperature in (0, 1.0):
        answer = (
            chat(api)
            .create(
                **ask,
                temperature=temperature,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "person", "schema": schema, "strict": True},
                },
            )
            .choices[0]
        )
        found = json.loads(answer.message.content or "")
        assert found["who"] in ("Hamlet", "Ophelia")
        assert 1 <= found["age"] <= 99
        assert answer.finish_reason == "stop"
    text = chat(api).create(**ask, response_format={"type": "json_object"}).choices[0].message.content
    assert (text or "").startswith("{")


def test_several_answers_share_a_prompt(api: RunningApi) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hark!"}],
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 3,
    }
    answer = chat(api).create(**ask, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage
    assert answer.usage.completion_tokens <= 24
    assert chat(api).create(**ask).choices[0].message.content == texts[0]
    streamed: dict[int, str] = {}
    for chunk in chat(api).create(**ask, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts
