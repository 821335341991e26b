"""API keys: kept as digests with a name, compared in constant time, limited if wanted. Knows no HTTP framework."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from titan.common.errors import QueueFull, Unauthorized

__all__ = ["ApiKeys", "Key", "key_digest"]

_MEND = "send the header `Authorization: Bearer KEY`"
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Key:
    """What a key may do.

    Args:
        name: for logs.
        digest: SHA-256 of the key; the key itself is not kept, so that no file, log or dump can show it.
        operator: may drain and the like.
        requests_per_minute: None for no limit.
    """

    name: str
    digest: bytes = field(repr=False)
    operator: bool = False
    requests_per_minute: int | None = None


class ApiKeys:
    """The keys that open the API."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)
        self._lock = threading.Lock()
        self._recent: dict[str, deque[float]] = {}

    @staticmethod
    def of(keys: Iterable[str]) -> ApiKeys:
        """Keys in the clear; each is an operator's."""
        return ApiKeys(Key(f"key-{i}", key_digest(key), operator=True) for i, key in enumerate(keys, start=1))

    def check(self, authorization: bytes | None, x_api_key: bytes | None = None) -> Key:
        """The key that the headers show: `Authorization: Bearer KEY` as OpenAI's clients send it, or `x-api-key: KEY`
        as Anthropic's do.

        Raises:
            Unauthorized: there is none, or it is not one of these.
            QueueFull: it has asked too often within a minute.
        """
        if authorization is None and x_api_key:
            authorization = b"Bearer " + x_api_key
        if authorization is None:
            raise Unauthorized("this API needs a key and the request has none", _MEND)
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("the Authorization header is not of the form `Bearer KEY`", _MEND)
        given = hashlib.sha256(key.strip()).digest()
        found = [known for known in self._keys if hmac.compare_digest(given, known.digest)]
        if not found:
            raise Unauthorized("the API key is not one of this coordinator's", _MEND)
        self._limit(found[0])
        return found[0]

    def _limit(self, key: Key) -> None:
        if key.requests_per_minute is None:
            return
        now = time.monotonic()
        with self._lock:
            recent = self._recent.setdefault(key.name, deque())
            while recent and now - recent[0] > _MINUTE_S:
                recent.popleft()
            if len(recent) >= key.requests_per_minute:
                raise QueueFull(
                    f"the key {key.name!r} may ask {key.requests_per_minute} times a minute", "try again later"
                )
            recent.append(now)


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
