"""Worker processes on this machine: started, waited for, stopped, killed. Used by the demo, the benchmarks and tests.

A process is always ended: by `stop`, or by leaving the `with` block.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from titan.common.errors import WorkerUnreachable
from titan.common.platform import every_core

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
KEPT_LOG_LINES = 400
PROGRAM = (sys.executable, "-m", "titan.worker")


class WorkerProcess:
    """A `titan-worker` on loopback.

    Args:
        name: its certificate's name; the certificate is in `certs`.
        certs: folder with ca.pem, NAME.pem and NAME.key.
        memory: bytes of experts it may hold.
        model: its own copy of the checkpoint, or None to be sent its experts.
        port: 0 takes a free one.
        program: what to run instead of titan-worker, with the same options.
        arguments: further ones.
        own_cores: it may use every core, also where this thread is kept on one.
    """

    def __init__(
        self,
        name: str,
        certs: Path,
        memory: int,
        model: Path | None = None,
        port: int = 0,
        program: tuple[str, ...] = PROGRAM,
        arguments: tuple[str, ...] = (),
        *,
        own_cores: bool = True,
    ) -> None:
        self.name = name
        self.address = ""
        self.log: deque[dict] = deque(maxlen=KEPT_LOG_LINES)
        self._listening = threading.Event()
        command = [*program, "--listen", f"127.0.0.1:{port}", "--certs", str(certs), "--name", name]
        command += ["--memory", str(memory), "--log-format", "json", "--with-parent", *arguments]
        if model is not None:
            command += ["--model", str(model)]
        with every_core() if own_cores else contextlib.nullcontext():
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        self._reader = threading.Thread(target=self._read_log, name=f"log-{name}", daemon=True)
        self._reader.start()

    def wait_until_listening(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The address it listens on.

        Raises:
            WorkerUnreachable: it ended, or does not listen in time; the sentence has its last words.
        """
        if not self._listening.wait(timeout_s) or not self.address:
            words = "; ".join(str(line.get("message", "")) for line in list(self.log)[-3:])
            raise WorkerUnreachable(f"worker process {self.name} does not listen ({words or 'it said nothing'})")
        return self.address

    def kill(self) -> None:
        """SIGKILL, as a machine that loses power."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        """SIGSTOP: it accepts connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM, then SIGKILL when it does not end in time; returns the exit status."""
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(STOP_TIMEOUT_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.process.returncode

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            entry: dict = {"message": line.rstrip()}
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
            self.log.append(entry)
            if entry.get("message") == "listening":
                self.address = str(entry.get("address", ""))
                self._listening.set()
        self._listening.set()  # ended: nobody needs to wait on
