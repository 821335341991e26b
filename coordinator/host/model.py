"""Load mlx-lm's model with Titan's hook in every MoE layer; the stacked expert tensors are never read.

Runs on the engine's thread. Knows the plan's slots for node 0; not who else holds what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from titan.common.errors import CheckpointContradiction
from titan.common.experts import ExpertLayer
from titan.common.registry import Checkpoint, ModelShape
from titan.common.registry.families import FAMILIES
from titan.common.slots import make_policies
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool
from titan.coordinator.host.routers import Router, descend
from titan.coordinator.moe.hook import Executor, Faults, TitanSwitchGLU
from titan.coordinator.moe.layer_times import LayerTimes
from titan.coordinator.moe.recorder import Recorder
from titan.placement import Plan


class HostModel:
    """mlx-lm's model as the generation engine calls it; failures inside the hook come out after the forward pass.

    Args:
        module: mlx-lm's model with hooks in place.
        hooks: by the model's layer number.
        routers: the MoE layers' routers in the order they run.
        faults: where the hooks record what went wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        hooks: Mapping[int, TitanSwitchGLU],
        routers: Sequence[Router],
        faults: Faults,
    ) -> None:
        self.module = module
        self.routers = routers
        self._hooks = hooks
        self._faults = faults
        self._recorder: Recorder | None = None
        self._times: LayerTimes | None = None

    def record(self, path: Path, shape: ModelShape) -> None:
        """Record every step's routing in a trace file from now on; `close` ends it.

        Raises:
            StoreError: the file cannot be written.
        """
        self._recorder = Recorder(path, shape, self.routers)
        for hook in self._hooks.values():
            hook.watch(self._recorder.saw)

    def time(self, times: LayerTimes) -> None:
        """Measure some forward passes from now on."""
        self._times = times
        for hook in self._hooks.values():
            hook.time(times)

    def close(self) -> None:
        """Finish what is recorded."""
        if self._recorder is not None:
            self._recorder.close()

    def bind(self, layers: Mapping[int, ExpertLayer], executor: Executor) -> None:
        """Execute experts with these. Until then, and after `unbind`, experts give zeros (which calibration uses)."""
        for layer, hook in self._hooks.items():
            hook.bind(layers[layer], executor)

    def bind_layer(self, layer: int, local: ExpertLayer, executor: Executor) -> None:
        """Execute one layer with other slots from now on. Between two steps."""
        self._hooks[layer].bind(local, executor)

    def unbind(self) -> None:
        for hook in self._hooks.values():
            hook.unbind()

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        """tokens: [B, n] -> logits: [B, n, vocabulary].

        Raises:
            TitanError: an expert could not be executed anywhere. The KV cache then has the same length in every
                layer, but its contents are worthless: drop it.
        """
        if self._times is not None:
            self._times.begin(tokens.size)
        logits = self.module(tokens, cache=cache)
        if self._recorder is not None:
            self._recorder.finish()
        error = self._faults.take()
        if error is not None:
            raise error
        return logits


def build_local_layers(
    checkpoint: Checkpoint,
    plan: Plan,
    store: ExpertStore,
    dtype: str,
    *,
    policy: str = "lru",
    readers: ReaderPool | None = None,
    on_layer: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[int, ExpertLayer]:
    """Node 0's slot tables with its pinned experts read in, by the model's layer number."""
    shape = checkpoint.shape
    layers: dict[int, ExpertLayer] = {}
    policies = make_policies(policy, shape.num_experts, len(shape.layers))
    for position, spec in enumerate(shape.layers):
        layers[spec.index] = layer = ExpertLayer(
            LayerBuffers(spec, plan.slots[0][position], dtype),
            store.read_expert,
            policies[position],
            readers,
            fill_many=store.read_experts,
            fill_cached=store.read_cached,
        )
        pin_local(layer, plan, position)
        on_layer(position + 1, len(shape.layers))
    return layers


def pin_local(layer: ExpertLayer, plan: Plan, position: int, old: ExpertLayer | None = None) -> None:
    """Bring the experts into `layer` that the plan pins on node 0; those that `old` has are copied from there."""
    if plan.is_whole(position):
        layer.pin_all(plan.num_experts)
        return
    pinned = plan.held_by(0)[position]
    if old is not None:
        layer.adopt(old, pinned, pin=True)
    layer.pin(pinned)


def loose_experts(layer: ExpertLayer, plan: Plan, position: int) -> list[int]:
    """Experts of a layer that node 0's cache slots are for, as no node holds them: the most used first."""
    return sorted(plan.served_by(0)[position], key=lambda e: -layer.table.uses[e])


def load_host_model(checkpoint: Checkpoint, dtype: str) -> HostModel:
    """mlx-lm's model of the checkpoint, everything but the experts in memory, with hooks that are not bound yet.

    Raises:
        CheckpointContradiction: mlx-lm cannot load what the registry accepted.
    """
    try:
        # A pack keeps its experts where mlx-lm does not look; that nothing else is absent, the registry has checked.
        strict = checkpoint.pack is None
        module, _ = load_model(checkpoint.path, lazy=True, strict=strict, model_config=dict(checkpoint.config_defaults))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise CheckpointContradiction(
            f"mlx-lm cannot load {checkpoint.path} ({type(error).__name__}: {error})", "convert it again with mlx-lm"
        ) from error
    faults = Faults()
    hooks: dict[int, TitanSwitchGLU] = {}
    routers: list[Router] = []
    family = FAMILIES[checkpoint.shape.family]
    for spec in checkpoint.shape.layers:
        parent_path, _, name = spec.module_path.rpartition(".")
        parent = descend(module, parent_path)
        hooks[spec.index] = TitanSwitchGLU(spec.index, faults)
        setattr(parent, name, hooks[spec.index])
        routers.append(Router(parent, family))
    if dtype == "float32":
        module.set_dtype(mx.float32)
    for _, array in tree_flatten(module.parameters()):
        mx.eval(array)  # one by one: the tensor as it is on disk and its conversion exist for one at a time
    mx.clear_cache()
    return HostModel(module, hooks, routers, faults)
