"""`titan chat` at a terminal: a real process behind a pseudo-terminal.

Run: `.venv/bin/pytest tests/coordinator/test_chat.py`.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import DEADLINE_S, ProbedEngine, wait_until

from titan.coordinator.chat_view import split_finished

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
HELP = "/save FILE"


class Terminal:
    """`titan chat` and the person in front of it."""

    def __init__(self, url: str, home: Path) -> None:
        arguments = ["titan", "chat", "--url", url, "--temperature", "0", "--max-tokens", "24"]
        program = (
            "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv = sys.argv[1:]\n"
            "from titan.cli import main; main()"
        )
        environment = os.environ | {"HOME": str(home), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self._fd, text.encode())

    def see(self, text: str) -> str:
        """Wait until `text` is shown; returns all since something was typed."""
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{text!r} is not shown: {self.shown!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                self.shown += ESCAPES.sub("", os.read(self._fd, 1 << 16).decode("utf-8", "replace"))
        return self.shown

    def asks(self) -> None:
        """Wait until the prompt is the last thing shown."""
        self._until(r"> $")

    def _until(self, pattern: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.shown):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern} is not shown: {self.shown[:2000]!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                self.shown += ESCAPES.sub("", os.read(self._fd, 1 << 16).decode("utf-8", "replace"))

    def answers(self) -> None:
        """Wait until something of an answer is shown below what was typed."""
        self._until(r"\n\s*\w")

    def close(self) -> None:
        """End the program if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            os.close(self._fd)

    def end(self) -> int:
        """Leave; returns the exit status."""
        self.asks()
        self.type("/exit\r")
        deadline_s = time.monotonic() + DEADLINE_S
        while self._process.poll() is None:
            assert time.monotonic() < deadline_s, "the program does not end"
            if select.select([self._fd], [], [], 0.02)[0]:
                with contextlib.suppress(OSError):  # the other end is closed
                    os.read(self._fd, 1 << 16)
        os.close(self._fd)
        return self._process.returncode


def test_a_person_talks_stops_an_answer_and_survives_the_server(tmp_path: Path) -> None:
    with ProbedEngine() as probed, contextlib.ExitStack() as stack:
        with RunningApi(probed) as api:
            terminal = stack.enter_context(contextlib.closing(Terminal(api.url, tmp_path)))
            terminal.see(HELP)
            for typed, shown in (
                ("/temperature 9\r", "needs a number in 0..2"),
                ("/sing\r", "there is no command /sing"),
                (f"/save {tmp_path}/no/such/place\r", "cannot be written"),
            ):
                terminal.type(typed)
                terminal.see(shown)
            terminal.type("Who art thou?\r")
            body = {"messages": [{"role": "user", "content": "Who art thou?"}], "temperature": 0, "max_tokens": 24}
            whole = api.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            terminal.see(whole.split()[-1])
            terminal.asks()

            go_on, reached = threading.Event(), threading.Event()

            def hold(_: int) -> None:
                if len(probed.probe.call_tokens) > 8:
                    reached.set()
                    assert go_on.wait(DEADLINE_S)

            probed.probe.reset()
            probed.probe.before(hold)
            terminal.type("Speak.\r")
            terminal.answers()
            wait_until(reached.is_set, "the answer to be held")
            terminal.type("\x03")
            terminal.asks()
            go_on.set()
            wait_until(lambda: probed.engine.status().cancelled == 1, "the answer to be stopped")

            def wait(_: int) -> None:
                assert go_on.wait(DEADLINE_S)

            probed.probe.reset()
            probed.probe.before(wait)
            for place in range(5):  # before the first word
                go_on.clear()
                terminal.type("Speak.\r")
                terminal.see("Speak.\n")
                terminal.type("\x03")
                terminal.asks()
                go_on.set()
                wait_until(lambda place=place: probed.engine.status().running == 0, "the answer to be stopped")
            terminal.type(f"/save {tmp_path}/talk.md\r")
            terminal.see("saved 4 messages")
            assert whole in (tmp_path / "talk.md").read_text()
        terminal.type("Art thou there?\r")
        terminal.see("does not answer")
        assert terminal.end() == 0
    assert "Who art thou?" in (tmp_path / ".titan/chat_history").read_text()


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\ntwo", ""),
        ("a\n\n```\nx\n\ny", "a\n\n"),
        ("```\nx\n\ny\n```\n\nz", "```\nx\n\ny\n```\n\n"),
    ],
)
def test_only_finished_paragraphs_are_left_behind(text: str, finished: str) -> None:
    assert split_finished(text) == (finished, text[len(finished) :])
