"""Small checkpoints of each kind, made once, and copies of them for tests that damage one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.checkpoint_kinds import KINDS
from fixtures.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read-only checkpoints by the names of KINDS."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: make_checkpoint(root / kind, **options) for kind, options in KINDS.items()}


@pytest.fixture
def copy_of(kinds: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint, to be damaged."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(kinds[kind], tmp_path / "model"))

    return copy


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Sets keys of a checkpoint's config.json; a value of ... removes the key."""

    def edit(directory: Path, **keys: object) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return edit
