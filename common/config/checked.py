"""A YAML file checked against a pydantic model, every problem reported with its line. Knows no file of Titan's."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from titan.common.config.yaml_source import Document, Location, Problem, Tree, parse, read_text
from titan.common.errors import ConfigError

MAX_PROBLEMS_SHOWN = 50
FOUND_IN_TREE = "found_in_tree"
"""Type of a model validator's error that `check` reports too, with its line."""

M = TypeVar("M", bound=BaseModel)
_REASONS = {
    "missing": "is missing",
    "model_type": "should hold `key: value` lines",
    "dict_type": "should hold `key: value` lines",
    "tuple_type": "should be a list, one `- item` a line",
    "list_type": "should be a list, one `- item` a line",
    "string_type": "should be plain text",
    "float_parsing": "should be a number",
}
_NOT_FINITE = ("nan", "inf", "infinity")


def load_yaml(
    path: str | os.PathLike[str],
    model: type[M],
    *,
    missing_mend: str = "Check the path",
    check: Callable[[Tree], Iterator[Problem]] = lambda _: iter(()),
) -> M:
    """Read `path` into `model`; its validators find the file's folder as `info.context["folder"]`.

    Args:
        missing_mend: what to do when there is no such file.
        check: finds problems in the raw tree that no field's validator can see (two items that clash).

    Raises:
        ConfigError: the file is absent, not a file, too large, not UTF-8, not YAML; or it breaks the model, and then
            every problem is listed as `hosts.yaml:12: workers[1].addresses[0]: reason`.
    """
    path = Path(path)
    document = parse(read_text(path, missing_mend=missing_mend), path.name)
    problems = list(document.problems)
    value = None
    if not isinstance(document.root, dict):
        what = "is empty" if document.root is None else "is not a list of `key: value` lines"
        raise ConfigError(f"{path} {what}", missing_mend)
    try:
        value = model.model_validate(document.root, context={"folder": path.absolute().parent})
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [_problem(detail, model) for detail in details if detail["type"] != FOUND_IN_TREE]
    problems += check(document.root)
    if problems or value is None:
        raise _config_error(path, document, problems)
    return value


def _problem(error: Mapping[str, typing.Any], root: type[BaseModel]) -> Problem:
    location: Location = tuple(error["loc"])
    kind = error["type"]
    if kind == "extra_forbidden":
        return Problem(location, _unknown_key(str(location[-1]), _model_at(root, location[:-1])))
    if kind in ("too_long", "too_short"):
        bounds = error["ctx"]
        limit = f"at most {bounds['max_length']}" if kind == "too_long" else f"at least {bounds['min_length']}"
        return Problem(location, f"has {bounds['actual_length']} items; there may be {limit}")
    if kind not in ("missing", "value_error") and error["input"] is None:
        return Problem(location, "has no value. Write one, or remove the line")
    if kind == "finite_number" or (
        kind == "float_parsing" and str(error["input"]).strip().lower().lstrip("+-.") in _NOT_FINITE
    ):
        return Problem(location, f"must be a finite number, not {error['input']}")
    return Problem(location, _REASONS.get(kind) or str(error["msg"]).removeprefix("Value error, "))


def _unknown_key(key: str, model: type[BaseModel] | None) -> str:
    known = list(model.model_fields) if model else []
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"unknown key; did you mean {close[0]!r}?"
    return f"unknown key; known here: {', '.join(known)}" if known else "unknown key"


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model that describes the mapping at `location`, following fields and items of lists."""
    current: object = model
    for step in location:
        if isinstance(step, str):
            info = current.model_fields.get(step) if _is_model(current) else None
            current = info.annotation if info else None
        current = _inner(current)
    return current if _is_model(current) else None


def _inner(annotation: object) -> object:
    """The model inside `Model | None`, `tuple[Model, ...]`, `list[Model]`; the annotation itself otherwise."""
    if isinstance(annotation, (types.UnionType, types.GenericAlias)) or typing.get_origin(annotation) is not None:
        return next((found for a in typing.get_args(annotation) if _is_model(found := _inner(a))), None)
    return annotation


def _is_model(value: object) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(value, type) and issubclass(value, BaseModel)


def show_location(location: Location) -> str:
    """`("workers", 1, "name")` -> `workers[1].name`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")


def _config_error(path: Path, document: Document, problems: list[Problem]) -> ConfigError:
    rows = sorted({(document.line(p.location), show_location(p.location), p.reason) for p in problems})
    shown = [
        f"{path.name}:{line}: {where + ': ' if where else ''}{reason.rstrip('. ')}"
        for line, where, reason in rows[:MAX_PROBLEMS_SHOWN]
    ]
    if len(rows) > len(shown):
        shown.append(f"and {len(rows) - len(shown)} more")
    if len(shown) == 1:
        return ConfigError(shown[0])
    return ConfigError(f"{path} has {len(rows)} problems:\n  " + "\n  ".join(shown))
