"""A file is whole or not there. Run: .venv/bin/pytest tests/common/test_whole_file.py"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan.common.whole_file import whole_file


def test_the_name_comes_with_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"before")
    with whole_file(path, mode=0o600) as file:
        file.write(b"after")
        file.flush()
        assert path.read_bytes() == b"before"
        (temporary,) = (entry for entry in tmp_path.iterdir() if entry != path)
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"before")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    monkeypatch.setattr(os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"), whole_file(path) as file:
        file.write(b"whole, but not on disk")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "none" / "state"):
        pass
