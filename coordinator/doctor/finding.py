"""One thing that the doctor looked at. A value; knows no check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from titan.common.errors import TitanError

Level = Literal["ok", "warn", "fail"]
_ORDER: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found.

    Args:
        check: what was looked at: "certificates", "clock", ...
        subject: whose: a worker, an address, a folder.
        level: "fail" keeps the cluster from working, "warn" makes it slower or will keep it from working.
        mend: what to do; empty when all is well.
    """

    check: str
    subject: str
    level: Level
    text: str
    mend: str = ""


def failed(check: str, subject: str, error: TitanError, level: Level = "fail") -> Finding:
    """A finding with an error's own sentence."""
    return Finding(check, subject, level, error.cause, error.mend)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst of all levels; "ok" when there is none."""
    result: Level = "ok"
    for finding in findings:
        if _ORDER[finding.level] > _ORDER[result]:
            result = finding.level
    return result
