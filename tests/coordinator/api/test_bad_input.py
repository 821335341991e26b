"""Requests that are refused: status, shape and the field they name, and nothing else disturbed.

Run: `.venv/bin/pytest tests/coordinator/api/test_bad_input.py`.
"""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import CONTEXT_TOKENS, DEADLINE_S, PROMPTS, ProbedEngine

from titan.coordinator.api import Limits

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hark!"}], "max_tokens": 1}
TEXT: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 1}


def check_shape(response: Any, status: int, code: str, param: str | None = None) -> str:
    """The message, after everything around it was checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-request-id"]
    return error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 7}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"unknown": 1}}, "stream_options.unknown"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hark!"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
            "response_format",
        ),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_bad_field_of_a_chat_is_named(api: RunningApi, changes: dict[str, Any], param: str) -> None:
    message = check_shape(api.http.post(CHAT_PATH, json=CHAT | changes), 400, "invalid_request", param)
    assert param.split(".")[-1].split("[")[0] in message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [0, 2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"n": 17}, "n"),
        ({"n": 5, "prompt": ["a"] * 16}, "n"),
        ({"suffix": "end"}, "suffix"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_bad_field_of_a_completion_is_named(api: RunningApi, changes: dict[str, Any], param: str) -> None:
    check_shape(api.http.post(TEXT_PATH, json=TEXT | changes), 400, "invalid_request", param)


def test_missing_fields_are_named(api: RunningApi) -> None:
    check_shape(api.http.post(CHAT_PATH, json={"model": "demo"}), 400, "invalid_request", "messages")
    check_shape(api.http.post(TEXT_PATH, json={"model": "demo"}), 400, "invalid_request", "prompt")


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none", "functions": None, "logit_bias": {}, "response_format": {"type": "text"}},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "modalities": ["text"], "logprobs": False},
        {"temperature": None, "top_p": 0, "top_k": -1, "min_p": 0, "seed": None, "stop": None, "stream": None},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y", "name": "Ann"}]},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
        {"model": None},
    ],
)
def test_harmless_and_neutral_fields_pass(api: RunningApi, changes: dict[str, Any]) -> None:
    response = api.http.post(CHAT_PATH, json=CHAT | changes)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "line 1 column 2"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"model": "\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "1e999"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "cannot be read"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "64 levels"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "64 levels"),
    ],
    ids=range(15),
)
def test_a_body_that_is_no_proper_json_object_is_refused(api: RunningApi, body: bytes, words: str) -> None:
    for path in (CHAT_PATH, TEXT_PATH):
        assert words in check_shape(api.http.post(path, content=body), 400, "invalid_request")


def test_a_compressed_body_is_refused(api: RunningApi) -> None:
    body = gzip.compress(json.dumps(TEXT).encode())
    message = check_shape(
        api.http.post(TEXT_PATH, content=body, headers={"Content-Encoding": "gzip"}), 400, "invalid_request"
    )
    assert "uncompressed" in message


def test_what_exceeds_the_context_says_limit_length_and_what_fits(api: RunningApi) -> None:
    prompt = [5] * 1000
    too_much = TEXT | {"prompt": prompt, "max_tokens": 25}
    message = check_shape(api.http.post(TEXT_PATH, json=too_much), 400, "context_length_exceeded", "prompt")
    assert "1000 tokens" in message
    assert str(CONTEXT_TOKENS) in message
    assert "at most 24" in message
    for max_tokens in (1, None):
        too_long = TEXT | {"prompt": [5] * CONTEXT_TOKENS, "max_tokens": max_tokens}
        check_shape(api.http.post(TEXT_PATH, json=too_long), 400, "context_length_exceeded", "prompt")
    huge = CHAT | {"max_tokens": 10**40}
    check_shape(api.http.post(CHAT_PATH, json=huge), 400, "context_length_exceeded", "messages")


def test_an_unknown_model_is_a_404_with_the_one_that_is_served(api: RunningApi) -> None:
    message = check_shape(api.http.post(CHAT_PATH, json=CHAT | {"model": "x\n\x1b"}), 404, "model_not_found", "model")
    assert "'demo'" in message
    assert "\n" not in message


def test_a_chat_template_that_refuses_is_the_clients_error(api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = api.probed.engine.served().tokenizer
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    message = check_shape(api.http.post(CHAT_PATH, json=CHAT), 400, "invalid_request", "messages")
    assert "roles must alternate" in message


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/models/", 405, "method_not_allowed"),
        ("GET", CHAT_PATH, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("OPTIONS", CHAT_PATH, 405, "method_not_allowed"),
        ("GET", "/v1/../../etc/passwd", 404, "not_found"),
    ],
)
def test_unknown_paths_and_methods(api: RunningApi, method: str, path: str, status: int, code: str) -> None:
    check_shape(api.http.request(method, path), status, code)


def test_a_good_request_works_after_all_of_this(api: RunningApi) -> None:
    assert api.http.post(CHAT_PATH, json=CHAT).status_code == 200


class Raw:
    """A bare connection, for requests that no client library would send."""

    def __init__(self, api: RunningApi, *parts: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", api.server.port), timeout=DEADLINE_S)
        self.send(*parts)

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self._socket.sendall(part)

    def answer(self, until: bytes | None = None) -> bytes:
        """What the server says until it closes, or until `until` is seen; closes the connection."""
        with self._socket:
            received = b""
            while (data := self._socket.recv(65536)) and (until is None or until not in received + data):
                received += data
            return received + data


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_a_body_over_the_limit_is_refused_announced_or_not(probed: ProbedEngine) -> None:
    with RunningApi(probed, limits=Limits(body_bytes=1000)) as api:
        big = TEXT | {"user": "x" * 1000}
        for response in (
            api.http.post(TEXT_PATH, json=big),
            api.http.post(TEXT_PATH, content=iter([json.dumps(big).encode()])),
        ):
            assert "1000 bytes" in check_shape(response, 413, "request_too_large")
        announced = Raw(api, HEAD + b"Content-Length: 1001\r\n\r\n")
        assert b" 413 " in announced.answer(b"request_too_large"), "the answer must not wait for the body"
        sent = Raw(api, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert b" 413 " in sent.answer(b"request_too_large"), "the answer must not wait for the end"
        assert api.http.post(TEXT_PATH, json=TEXT).status_code == 200


def test_what_does_not_arrive_in_time_is_cut(probed: ProbedEngine) -> None:
    with RunningApi(probed, limits=Limits(body_s=0.3, head_s=0.3, keep_alive_s=1)) as api:
        assert b" 408 " in Raw(api, HEAD + b"Content-Length: 50\r\n\r\n", b"{").answer(b"request_timeout")
        assert Raw(api, HEAD).answer() == b""
        assert Raw(api).answer() == b""
        assert api.http.get("/health").status_code == 200


def test_what_is_no_http_or_has_a_huge_head_is_refused_in_the_same_shape(api: RunningApi) -> None:
    for parts in (
        [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
        [HEAD, b"X-Filler: " + b"x" * (33 << 10)],
    ):
        answer = Raw(api, *parts).answer()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
