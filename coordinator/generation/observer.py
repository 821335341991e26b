"""Who is told how requests and steps went, as they happen. Knows no metrics library.

Called on the engine's thread between two steps: an observer counts and returns.
"""

from __future__ import annotations

from typing import Literal, Protocol

from titan.coordinator.generation.events import Timings, Usage

__all__ = ["Observer", "Outcome", "Unobserved"]

Outcome = Literal["completed", "failed", "cancelled"]


class Observer(Protocol):
    def stepped(self, rows: int, seconds: float) -> None:
        """A decode step gave `rows` tokens."""

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A chunk of a prompt has been run."""

    def first_token(self, seconds: float) -> None:
        """From submission to a request's first token."""

    def next_token(self, seconds: float) -> None:
        """Between two tokens of a request."""

    def set_back(self) -> None:
        """A sequence's KV has made room for others; it will be run again."""

    def finished(self, outcome: Outcome, usage: Usage, timings: Timings) -> None:
        """A request is over."""


class Unobserved:
    """Nobody watches."""

    def stepped(self, rows: int, seconds: float) -> None:
        pass

    def prefilled(self, tokens: int, seconds: float) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def next_token(self, seconds: float) -> None:
        pass

    def set_back(self) -> None:
        pass

    def finished(self, outcome: Outcome, usage: Usage, timings: Timings) -> None:
        pass
