"""One fingerprint for copies of one model, another for anything that computes differently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.safetensors_file import read_tensors, write_tensors

from titan.common.errors import CheckpointChanged
from titan.common.registry import fingerprint as module
from titan.common.registry import open_checkpoint
from titan.common.registry.fingerprint import MAX_SAMPLED_TENSORS, WINDOW_BYTES, fingerprint
from titan.common.registry.headers import TensorInfo, identity_of

Copy = Callable[[str], Path]
Edit = Callable[..., None]


def of(directory: Path) -> str:
    return open_checkpoint(directory).shape.fingerprint


def test_split_names_order_and_offsets_do_not_matter(kinds: dict[str, Path], tmp_path: Path) -> None:
    tensors = read_tensors(kinds["olmoe"] / "model.safetensors")
    names = sorted(tensors, reverse=True)
    for number, part in enumerate((names[::2], names[1::2])):
        write_tensors(tmp_path / f"model-part{number}.safetensors", {name: tensors[name] for name in part})
    shutil.copyfile(kinds["olmoe"] / "config.json", tmp_path / "config.json")
    assert of(tmp_path) == of(kinds["olmoe"])
    assert len(of(tmp_path)) == 64


def test_the_same_seed_makes_the_same_model(kinds: dict[str, Path], tmp_path: Path) -> None:
    assert of(make_checkpoint(tmp_path / "same", shards=2)) == of(kinds["olmoe"])
    assert of(make_checkpoint(tmp_path / "other", seed=1)) != of(kinds["olmoe"])


def test_config_that_changes_nothing(copy_of: Copy, edit_config: Edit) -> None:
    directory = copy_of("olmoe")
    before = of(directory)
    config = json.loads((directory / "config.json").read_text())
    shuffled = dict(reversed(config.items()))
    edit_config(directory, **dict.fromkeys(config, ...))
    edit_config(
        directory, **shuffled, transformers_version="9", torch_dtype="bfloat16", clip_qkv=None, rope_scaling=None
    )
    edit_config(directory, rope_theta=10000, attention_bias=False, norm_topk_prob=...)
    edit_config(directory, quantization={"bits": 4, "group_size": 64}, quantization_config=...)  # an old file
    assert of(directory) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-6),
        ("rope_theta", 5e5),
        ("norm_topk_prob", True),
        ("num_experts_per_tok", 3),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_config_that_changes_the_computation(copy_of: Copy, edit_config: Edit, key: str, value: object) -> None:
    directory = copy_of("olmoe")
    before = of(directory)
    edit_config(directory, **{key: value})
    assert of(directory) != before


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.1.mlp.switch_mlp.down_proj.scales"])
@pytest.mark.parametrize("at", [0, -1])
def test_content_at_either_end_of_a_tensor(copy_of: Copy, tensor: str, at: int) -> None:
    directory = copy_of("olmoe")
    before = of(directory)
    tensors = read_tensors(directory / "model.safetensors")
    data = bytearray(tensors[tensor].data)
    data[at] ^= 1
    tensors[tensor].data = bytes(data)
    write_tensors(directory / "model.safetensors", tensors)
    assert of(directory) != before


def test_windows_reach_both_ends_and_between(tmp_path: Path) -> None:
    file, nbytes = tmp_path / "f", 8 * WINDOW_BYTES * 16
    tensors = {"a": TensorInfo("a", "U8", (nbytes,), file, 0, nbytes)}

    def with_byte(position: int | None) -> str:
        data = bytearray(nbytes)
        if position is not None:
            data[position] = 1
        file.write_bytes(data)
        return fingerprint({}, (), tensors, {file: identity_of(file.stat())})

    step = (nbytes - WINDOW_BYTES) // 7
    positions = [None, 0, step, 3 * step, nbytes - 1]
    assert len({with_byte(position) for position in positions}) == len(positions)


def test_tensor_names_and_dtypes_count(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(64))
    identities = {file: identity_of(file.stat())}

    def of_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> str:
        return fingerprint({}, (), {name: TensorInfo(name, dtype, shape, file, 0, 64)}, identities)

    variants = [("a", "F32", (16,)), ("b", "F32", (16,)), ("a", "U32", (16,)), ("a", "F32", (4, 4))]
    assert len({of_tensor(*variant) for variant in variants}) == 4


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"")
    nbytes = 1 << 30
    with open(file, "r+b") as handle:
        handle.truncate(nbytes * 4)  # sparse
    read: list[int] = []

    def pread(_descriptor: int, size: int, offset: int) -> bytes:
        assert 0 <= offset <= offset + size <= 4 * nbytes
        read.append(size)
        return bytes(size)

    monkeypatch.setattr(module.os, "pread", pread)
    for count in (1, 100, 5 * MAX_SAMPLED_TENSORS):
        read.clear()
        tensors = {f"t{n}": TensorInfo(f"t{n}", "U8", (nbytes,), file, n % 4 * nbytes, nbytes) for n in range(count)}
        fingerprint({}, (), tensors, {file: identity_of(file.stat())})
        assert set(read) == {WINDOW_BYTES}
        assert min(count, MAX_SAMPLED_TENSORS) <= len(read) <= 2 * MAX_SAMPLED_TENSORS


def test_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(64))
    stale = identity_of(file.stat())
    file.unlink()
    file.write_bytes(bytes(65))
    with pytest.raises(CheckpointChanged, match=str(file)):
        fingerprint({}, (), {"a": TensorInfo("a", "U8", (64,), file, 0, 64)}, {file: stale})
