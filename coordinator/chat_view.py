"""An answer on the terminal as it comes: finished paragraphs stay, the last one is drawn anew. Knows no HTTP."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from titan.coordinator.stopping import handled_elsewhere

__all__ = ["AnswerView"]

_FENCE = "```"


class AnswerView:
    """Use as a context.

    Args:
        plain: print text as it is, without Markdown.
    """

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = None if plain else Live(console=console, refresh_per_second=8, vertical_overflow="visible")
        self._reasoning = ""
        self._tail = ""  # what is not finished yet

    def __enter__(self) -> AnswerView:
        if self._live is not None:
            with handled_elsewhere():
                self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if self._live is None:
            self._console.print()
        else:
            self._live.stop()

    def reason(self, piece: str) -> None:
        """What the model says to itself."""
        if self._live is None:
            self._print(piece, style="dim")
        else:
            self._reasoning += piece
            self._draw()

    def say(self, piece: str) -> None:
        if self._live is None:
            self._print(piece)
            return
        if self._reasoning:
            self._live.console.print(Text(self._reasoning.strip(), style="dim italic"))
            self._reasoning = ""
        head, self._tail = split_finished(self._tail + piece)
        if head:
            self._live.console.print(Markdown(head))
        self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        parts: list[RenderableType] = []
        if self._reasoning:
            parts.append(Text(self._reasoning.strip(), style="dim italic"))
        parts.append(Markdown(self._tail))
        self._live.update(Group(*parts))

    def _print(self, piece: str, style: str | None = None) -> None:
        self._console.print(piece, end="", style=style, markup=False, highlight=False, soft_wrap=True)


def split_finished(text: str) -> tuple[str, str]:
    """The paragraphs that nothing can change any more, with the blank line after them, and the rest."""
    at = text.rfind("\n\n")
    while at >= 0:
        if text.count(_FENCE, 0, at) % 2 == 0:
            return text[: at + 2], text[at + 2 :]
        at = text.rfind("\n\n", 0, at)
    return "", text
