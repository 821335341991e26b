"""Which Host and Origin may talk to a server that asks for no key. Pure.

Without a key, loopback is the only protection, and a web page can get around it: by a name of its own that resolves to
127.0.0.1 (DNS rebinding; the Host header shows it) or by a cross-site POST (the Origin header shows it).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from titan.common.config.address import is_loopback
from titan.common.errors import Forbidden

__all__ = ["check_local"]


def check_local(host: str | None, origin: str | None, listen_host: str) -> None:
    """Raise Forbidden unless both name this machine.

    Args:
        host, origin: the request's headers; a request without Origin is no browser's.
        listen_host: the address the server was told to listen on.
    """
    name = _hostname(f"//{host}") if host else None
    if name is None or not (is_loopback(name) or name == listen_host):
        raise Forbidden(
            f"the Host header {_shown(host)} is not this machine's loopback address",
            f"use http://{listen_host} or http://localhost, or configure an API key to serve other names",
        )
    if origin is not None:
        name = _hostname(origin)
        if name is None or not is_loopback(name):
            raise Forbidden(
                f"requests of the web page {_shown(origin)} are not answered here",
                "configure an API key to serve web pages",
            )


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _shown(value: str | None) -> str:
    return "(missing)" if value is None else repr(value[:100])
