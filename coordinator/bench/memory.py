"""Peak memory of a coordinator that holds few experts, in a process of its own, against what it may need.

Run as a module it is that process: `python -m titan.coordinator.bench.memory CHECKPOINT SLOTS TOKENS`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from titan.common.errors import EngineFailed
from titan.common.platform import process_memory_bytes, process_peak_bytes
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.bench.alone import greedy_tokens
from titan.coordinator.bench.local import load_alone
from titan.coordinator.host.budget import kv_bytes_per_token, non_expert_bytes

ALLOWANCE_BYTES = 300 << 20
CHILD_TIMEOUT_S = 900.0
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes; `allowed_bytes` = interpreter with the same imports + non-expert + slots + KV + 300 MiB."""

    model: str
    slots_per_layer: int
    tokens: int
    interpreter_bytes: int
    non_expert_bytes: int
    slot_bytes: int
    kv_bytes: int
    checkpoint_expert_bytes: int
    peak_bytes: int
    allowed_bytes: int

    @property
    def within(self) -> bool:
        return self.peak_bytes <= self.allowed_bytes


def bench_memory(path: Path, slots: int, tokens: int) -> MemoryFigures:
    """Load and decode in a child process; returns its figures."""
    command = [sys.executable, "-m", "titan.coordinator.bench.memory", str(path), str(slots), str(tokens)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    if child.returncode != 0:
        raise EngineFailed(f"the measured process ended with status {child.returncode}: {child.stderr[-500:]}")
    return MemoryFigures(**json.loads(child.stdout.splitlines()[-1]))


def measure(path: Path, slots: int, tokens: int) -> MemoryFigures:
    """What the child does: load with `slots` slots a layer, prefill a short prompt, decode."""
    interpreter = process_memory_bytes()
    checkpoint = open_checkpoint(path)
    shape = checkpoint.shape
    slots = min(slots, shape.num_experts)
    cluster, loaded = load_alone(checkpoint, slots * sum(slot_bytes(spec, "float32") for spec in shape.layers))
    prompt = [(7 * i) % 1000 + 1 for i in range(PROMPT_TOKENS)]
    greedy_tokens(loaded, prompt, tokens)
    kv = -(-(PROMPT_TOKENS + tokens) // 256) * 256 * kv_bytes_per_token(checkpoint, cluster.dtype)
    held = sum(layer.buffers.nbytes for layer in cluster.layers.values())
    figures = MemoryFigures(
        model=str(path),
        slots_per_layer=slots,
        tokens=tokens,
        interpreter_bytes=interpreter,
        non_expert_bytes=non_expert_bytes(checkpoint, cluster.dtype),
        slot_bytes=held,
        kv_bytes=kv,
        checkpoint_expert_bytes=checkpoint.expert_bytes_total,
        peak_bytes=process_peak_bytes(),
        allowed_bytes=interpreter + non_expert_bytes(checkpoint, cluster.dtype) + held + kv + ALLOWANCE_BYTES,
    )
    loaded.close()
    return figures


if __name__ == "__main__":
    result = measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
