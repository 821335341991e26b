"""Filling experts that an Assign names from parts the coordinator pushes, and telling it how far that is.

Knows the order in which parts must come, and their bounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from titan.common.arrays import DISK_DTYPES, widen
from titan.common.errors import WireError
from titan.common.registry.shape import LayerSpec
from titan.common.wire.messages import PART_BYTES
from titan.proto.titan.v1 import worker_pb2 as pb

PROGRESS_EVERY_S = 0.2


def receive(spec: LayerSpec, expert: int, parts: Iterator[pb.AssignRequest]) -> bytearray:
    """One expert's bytes out of the coordinator's stream, in consecutive parts.

    The coordinator pushes experts in the order in which `needed` named them.

    Raises:
        WireError: another part came, or none.
    """
    received = bytearray(spec.expert_bytes)
    done = 0
    while done < spec.expert_bytes:
        part = _next_part(parts)
        if (part.layer, part.expert, part.offset) != (spec.index, expert, done):
            raise WireError(
                f"part of expert {part.expert} in layer {part.layer} at {part.offset} came where expert {expert} "
                f"in layer {spec.index} at {done} was due"
            )
        if not 0 < len(part.data) <= min(PART_BYTES, spec.expert_bytes - done):
            raise WireError(f"a part of {len(part.data)} bytes at {done} of {spec.expert_bytes}")
        received[done : done + len(part.data)] = part.data
        done += len(part.data)
    return received


def unpack(spec: LayerSpec, data: bytearray, targets: Sequence[np.ndarray]) -> None:
    """Spread one expert's bytes, as they are on disk, over the views of a slot."""
    offset = 0
    components = [c for matrix in spec.matrices for c in matrix.components]
    for component, target in zip(components, targets, strict=True):
        bits = np.frombuffer(data, DISK_DTYPES[component.dtype][0], count=int(np.prod(component.shape)), offset=offset)
        bits = bits.reshape(component.shape)
        if target.nbytes == component.nbytes:
            np.copyto(target, bits.view(target.dtype))
        else:
            widen(bits, component.dtype, target)
        offset += component.nbytes


def _next_part(parts: Iterator[pb.AssignRequest]) -> pb.ExpertPart:
    message = next(parts, None)
    if message is None or message.WhichOneof("kind") != "part":
        raise WireError("the stream of experts ended before all that were needed had come")
    return message.part


class Progress:
    """Counts of an install; `message` makes the AssignProgress to send."""

    def __init__(self, experts_total: int, bytes_total: int) -> None:
        self.experts_total, self.bytes_total = experts_total, bytes_total
        self.experts_done = self.bytes_done = 0
        self._said = time.monotonic()

    def add(self, expert_bytes: int) -> bool:
        """One more is there; True when it is time to say so."""
        self.experts_done += 1
        self.bytes_done += expert_bytes
        now = time.monotonic()
        if now - self._said < PROGRESS_EVERY_S:
            return False
        self._said = now
        return True

    def message(
        self,
        *,
        installed: bool = False,
        needed: Sequence[pb.LayerExperts] = (),
        held: Sequence[pb.LayerExperts] = (),
        serves: Sequence[pb.LayerCache] = (),
    ) -> pb.AssignProgress:
        return pb.AssignProgress(
            needed=needed,
            held=held,
            serves=serves,
            experts_done=self.experts_done,
            experts_total=self.experts_total,
            bytes_done=self.bytes_done,
            bytes_total=self.bytes_total,
            installed=installed,
        )
