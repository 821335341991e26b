"""Ends an answer at a stop string, however tokens cut the text. Knows only text."""

from __future__ import annotations

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text on, holding back what could still become a stop string.

    The answer ends where a stop string is first complete; the string itself and what follows are dropped. When two
    are complete at the same character the longer one counts. Work grows with the text, not with its square
    (Knuth-Morris-Pratt, one automaton a string).
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._failures = [_failure_table(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.stopped = False
        self.found: str | None = None

    @property
    def held_characters(self) -> int:
        """Characters that were given to `push` and are neither passed on nor dropped."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Take the next piece of the answer, return what is certain to belong to it.

        Once a stop string is complete, `stopped` is true and every further text is dropped.
        """
        if self.stopped or not text:
            return ""
        if not self._stops:
            return text
        self._held += text
        first_new = len(self._held) - len(text)
        for position in range(first_new, len(self._held)):
            complete = self._advance(self._held[position])
            if complete:
                self.stopped = True
                self.found = self._held[position + 1 - complete : position + 1]
                passed, self._held = self._held[: position + 1 - complete], ""
                return passed
        keep = max(self._matched)
        passed = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return passed

    def flush(self) -> str:
        """The answer is over: what was held back belongs to it after all."""
        passed, self._held = self._held, ""
        return passed

    def _advance(self, character: str) -> int:
        """Move every automaton by one character; the length of the longest string now complete, or 0."""
        complete = 0
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
