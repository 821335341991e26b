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
import time
import urllib.request
from pathlib import Path

import psutil
from fixtures.processes import run_titan


def started_in(folder: Path) -> list[int]:
    """Processes whose TMPDIR is `folder`: the demo and all that it started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue  # ended meanwhile, or not ours
    return found


def assert_nothing_is_left(folder: Path) -> None:
    assert started_in(folder) == []
    left = {path.name for path in folder.iterdir()}
    assert left <= {"mlx"}, "only the kernels that MLX compiles and keeps may be there"


def test_answers_like_mlx_lm_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run_titan("demo", "--json", "--max-tokens", "24", TMPDIR=str(tmp_path))
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
    assert_nothing_is_left(tmp_path)


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


def test_serves_until_interrupted_and_the_curl_line_works(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "titan.cli", "demo", "--serve"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TMPDIR": str(tmp_path)},
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
        assert len(started_in(tmp_path)) == 3
        demo.send_signal(signal.SIGINT)
        assert demo.wait(40) == 0
    finally:
        demo.kill()
        demo.wait()
        assert demo.stderr is not None
        demo.stderr.close()
    assert_nothing_is_left(tmp_path)


def test_wrong_options_are_refused_with_a_sentence() -> None:
    done = run_titan("demo", "--serve", "--json")
    assert done.returncode == 2
    assert "leave one out" in done.stderr
    assert run_titan("demo", "--prompt", " ").returncode == 2
    missing = run_titan("demo", "--json", "--model", "/nonexistent-model")
    assert missing.returncode == 1
    assert "/nonexistent-model" in missing.stderr
