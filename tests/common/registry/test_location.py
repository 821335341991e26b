"""Paths, and names that the local Hugging Face cache knows; the network is never asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from titan.common.errors import CheckpointMissing
from titan.common.registry import open_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cached_repository(kinds: dict[str, Path], cache: Path) -> None:
    repository = cache / "models--someone--Some-MoE-4bit"
    snapshot = repository / "snapshots" / "0123abc"
    shutil.copytree(kinds["olmoe"], snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    checkpoint = open_checkpoint(Path("someone/Some-MoE-4bit"))
    assert checkpoint.path == snapshot
    assert checkpoint.shape == open_checkpoint(kinds["olmoe"]).shape


@pytest.mark.usefixtures("cache")
def test_a_repository_that_is_not_cached() -> None:
    with pytest.raises(CheckpointMissing, match="nor in the local Hugging Face cache") as refused:
        open_checkpoint(Path("someone/absent"))
    assert "titan download someone/absent" in refused.value.mend


@pytest.mark.parametrize("name", ["absent", "/a/b", "a/b/c", "a/../b", "-a/b", "a\0b", "a/" + "b" * 300])
@pytest.mark.usefixtures("cache")
def test_paths_that_lead_nowhere(name: str) -> None:
    with pytest.raises(CheckpointMissing) as refused:
        open_checkpoint(Path(name))
    assert "titan download" not in str(refused.value)


def test_a_file_is_not_a_model(kinds: dict[str, Path]) -> None:
    with pytest.raises(CheckpointMissing, match="is a file") as refused:
        open_checkpoint(kinds["olmoe"] / "model.safetensors")
    assert "folder" in refused.value.mend


def test_a_directory_without_a_config(cache: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"config\.json"):
        open_checkpoint(cache)


def test_a_directory_without_weights(copy_of) -> None:
    directory = copy_of("olmoe")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointMissing, match=r"no file named model\*\.safetensors"):
        open_checkpoint(directory)
