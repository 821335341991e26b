"""Where the engine is in its life, and whether it takes requests: loading, ready, draining, failed, stopping.

For every thread. Knows no requests and no MLX.
"""

from __future__ import annotations

import threading

from titan.common.errors import EngineNotReady
from titan.common.log import get_logger
from titan.coordinator.generation.model import ServedModel
from titan.coordinator.generation.status import EngineState
from titan.coordinator.generation.watchdog import Watchdog

__all__ = ["Life", "stopping_error"]

log = get_logger("coordinator.engine")


class Life:
    """State and phase in words; `stuck` is not a state of its own but what the watchdog sees of "ready"."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._state: EngineState = "loading"
        self._phase = "not started"
        self._served: ServedModel | None = None

    @property
    def stopping(self) -> bool:
        return self._state == "stopping"

    def now(self) -> tuple[EngineState, str]:
        """State and phase, as others should be told."""
        with self._lock:
            state, phase = self._state, self._phase
        stuck_s = self._watchdog.stuck_s
        if state in ("ready", "draining") and stuck_s > 0:
            return "stuck", self.stuck_phase(stuck_s + self._watchdog.limit_s)
        return state, phase

    def served(self) -> ServedModel:
        """The model.

        Raises:
            EngineNotReady: it takes no requests now; says why.
        """
        state, phase = self.now()
        if state == "ready" and self._served is not None:
            return self._served
        if state == "failed":
            raise EngineNotReady(f"the model cannot be used: {phase}", "see the coordinator's log")
        if state == "stopping":
            raise stopping_error()
        if state == "draining":
            raise EngineNotReady("the coordinator is draining and takes no new requests", "try again later")
        if state == "stuck":
            raise EngineNotReady(phase, "see the coordinator's log")
        raise EngineNotReady(f"the model is loading ({phase})", "ask /ready and try again when it is ready")

    def loading(self, phase: str) -> None:
        """What loading is at; nothing once it is over."""
        with self._lock:
            if self._state == "loading":
                self._phase = phase

    def ready(self, served: ServedModel) -> None:
        with self._lock:
            self._served = served
            if self._state == "loading":
                self._state, self._phase = "ready", "ready"

    def fail(self, phase: str) -> None:
        with self._lock:
            self._state, self._phase = "failed", phase

    def stop(self) -> None:
        with self._lock:
            if self._state != "failed":
                self._state, self._phase = "stopping", "stopping"

    def switch(self, before: EngineState, after: EngineState, phase: str) -> None:
        """From one state to another; nothing in any other state."""
        with self._lock:
            if self._state != before:
                return
            self._state, self._phase = after, phase
        log.info("the engine changed state", before=before, after=after)

    @staticmethod
    def stuck_phase(seconds: float) -> str:
        return f"one step of the model has been running for {seconds:.0f} s"


def stopping_error() -> EngineNotReady:
    return EngineNotReady("the coordinator is stopping", "try again when it is back")
