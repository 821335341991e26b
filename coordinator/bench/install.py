"""What it costs to put one expert into a slot, against a bare `preadv` of the same bytes into plain memory.

Slots as a CPU or a Mac has them: raw (the disk's dtypes) and widened (float32 scales). No decode.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from titan.common.registry import Checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import CacheMode, ExpertStore, ReaderPool
from titan.coordinator.bench.fio import fio_bytes_per_s

__all__ = ["InstallFigures", "bench_install"]

REPEATS = 60
SEQUENTIAL_BYTES = 512 << 20
CHUNK = 8  # experts
READERS = 2
RAW_DTYPE = "bfloat16"  # slots keep what is on disk


@dataclass(frozen=True, slots=True)
class InstallFigures:
    """Median microseconds an expert; `over_bare` against the bare read in the same cache mode."""

    how: str
    nbytes: int
    us: float
    over_bare: float
    gb_per_s: float


def bench_install(checkpoint: Checkpoint, pack: Checkpoint) -> list[InstallFigures]:
    """Page cache first (everything warm), then direct reads; the same experts for every way, interleaved."""
    spec = checkpoint.shape.layers[0]
    nbytes = spec.expert_bytes
    experts = range(min(checkpoint.shape.num_experts, 16))
    plain = mmap.mmap(-1, nbytes + 8192)
    memory = memoryview(plain)
    raw = LayerBuffers(spec, 2, RAW_DTYPE)
    wide = LayerBuffers(spec, 2, "float32")
    rows: list[InstallFigures] = []
    for cache in (CacheMode.PAGE_CACHE, CacheMode.DIRECT):
        flags = os.O_RDONLY | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if cache is CacheMode.DIRECT else 0)
        first = pack.ranges(spec.index, 0)[0]
        descriptor = os.open(first.file, flags)
        length = -(-nbytes // 4096) * 4096 if cache is CacheMode.DIRECT else nbytes
        packed = ExpertStore(pack, cache=cache, verify="never")
        unpacked = ExpertStore(checkpoint, cache=cache)

        def bare(expert: int, descriptor: int = descriptor, length: int = length) -> None:
            os.preadv(descriptor, [memory[:length]], pack.ranges(spec.index, expert)[0].offset)

        def slice_assign(expert: int, store: ExpertStore = packed) -> None:
            parts = [np.empty(view.shape, view.dtype) for view in raw.targets(0)]
            store.read_expert(spec.index, expert, parts)
            arrays = [a for m in (raw.gate, raw.up, raw.down) for a in m.arrays.values()]
            for array, part in zip(arrays, parts, strict=True):
                value = mx.array(part)
                array[1] = value if value.dtype == array.dtype else value.view(array.dtype)
            mx.eval(arrays)

        ways: dict[str, Callable[[int], None]] = {
            "bare preadv": bare,
            "packed into a slot": lambda e, s=packed: s.read_expert(spec.index, e, raw.targets(1)),
            "as mlx saves, into a slot": lambda e, s=unpacked: s.read_expert(spec.index, e, raw.targets(1)),
            "packed, widened to float32": lambda e, s=packed: s.read_expert(spec.index, e, wide.targets(1)),
            "packed, temporaries and slice assignment": slice_assign,
        }
        times: dict[str, list[float]] = {how: [] for how in ways}
        for repeat in range(REPEATS + 8):
            expert = experts[repeat * 5 % len(experts)]
            turns = [*ways.items()]
            for how, way in turns[repeat % len(turns) :] + turns[: repeat % len(turns)]:  # none is always the first
                start = time.perf_counter()
                way(expert)
                if repeat >= 8:
                    times[how].append(time.perf_counter() - start)
        base = statistics.median(times["bare preadv"])
        for how, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(InstallFigures(f"{how}, {cache}", nbytes, 1e6 * median, median / base, nbytes / median / 1e9))
        rows.extend(
            _sequential(pack, packed, descriptor, LayerBuffers(spec, CHUNK, RAW_DTYPE))
            if cache is CacheMode.DIRECT
            else []
        )
        os.close(descriptor)
        packed.close()
        unpacked.close()
    return rows


def _sequential(pack: Checkpoint, store: ExpertStore, descriptor: int, buffers: LayerBuffers) -> list[InstallFigures]:
    """Experts as they lie in the first file, READERS at a time: bare and through the store by turns, and fio if any."""
    spec = pack.shape.layers[0]
    file = pack.ranges(spec.index, 0)[0].file
    places = sorted(
        (pack.ranges(layer.index, e)[0].offset, layer.index, e)
        for layer in pack.shape.layers
        if layer.matrices == spec.matrices
        for e in range(pack.shape.num_experts)
        if pack.ranges(layer.index, e)[0].file == file
    )[: max(8, SEQUENTIAL_BYTES // spec.expert_bytes)]
    length = -(-spec.expert_bytes // 4096) * 4096
    memory = [memoryview(mmap.mmap(-1, length)) for _ in range(CHUNK)]
    pool = ReaderPool(READERS)

    def bare(number: int, offset: int) -> None:
        os.preadv(descriptor, [memory[number]], offset)

    def through(number: int, layer: int, expert: int) -> None:
        store.read_expert(layer, expert, buffers.targets(number))

    seconds: dict[str, list[float]] = {"bare preadv": [], "packed into slots": []}
    for turn, first in enumerate(range(0, len(places) - CHUNK + 1, CHUNK)):
        how = "packed into slots" if turn % 2 else "bare preadv"
        chunk = list(enumerate(places[first : first + CHUNK]))
        start = time.perf_counter()
        if turn % 2:
            pool.run_all([lambda n=n, la=la, e=e: through(n, la, e) for n, (_, la, e) in chunk])
        else:
            pool.run_all([lambda n=n, o=o: bare(n, o) for n, (o, _, _) in chunk])
        seconds[how].append((time.perf_counter() - start) / CHUNK)
    pool.close()
    each_s = {how: statistics.median(times) for how, times in seconds.items()}
    base, reference = each_s["bare preadv"], "bare preadv"
    rate = fio_bytes_per_s(file, length, READERS)
    if rate is not None:
        base, reference = length / rate, "fio"
        each_s = {"fio": base, **each_s}
    return [
        InstallFigures(
            f"sequential, {how}, {READERS} readers, direct (against {reference})",
            spec.expert_bytes,
            1e6 * seconds_each,
            seconds_each / base,
            spec.expert_bytes / seconds_each / 1e9,
        )
        for how, seconds_each in each_s.items()
    ]
