"""Wire precision `reduced` in every verified family's own block, and its error on the demo model's router decisions.

Run: .venv/bin/pytest tests/coordinator/moe/test_reduced.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.fake_workers import Experts, FakeTransport, FakeWorker
from fixtures.reference import load_reference
from fixtures.sums import exact_sums, sum_bound

from titan.common.arrays import raw_bits
from titan.common.config.hosts import HostsConfig
from titan.common.errors import EngineFailed, UnsupportedFamily
from titan.common.execution import weighted_sums
from titan.common.registry import families, open_checkpoint
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.host.model import load_host_model
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.moe.hook import Faults, TitanSwitchGLU
from titan.coordinator.moe.outputs import RowSums
from titan.coordinator.moe.weighted import Unweighted
from titan.coordinator.remote.reply_times import ReplyTimes
from titan.deploy import DEMO_MODEL

HIDDEN, EXPERTS, TOP_K = 128, 8, 4
SUMMING = sorted(name for name, family in families.FAMILIES.items() if family.weighted_sum)


KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"kv_heads": 1},
    "minimax": {"family": "minimax_m2", "heads": 4},
    "deepseek_v3": {"layers": 4},
    "glm4_moe": {"layers": 4},
    "gpt_oss": {"layers": 2},
}


def make_model(path: Path, family: str) -> Path:
    kind = {"family": family, "layers": 1, "width": 64, "experts": 16, "top_k": TOP_K, "hidden": HIDDEN, "tie": False}
    return make_checkpoint(path, **(kind | KINDS.get(family, {})))


class Block:
    """The first MoE layer's block in a model of mlx-lm's, and the place of its experts."""

    def __init__(self, model: Any, experts: Experts) -> None:
        spec = experts.checkpoint.shape.layers[0]
        path, _, self.name = spec.module_path.rpartition(".")
        self.layer = spec.index
        self.block: Any = model
        for part in path.split("."):
            self.block = self.block[int(part)] if part.isdecimal() else self.block[part]

    @property
    def experts(self) -> Any:
        return self.block[self.name]

    def __call__(self, x: mx.array) -> mx.array:
        return self.block(x)


def block_of(model: Any) -> Any:
    return model.model.layers[0].mlp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SUMMING)
def test_mlx_lms_own_block_gives_what_it_gives_with_its_own_experts(family: str, dtype: str, tmp_path: Path) -> None:
    """The blocks call nothing on the hook's object that it does not have, and get the same dtype and shape."""
    path = make_model(tmp_path / "model", family)
    kind = {"float32": mx.float32, "bfloat16": mx.bfloat16}[dtype]
    reference = load_reference(path)
    reference.set_dtype(kind)
    experts = Experts.of(path)
    model = load_host_model(experts.checkpoint, dtype)
    model.module.set_dtype(kind)
    expected_of, found_of = Block(reference, experts), Block(model.module, experts)
    own = expected_of.experts

    class Borrowed:
        """Executes by mlx-lm's own experts, which are not in float32 here."""

        reduced = True

        def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
            assert layer == found_of.layer
            assert scores is not None
            return (own(x, indices) * scores[..., None]).sum(axis=-2)

        def executed_at_home(self, pairs: int) -> None: ...

    layers = {spec.index: experts.layer(TOP_K) for spec in experts.checkpoint.shape.layers}
    model.bind(layers, Borrowed())
    for shape in ((1, 1), (2, 3), (1, 40)):
        x = mx.random.normal((*shape, HIDDEN), key=mx.random.key(3)).astype(kind)
        expected, found = expected_of(x), found_of(x)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(np.array(raw_bits(found)), np.array(raw_bits(expected)))
    experts.store.close()


