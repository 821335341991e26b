"""Write a pack: shard after shard into a directory beside the destination, which gets its name when all is there.

An interrupted run goes on after the last finished shard. Knows how experts are read and where they go; the layout is
`titan.common.pack.layout`'s.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from titan.common.errors import CheckpointContradiction, DiskFull, StoreError
from titan.common.pack.files import copy_range, disk_errors, pwrite_all, sync_directory, write_text, written
from titan.common.pack.layout import DEFAULT_SHARD_BYTES, ShardLayout, plan_shards
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.registry.families import FAMILIES
from titan.common.registry.fingerprint import fingerprint
from titan.common.registry.packed import MANIFEST_NAME, PackManifest, seal_of
from titan.common.registry.shards import INDEX_NAME, read_shards
from titan.common.store import ExpertStore
from titan.common.units import format_bytes

__all__ = ["write_pack"]

JOURNAL_NAME = "titan-pack.partial.json"
LOCK_NAME = ".titan-pack.lock"
MAX_SIDE_FILE_BYTES = 64 << 20
SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def write_pack(
    source: Checkpoint,
    destination: Path,
    *,
    experts: Mapping[int, Sequence[int]] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: Progress = lambda _done, _total: None,
) -> Checkpoint:
    """Pack `source` into the new directory `destination` and open it.

    Args:
        experts: layer -> expert numbers; None packs all.
        shard_bytes: about how large a file may become.

    Raises:
        CheckpointContradiction: the experts to pack are not the model's.
        DiskFull: what is written so far is kept and goes on when it is run again.
        StoreError: a file cannot be read or written, the destination exists, or another run works on it.
        CheckpointChanged: the source changed meanwhile.
    """
    wanted = _wanted(source, experts)
    if os.path.lexists(destination):
        raise StoreError(f"{destination} exists already", "Remove it or choose another name")
    partial = destination.with_name(f"{destination.name}.titan-partial")
    layouts = plan_shards(source.shape, wanted, shard_bytes)
    with disk_errors(partial, 0):
        partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        journal = _Journal(partial, source.shape.fingerprint, wanted, shard_bytes)
        remaining = [layout for layout in layouts if not journal.holds(layout)]
        _check_space(partial, sum(x.nbytes for x in remaining) + source.non_expert_bytes)
        total = sum(layout.nbytes for layout in layouts)
        done = total - sum(layout.nbytes for layout in remaining)
        store = ExpertStore(source)
        try:
            for layout in remaining:
                sums = _write_shard(
                    store, partial / layout.name, layout, lambda n, base=done: on_progress(base + n, total)
                )
                journal.add(layout.name, sums)
                done += layout.nbytes
                on_progress(done, total)
        finally:
            store.close()
        _write_non_experts(source, partial / "model.safetensors")
        _copy_side_files(source.path, partial)
        manifest = PackManifest(
            source.shape, journal.checksums(layouts), tuple(x.name for x in layouts), str(source.path.resolve()), ""
        )
        shards, tensors = read_shards(partial)
        family = FAMILIES[source.shape.family]
        content = fingerprint(
            {**source.config, **source.config_defaults},
            family.computation_keys,
            tensors,
            {shard.path: shard.identity for shard in shards},
        )
        write_text(partial / MANIFEST_NAME, replace(manifest, seal=seal_of(manifest, content)).to_json())
        open_checkpoint(partial)
        journal.remove()
        with disk_errors(destination, 0):
            os.rename(partial, destination)
            sync_directory(destination.parent)
    (destination / LOCK_NAME).unlink()
    return open_checkpoint(destination)


def _wanted(source: Checkpoint, experts: Mapping[int, Sequence[int]] | None) -> dict[int, tuple[int, ...]]:
    shape = source.shape
    if experts is None:
        return {spec.index: tuple(range(shape.num_experts)) for spec in shape.layers}
    known = {spec.index for spec in shape.layers}
    for layer, numbers in experts.items():
        bad = [e for e in numbers if not 0 <= e < shape.num_experts]
        if layer not in known or bad:
            raise CheckpointContradiction(
                f"{source.path} has no expert {bad[0] if bad else 0} in layer {layer}", "Give a plan for this model"
            )
    if not any(experts.values()):
        raise CheckpointContradiction("there is no expert to pack", "Name a node that holds some")
    return {layer: tuple(sorted(set(numbers))) for layer, numbers in sorted(experts.items())}


def _check_space(path: Path, nbytes: int) -> None:
    free = shutil.disk_usage(path).free
    if nbytes > free:
        raise DiskFull(
            f"the pack needs {format_bytes(nbytes)} more at {path.parent}, which has {format_bytes(free)} left",
            "Free some space and run it again",
        )


def _write_shard(store: ExpertStore, path: Path, layout: ShardLayout, on_bytes: Callable[[int], None]) -> list[int]:
    sums = []
    with written(path, layout.nbytes) as descriptor:
        pwrite_all(descriptor, layout.header, 0)
        for layer, expert, offset in layout.places:
            data = store.read_bytes(layer, expert)
            sums.append(zlib.crc32(data))
            pwrite_all(descriptor, data, offset)
            on_bytes(offset + len(data))
    return sums


def _write_non_experts(source: Checkpoint, path: Path) -> None:
    """Every tensor outside the experts, as it is, in one file that mlx-lm finds."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in source.non_expert_tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with written(path, start + end) as target:
        pwrite_all(target, len(text).to_bytes(8, "little") + text, 0)
        for file in {tensor.file for tensor in source.non_expert_tensors}:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                position = start
                for tensor in source.non_expert_tensors:
                    if tensor.file == file:
                        copy_range(descriptor, tensor.offset, tensor.nbytes, target, position)
                    position += tensor.nbytes
            finally:
                os.close(descriptor)


