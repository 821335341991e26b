"""Run: `.venv/bin/pytest tests/common/config/test_address.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.common.config import is_loopback, normalise_address, split_address
from titan.common.config.address import join_address
from titan.common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "address", "host", "port"),
    [
        ("mini.local", "mini.local:7077", "mini.local", 7077),
        ("Mini.Local.:80", "mini.local:80", "mini.local", 80),
        ("10.0.0.2:7078", "10.0.0.2:7078", "10.0.0.2", 7078),
        ("[::1]", "[::1]:7077", "::1", 7077),
        ("[FE80:0::1%en0]:9", "[fe80::1%en0]:9", "fe80::1%en0", 9),
        (" my_mac ", "my_mac:7077", "my_mac", 7077),
    ],
)
def test_addresses_take_their_normal_form(text: str, address: str, host: str, port: int) -> None:
    assert normalise_address(text) == address
    assert split_address(address) == (host, port)
    assert normalise_address(address) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":7077",
        "a:",
        "a:0",
        "a:65536",
        "a:x",
        "a:-1",
        "a:٣",
        "a:7077 x",
        "::1",
        "fe80::1:7077",
        "[::1",
        "[a]:1",
        "[]:1",
        "[::1]7077",
        "a b",
        "a/b",
        "http://a:1",
        "a..b",
        "-a",
        "a-.b",
        "300.1.1.1",
        "10.0.0",
        "10.0.0.2%en0",
        "[::1%a b]",
        "a" * 64,
        "a." * 127 + "a",
        "x" * 400,
        "ä.local",
        "a\0",
        "a\n:1",
        "*",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        normalise_address(text)


def test_only_a_listener_may_ask_for_any_port() -> None:
    assert normalise_address("127.0.0.1:0", any_port=True) == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("a.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("mini.local", False),
        ("localhost.evil", False),
    ],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@given(st.text(max_size=50))
def test_any_text_is_an_address_in_normal_form_or_a_config_error(text: str) -> None:
    try:
        address = normalise_address(text)
    except ConfigError:
        return
    assert normalise_address(address) == address
    assert join_address(*split_address(address)) == address
