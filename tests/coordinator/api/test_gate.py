"""Keys, Host and Origin, request ids, the last catch. Run: `.venv/bin/pytest tests/coordinator/api/test_gate.py`."""

from __future__ import annotations

import logging
from typing import Any

import openai
import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import ProbedEngine

from titan.common.errors import ConfigError, Forbidden, Unauthorized
from titan.common.origin import check_local
from titan.coordinator.api import ApiKeys, create_app

KEY, OTHER_KEY = "first-key-0123456789", "second-key-9876543210"
BODY: dict[str, Any] = {"model": "demo", "prompt": "Enter", "max_tokens": 1}


@pytest.mark.parametrize("value", [None, b"", b"Bearer", b"Bearer ", b"Basic abc", b"Bearer wrong", KEY.encode()])
def test_only_a_bearer_of_a_known_key_passes(value: bytes | None) -> None:
    with pytest.raises(Unauthorized):
        ApiKeys.of([KEY]).check(value)


def test_any_of_the_keys_passes_and_none_is_shown() -> None:
    keys = ApiKeys.of([KEY, OTHER_KEY])
    keys.check(f"Bearer {KEY}".encode())
    keys.check(f"bearer {OTHER_KEY}".encode())
    assert KEY not in repr(keys)


def test_no_key_opens_no_api_without_keys() -> None:
    with pytest.raises(Unauthorized):
        ApiKeys.of([]).check(b"Bearer ")


def test_with_keys_everything_but_the_probes_needs_one(probed: ProbedEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), RunningApi(probed, api_keys=ApiKeys.of([KEY])) as api:
        assert api.http.get("/health").status_code == 200
        assert api.http.get("/ready").status_code == 200
        for response in (
            api.http.get("/v1/models"),
            api.http.post("/v1/completions", json=BODY),
            api.http.get("/elsewhere", headers={"Authorization": "Bearer wrong"}),
        ):
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["x-request-id"]
        with pytest.raises(openai.AuthenticationError):
            api.openai.models.list()
        good = {"Authorization": f"Bearer {KEY}", "Host": "models.example", "Origin": "https://chat.example"}
        assert api.http.post("/v1/completions", json=BODY, headers=good).status_code == 200
        with api.openai.with_options(api_key=KEY) as client:
            assert [model.id for model in client.models.list()] == ["demo"]
    logged = [repr(vars(record)) for record in caplog.records if record.name.startswith(("titan", "uvicorn"))]
    assert any("/v1/completions" in line for line in logged)
    assert not any(KEY in line or "Bearer" in line for line in logged)


def test_without_keys_only_loopback_is_served(probed: ProbedEngine) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "mini.local"):
        with pytest.raises(ConfigError, match="no API key"):
            create_app(probed.engine, listen_host=host)
    for host in ("127.0.0.1", "::1", "localhost"):
        create_app(probed.engine, listen_host=host)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8080", None),
        ("", None),
        (None, None),
        ("192.168.1.5:8080", None),
        ("localhost.evil.example", None),
        ("[::1", None),
        ("localhost:8080", "https://evil.example"),
        ("localhost:8080", "null"),
        ("localhost:8080", ""),
        ("localhost:8080", "http://localhost.evil.example"),
    ],
)
def test_a_foreign_host_or_web_page_is_refused(host: str | None, origin: str | None) -> None:
    with pytest.raises(Forbidden):
        check_local(host, origin, "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", None),
        ("LOCALHOST:8080", None),
        ("127.0.0.1:8080", "http://localhost:3000"),
        ("127.9.9.9", "http://127.0.0.1:5173"),
        ("[::1]:8080", "http://[::1]"),
        ("box.localhost:1", None),
    ],
)
def test_loopback_names_pass(host: str, origin: str | None) -> None:
    check_local(host, origin, "127.0.0.1")


def test_a_rebound_name_gets_a_403_and_nothing_else(api: RunningApi) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        for method, path in (("GET", "/v1/models"), ("GET", "/ready"), ("POST", "/v1/completions")):
            response = api.http.request(method, path, headers=headers)
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "forbidden"
    assert api.probed.probe.call_tokens == []


def test_a_request_id_is_echoed_when_it_is_one(api: RunningApi) -> None:
    assert api.http.get("/health", headers={"X-Request-Id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    made = {
        api.http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        for bad in ("", "a b", "x" * 129, 'a"b', "a;b=c")
    }
    assert len(made) == 5
    assert all(len(identity) == 32 for identity in made)


def test_an_error_that_nobody_expected_is_a_500_in_the_same_shape(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("inner detail")

    monkeypatch.setattr(api.probed.engine, "served", broken)
    response = api.http.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "inner detail" not in response.text
    assert "inner detail" in caplog.text
    monkeypatch.undo()
    assert api.http.get("/v1/models").status_code == 200
