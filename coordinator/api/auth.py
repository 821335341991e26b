"""API keys: kept as digests, compared in constant time. Knows no file and no HTTP framework."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from titan.common.errors import Unauthorized

__all__ = ["ApiKeys"]

_MEND = "send the header `Authorization: Bearer KEY`"


@dataclass(frozen=True)
class ApiKeys:
    """The keys that open the API. The keys themselves are not kept, so that no log or dump can show them."""

    digests: frozenset[bytes] = field(repr=False)

    @staticmethod
    def of(keys: Iterable[str]) -> ApiKeys:
        return ApiKeys(frozenset(_digest(key.encode()) for key in keys))

    def check(self, authorization: bytes | None, x_api_key: bytes | None = None) -> None:
        """Raise Unauthorized unless the headers' value is one of the keys: `Authorization: Bearer KEY` as OpenAI's
        clients send it, or `x-api-key: KEY` as Anthropic's do."""
        if authorization is None and x_api_key:
            authorization = b"Bearer " + x_api_key
        if authorization is None:
            raise Unauthorized("this API needs a key and the request has none", _MEND)
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("the Authorization header is not of the form `Bearer KEY`", _MEND)
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self.digests]
        if not any(known):
            raise Unauthorized("the API key is not one of this coordinator's", _MEND)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
