"""Learned heads fit the predictor interface: an adapter for prerouter files of Edge0's layout, written here.

Owner N's head reads its MoE input and its own sets at t and t - 1, and speaks of layer N + 1 at token t + 1: one whole
round of layers after position N + 1 has routed, so its depth is the number of layers.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
from fixtures.checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

from titan.common.experts import ExpertLayer
from titan.common.prediction import PredictionScore, Predictor, Routing
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.registry import open_checkpoint
from titan.common.slots.buffers import LayerBuffers
from titan.common.store import ExpertStore, ReaderPool

LAYERS, EXPERTS, HIDDEN, TOP_K, WIDTH = 4, 8, 16, 2, 12
_erf = np.vectorize(math.erf)


class Prerouter:
    """Ranks layer N + 1 by owner N's head: linear_init f + fc2 gelu(fc1 f), f = [m_in, one-hot at t, one-hot at t - 1].

    Rows of a batch are ranked by their largest logit; the first K are the set. Layers without a head rank nothing.
    """

    name = "prerouter"
    needs_probabilities = False
    needs_probe = False
    needs_hidden = True

    def __init__(self, tensors: dict[str, np.ndarray], layers: int, num_experts: int) -> None:
        self.depth = layers
        self._experts = num_experts
        self._heads: dict[int, dict[str, np.ndarray]] = {}
        for key, tensor in tensors.items():
            parts = key.split(".")
            self._heads.setdefault(int(parts[1]), {})[parts[-2]] = tensor.astype(np.float32)
        self._before: dict[int, np.ndarray] = {}
        self._logits: dict[int, np.ndarray] = {}

    def observe(self, layer: int, routing: Routing) -> None:
        head = self._heads.get(layer)
        if head is None or routing.hidden is None or routing.choices is None:
            return
        now = np.zeros((len(routing.choices), self._experts), np.float32)
        np.put_along_axis(now, routing.choices, 1, axis=1)
        before = self._before.get(layer)
        self._before[layer] = now
        if before is None or before.shape != now.shape:  # the first token, or another batch
            self._logits.pop(layer + 1, None)
            return
        features = np.concatenate([routing.hidden, now, before], axis=1)
        inner = features @ head["fc1"].T
        logits = (0.5 * inner * (1 + _erf(inner / math.sqrt(2)))) @ head["fc2"].T
        if "linear_init" in head:
            logits += features @ head["linear_init"].T
        self._logits[layer + 1] = logits.max(axis=0)

    def rank(self, layer: int) -> np.ndarray:
        logits = self._logits.get(layer)
        return np.empty(0, np.intp) if logits is None else np.argsort(-logits, kind="stable")[:TOP_K]


def heads(path: Path) -> dict[str, np.ndarray]:
    """Heads that know a rule: layer N + 1 chooses at t + 1 what layer N chose at t - 1, shifted by one."""
    shift = np.roll(np.eye(EXPERTS), 1, axis=0)
    tensors = {}
    for owner in range(LAYERS - 1):
        features = HIDDEN + 2 * EXPERTS
        tensors[f"layers.{owner}.fc1.weight"] = np.zeros((WIDTH, features), np.float16)
        tensors[f"layers.{owner}.mlp.prerouter.fc2.weight"] = np.zeros((EXPERTS, WIDTH), np.float16)
        linear = np.concatenate([np.zeros((EXPERTS, HIDDEN + EXPERTS)), shift], axis=1)
        tensors[f"layers.{owner}.linear_init.weight"] = linear.astype(np.float16)
    save_file(tensors, path)
    return load_file(path)


def ruled_trace(tokens: int) -> np.ndarray:
    """[tokens, layers, K] by that rule; the first layer is random."""
    random = np.random.default_rng(0)
    ids = np.zeros((tokens, LAYERS, TOP_K), np.int64)
    for token in range(tokens):
        for layer in range(LAYERS):
            if layer == 0 or token < 2:
                ids[token, layer] = random.permutation(EXPERTS)[:TOP_K]
            else:
                ids[token, layer] = (ids[token - 2, layer - 1] + 1) % EXPERTS
    return ids


def test_a_head_ranks_the_next_token_through_the_interface(tmp_path: Path) -> None:
    predictor: Predictor = Prerouter(heads(tmp_path / "prerouter.safetensors"), LAYERS, EXPERTS)
    ids = ruled_trace(40)
    score = PredictionScore(TOP_K)
    ranked: list[list[int]] = [[] for _ in range(LAYERS)]
    hidden = np.zeros((1, HIDDEN), np.float32)
    for token in range(len(ids)):
        for layer in range(LAYERS):
            chosen = ids[token, layer].tolist()
            if ranked[layer]:
                score.add(ranked[layer], [], chosen, [])
            predictor.observe(layer, Routing(chosen, hidden=hidden, choices=ids[token, layer][None]))
            ahead = (layer + predictor.depth) % LAYERS
            ranked[ahead] = predictor.rank(ahead)[:TOP_K].tolist()
    assert score.steps == (LAYERS - 1) * (len(ids) - 2)
    assert score.recall(TOP_K) == 1.0


def test_the_prefetcher_feeds_a_head_and_reads_what_it_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        make_checkpoint(tmp_path / "m", layers=LAYERS, experts=EXPERTS, top_k=TOP_K, hidden=64, width=64)
    )
    store, pool = ExpertStore(checkpoint), ReaderPool(4)
    layers = [
        ExpertLayer(LayerBuffers(spec, 2 * TOP_K, "float32"), store.read_expert, readers=pool)
        for spec in checkpoint.shape.layers
    ]
    features = 64 + 2 * EXPERTS
    tensors = {}
    for owner in range(LAYERS - 1):
        linear = np.zeros((EXPERTS, features), np.float32)
        linear[:, :EXPERTS] = np.eye(EXPERTS)  # what comes stands in the first components of the MoE input
        tensors[f"layers.{owner}.linear_init.weight"] = linear
        tensors[f"layers.{owner}.fc1.weight"] = np.zeros((WIDTH, features), np.float32)
        tensors[f"layers.{owner}.fc2.weight"] = np.zeros((EXPERTS, WIDTH), np.float32)
    prefetcher = Prefetcher(layers, [Prerouter(tensors, LAYERS, EXPERTS)], 4, forced=TOP_K)
    random = np.random.default_rng(0)
    ids = np.stack([[random.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(60)])
    for token in range(len(ids) - 1):
        for position, layer in enumerate(layers):
            x = np.zeros((1, 64), np.float32)
            if position + 1 < LAYERS:
                x[0, ids[token + 1, position + 1]] = 5
            arrays = prefetcher.lookout(layer.buffers.layer.index, mx.array(x))
            mx.eval(arrays)
            layer.run_rows(mx.array(x), ids[token, position][None])
            prefetcher.routed(layer.buffers.layer.index, ids[token, position][None])
            for other in layers:
                if other.incoming is not None:
                    for ticket in list(other.incoming._tickets.values()):
                        ticket.wait()
    for layer in layers[1:]:
        counts = layer.table.counts
        assert counts.prefetched > 20
        assert counts.useful > 0.9 * counts.prefetched
        assert counts.misses <= 3 * TOP_K
    pool.close()
    store.close()