@pytest.mark.parametrize("family", SUMMING)
def test_workers_sums_are_the_blocks_within_the_bound(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", family)
    reference, experts = load_reference(path), Experts.of(path)
    transport = FakeTransport("one", experts.everywhere())
    model = load_host_model(experts.checkpoint, "float32")
    expected_of, found_of = Block(reference, experts), Block(model.module, experts)
    worker = FakeWorker("one", transport, range(11), found_of.layer, ReplyTimes(10.0, 1e-6))
    home = experts.layer(TOP_K, pinned=())
    dispatcher = Dispatcher({found_of.layer: home}, [worker], HIDDEN, "float32", reduced=True)
    model.bind({spec.index: home for spec in experts.checkpoint.shape.layers}, dispatcher)
    seen: list[tuple[mx.array, mx.array]] = []
    own = expected_of.experts

    class Watched(nn.Module):
        def __call__(self, x: mx.array, indices: mx.array) -> Unweighted:
            y = own(x, indices)

            def total(scores: mx.array) -> mx.array:
                top_k = scores.shape[-1]
                seen.append((y.reshape(-1, top_k, HIDDEN), scores.reshape(-1, top_k)))
                return (y * scores[..., None]).sum(axis=-2)

            return Unweighted(y.shape, y.dtype, total)

    expected_of.block[expected_of.name] = Watched()
    for shape in ((1, 1), (2, 3), (1, 40)):
        x = mx.random.normal((*shape, HIDDEN), key=mx.random.key(3))
        found, expected = found_of(x), expected_of(x)
        assert found.shape == expected.shape
        y, scores = seen.pop()
        # What the block adds besides (shared experts) is the same in both, but rounded: one more roundoff of the total.
        off = np.abs(np.array(found) - np.array(expected)).reshape(-1, HIDDEN)
        bound = 2 * sum_bound(y, scores, parts=2)
        assert (off <= bound + 2.0**-22 * np.abs(np.array(expected)).reshape(-1, HIDDEN)).all()
    assert dispatcher.executed.remote["one"] > 0
    assert dispatcher.executed.ssd > 0
    assert all(call.scores is not None for call in transport.calls)
    transport.close()
    experts.store.close()


def test_without_workers_a_layer_is_mlx_lms_to_the_bit(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", layers=1, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=64)
    reference, experts = load_reference(path), Experts.of(path)
    home = experts.layer(TOP_K)
    model = load_host_model(experts.checkpoint, "float32")
    model.bind({0: home}, Dispatcher({0: home}, [], HIDDEN, "float32", reduced=True))
    x = mx.random.normal((3, 5, HIDDEN), key=mx.random.key(1))
    np.testing.assert_array_equal(np.array(block_of(model.module)(x)), np.array(block_of(reference)(x)))
    experts.store.close()


def test_a_failure_is_recorded_and_zeros_flow_on(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", layers=1, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=64)
    experts = Experts.of(path)

    class Failing:
        reduced = True

        def execute(self, layer: int, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
            raise EngineFailed(f"{layer} {x.shape} {indices.shape} {scores}")

        def executed_at_home(self, pairs: int) -> None: ...

    faults = Faults()
    hook = TitanSwitchGLU(0, faults)
    hook.bind(experts.layer(TOP_K), Failing())
    y = hook(mx.ones((2, HIDDEN)), mx.zeros((2, TOP_K), mx.uint32))
    assert isinstance(y, Unweighted)
    assert faults.take() is None
    total = (y * mx.ones((2, TOP_K, 1))).sum(axis=-2).astype(y.dtype)
    assert total.shape == (2, HIDDEN)
    assert not np.array(total).any()
    assert isinstance(faults.take(), EngineFailed)
    experts.store.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y * mx.ones((2, TOP_K)),
        lambda y: (y * mx.ones((2, TOP_K, 1))).sum(axis=-1),
        lambda y: y.sum(axis=-2),
        lambda y: y + 1,
    ],
)
def test_what_no_verified_block_does_raises(use: Callable[[Any], object]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        use(Unweighted((2, TOP_K, HIDDEN), mx.float32, lambda scores: scores))


def test_a_family_that_combines_otherwise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(families.FAMILIES["olmoe"], weighted_sum=False)
    monkeypatch.setattr(families, "_BY_NAME", {"olmoe": other})
    hosts = HostsConfig.model_validate({"model": str(DEMO_MODEL), "precision": "reduced"})
    with pytest.raises(UnsupportedFamily, match=r"olmoe combines.*precision: exact"):
        Cluster(hosts, open_checkpoint(DEMO_MODEL), None, ClusterOptions())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_the_error_on_the_demo_models_router_decisions_is_within_the_bound(wire: str, workers: int) -> None:
    kind = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[wire]
    parts, worst = workers + 1, 0.0
    for y, scores, chosen in _decisions():
        outputs, weights = y.astype(kind), np.array(scores)
        rows, top_k = weights.shape
        pair_rows = np.repeat(np.arange(rows), top_k)
        flat = outputs.reshape(rows * top_k, -1)
        collected = RowSums(pair_rows, weights.reshape(-1), rows, wire)
        for part in range(parts):  # the last is at home
            at = np.flatnonzero(chosen.reshape(-1) % parts == part)
            if not at.size:
                continue
            if part == workers:
                collected.add(at, flat[mx.array(at)])
                continue
            used, places = np.unique(pair_rows[at], return_inverse=True)
            sums = weighted_sums(flat[mx.array(at)], places, weights.reshape(-1)[at], used.size)
            collected.add_answer(at, np.array(raw_bits(sums.astype(kind))))
        off = np.abs(np.array(collected.joined()) - exact_sums(outputs, scores))
        bound = sum_bound(outputs, scores, parts=parts, wire=wire)
        assert (off <= bound).all()
        worst = max(worst, float((off / np.maximum(bound, 1e-300)).max()))
    assert worst > 0.05, "a bound that is never come near says nothing"


def _decisions() -> list[tuple[mx.array, mx.array, np.ndarray]]:
    """(outputs [N, K, D], scores [N, K], experts [N, K]) of every layer of the demo model, for a prompt and a token."""
    reference = load_reference(DEMO_MODEL)
    found: list[tuple[mx.array, mx.array, np.ndarray]] = []

    class Watched(nn.Module):
        def __init__(self, own: nn.Module) -> None:
            super().__init__()
            self._own = own

        def __call__(self, x: mx.array, indices: mx.array) -> Unweighted:
            y = self._own(x, indices)

            def total(scores: mx.array) -> mx.array:
                found.append((y, scores, np.array(indices)))
                return (y * scores[..., None]).sum(axis=-2)

            return Unweighted(y.shape, y.dtype, total)

    for layer in reference["model"]["layers"]:
        layer.mlp.switch_mlp = Watched(layer.mlp.switch_mlp)
    mx.eval(reference(mx.array([np.random.default_rng(5).integers(3, 2000, 24).tolist()])))
    mx.eval(reference(mx.array([[77]])))
    return found
