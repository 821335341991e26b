"""The coordinator's side of a cluster: from hosts.yaml and a checkpoint to a model whose experts live on many nodes.

`Cluster.load` is what the engine's thread runs once: greet the workers, plan, read the local experts, have the workers
install theirs, load the host model. Knows neither HTTP nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from titan.common.arrays import compute_dtype
from titan.common.config.hosts import HostsConfig
from titan.common.cores import OneCore
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.platform import memory_budget_bytes
from titan.common.prefetch.build import make_prefetcher
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.registry import Checkpoint
from titan.common.registry.families import require_weighted_sum
from titan.common.security.credentials import Credentials
from titan.common.store import ExpertStore, ReaderPool
from titan.coordinator.calibration.cluster import Calibration
from titan.coordinator.cluster_options import ClusterOptions
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.generation.prompt_cache import PromptCache, open_prompt_cache
from titan.coordinator.host.budget import HostMemory, host_memory
from titan.coordinator.host.model import (
    HostModel,
    build_local_layers,
    load_host_model,
    loose_experts,
)
from titan.coordinator.learned import LearnedRouting
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.moe.layer_times import LayerTimes
from titan.coordinator.moe.routing_counts import RoutingCounts
from titan.coordinator.planner import Planner
from titan.coordinator.planning import log_plan
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.hints import HintSender
from titan.coordinator.remote.link import WorkerLink
from titan.coordinator.remote.workers import Workers
from titan.placement import Plan
from titan.placement.figures import Figures
from titan.placement.reuse import Reuse

__all__ = ["READERS", "Cluster", "ClusterOptions"]

log = get_logger("coordinator")

READERS = 4
CACHE_LIMIT_BYTES = 128 << 20  # what MLX may keep of freed temporaries


class Cluster:
    """Workers, plan and local experts of one model.

    Args:
        hosts: the cluster's description.
        checkpoint: the opened model.
        credentials: this coordinator's; None when there are no workers.
        report: told what loading is at.
    """

    def __init__(
        self,
        hosts: HostsConfig,
        checkpoint: Checkpoint,
        credentials: Credentials | None,
        options: ClusterOptions,
        report: Callable[[str], None] = lambda _phase: None,
    ) -> None:
        self.reduced = hosts.precision == "reduced"
        if self.reduced:
            require_weighted_sum(checkpoint.shape.family)
        self.hosts = hosts
        self.checkpoint = checkpoint
        self.options = options
        self.plan: Plan | None = None
        self.figures: Figures | None = None
        self.frequencies: tuple[tuple[float, ...], ...] | None = None  # of routing, that the plan was made for
        self._told_reuse: Reuse | None = None
        self.model: HostModel | None = None
        self.layers: dict[int, ExpertLayer] = {}
        self.prompt_cache: PromptCache | None = None
        self.report = report
        floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
        self.dtype = compute_dtype(floats)
        available_bytes = memory_budget_bytes()
        memory = host_memory(
            checkpoint,
            self.dtype,
            available_bytes=available_bytes,
            experts_bytes=hosts.coordinator.memory,
            context=options.context,
            prompt_cache_bytes=options.prompt_cache_bytes,
        )
        self.store = ExpertStore(checkpoint)
        self._readers = ReaderPool(READERS, hosts.timeouts.read)
        self.exchange = Exchange()
        self.layer_times: LayerTimes | None = None
        self.workers = Workers(
            hosts, credentials, checkpoint.shape, self.dtype, self._read_bytes, lambda phase: self.report(phase)
        )
        self.planner = Planner(hosts, checkpoint, self.dtype, memory, available_bytes, self.workers, options)
        self._learned = LearnedRouting(options.figures_folder, checkpoint.shape)
        self.dispatcher: Dispatcher | None = None
        self._one_core: OneCore | None = None

    def load(self) -> LoadedModel:
        """Everything from greeting to a model that answers. On the engine's thread.

        Raises:
            TitanError: the checkpoint, the memory or the plan does not allow it. Absent workers are no error.
        """
        try:
            return self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> LoadedModel:
        mx.set_cache_limit(CACHE_LIMIT_BYTES)
        started = time.monotonic()
        self.workers.greet()
        model = self.load_host()
        self.plan = self.options.plan or self.make_plan()
        self.planner.check(self.plan)
        log_plan(self.plan)
        self.workers.assign(self.plan)
        self.report("reading local experts")
        self.layers = build_local_layers(
            self.checkpoint,
            self.plan,
            self.store,
            self.dtype,
            policy=self.options.policy,
            readers=self._readers,
            on_layer=lambda done, total: self.report(f"reading local experts: layer {done} of {total}"),
        )
        shape = self.checkpoint.shape
        self.dispatcher = Dispatcher(
            self.layers,
            self.links,
            shape.hidden_size,
            self.dtype,
            self.exchange,
            self.planner.costs(self.plan),
            self.hosts.verify,
            reduced=self.reduced,
        )
        self.dispatcher.prefetcher = self.make_prefetcher(model)
        self.dispatcher.routing = RoutingCounts([spec.index for spec in shape.layers], shape.num_experts, shape.top_k)
        self._learned.recall(list(self.layers.values()), self.dispatcher.prefetcher)
        self._preload(self.plan)
        model.bind(self.layers, self.dispatcher)
        self.layer_times = LayerTimes(self.dispatcher.executed, self.exchange)
        model.time(self.layer_times)
        if self.options.trace is not None:
            model.record(self.options.trace, self.checkpoint.shape)
        tokenizer = load_tokenizer(self.checkpoint.path)
        self.workers.wait()
        log.info(
            "model loaded",
            model=self.name,
            took_s=round(time.monotonic() - started, 2),
            local_experts=sum(len(layer.table.slots) for layer in self.layers.values()),
            workers_ready=sum(link.ready is not None for link in self.links),
            workers=len(self.links),
        )
        return self._loaded(tokenizer)

    @property
    def name(self) -> str:
        return self.options.name or self.checkpoint.path.name

    @property
    def links(self) -> list[WorkerLink]:
        return self.workers.links

    @property
    def memory(self) -> HostMemory:
        return self.planner.memory

    def _read_bytes(self, layer: int, expert: int) -> bytearray:
        """An expert for a worker, read behind all demand. On a keeper's thread."""
        return self._readers.call(partial(self.store.read_bytes, layer, expert))

    def close(self) -> None:
        """End sessions and give files and memory back."""
        self.workers.close()
        self._readers.close()
        self.store.close()
        if self.dispatcher is not None:
            self._learned.remember(list(self.layers.values()), self.dispatcher.prefetcher, self.reuse)
        if self.model is not None:
            self.model.close()
        self.layers.clear()
        self.model = None
        self.dispatcher = None
        if self._one_core is not None:
            self._one_core.release()

    # ----------------------------------------------------------------------------------------------------------------

    def load_host(self) -> HostModel:
        """mlx-lm's model without experts. On the thread that will own MLX."""
        self.report("loading attention, routers and embeddings")
        self.model = load_host_model(self.checkpoint, self.dtype)
        self._one_core = OneCore()
        return self.model

    def make_plan(
        self,
        *,
        frequencies: tuple[tuple[float, ...], ...] | None = None,
        reuse: Reuse | None = None,
        time_limit_s: float | None = None,
    ) -> Plan:
        """Plan for the workers that answered Hello, from figures if the options say so; `frequencies` and `reuse` as a
        trace told them.

        On the engine's thread, with the host model loaded and not bound.
        """
        figures = self.measured_figures() if self.options.measure else None
        self.figures, self.frequencies, self._told_reuse = figures, frequencies, reuse
        self.report("planning")
        return self.planner.solve(self.planner.problem(figures, frequencies, self.reuse), time_limit_s)

    @property
    def reuse(self) -> Reuse | None:
        """How rows resemble the rows before: as this run served them, else as a trace said, else as an earlier run."""
        counts = self.dispatcher.routing if self.dispatcher is not None else None
        served = counts.reuse() if counts is not None else None
        return served or self._told_reuse or self._learned.reuse()

    def measured_figures(self) -> Figures:
        """Kept figures of this cluster, or new ones. On the engine's thread; the model must be loaded and not bound."""
        assert self.model is not None
        calibration = Calibration(
            self.checkpoint,
            self.store,
            self._readers,
            self.model,
            self.dtype,
            self.links,
            self.workers.wait_for,
            self.options.figures_folder,
            self.report,
        )
        return calibration.figures(again=self.options.measure_again)

    def make_prefetcher(self, model: HostModel) -> Prefetcher | None:
        return make_prefetcher(
            self.options.prefetch,
            list(self.layers.values()),
            self.checkpoint.shape.num_experts,
            READERS,
            dict(enumerate(model.routers)),
            remote=HintSender(self.links) if self.links else None,
        )

    def _preload(self, plan: Plan) -> None:
        """Fill the cache slots with experts that no node holds, the most used first, as far as that is known."""
        for position, layer in enumerate(self.layers.values()):
            self.report(f"reading local experts: cache of layer {position + 1} of {len(self.layers)}")
            layer.preload(loose_experts(layer, plan, position))

    def _loaded(self, tokenizer: TokenizerWrapper) -> LoadedModel:
        model = self.model
        assert model is not None
        self.prompt_cache = open_prompt_cache(
            self.checkpoint.shape.fingerprint,
            self.dtype,
            self.options.prompt_cache_bytes,
            self.options.prompt_cache_folder,
            self.options.prompt_cache_disk_bytes,
        )
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            context_tokens=self.memory.context_tokens,
            name=self.name,
            make_cache=lambda: make_prompt_cache(model.module),
            close=self.close,
            prefill_step_tokens=self.options.prefill_step_tokens,
            kv_tokens=self.memory.kv_tokens,
            prompt_cache=self.prompt_cache,
            lookahead=lambda: all(layer.whole for layer in self.layers.values()),
        )
