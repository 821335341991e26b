"""Bounds on what one HTTP client can make the coordinator hold or wait for. Values only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Every figure has a test that goes beyond it.

    Args:
        body_bytes: longest request body; counted while it arrives.
        body_s: time for the whole body to arrive.
        head_bytes: longest request line and headers.
        head_s: time for the head of a request to arrive, and for what is left of a refused body.
        stalled_write_s: time a client may leave an answer unread before its connection is cut.
        stream_comment_s: a stream that is silent so long gets a comment, so that nobody takes it for dead.
        keep_alive_s: time an idle connection stays open.
        connections: open connections; beyond it clients get 503.
        default_max_tokens: length of an answer when the request names none and the context has room for more.
        shutdown_s: time for answers under way when the server stops.
    """

    body_bytes: int = 4 << 20
    body_s: float = 30.0
    head_bytes: int = 32 << 10
    head_s: float = 10.0
    stalled_write_s: float = 30.0
    stream_comment_s: float = 5.0
    keep_alive_s: int = 15
    connections: int = 512
    default_max_tokens: int = 4096
    shutdown_s: int = 10
