"""The header parser believes nothing: damaged files, impossible offsets, random bytes."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from fixtures.safetensors_file import Tensor, write_raw, write_tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan.common.errors import CheckpointContradiction, CheckpointMissing, CheckpointTruncated, TitanError
from titan.common.registry.headers import MAX_HEADER_BYTES, MAX_TENSORS, read_header


def header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


def entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_offsets_are_absolute(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(
        path, {"a": Tensor("F32", [2, 3], bytes(24)), "b": Tensor("U8", [], b"x"), "c": Tensor("F16", [0], b"")}
    )
    shard = read_header(path)
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in shard.tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("U8", (), 1),
        "c": ("F16", (0,), 0),
    }
    assert path.read_bytes()[shard.tensors["b"].offset :] == b"x"
    assert shard.nbytes == path.stat().st_size


def test_padding_and_gaps_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header(b=entry(offsets=(30, 54)), a=entry()) + b"    ", bytes(60))
    tensors = read_header(path).tensors
    assert tensors["b"].offset - tensors["a"].offset == 30


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (header(a=entry(), b=entry(offsets=(23, 47))), CheckpointContradiction, "a and b overlap"),
        (header(a=entry(), b=entry()), CheckpointContradiction, "overlap"),
        (header(a=entry(shape=[2, 4])), CheckpointContradiction, "a is F32 [2, 4], 32 bytes, but lies at 0..24"),
        (header(a=entry(shape=[2, 2])), CheckpointContradiction, "a is F32 [2, 2], 16 bytes, but lies at 0..24"),
        (header(a=entry(offsets=[24, 0])), CheckpointContradiction, "a is F32"),
        (header(a=entry(offsets=[40, 64])), CheckpointTruncated, "before its tensor a"),
        (header(a=entry(offsets=[2**62, 2**62 + 24])), CheckpointTruncated, "before its tensor a"),
        (header(a=entry(offsets=[-24, 0])), CheckpointContradiction, "data_offsets"),
        (header(a=entry(shape=[-2, -3])), CheckpointContradiction, "shape"),
        (header(a=entry(shape=[2.0, 3])), CheckpointContradiction, "shape"),
        (header(a=entry(shape=[True, 6])), CheckpointContradiction, "shape"),
        (header(a=entry(shape=[1] * 9)), CheckpointContradiction, "shape"),
        (header(a=entry(dtype="Q4_K")), CheckpointContradiction, "Q4_K"),
        (header(a=entry(dtype=["F32"])), CheckpointContradiction, "dtype"),
        (header(a=[0, 24]), CheckpointContradiction, "a is not an object"),
        (header(a={}), CheckpointContradiction, "dtype"),
        (b"[]", CheckpointTruncated, "not an object"),
        (b"{}garbage", CheckpointTruncated, "cannot be read"),
        (b'{"a": {}, "a": {}}', CheckpointTruncated, "twice"),
        ("{}".encode("utf-16"), CheckpointTruncated, "cannot be read"),
        (b"[" * 100_000, CheckpointTruncated, "cannot be read"),
        (b'{"a": ' + b"9" * 10_000 + b"}", CheckpointTruncated, "cannot be read"),
        (header(**{"a\nb": entry()}), CheckpointTruncated, "name"),
        (header(**{"a" * 600: entry()}), CheckpointTruncated, "name"),
        (b'{"\\ud800": 1}', CheckpointTruncated, "name"),
    ],
)
def test_headers_that_lie(tmp_path: Path, text: bytes, error: type[TitanError], words: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, text, bytes(60))
    with pytest.raises(error) as refused:
        read_header(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\x02", b"\xff" * 8, (60).to_bytes(8, "little") + b"{}", bytes(8), bytes(9)])
def test_files_shorter_than_their_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointTruncated, match="truncated or not safetensors"):
        read_header(path)


def test_not_a_file(tmp_path: Path) -> None:
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    for path in (tmp_path, tmp_path / "absent", fifo, loop):
        with pytest.raises(CheckpointMissing, match=str(path)):
            read_header(path)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    before = set(os.listdir("/dev/fd"))
    for text in (b"{}", b"nonsense"):
        write_raw(path, text, b"")
        for _ in range(3):
            try:
                read_header(path)
            except CheckpointTruncated:
                continue
    assert set(os.listdir("/dev/fd")) == before


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * MAX_HEADER_BYTES)  # sparse
    assert peak_bytes_of_refusal(path) < 1 << 20


def test_a_header_of_too_many_values_is_refused_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"a":[' + b"[]," * (9 * MAX_TENSORS) + b"[]]}"
    write_raw(path, text, b"")
    assert peak_bytes_of_refusal(path) < 3 * len(text)


def peak_bytes_of_refusal(path: Path) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointTruncated):
            read_header(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBER = st.integers(-2, 70) | st.sampled_from([2**31, 2**63, 2**64, 10**30])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F6_E2M3", "", "X"]) | JSON,
        "shape": st.lists(NUMBER, max_size=3) | JSON,
        "data_offsets": st.lists(NUMBER, min_size=2, max_size=2) | JSON,
    }
)
HEADER = (
    st.dictionaries(st.text(max_size=6), ENTRY | JSON, max_size=4).map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=80)
)
LENGTH = st.none() | st.integers(0, 200) | st.integers(0, 2**64 - 1)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HEADER, length=LENGTH, data=st.binary(max_size=64))
def test_nothing_but_titan_errors(tmp_path: Path, text: bytes, length: int | None, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    try:
        shard = read_header(path)
    except TitanError:
        return
    for tensor in shard.tensors.values():
        assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= shard.nbytes