def _copy_side_files(source: Path, target: Path) -> None:
    """Config, tokenizer and templates: the small files beside the weights."""
    for entry in sorted(os.scandir(source), key=lambda e: e.name):
        if entry.name in (INDEX_NAME, MANIFEST_NAME) or not entry.name.endswith(SIDE_FILES) or not entry.is_file():
            continue
        if entry.stat().st_size <= MAX_SIDE_FILE_BYTES:
            with disk_errors(target / entry.name, entry.stat().st_size):
                shutil.copyfile(entry.path, target / entry.name)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another `titan pack` writes {directory}", "Wait for it to end") from error
        yield
    finally:
        os.close(descriptor)


class _Journal:
    """Which shards are finished, with their checksums; survives an interrupted run."""

    def __init__(self, directory: Path, content: str, wanted: Mapping[int, tuple[int, ...]], shard_bytes: int) -> None:
        self._directory = directory
        self._path = directory / JOURNAL_NAME
        self._job = {
            "fingerprint": content,
            "experts": {str(layer): list(numbers) for layer, numbers in wanted.items()},
            "shard_bytes": shard_bytes,
        }
        self._done: dict[str, list[int]] = {}
        if self._path.exists():
            try:
                raw = json.loads(self._path.read_text())
                job, self._done = raw["job"], raw["done"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{self._path} cannot be read ({error})", f"Remove {directory}") from error
            if job != self._job:
                raise StoreError(
                    f"{directory} holds an unfinished pack of another checkpoint or choice of experts",
                    "Remove it, or finish it with the options it was begun with",
                )

    def holds(self, layout: ShardLayout) -> bool:
        file = self._directory / layout.name
        sums = self._done.get(layout.name, ())
        return len(sums) == len(layout.places) and file.exists() and file.stat().st_size == layout.nbytes

    def add(self, name: str, sums: list[int]) -> None:
        self._done[name] = sums
        write_text(self._path, json.dumps({"job": self._job, "done": self._done}, separators=(",", ":")))

    def checksums(self, layouts: Sequence[ShardLayout]) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {}
        for layout in layouts:
            for (layer, expert, _), crc in zip(layout.places, self._done[layout.name], strict=True):
                found.setdefault(layer, {})[expert] = crc
        return found

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
