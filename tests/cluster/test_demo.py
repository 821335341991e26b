"""`titan demo` as a user runs it.

Run: .venv/bin/pytest tests/cluster/test_demo.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
from fixtures.processes import run_titan


def leftovers() -> tuple[set[int], set[str]]:
    """Worker processes started here, and the demo's folders."""
    workers = {
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if "titan.worker" in (p.info["cmdline"] or []) and "--with-parent" in (p.info["cmdline"] or [])
    }
    return workers, {p.name for p in Path(tempfile.gettempdir()).glob("titan-demo-*")}


def test_answers_like_mlx_lm_and_leaves_nothing_behind() -> None:
    before = leftovers()
    done = run_titan("demo", "--json", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["tokens"] == report["reference_tokens"]
    assert len(report["tokens"]) == 24
    assert report["text"]
    assert report["tokens_per_s"] > 0
    assert len(report["workers"]) == 2
    assert set(report["executed"]) >= {"local", "remote", "ssd"}
    assert report["executed"]["remote"] > 0
    assert report["executed"]["local"] > 0
    assert leftovers() == before


def test_killed_worker_changes_nothing() -> None:
    done = run_titan("demo", "--json", "--max-tokens", "24", "--kill-worker-after", "8")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["killed"] == "worker-1"
    assert report["executed"]["ssd"] > 0


def test_chat_output_for_people() -> None:
    done = run_titan("demo", "--chat", "--prompt", "Good morrow, sir.", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "the same as mlx-lm's" in done.stdout
    assert re.search(r"worker-2 at 127\.0\.0\.1:\d+", done.stdout)


def test_serves_until_interrupted_and_the_curl_line_works() -> None:
    before = leftovers()
    demo = subprocess.Popen(
        [sys.executable, "-m", "titan.cli", "demo", "--serve"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )
    try:
        assert demo.stderr is not None
        shown = ""
        deadline = time.monotonic() + 60
        while not shown.rstrip().endswith("'"):
            line = demo.stderr.readline()
            assert line, shown
            assert time.monotonic() < deadline, shown
            shown += line
        url = re.search(r"curl (http://\S+)", shown)
        body = re.search(r"-d '(.*)'", shown)
        assert url is not None
        assert body is not None
        request = urllib.request.Request(url[1], body[1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"]
        demo.send_signal(signal.SIGINT)
        assert demo.wait(40) == 0
    finally:
        demo.kill()
        demo.wait()
        assert demo.stderr is not None
        demo.stderr.close()
    assert leftovers() == before


def test_wrong_options_are_refused_with_a_sentence() -> None:
    done = run_titan("demo", "--serve", "--json")
    assert done.returncode == 2
    assert "leave one out" in done.stderr
    assert run_titan("demo", "--prompt", " ").returncode == 2
    missing = run_titan("demo", "--json", "--model", "/nonexistent-model")
    assert missing.returncode == 1
    assert "/nonexistent-model" in missing.stderr
