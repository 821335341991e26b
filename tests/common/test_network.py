"""Interfaces, Wi-Fi, ports and sleep, with the words that macOS and Linux give.

Run: .venv/bin/pytest tests/common/test_network.py
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from titan.common.network import (
    Listener,
    hardware_ports,
    listener_on,
    local_address_towards,
    route_to,
    run_quietly,
)
from titan.common.power import SleepSetting, sleep_setting

PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: a4:83:e7:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: a4:83:e7:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: a4:83:e7:00:00:03

VLAN Configurations
===================
"""
PMSET = """System-wide power settings:
Currently in use:
 standby              1
 displaysleep         10
 sleep                {minutes}{held}
 womp                 1
"""


def _interfaces(**addresses: str) -> dict[str, list]:
    return {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}


@pytest.mark.parametrize(
    ("own", "interface", "kind", "wifi"),
    [
        ("10.0.0.5", "en0", "Ethernet", False),
        ("192.168.1.7", "en1", "Wi-Fi", True),
        ("169.254.3.4", "bridge0", "Thunderbolt Bridge", False),
        ("fe80::1%utun3", "utun3", "utun3", False),
    ],
)
def test_macos_names_the_port(own: str, interface: str, kind: str, wifi: bool) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return PORTS

    route = route_to(
        "mini.local",
        7077,
        platform="darwin",
        run=run,
        local_address=lambda *_: own,
        addresses=lambda: _interfaces(en0="10.0.0.5", en1="192.168.1.7", bridge0="169.254.3.4", utun3="fe80::1%utun3"),
    )
    assert route is not None
    assert (route.interface, route.kind, route.wifi) == (interface, kind, wifi)
    assert asked == [["networksetup", "-listallhardwareports"]]


def test_macos_without_networksetup_does_not_guess() -> None:
    route = route_to(
        "x",
        1,
        platform="darwin",
        run=lambda _: None,
        local_address=lambda *_: "10.0.0.5",
        addresses=lambda: _interfaces(en0="10.0.0.5"),
    )
    assert route is not None
    assert not route.wifi


def test_linux_looks_into_sysfs(tmp_path: Path) -> None:
    (tmp_path / "wlan0" / "wireless").mkdir(parents=True)
    (tmp_path / "eth0").mkdir()

    def route(own: str) -> bool | None:
        found = route_to(
            "x",
            1,
            platform="linux",
            local_address=lambda *_: own,
            addresses=lambda: _interfaces(eth0="10.0.0.5", wlan0="192.168.1.7"),
            sys_net=tmp_path,
        )
        return None if found is None else found.wifi

    assert [route(own) for own in ("10.0.0.5", "192.168.1.7", "172.16.0.1")] == [False, True, None]


def test_no_way_is_no_route() -> None:
    assert route_to("no-such-host.invalid", 1) is None
    assert local_address_towards("127.0.0.1", 7077) == "127.0.0.1"
    here = route_to("127.0.0.1", 7077)
    assert here is not None
    assert not here.wifi


def test_hardware_ports_of_odd_output() -> None:
    assert hardware_ports("") == {}
    assert hardware_ports("Hardware Port: Wi-Fi\n\nDevice: en0") == {}
    assert hardware_ports("Hardware Port: X\nDevice: en0\nHardware Port: Y\nDevice: en1\n") == {"en0": "X", "en1": "Y"}


def test_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = listener_on(port)
        assert holder is not None
        assert holder.pid == os.getpid()
        assert holder.name

        def denied(_: str) -> list:
            raise psutil.AccessDenied

        assert listener_on(port, connections=denied) == Listener()  # macOS without root: held, by whom is not said
    assert listener_on(port) is None
    assert listener_on(port, connections=denied) is None


def test_commands_that_fail_say_nothing() -> None:
    assert run_quietly(["no-such-command-here"]) is None
    assert run_quietly(["false"]) is None
    assert run_quietly(["echo", "x"]) == "x\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (PMSET.format(minutes=0, held=""), SleepSetting(False, "sleep is off")),
        (PMSET.format(minutes=10, held=""), SleepSetting(True, "sleeps after 10 min without use")),
        (
            PMSET.format(minutes=1, held=" (sleep prevented by caffeinate)"),
            SleepSetting(True, "sleeps after 1 min without use (held off now)"),
        ),
        ("displaysleep 10\n", None),
        (None, None),
    ],
)
def test_sleep_on_macos(output: str | None, expected: SleepSetting | None) -> None:
    assert sleep_setting(platform="darwin", run=lambda _: output) == expected


def test_sleep_on_linux(tmp_path: Path) -> None:
    def sleeps(state: str | None) -> bool:
        found = sleep_setting(platform="linux", run=lambda _: state, power_supply=tmp_path)
        assert found is not None
        return found.sleeps

    assert not sleeps(None)
    assert not sleeps("loaded\n")
    (tmp_path / "BAT0").mkdir()
    assert sleeps("loaded\n")
    assert not sleeps("masked\n")
