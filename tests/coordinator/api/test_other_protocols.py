"""`/v1/messages` with the anthropic package, `/v1/responses` with openai's.

Run: `.venv/bin/pytest tests/coordinator/api/test_other_protocols.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import DEADLINE_S
from fixtures.scripted import ScriptedEngine, call

PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TALK = f"I look.\n{call('weather', town='Elsinore')}"


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningApi]:
    with ScriptedEngine() as engine, RunningApi(engine) as api:
        yield api


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningApi]:
    with ScriptedEngine(thinking=True) as engine, RunningApi(engine) as api:
        yield api


def say(api: RunningApi, text: str) -> None:
    assert isinstance(api.probed, ScriptedEngine)
    api.probed.say(text)


@pytest.fixture
def client(scripted: RunningApi) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=scripted.url, api_key="unused", max_retries=0, timeout=DEADLINE_S) as made:
        yield made


def responses(api: RunningApi) -> Any:
    return api.openai.responses


ASK: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}],
}
TOOL: dict[str, Any] = {"name": "weather", "description": "of a town", "input_schema": PARAMETERS}


def test_messages_whole_and_streamed(scripted: RunningApi, client: Any) -> None:
    say(scripted, "It rains.")
    message = client.messages.create(**ASK)
    assert [block.text for block in message.content if block.type == "text"] == ["It rains."]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "scripted")
    assert (
        message.usage.input_tokens
        == client.messages.count_tokens(model="scripted", system=ASK["system"], messages=ASK["messages"]).input_tokens
    )
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "It rains."
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", message.usage.output_tokens)
    cut = client.messages.create(**(ASK | {"max_tokens": 1}))
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(**(ASK | {"stop_sequences": ["rain", "zzz"]}))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rain")


def test_messages_call_tools(scripted: RunningApi, client: Any) -> None:
    say(scripted, TALK)
    message = client.messages.create(**ASK, tools=[TOOL])
    assert message.stop_reason == "tool_use"
    text, use = message.content
    assert text.type == "text"
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("weather", {"town": "Elsinore"})
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"town": "Elsinore"}
    say(scripted, "Wet.")
    following = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": use.id, "name": "weather", "input": use.input}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    answer = client.messages.create(**(ASK | {"messages": following}), tools=[TOOL])
    assert answer.content[0].text == "Wet."
    forced = client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert forced.content[0].type in ("tool_use", "text")


def test_messages_show_reasoning(thinking: RunningApi) -> None:
    say(thinking, "Hm.</think>Yes.")
    with anthropic.Anthropic(base_url=thinking.url, api_key="x", max_retries=0) as made:
        client: Any = made
        message = client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Hm."
        with client.messages.stream(**ASK) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 10**9}, "context"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_messages_refuse_in_their_own_shape(client: Any, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK, extra_body=changes)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert word in body["error"]["message"]


def test_messages_errors_have_their_own_types(scripted: RunningApi, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**(ASK | {"model": "other"}))
    missing = scripted.http.post("/v1/messages", json={"model": "scripted", "messages": ASK["messages"]})
    assert missing.json()["error"]["message"].startswith("max_tokens is missing")
    assert scripted.http.get("/v1/messages").json()["type"] == "error"


def test_responses_whole_and_streamed(scripted: RunningApi) -> None:
    say(scripted, "It rains.")
    ask: dict[str, Any] = {"model": "scripted", "input": "Rain?", "instructions": "Be brief."}
    response = responses(scripted).create(**ask)
    assert (response.output_text, response.status) == ("It rains.", "completed")
    assert response.usage
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    events = list(responses(scripted).create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "It rains."
    with responses(scripted).stream(**ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "It rains."
    cut = responses(scripted).create(**ask, max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_responses_call_functions(scripted: RunningApi) -> None:
    say(scripted, TALK)
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    ask: dict[str, Any] = {"model": "scripted", "input": [{"role": "user", "content": "Rain?"}], "tools": [tool]}
    response = responses(scripted).create(**ask)
    assert [item.type for item in response.output] == ["message", "function_call"]
    made = response.output[1]
    assert made.type == "function_call"
    assert json.loads(made.arguments) == {"town": "Elsinore"}
    events = list(responses(scripted).create(**ask, stream=True))
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"town": "Elsinore"}
    say(scripted, "Wet.")
    echoed = [item.model_dump(exclude_none=True) for item in response.output]
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    following = responses(scripted).create(**(ask | {"input": [*ask["input"], *echoed, output]}))
    assert following.output_text == "Wet."


def test_responses_have_a_form_and_refuse_what_is_not_here(api: RunningApi) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = responses(api).create(model="demo", input="x", text=text, temperature=0)
    assert json.loads(answer.output_text) == {"a": 1}
    for body, param in (
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "background": True}, "background"),
        ({}, "input"),
    ):
        response = api.http.post("/v1/responses", json={"model": "demo"} | body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_silent_stream_gets_comments(scripted: RunningApi) -> None:
    from titan.coordinator.api import Limits

    say(scripted, "It rains.")
    assert isinstance(scripted.probed, ScriptedEngine)
    with RunningApi(scripted.probed, limits=Limits(stream_comment_s=0.05)) as api:
        release = scripted.probed.engine.run_between_steps(lambda: __import__("time").sleep(0.4))
        with api.http.stream("POST", "/v1/messages", json=ASK | {"stream": True}) as response:
            lines = list(response.iter_lines())
        release.result(DEADLINE_S)
    assert any(line.startswith(": 0 of ") for line in lines)
    assert "event: message_stop" in lines
