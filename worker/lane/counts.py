"""What happened to lanes since start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneCounts:
    """Open now; openings that failed; frames that ended their connection; requests refused by a named error."""

    open: int = 0
    refused: int = 0
    malformed: int = 0
    refused_requests: int = 0
