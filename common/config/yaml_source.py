"""YAML text read into a plain tree, with bounds and line numbers. Knows no key and no type.

Scalars stay text (whoever checks the tree gives them types), so that `on`, `1:30` or `0o17` mean what they say. Tags,
anchors and aliases are refused: no configuration needs them, and they are how a small file grows into a big one.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from titan.common.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_EVENTS = 50_000

Location = tuple[str | int, ...]
Tree = dict[str, "Tree"] | list["Tree"] | str | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where in the tree, and a sentence."""

    location: Location
    reason: str


@dataclass(slots=True)
class Document:
    """What a YAML file holds: `root`, and the line (from 1) of every key and item."""

    root: Tree = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, location: Location) -> int:
        """Line of the nearest thing that exists in the file."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def read_text(path: Path, *, missing_mend: str) -> str:
    """The text of a small UTF-8 file.

    Raises:
        ConfigError: absent, unreadable, not a plain file, over 1 MiB or not UTF-8.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for its writer
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path} is not a plain file", missing_mend)
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist", missing_mend) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a folder, not a file", missing_mend) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read ({reason})", "Check its permissions") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB", "Check that this is the file you mean")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte {raw[error.start]:#04x} is not UTF-8", "Save the file as UTF-8"
        ) from error


def parse(text: str, name: str) -> Document:
    """The first document of a YAML text; `name` is the file's, for messages.

    Raises:
        ConfigError: not YAML, two documents, a tag, anchor or alias, too deep or too long. Doubled keys are left as
            problems of the document.
    """
    try:
        return _build(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: this is not YAML ({reason})", "Check indentation, quotes and colons") from error
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:  # the scanner's own on odd escapes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{name}: this is not YAML ({reason[:200]})", "Save the file as plain text") from error


class _Frame:
    """A list or mapping that is being read."""

    def __init__(self, value: dict[str, Tree] | list[Tree], location: Location) -> None:
        self.value = value
        self.location = location
        self.key: str | None = None  # of the mapping entry whose value comes next


def _build(text: str, name: str) -> Document:
    document = Document()
    stack: list[_Frame] = []
    seen_root = False
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        line = event.start_mark.line + 1
        if count >= MAX_EVENTS:
            raise ConfigError(f"{name}:{line}: more than {MAX_EVENTS} entries", "Check that this is the file you mean")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(f"{name}:{line}: anchors and aliases (& and *) are not used here", "Write the value out")
        if getattr(event, "tag", None):
            raise ConfigError(f"{name}:{line}: tags (!) are not used here", "Write the plain value")
        if isinstance(event, yaml.DocumentStartEvent) and seen_root:
            raise ConfigError(f"{name}:{line}: a second document begins", "Keep one, and remove the `---` line")
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            stack.pop()
        elif isinstance(event, (yaml.ScalarEvent, yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            seen_root = True
            location = _place(document, stack, event, line, name)
            if location is None:
                continue
            value = _value(event, line, name)
            _store(document, stack, value)
            if isinstance(value, (dict, list)):
                stack.append(_Frame(value, location))
                if len(stack) > MAX_DEPTH:
                    raise ConfigError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels", "Check the indentation")
    return document


def _place(document: Document, stack: list[_Frame], event: yaml.NodeEvent, line: int, name: str) -> Location | None:
    """Where the node of this event goes; None when it was a key and nothing is to be stored yet."""
    if not stack:
        return ()
    frame = stack[-1]
    if isinstance(frame.value, list):
        location = (*frame.location, len(frame.value))
    elif frame.key is None:
        if not isinstance(event, yaml.ScalarEvent):
            raise ConfigError(
                f"{name}:{line}: a key is a list or a mapping", "Put braces in quotes, and use plain keys"
            )
        frame.key = _printable(event.value, line, name)
        location = (*frame.location, frame.key)
        if frame.key in frame.value:
            document.problems.append(Problem(location, f"appears twice (first in line {document.lines[location]})"))
        document.lines[location] = line
        return None
    else:
        return (*frame.location, frame.key)
    document.lines[location] = line
    return location


def _value(event: yaml.NodeEvent, line: int, name: str) -> Tree:
    if isinstance(event, yaml.MappingStartEvent):
        return {}
    if isinstance(event, yaml.SequenceStartEvent):
        return []
    assert isinstance(event, yaml.ScalarEvent)
    if event.style is None and event.value in ("", "~", "null", "Null", "NULL"):
        return None
    return _printable(event.value, line, name)


def _store(document: Document, stack: list[_Frame], value: Tree) -> None:
    if not stack:
        document.root = value
        return
    frame = stack[-1]
    if isinstance(frame.value, list):
        frame.value.append(value)
    else:
        assert frame.key is not None
        frame.value[frame.key] = value
        frame.key = None


def _printable(text: str, line: int, name: str) -> str:
    if text.isprintable():
        return text
    odd = next(c for c in text if not c.isprintable())
    raise ConfigError(f"{name}:{line}: a value holds the character U+{ord(odd):04X}", "Use printable characters only")
