"""What happened to lanes since start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LaneCounts:
    """Open now; connections accepted, peers that showed a certificate, openings that failed; frames that end a lane."""

    open: int = 0
    accepted: int = 0
    proved: int = 0
    refused: int = 0
    malformed: int = 0
