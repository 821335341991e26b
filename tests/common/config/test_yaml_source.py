"""Run: `.venv/bin/pytest tests/common/config/test_yaml_source.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.common.config.yaml_source import MAX_DEPTH, MAX_EVENTS, MAX_FILE_BYTES, parse, read_text
from titan.common.errors import ConfigError


def test_scalars_stay_text_and_lines_are_kept() -> None:
    document = parse("a: on\nb:\n  - 1:30\n  - {c: 0o17, d: ~}\n  - 'null'\n  -\ne: |\n  text", "x.yaml")
    assert document.root == {"a": "on", "b": ["1:30", {"c": "0o17", "d": None}, "null", None], "e": "text"}
    assert document.line(("a",)) == 1
    assert document.line(("b", 1, "d")) == 4
    assert document.line(("b", 2)) == 5
    assert document.line(("b", 1, "absent", 7)) == 4
    assert document.problems == []


def test_doubled_keys_are_problems() -> None:
    document = parse("a: 1\nb: {c: 1, c: 2}\na: 2\n", "x.yaml")
    assert [(p.location, p.reason) for p in document.problems] == [
        (("b", "c"), "appears twice (first in line 2)"),
        (("a",), "appears twice (first in line 1)"),
    ]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "~"])
def test_an_empty_text_is_nothing(text: str) -> None:
    assert parse(text, "x.yaml").root is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", r"x\.yaml:2: this is not YAML"),
        ("a:\n\t- 1\n", r"x\.yaml:2: this is not YAML"),
        ("a: 'open\n", "not YAML"),
        ("a: &x 1\n", r"x\.yaml:1: anchors and aliases"),
        ("a: *x\n", "anchors and aliases"),
        ("&x [*x]\n", "anchors and aliases"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", r"x\.yaml:2: tags"),
        ("a: !!str 1\n", "tags"),
        ("a: 1\n---\nb: 2\n", r"x\.yaml:2: a second document"),
        ("? [a, b]\n: 1\n", "a key is a list"),
        ("? {a: b}\n: 1\n", "a key is a list"),
        ('a: "\\x1b[31m"\n', r"U\+001B"),
        ('a: "\\ud800"\n', r"U\+D800"),
        ('a: "\\0"\n', r"U\+0000"),
        ('"\\r": 1\n', r"U\+000D"),
        ("a: |\n  two\n  lines\n", r"U\+000A"),
        ('a: "\\UFFFFFFFF"\n', "not YAML"),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1\n", "not YAML"),
        ("a: \0\n", "not YAML"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested deeper"),
        ("[" * 20_000, "nested deeper"),
        ("- x\n" * (MAX_EVENTS + 1), "more than"),
    ],
)
def test_what_yaml_can_do_and_a_configuration_may_not(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, "x.yaml")


def test_files_are_read_with_bounds(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("\ufeffa: ü\n".encode())
    assert read_text(path, missing_mend="") == "a: ü\n"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: byte 0xff is not UTF-8"):
        read_text(path, missing_mend="")
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_text(path, missing_mend="")
    os.mkfifo(tmp_path / "pipe")  # opening it must not wait for a writer
    with pytest.raises(ConfigError, match="not a plain file"):
        read_text(tmp_path / "pipe", missing_mend="")
    with pytest.raises(ConfigError, match="folder"):
        read_text(tmp_path, missing_mend="")
    with pytest.raises(ConfigError, match=r"does not exist\. Do this\."):
        read_text(tmp_path / "absent", missing_mend="Do this")
    for impossible in (tmp_path / ("x" * 300), tmp_path / "a\0b", path / "below"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_text(impossible, missing_mend="")


@given(st.one_of(st.text(max_size=200), st.text(alphabet="ab:-[]{},'\"\\ \n\t&*!|>%#?~01", max_size=60)))
def test_any_text_is_a_tree_or_a_config_error(text: str) -> None:
    try:
        document = parse(text, "x.yaml")
    except ConfigError as error:
        assert error.exit_status == 2  # noqa: PT017  (either outcome is fine, another exception is not)
    else:
        assert document.root is None or isinstance(document.root, (dict, list, str))
