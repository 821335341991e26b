"""Traces: file, reader, summaries, generators. Run: pytest tests/placement/test_trace.py"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from titan.common.errors import PlanError, StoreError
from titan.placement import trace_file
from titan.placement.routing import zipf_frequencies
from titan.placement.synthetic import synthetic_trace
from titan.placement.trace import Trace, TraceHeader
from titan.placement.trace_file import MAGIC, TraceWriter, rotated
from titan.placement.trace_read import read_trace

HEADER = TraceHeader("a" * 64, (1, 2, 5), 16, 4)


def write(path: Path, trace: Trace, **kwargs) -> None:
    with TraceWriter(path, trace.header, **kwargs) as writer:
        for row in range(len(trace.ids)):
            writer.write(trace.ids[row][:, None, :])


def test_round_trip(tmp_path: Path) -> None:
    trace = synthetic_trace(HEADER, 500, zipf=0.7, seed=1)
    write(tmp_path / "t", trace)
    back = read_trace(tmp_path / "t", fingerprint="a" * 64)
    assert back.header == HEADER
    assert (back.ids == trace.ids).all()
    assert (back.step == np.arange(500)).all()
    assert back.probabilities is None
    back.check()


def test_rows_of_a_step_and_probabilities(tmp_path: Path) -> None:
    ids = np.stack([np.stack([np.arange(4) + r for r in range(3)])] * 3)  # [layers, rows, K]
    with TraceWriter(tmp_path / "t", HEADER, probabilities=True) as writer:
        writer.write(ids, np.full(ids.shape, 0.25))
        writer.write(ids[:, :1], np.full((3, 1, 4), float("nan")))
    back = read_trace(tmp_path / "t")
    assert back.step.tolist() == [0, 0, 0, 1]
    assert back.ids[2, 0].tolist() == [2, 3, 4, 5]
    assert back.probabilities is not None
    assert back.probabilities[0] == pytest.approx(0.25, abs=1 / 255)


def test_recording_stays_within_its_bound_and_keeps_the_newest(tmp_path: Path) -> None:
    trace, path = synthetic_trace(HEADER, 60_000, seed=2), tmp_path / "t"
    write(path, trace, max_bytes=400_000)
    assert rotated(path).exists()
    assert path.stat().st_size + rotated(path).stat().st_size <= 400_000
    back = read_trace(path, max_rows=1_000_000)
    assert 5_000 < len(back.ids) < 60_000
    assert (back.ids == trace.ids[-len(back.ids) :]).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t", "t.1"]
    assert len(read_trace(path, max_rows=100).ids) == 100


def test_an_earlier_file_is_rotated_not_lost(tmp_path: Path) -> None:
    first, second = synthetic_trace(HEADER, 10, seed=1), synthetic_trace(HEADER, 10, seed=2)
    write(tmp_path / "t", first)
    write(tmp_path / "t", second)
    assert (read_trace(tmp_path / "t").ids == np.concatenate([first.ids, second.ids])).all()


def test_a_recorder_that_was_killed_leaves_a_readable_file(tmp_path: Path) -> None:
    trace, path = synthetic_trace(HEADER, 6_000, seed=3), tmp_path / "t"
    write(path, trace)
    path.write_bytes(path.read_bytes()[:-7])
    back = read_trace(path)
    assert 0 < len(back.ids) < 6_000
    assert (back.ids == trace.ids[: len(back.ids)]).all()


def test_few_rows_are_written_before_a_block_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "FLUSH_S", -1.0)
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.write(synthetic_trace(HEADER, 1).ids.transpose(1, 0, 2))
    assert len(read_trace(tmp_path / "t", min_rows=1).ids) == 1
    with pytest.raises(PlanError, match="1 rows, at least 2 are needed"):
        read_trace(tmp_path / "t", min_rows=2)
    writer.close()


def test_no_space_ends_recording_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="recording is over"):
        TraceWriter(tmp_path / "missing" / "t", HEADER)


def test_wrong_steps_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        for bad in (np.zeros((3, 4)), np.zeros((2, 1, 4)), np.full((3, 1, 4), 16), np.full((3, 1, 4), -1)):
            with pytest.raises(ValueError, match="a step has"):
                writer.write(bad)
    assert len(read_trace(tmp_path / "t").ids) == 0


def _damage(data: bytes, how: str) -> bytes:
    if how == "magic":
        return b"X" + data[1:]
    if how == "flip":
        return data[:-20] + bytes([data[-20] ^ 255]) + data[-19:]
    if how == "length":
        return data[: len(MAGIC)] + struct.pack("<I", 1 << 30) + data[len(MAGIC) + 4 :]
    if how == "version":
        return data.replace(b'"version": 1', b'"version": 7')
    if how == "top_k":
        return data.replace(b'"top_k": 4', b'"top_k": 3')
    if how == "json":
        return data.replace(b'"version"', b"!version!")
    if how == "experts":
        return data.replace(b'"num_experts": 16', b'"num_experts": 12')
    return b""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("magic", "not a trace"),
        ("empty", "not a trace"),
        ("flip", "damaged"),
        ("length", "too long"),
        ("version", "version 7"),
        ("top_k", "whole steps"),
        ("json", "cannot be read"),
        ("experts", "the model has 12"),
    ],
)
def test_damage_is_named(tmp_path: Path, how: str, says: str) -> None:
    write(tmp_path / "t", synthetic_trace(HEADER, 101, seed=4))
    (tmp_path / "t").write_bytes(_damage((tmp_path / "t").read_bytes(), how))
    with pytest.raises(PlanError, match=says):
        read_trace(tmp_path / "t")


def test_another_model_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", synthetic_trace(HEADER, 3))
    with pytest.raises(PlanError, match="another model"):
        read_trace(tmp_path / "t", fingerprint="b" * 64)
    with pytest.raises(PlanError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def test_an_expert_twice_in_a_row_is_refused() -> None:
    ids = np.zeros((1, 3, 4), dtype=np.uint16)
    with pytest.raises(PlanError, match="twice in row 0, layer 1"):
        Trace(HEADER, ids, np.zeros(1, dtype=np.int64)).check()


def test_generators_give_what_they_are_asked_for() -> None:
    flat = synthetic_trace(HEADER, 4_000, seed=5)
    flat.check()
    assert flat.frequencies() == pytest.approx(0.25, abs=0.04)
    assert flat.reuse() == pytest.approx(0.25, abs=0.03)
    skewed = np.sort(synthetic_trace(HEADER, 4_000, zipf=1.0, seed=5).frequencies(), axis=1)[:, ::-1]
    assert skewed[0, 0] > zipf_frequencies(16, 4, 1.0)[0] - 0.1
    assert synthetic_trace(HEADER, 2_000, reuse=0.6, seed=5).reuse().mean() > 0.6
    still = synthetic_trace(HEADER, 4_000, zipf=1.0, seed=6)
    moving = synthetic_trace(HEADER, 4_000, zipf=1.0, drift=1.0, seed=6)
    assert _change(moving) > 3 * _change(still)


def _change(trace: Trace) -> float:
    half = len(trace.ids) // 2
    first = Trace(trace.header, trace.ids[:half], trace.step[:half]).frequencies()
    return float(np.abs(first - Trace(trace.header, trace.ids[half:], trace.step[half:]).frequencies()).mean())


def test_summaries() -> None:
    ids = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[0, 3]]], dtype=np.uint16)
    trace = Trace(TraceHeader("x", (0,), 4, 2), ids, np.arange(4))
    assert trace.frequencies().tolist() == [[0.5, 0.75, 0.5, 0.25]]
    assert trace.reuse().tolist() == [(1 + 2 + 0) / 6]
    together = trace.coactivation(0)
    assert together[1, 2] == 0.5
    assert together[0, 3] == together[3, 0] == 0.25
    assert np.diag(together).tolist() == [0.5, 0.75, 0.5, 0.25]
    assert trace.working_set(2).tolist() == [(3 + 2 + 4) / 3]
