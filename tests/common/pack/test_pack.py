"""Packs made from real checkpoints: the same bytes, side by side and aligned; what breaks is named, never read."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from safetensors.numpy import load_file

from titan.common.errors import (
    CheckpointContradiction,
    CheckpointMissing,
    CheckpointTruncated,
    ChecksumMismatch,
    DiskFull,
    PlanError,
    StoreError,
    TitanError,
)
from titan.common.pack import verify_pack, write_pack
from titan.common.pack.selection import read_selection
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.registry.packed import ALIGNMENT_BYTES, MANIFEST_NAME
from titan.common.store import ExpertStore

# One expert is no multiple of 4 KiB in any of them, so that there is padding.
SOURCES: dict[str, dict[str, Any]] = {
    "olmoe": {"header_padding": 3},
    "qwen3": {"family": "qwen3_moe", "layers": 3, "mlp_only_layers": [1], "dtype": "float16", "bits": 8, "shards": 2},
    "per-expert": {"layout": "per-expert", "group_size": 32},
    "unquantized": {"bits": None, "dtype": "float16", "width": 96},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("sources")
    return {name: open_checkpoint(make_checkpoint(root / name, **options)) for name, options in SOURCES.items()}


@pytest.fixture
def source(sources: dict[str, Checkpoint]) -> Checkpoint:
    return sources["olmoe"]


def expert_bytes(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    store = ExpertStore(checkpoint)
    try:
        return bytes(store.read_bytes(layer, expert))
    finally:
        store.close()


@pytest.mark.parametrize("name", SOURCES)
def test_a_pack_is_the_same_model_with_every_expert_in_one_piece(
    sources: dict[str, Checkpoint], name: str, tmp_path: Path
) -> None:
    source = sources[name]
    packed = write_pack(source, tmp_path / "pack", shard_bytes=100_000)
    assert packed.shape == source.shape
    assert packed.pack is not None
    assert len(packed.pack.shards) > 1
    assert packed.config == source.config
    for spec in source.shape.layers:
        for expert in range(source.shape.num_experts):
            ranges = packed.ranges(spec.index, expert)
            assert ranges[0].offset % ALIGNMENT_BYTES == 0
            assert all(a.offset + a.nbytes == b.offset for a, b in itertools.pairwise(ranges))
            assert len({part.file for part in ranges}) == 1
            assert expert_bytes(packed, spec.index, expert) == expert_bytes(source, spec.index, expert)
    assert verify_pack(packed) == len(source.shape.layers) * source.shape.num_experts
    assert [(t.name, t.dtype, t.shape) for t in packed.non_expert_tensors] == [
        (t.name, t.dtype, t.shape) for t in source.non_expert_tensors
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pack"]
    assert not (tmp_path / "pack" / ".titan-pack.lock").exists()


def test_its_files_are_valid_safetensors(sources: dict[str, Checkpoint], tmp_path: Path) -> None:
    source = sources["unquantized"]
    write_pack(source, tmp_path / "pack")
    tensors = load_file(tmp_path / "pack" / "experts-00001-of-00001.safetensors")  # upstream's reader forbids gaps
    weight = tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    stacked = load_file(source.shards[0].path)["model.layers.1.mlp.switch_mlp.up_proj.weight"]
    np.testing.assert_array_equal(weight, stacked[5])
    others = load_file(tmp_path / "pack" / "model.safetensors")
    np.testing.assert_array_equal(
        others["model.embed_tokens.weight"], load_file(source.shards[0].path)["model.embed_tokens.weight"]
    )


def test_a_subset_opens_and_names_what_it_does_not_hold(source: Checkpoint, tmp_path: Path) -> None:
    packed = write_pack(source, tmp_path / "pack", experts={1: [5, 2]})
    assert packed.shape == source.shape
    assert packed.pack is not None
    assert packed.pack.experts == 2
    assert expert_bytes(packed, 1, 2) == expert_bytes(source, 1, 2)
    assert expert_bytes(packed, 1, 3) == expert_bytes(source, 1, 3), "the checkpoint beside the pack has it"
    with pytest.raises(CheckpointContradiction, match="no expert 8 in layer 1"):
        write_pack(source, tmp_path / "other", experts={1: [8]})


def test_a_subset_without_its_source_names_what_it_does_not_hold(tmp_path: Path) -> None:
    source = open_checkpoint(make_checkpoint(tmp_path / "model"))
    packed = write_pack(source, tmp_path / "pack", experts={1: [5, 2]})
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"expert 3 of layer 1.*pack"):
        expert_bytes(packed, 1, 3)


def test_the_plan_says_what_a_node_packs(source: Checkpoint, tmp_path: Path) -> None:
    plan = {
        "fingerprint": source.shape.fingerprint,
        "nodes": [{"name": "home"}, {"name": "mini"}],
        "layers": [0, 1],
        "residency": [[[0], [1], [0, 1], [], [], [], [], []], [[1]] + [[] for _ in range(7)]],
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert read_selection(path, None, source.shape) == {0: (1, 2), 1: (0,)}
    assert read_selection(path, "home", source.shape) == {0: (0, 2), 1: ()}
    with pytest.raises(PlanError, match="home, mini"):
        read_selection(path, "studio", source.shape)
    path.write_text(json.dumps({**plan, "fingerprint": "0" * 64}))
    with pytest.raises(PlanError, match="is for checkpoint 000000000000"):
        read_selection(path, None, source.shape)


class Interrupted(Exception):
    pass


def test_an_interrupted_run_goes_on_after_the_last_finished_shard(source: Checkpoint, tmp_path: Path) -> None:
    total = 0

    def interrupt(done: int, whole: int) -> None:
        nonlocal total
        total = whole
        if done > whole // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        write_pack(source, tmp_path / "pack", shard_bytes=100_000, on_progress=interrupt)
    assert not (tmp_path / "pack").exists()
    partial = tmp_path / "pack.titan-partial"
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("experts-*.safetensors")}
    assert finished
    with pytest.raises(StoreError, match="unfinished pack of another"):
        write_pack(source, tmp_path / "pack", shard_bytes=200_000)
    seen: list[int] = []
    packed = write_pack(source, tmp_path / "pack", shard_bytes=100_000, on_progress=lambda done, _: seen.append(done))
    assert seen[0] > total // 4, "it began anew"
    assert seen[-1] == total
    verify_pack(packed)
    for name, written in finished.items():
        assert (tmp_path / "pack" / name).stat().st_mtime_ns == written


def test_a_full_disk_is_named_and_what_was_written_is_kept(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, calls = os.posix_fallocate, []

    def full_after_two(descriptor: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full_after_two)
    with pytest.raises(DiskFull, match="experts-00003-of-"):
        write_pack(source, tmp_path / "pack", shard_bytes=100_000)
    partial = tmp_path / "pack.titan-partial"
    assert len(list(partial.glob("experts-*.safetensors"))) == 2
    assert not list(partial.glob("*.tmp"))
    monkeypatch.undo()
    verify_pack(write_pack(source, tmp_path / "pack", shard_bytes=100_000))


def test_too_little_space_is_said_before_anything_is_written(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    with pytest.raises(DiskFull, match="1000 B left"):
        write_pack(source, tmp_path / "pack")


def test_a_destination_in_use_is_left_alone(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        write_pack(source, tmp_path / "pack")
    (tmp_path / "other.titan-partial").mkdir()
    lock = os.open(tmp_path / "other.titan-partial" / ".titan-pack.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="another `titan pack`"):
        write_pack(source, tmp_path / "other")
    os.close(lock)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_one_flipped_bit_is_found_and_named(source: Checkpoint, tmp_path: Path) -> None:
    packed = write_pack(source, tmp_path / "pack")
    part = packed.ranges(1, 6)[4]
    flip(part.file, part.offset + part.nbytes - 1)
    with pytest.raises(ChecksumMismatch, match=r"1 of 16 experts .* expert 6 of layer 1 in experts-00001"):
        verify_pack(open_checkpoint(packed.path))


def test_faults_of_a_pack_are_refused_when_it_is_opened(source: Checkpoint, tmp_path: Path) -> None:
    def faulty(name: str) -> Path:
        return write_pack(source, tmp_path / name).path

    def refused(path: Path, error: type[TitanError], match: str) -> None:
        with pytest.raises(error, match=match):
            open_checkpoint(path)

    path = faulty("config")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    refused(path, CheckpointContradiction, "do not belong together")

    path = faulty("other-tensors")
    flip(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)
    refused(path, CheckpointContradiction, "do not belong together")

    path = faulty("manifest")
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text.replace(source.shape.fingerprint, "0" * 64))
    refused(path, CheckpointContradiction, "do not belong together")

    path = faulty("version")
    (path / MANIFEST_NAME).write_text(text.replace('"version":2', '"version":3'))
    refused(path, CheckpointContradiction, "version '3'")

    path = faulty("half-a-manifest")
    (path / MANIFEST_NAME).write_text(text[: len(text) // 2])
    refused(path, CheckpointTruncated, "not a valid JSON object")

    path = faulty("short")
    shard = path / "experts-00001-of-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 5000)
    refused(path, CheckpointTruncated, "ends at byte")

    path = faulty("absent")
    (path / "experts-00001-of-00001.safetensors").unlink()
    refused(path, CheckpointMissing, "experts-00001")


def test_verify_wants_a_pack(source: Checkpoint) -> None:
    with pytest.raises(CheckpointContradiction, match="is not a pack"):
        verify_pack(source)
