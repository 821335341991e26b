"""`titan chat`, `titan top`, `titan bench serve`, `titan keys` against a server in this process.

Run: `.venv/bin/pytest tests/coordinator/test_serving_cli.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import ProbedEngine
from typer.testing import CliRunner

from titan.cli import app
from titan.coordinator.api import Operations


@pytest.fixture(scope="module")
def api() -> Iterator[RunningApi]:
    state = {"model": {"name": "demo"}, "plan": {"nodes": [{"name": "home", "experts": 3}]}, "workers": []}
    with ProbedEngine() as probed, RunningApi(probed, operations=Operations(bytes, lambda: state)) as running:
        yield running


def run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_chat_answers_what_it_is_given(api: RunningApi) -> None:
    asked = run("chat", "--url", api.url, "--temperature", "0", "--max-tokens", "12", text="Who art thou?")
    body = {"messages": [{"role": "user", "content": "Who art thou?"}], "temperature": 0, "max_tokens": 12}
    expected = api.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert asked.split() == expected.split()


def test_top_shows_the_cluster(api: RunningApi) -> None:
    shown = run("top", "--url", api.url, "--once")
    assert "demo — ready" in shown
    assert "home" in shown
    assert json.loads(run("top", "--url", api.url, "--json"))["engine"]["state"] == "ready"


def test_bench_serve_measures_over_http_and_the_engine_alone(api: RunningApi) -> None:
    rows = json.loads(
        run("bench", "serve", "--url", api.url, "--concurrency", "1,2", "--tokens", "12", "--repeats", "1", "--json")
    )
    assert [row["concurrency"] for row in rows] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["gap_ms_p99"] >= row["gap_ms_p50"] for row in rows)
    (row,) = json.loads(run("bench", "serve", "--concurrency", "2", "--tokens", "8", "--repeats", "1", "--json"))
    assert row["identical"]
    assert row["ratio"] > 0


def test_keys_add_prints_the_key_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = run("keys", "add", "ann", "--file", str(path), "--operator").strip()
    assert key.startswith("titan-")
    assert key not in path.read_text()
    assert path.read_text().startswith("ann operator sha256:")


def test_nobody_at_the_address_is_a_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:1", "--once"])
    assert result.exit_code != 0
    assert "does not answer" in str(result.exception)
