"""`host:port` texts: checked, completed and taken apart. Knows no socket and resolves nothing.

An address is a plain `str` in normal form: `mini.local:7077`, `10.0.0.2:7077`, `[fe80::1%en0]:7077`.
"""

from __future__ import annotations

import ipaddress
import re

from titan.common.errors import ConfigError

DEFAULT_WORKER_PORT = 7077
MAX_ADDRESS_CHARS = 300
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.ASCII)
_MEND = "Write HOST:PORT, e.g. mini.local:7077, 10.0.0.2:7077 or [fd00::2]:7077"


def normalise_address(text: str, default_port: int = DEFAULT_WORKER_PORT, *, any_port: bool = False) -> str:
    """`Mini.local` -> `mini.local:7077`, `[::1]:80` -> `[::1]:80`.

    Args:
        text: host name, IPv4 address or bracketed IPv6 address, with or without `:port`.
        default_port: used when the text has none.
        any_port: allow port 0, "a free one", which only a listener can use.

    Raises:
        ConfigError: no host, a name or address that cannot be one, a port outside 1..65535, IPv6 without brackets.
    """
    if len(text) > MAX_ADDRESS_CHARS:
        raise ConfigError(f"{text[:40]!r}… is too long for an address", _MEND)
    host, port_text = _cut(text.strip())
    if port_text is None:
        port = default_port
    elif re.fullmatch(r"[0-9]{1,5}", port_text) and (0 if any_port else 1) <= int(port_text) <= 65_535:
        port = int(port_text)
    else:
        raise ConfigError(f"{text!r} has no port between 1 and 65535", _MEND)
    return join_address(normalise_host(host), port)


def normalise_host(host: str) -> str:
    """A host name in lower case without a final dot, or an IP address in its shortest form, without brackets.

    Raises:
        ConfigError: neither a name nor an address.
    """
    bare, _, zone = host.partition("%")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        pass
    else:
        if zone and (address.version == 4 or not re.fullmatch(r"[A-Za-z0-9._-]{1,32}", zone)):
            raise ConfigError(f"{host!r} is not an address: the zone after % is not one", _MEND)
        return f"{address.compressed}%{zone}" if zone else address.compressed
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(f"{host!r} is not a host name or an IP address", _MEND)
    if labels[-1].isdigit():  # 10.0.0 or 300.1.1.1: a mistyped IPv4 address, which resolvers read in odd ways
        raise ConfigError(f"{host!r} is not an IP address", _MEND)
    return name


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of an address in normal form."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The opposite of `split_address`: brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host` (`localhost`, 127.0.0.0/8, ::1)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _cut(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise ConfigError(f"{text!r} has brackets that hold no IPv6 address", _MEND)
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        raise ConfigError(f"{text!r} looks like an IPv6 address without brackets", _MEND)
    host, colon, port = text.partition(":")
    if not host:
        raise ConfigError(f"{text!r} names no host", _MEND)
    return host, port if colon else None
