"""The response format of gpt-oss: messages in channels, calls as messages to a recipient. Knows no HTTP.

Format: cookbook.openai.com/articles/openai-harmony. An answer goes on where the prompt ends, within the header of the
assistant's message: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`; a call is
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`. mlx-lm has no parser for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = ["FINAL", "HarmonyState", "call_header", "speaks_harmony", "tail_text"]

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN = MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
FINAL = f"{CHANNEL}final{MESSAGE}"  # in front of an answer that has no room for reasoning
MAX_HEADER = 512  # characters; more is no header
_FUNCTIONS = "functions."
_BODY_ENDS = re.compile("|".join(map(re.escape, (START, CHANNEL, END, CALL, RETURN))))
_HEADER_ENDS = re.compile("|".join(map(re.escape, (MESSAGE, END, CALL, RETURN))))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_LONGEST = max(map(len, MARKS))


def speaks_harmony(tokenizer: TokenizerWrapper) -> bool:
    """Whether a tokenizer has the format's marks as tokens."""
    added: dict[str, Any] = tokenizer.get_added_vocab()
    return all(mark in added for mark in MARKS)


def call_header(name: str) -> str:
    """What stands in front of the arguments of a call."""
    return f"{CHANNEL}commentary to={_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}"


class HarmonyState:
    """Where in an answer's messages the text is.

    Args:
        prompt: text that the prompt ends with; an open message's header is part of it.
    """

    def __init__(self, prompt: str) -> None:
        opened = prompt.rpartition(START)[2]
        self._header: str | None = ""  # None within a message's body
        self._kind, self._name = "said", ""
        self._held = ""
        if MESSAGE in opened:
            self._open(opened.partition(MESSAGE)[0])
        else:
            self._header = opened[opened.find(CHANNEL) :] if CHANNEL in opened else ""

    def split(self, text: str) -> list[tuple[str, str, str]]:
        """Take text; return what is certain as (said | reasoning | call, function, text), and (called, function, "") at
        the end of a call."""
        self._held += text
        out: list[tuple[str, str, str]] = []
        while (rest := self._step(out)) is not None:
            self._held = rest
        return out

    def finish(self) -> list[tuple[str, str, str]]:
        """The answer is over: what was held back. A header that came to nothing is text."""
        out: list[tuple[str, str, str]] = []
        if self._header is None:
            self._give(self._held, out)
            self._close(out)
        elif (self._header + self._held).strip() and CHANNEL not in self._header + self._held:
            out.append(("said", "", self._header + self._held))
        self._held = ""
        return out

    def _step(self, out: list[tuple[str, str, str]]) -> str | None:
        """Go past one mark; None when there is none yet."""
        text = self._held
        if self._header is None:
            found = _BODY_ENDS.search(text)
            certain = found.start() if found else len(text) - _beginning(text)
            self._give(text[:certain], out)
            if found is None:
                self._held = text[certain:]
                return None
            self._close(out)
            self._header = found.group() if found.group() in (START, CHANNEL) else ""
            return text[found.end() :]
        found = _HEADER_ENDS.search(text)
        if found is None:
            if len(self._header) + len(text) > MAX_HEADER:
                held, self._header, self._kind, self._name = self._header + text, None, "said", ""
                return held
            return None
        header, self._header = self._header + text[: found.start()], ""
        if found.group() == MESSAGE:
            self._open(header)
        return text[found.end() :]

    def _open(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        to, name = recipient.group(1) if recipient else "", channel.group(1) if channel else "final"
        self._header, self._name = None, ""
        if to.startswith(_FUNCTIONS):
            self._kind, self._name = "call", to.removeprefix(_FUNCTIONS)
        else:
            # What goes to a built-in tool, which nobody runs here, is the model's own affair, as its analysis is.
            self._kind = "reasoning" if to not in ("", "all", "user") or name == "analysis" else "said"

    def _give(self, text: str, out: list[tuple[str, str, str]]) -> None:
        if text:
            out.append((self._kind, self._name, text))

    def _close(self, out: list[tuple[str, str, str]]) -> None:
        if self._kind == "call":
            out.append(("called", self._name, ""))
        self._kind, self._name = "said", ""


def tail_text(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> str:
    """The end of a prompt as text: all of an open message's header is in it."""
    return str(tokenizer.decode(list(prompt[-64:])))


def _beginning(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a mark."""
    for length in range(min(len(text), _LONGEST - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in MARKS):
            return length
    return 0
