"""What counts as the name of a repository, `org/name`. Opens nothing."""

from __future__ import annotations

import re

__all__ = ["is_repository"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def is_repository(name: str) -> bool:
    """Whether `name` could be a repository on a hub (it may be a relative path all the same)."""
    return _REPOSITORY.fullmatch(name) is not None
