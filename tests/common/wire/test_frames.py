"""Frames: what is packed is parsed, and nothing that a peer may send is taken for a frame when it is none.

Run: .venv/bin/pytest tests/common/wire/test_frames.py
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.common.errors import ClusterError, SessionUnknown, WireError, WorkerBadReply, WorkerOverloaded
from titan.common.wire import frames
from titan.common.wire.checks import Limits
from titan.common.wire.frames import HEADER_BYTES, TO_COORDINATOR, TO_WORKER, Header, Kind, Parts
from titan.common.wire.messages import MAX_MESSAGE_BYTES, MAX_PAIRS, MAX_ROWS, ExecuteCall, ExecuteResult, Hint

D, E = 16, 8
LIMITS = Limits(D, E, "float32")
FUZZ_CASES = 24_000  # from one seed; hypothesis, which is slower and finds smaller cases, runs beside them


def joined(frame: Parts) -> memoryview:
    data = b"".join(bytes(part) for part in frame.parts)
    assert len(data) == frame.nbytes
    return memoryview(data)


def call_of(rows: int, pairs: int, seed: int = 0, *, sort: bool = False) -> ExecuteCall:
    rng = np.random.default_rng(seed)
    return ExecuteCall(
        request_id=(1 << 63) + seed,
        layer=47,
        activations=rng.standard_normal((rows, D), np.float32),
        pair_rows=rng.integers(0, rows, pairs).astype(np.uint32),
        pair_experts=rng.integers(0, E, pairs).astype(np.uint32),
        sort=sort,
        deadline_s=0.25,
    )


@pytest.mark.parametrize(("rows", "pairs", "sort"), [(1, 1, False), (1, 8, False), (5, 40, True), (3, 200, True)])
def test_a_request_survives_the_way(rows: int, pairs: int, sort: bool) -> None:
    call = call_of(rows, pairs, sort=sort)
    data = joined(frames.encode_execute(call, 9, "float32"))
    header = frames.parse_header(data, TO_WORKER)
    assert header.epoch == 9
    assert header.length == len(data) - HEADER_BYTES
    found = frames.decode_execute(header, data[HEADER_BYTES:], LIMITS)
    assert (found.request_id, found.layer, found.sort, found.deadline_s) == (call.request_id, 47, sort, 0.25)
    for name in ("activations", "pair_rows", "pair_experts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(call, name))


def test_a_hint_survives_the_way_and_any_other_is_refused() -> None:
    data = joined(frames.encode_hint(Hint(3, (5, 0, 7), 2), 9))
    header = frames.parse_header(data, TO_WORKER)
    assert (header.epoch, header.layer) == (9, 3)
    assert frames.decode_hint(header, data[HEADER_BYTES:], LIMITS) == Hint(3, (5, 0, 7), 2)
    with pytest.raises(WireError):
        frames.parse_header(data, TO_COORDINATOR)
    for change in ({"pairs": 2}, {"pairs": 0}, {"rows": 4}, {"rows": 0}):
        with pytest.raises(WireError):
            frames.decode_hint(header._replace(**change), data[HEADER_BYTES:], LIMITS)


def test_a_request_is_decoded_without_a_copy() -> None:
    data = joined(frames.encode_execute(call_of(2, 4), 1, "float32"))
    found = frames.decode_execute(frames.parse_header(data, TO_WORKER), data[HEADER_BYTES:], LIMITS)
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(whole, a) for a in (found.activations, found.pair_rows, found.pair_experts))


def test_a_result_survives_the_way() -> None:
    call = call_of(2, 3)
    result = ExecuteResult(call.request_id, np.ones((3, D), np.float32), 0, 22, 33)
    data = joined(frames.encode_result(result, 9, "float32", 11))
    header = frames.parse_header(data, TO_COORDINATOR)
    found = frames.decode_result(header, data[HEADER_BYTES:], call, dtype="float32", worker="w")
    assert (found.request_id, found.queue_us, found.compute_us, found.load_us) == (call.request_id, 11, 22, 33)
    np.testing.assert_array_equal(found.outputs, result.outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_values_that_are_not_finite_are_found(dtype: str) -> None:
    exponent = 0x7F80 if dtype == "bfloat16" else 0x7C00
    call = call_of(1, 2)._replace(activations=np.zeros((1, D), np.uint16))
    outputs = np.zeros((2, D), np.uint16)

    def decode() -> ExecuteResult:
        data = joined(frames.encode_result(ExecuteResult(1, outputs, 0, 0), 1, dtype, 0))
        header = frames.parse_header(data, TO_COORDINATOR)
        return frames.decode_result(header, data[HEADER_BYTES:], call, dtype=dtype, worker="w")

    assert decode().outputs.dtype == np.uint16
    outputs[1, 5] = exponent  # infinity
    with pytest.raises(WorkerBadReply, match="not finite"):
        decode()


@pytest.mark.parametrize(
    ("error", "kind"), [(SessionUnknown("gone"), SessionUnknown), (WorkerOverloaded("full"), WorkerOverloaded)]
)
def test_a_failure_comes_out_as_the_error_it_went_in(error: ClusterError, kind: type[ClusterError]) -> None:
    data = memoryview(frames.encode_failure(5, 1, error))
    header = frames.parse_header(data, TO_COORDINATOR)
    with pytest.raises(kind, match=error.cause):
        frames.decode_result(header, data[HEADER_BYTES:], call_of(1, 1), dtype="float32", worker="w")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"kind": 99}, "kind 99"),
        ({"kind": int(Kind.RESULT)}, "no place here"),
        ({"flags": 0x80}, "unknown flags"),
        ({"length": MAX_MESSAGE_BYTES + 1}, "more than allowed"),
        ({"kind": int(Kind.OPEN), "length": 33}, "more than allowed"),
        ({"kind": int(Kind.PING), "length": (64 << 10) + 1}, "more than allowed"),
        ({"rows": MAX_ROWS + 1}, "more than allowed"),
        ({"pairs": MAX_PAIRS + 1}, "more than allowed"),
    ],
)
def test_a_header_out_of_bounds_is_refused_before_its_payload_matters(change: dict[str, int], words: str) -> None:
    data = joined(frames.encode_execute(call_of(1, 1), 1, "float32"))
    header = Header._make(frames.HEADER.unpack_from(data))._replace(**change)
    with pytest.raises(WireError, match=words):
        frames.parse_header(frames.HEADER.pack(*header), TO_WORKER)


@pytest.mark.parametrize(
    "change", [{"rows": 0}, {"rows": 2}, {"pairs": 0}, {"pairs": 2}, {"pairs": MAX_PAIRS}, {"dtype": 2}, {"dtype": 0}]
)
def test_a_header_that_does_not_fit_its_payload_is_refused(change: dict[str, int]) -> None:
    data = joined(frames.encode_execute(call_of(1, 1), 1, "float32"))
    header = frames.parse_header(data, TO_WORKER)._replace(**change)
    with pytest.raises(WireError):
        frames.decode_execute(header, data[HEADER_BYTES:], LIMITS)


def _fields(kinds: list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    small = st.integers(0, 12)
    return st.tuples(
        st.sampled_from([1, 1, 1, 0, 255]),
        st.sampled_from(kinds),
        st.integers(0, 4),
        st.integers(0, 2),
        st.integers(0, 0xFFFFFFFF),
        st.integers(0, (1 << 64) - 1),
        st.integers(0, (1 << 64) - 1),
        st.one_of(small, st.integers(0, 0xFFFFFFFF)),
        st.one_of(small, st.integers(0, 0xFFFFFFFF)),
        st.integers(0, 0xFFFFFFFF),
        st.one_of(st.integers(0, 1024), st.integers(0, 0xFFFFFFFF)),
    )


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(fields=_fields([3, 3, 3, 1, 6, 8, 8, 0, 77]), payload=st.binary(max_size=1024))
def test_any_request_is_a_valid_call_or_a_wire_error(fields: tuple[int, ...], payload: bytes) -> None:
    request_holds(frames.HEADER.pack(*fields), payload)


def request_holds(head: bytes, payload: bytes) -> str:
    try:
        header = frames.parse_header(head, TO_WORKER)
        if header.kind == Kind.HINT:
            hint = frames.decode_hint(header, memoryview(payload), LIMITS)
            assert all(0 <= expert < E for expert in hint.experts)
            assert 1 <= hint.reads <= len(hint.experts)
        if header.kind != Kind.EXECUTE:
            return "other"
        call = frames.decode_execute(header, memoryview(payload), LIMITS)
    except WireError:
        return "refused"
    assert call.activations.shape[1] == D
    assert int(call.pair_rows.max()) < call.activations.shape[0]
    assert int(call.pair_experts.max()) < E
    return "valid"


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(fields=_fields([4, 4, 5, 5, 7, 2, 3]), payload=st.binary(max_size=512))
def test_any_reply_is_a_valid_result_or_a_cluster_error(fields: tuple[int, ...], payload: bytes) -> None:
    reply_holds(frames.HEADER.pack(*fields), payload)


ASKED = call_of(2, 3)


def reply_holds(head: bytes, payload: bytes) -> str:
    try:
        header = frames.parse_header(head, TO_COORDINATOR)
        if header.kind not in (Kind.RESULT, Kind.FAILURE):
            return "other"
        result = frames.decode_result(header, memoryview(payload), ASKED, dtype="float32", worker="w")
    except (WireError, ClusterError):
        return "refused"
    assert result.outputs.shape == (3, D)
    assert np.isfinite(result.outputs).all()
    return "valid"


def mutated(draw: random.Random, data: bytes) -> tuple[bytes, bytes]:
    """A frame with a few of its bytes changed, some lost, some added: header and payload."""
    changed = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 2, 3, 8))):
        place = draw.randrange(HEADER_BYTES) if draw.random() < 0.6 else draw.randrange(len(changed))
        changed[place] = draw.choice((0, 1, 2, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    if draw.random() < 0.2:
        del changed[draw.randrange(HEADER_BYTES, len(changed)) :]
    if draw.random() < 0.1:
        changed += draw.randbytes(draw.randrange(64))
    return bytes(changed[:HEADER_BYTES]), bytes(changed[HEADER_BYTES:])


def test_mutated_requests() -> None:
    draw = random.Random(1)
    seeds = [
        bytes(joined(frames.encode_execute(call_of(r, p, r * p), 1, "float32"))) for r, p in ((1, 1), (1, 8), (5, 9))
    ]
    outcomes = Counter(request_holds(*mutated(draw, draw.choice(seeds))) for _ in range(FUZZ_CASES))
    assert min(outcomes[kind] for kind in ("valid", "refused")) > FUZZ_CASES // 20, outcomes


def test_mutated_replies() -> None:
    draw = random.Random(2)
    result = ExecuteResult(1, np.ones((3, D), np.float32), 0, 0)
    seeds = [bytes(joined(frames.encode_result(result, 1, "float32", 0))), frames.encode_failure(1, 1, WireError("no"))]
    outcomes = Counter(reply_holds(*mutated(draw, draw.choice(seeds))) for _ in range(FUZZ_CASES))
    assert min(outcomes[kind] for kind in ("valid", "refused")) > FUZZ_CASES // 20, outcomes
