"""Disconnects, failures, a full queue, loading and stopping, seen from a client.

Run: `.venv/bin/pytest tests/coordinator/api/test_lifecycle.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import DEADLINE_S, PROMPTS, ProbedEngine, wait_until

from titan.coordinator.api import Readiness

BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
LONG = BODY | {"max_tokens": 900}


class Gate:
    """Holds the engine's thread before one model call until the test opens it."""

    def __init__(self, probed: ProbedEngine, at_call: int = 0) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._remaining = at_call
        probed.probe.before(self._before)

    def _before(self, _: int) -> None:
        self._remaining -= 1
        if self._remaining == -1:
            self.reached.set()
            assert self.open.wait(DEADLINE_S)


@contextlib.contextmanager
def connection(api: RunningApi, body: dict[str, Any]) -> Iterator[None]:
    """A request whose client is there as long as the block lasts and reads nothing."""
    client = http.client.HTTPConnection("127.0.0.1", api.server.port, timeout=DEADLINE_S)
    try:
        client.request("POST", "/v1/completions", json.dumps(body))
        yield
    finally:
        client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at_call", [1, 6])
def test_a_client_that_disconnects_cancels_its_generation(api: RunningApi, stream: bool, at_call: int) -> None:
    gate = Gate(api.probed, at_call)
    cancelled = api.probed.engine.status().cancelled
    with connection(api, LONG | {"stream": stream}):
        wait_until(gate.reached.is_set, "the model call")
    # The server must have seen the disconnect before the engine goes on, or more steps would be right.
    wait_until(lambda: api.probed.engine.status().cancelling == 1, "the disconnect to arrive")
    gate.open.set()
    wait_until(api.idle, "the generation to end")
    assert api.probed.engine.status().cancelled == cancelled + 1
    assert len(api.probed.probe.call_tokens) == at_call + 1


def test_a_client_that_leaves_the_queue_frees_its_place(api: RunningApi) -> None:
    gate = Gate(api.probed)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(api.http.post, "/v1/completions", json=BODY)
        wait_until(gate.reached.is_set, "the first request to run")
        with connection(api, LONG):
            wait_until(lambda: api.probed.engine.status().queued == 1, "the second to wait")
        wait_until(lambda: api.probed.engine.status().queued == 0, "it to leave the queue")
        gate.open.set()
        assert running.result(DEADLINE_S).status_code == 200


@pytest.mark.parametrize("at_call", [0, 4])
def test_a_failure_in_the_model_is_a_500_and_the_next_request_works(api: RunningApi, at_call: int) -> None:
    expected = api.http.post("/v1/completions", json=BODY).json()["choices"]
    remaining = at_call

    def fail_from_then_on(_: int) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise ValueError("secret inner words")

    api.probed.probe.before(fail_from_then_on)
    response = api.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert "mine-1" in error["message"]
    assert "secret" not in error["message"]
    api.probed.probe.reset()
    assert api.http.post("/v1/completions", json=BODY).json()["choices"] == expected
    assert api.http.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_when_one_prompt_of_several_fails_the_others_are_cancelled(api: RunningApi, stream: bool) -> None:
    calls = 0

    def fail_once(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("broken")
        wait_until(lambda: api.probed.engine.status().cancelling == 2, "the other prompts to be cancelled")

    api.probed.probe.before(fail_once)
    before = api.probed.engine.status()
    response = api.http.post(
        "/v1/completions", json=BODY | {"prompt": ["a b", "c d", "e f"], "stream": stream, "max_tokens": 500}
    )
    assert response.status_code == (200 if stream else 500)
    assert "engine_failed" in response.text
    wait_until(api.idle, "the engine to be idle")
    after = api.probed.engine.status()
    assert (after.failed - before.failed, after.cancelled - before.cancelled) == (1, 2)


def test_a_failure_in_the_middle_of_a_stream_is_an_event(api: RunningApi) -> None:
    calls = 0

    def fail(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= 5:
            raise ValueError("broken")

    api.probed.probe.before(fail)
    events = api.events("/v1/completions", BODY)
    assert events[-1]["error"]["code"] == "engine_failed"
    assert len(events) > 1
    assert "[DONE]" not in events
    calls = 0
    with pytest.raises(openai.APIError, match="generation failed"):
        list(api.openai.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=8, stream=True))
    api.probed.probe.reset()
    assert api.events("/v1/completions", BODY)[-1] == "[DONE]"


def test_a_full_queue_is_a_429_that_says_when_to_come_back(api: RunningApi) -> None:
    gate = Gate(api.probed)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(api.http.post, "/v1/completions", json=BODY)
        wait_until(gate.reached.is_set, "the first request to run")
        waiting = pool.submit(api.http.post, "/v1/completions", json=BODY | {"prompt": ["a"] * 8, "max_tokens": 1})
        wait_until(lambda: api.probed.engine.status().queued == 8, "the queue to be full")
        refused = api.http.post("/v1/completions", json=BODY)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        gate.open.set()
        assert running.result(DEADLINE_S).status_code == 200
        assert len(waiting.result(DEADLINE_S).json()["choices"]) == 8


def test_ready_waits_for_the_plan(probed: ProbedEngine) -> None:
    state = [Readiness(False, "worker mini holds 12 of 40 experts")]
    with RunningApi(probed, readiness=lambda: state[0]) as api:
        response = api.http.get("/ready")
        assert response.status_code == 503
        assert response.json()["phase"] == "worker mini holds 12 of 40 experts"
        state[0] = Readiness()
        assert api.http.get("/ready").status_code == 200
        assert api.http.get("/health").json() == {"status": "ok"}


def test_while_the_model_loads_health_is_good_and_the_rest_says_what_is_missing() -> None:
    loading = ProbedEngine()
    with RunningApi(loading) as api:
        assert api.http.get("/health").status_code == 200
        ready = api.http.get("/ready")
        assert (ready.status_code, ready.json()["state"], ready.json()["ready"]) == (503, "loading", False)
        for response in (api.http.get("/v1/models"), api.http.post("/v1/completions", json=BODY)):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_not_ready"
            assert int(response.headers["retry-after"]) >= 1
        with loading:
            assert api.http.get("/ready").status_code == 200
        assert api.http.get("/ready").json()["state"] == "stopping"


def test_an_engine_that_stops_ends_a_stream_with_an_error() -> None:
    with ProbedEngine(max_sequences=1) as probed, RunningApi(probed) as api:
        gate = Gate(probed, at_call=4)
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(api.events, "/v1/completions", LONG)
            queued = pool.submit(api.http.post, "/v1/completions", json=BODY)
            wait_until(lambda: gate.reached.is_set() and probed.engine.status().queued == 1, "both requests")
            assert not probed.engine.stop(0.0)
            gate.open.set()
            assert queued.result(DEADLINE_S).status_code == 503
            assert streamed.result(DEADLINE_S)[-1]["error"]["code"] == "engine_not_ready"
