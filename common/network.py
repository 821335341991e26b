"""How this machine reaches another: the interface that carries the packets, whether it is Wi-Fi, who holds a port here.

Functions take the platform's name and the commands they ask as keyword arguments, as common.platform does.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

COMMAND_S = 5.0
MAX_OUTPUT_CHARS = 200_000
Run = Callable[[list[str]], str | None]


@dataclass(frozen=True, slots=True)
class Route:
    """How packets leave for another machine: interface (`en0`), its kind as the system calls it, and Wi-Fi or not."""

    interface: str
    kind: str
    wifi: bool


@dataclass(frozen=True, slots=True)
class Listener:
    """Who holds a port; name and pid are unknown when the process belongs to somebody else."""

    pid: int | None = None
    name: str = ""


def run_quietly(command: list[str]) -> str | None:
    """Output of a command of the system; None when it is not there, fails, or takes longer than five seconds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout[:MAX_OUTPUT_CHARS] if done.returncode == 0 else None


def route_to(
    host: str,
    port: int,
    *,
    platform: str = sys.platform,
    run: Run = run_quietly,
    local_address: Callable[[str, int], str | None] | None = None,
    addresses: Callable[[], Mapping[str, list]] = psutil.net_if_addrs,
    sys_net: Path = Path("/sys/class/net"),
) -> Route | None:
    """The way to an IP address or a name; None when there is none, or the interface cannot be told."""
    own = (local_address or local_address_towards)(host, port)
    if own is None:
        return None
    bare = own.partition("%")[0]
    interface = next(
        (name for name, listed in addresses().items() if any(a.address.partition("%")[0] == bare for a in listed)), None
    )
    if interface is None:
        return None
    if platform == "darwin":
        kind = hardware_ports(run(["networksetup", "-listallhardwareports"]) or "").get(interface, "")
        return Route(interface, kind or interface, wifi=kind.lower() in ("wi-fi", "airport"))
    wifi = (sys_net / interface / "wireless").exists() or (sys_net / interface / "phy80211").exists()
    return Route(interface, "Wi-Fi" if wifi else interface, wifi)


def local_address_towards(host: str, port: int) -> str | None:
    """This machine's own address on the way to `host`. Nothing is sent: a UDP socket only asks the routing table."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError, IndexError):
        return None


def hardware_ports(output: str) -> dict[str, str]:
    """Device -> name of the port, from `networksetup -listallhardwareports`: {"en0": "Wi-Fi", ...}."""
    found = re.findall(r"^Hardware Port: (.{1,80})\nDevice: (\S{1,32})$", output, re.MULTILINE)
    return {device: port for port, device in found}


def listener_on(port: int, *, connections: Callable[[str], list] | None = None) -> Listener | None:
    """Who listens on a TCP port of this machine; None when nobody does.

    Where the system does not say (macOS without root), a port that cannot be bound is held by an unknown one.
    """
    try:
        listed = (connections or psutil.net_connections)("tcp")
    except (psutil.Error, OSError):
        return None if _can_bind(port) else Listener()
    for connection in listed:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return Listener(connection.pid, _process_name(connection.pid))
    return None


def _can_bind(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _process_name(pid: int | None) -> str:
    try:
        return psutil.Process(pid).name() if pid is not None else ""
    except psutil.Error:
        return ""
