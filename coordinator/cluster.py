"""The coordinator's side of a cluster: from hosts.yaml and a checkpoint to a model whose experts live on many nodes.

`Cluster.load` is what the engine's thread runs once: greet the workers, plan, read the local experts, have the workers
install theirs, load the host model. Knows neither HTTP nor requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from titan.common.arrays import COMPUTE_DTYPES, compute_dtype
from titan.common.config.hosts import HostsConfig
from titan.common.cores import OneCore
from titan.common.errors import PlanError, StoreError
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.platform import memory_budget_bytes
from titan.common.prefetch.build import make_prefetcher
from titan.common.prefetch.learned import recall, remember
from titan.common.prefetch.prefetcher import Prefetcher
from titan.common.prefetch.uses import recall_uses, remember_uses
from titan.common.registry import Checkpoint
from titan.common.registry.families import require_weighted_sum
from titan.common.security.credentials import Credentials
from titan.common.security.own import OwnCertificate
from titan.common.store import ExpertStore, ReaderPool
from titan.common.units import format_bytes
from titan.coordinator.calibration.cluster import Calibration
from titan.coordinator.certificates import Certificates
from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS, LoadedModel
from titan.coordinator.generation.prompt_cache import PromptCache, open_prompt_cache
from titan.coordinator.host.budget import HostMemory, host_memory
from titan.coordinator.host.model import (
    HostModel,
    build_local_layers,
    load_host_model,
    loose_experts,
)
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.moe.layer_times import LayerTimes
from titan.coordinator.moe.routing_counts import RoutingCounts
from titan.coordinator.planning import log_plan, make_problem, with_caches
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.hints import HintSender
from titan.coordinator.remote.link import LinkStatus, WorkerLink
from titan.coordinator.remote.share import Cache
from titan.placement import Plan, Problem, solve
from titan.placement.cost import Costs
from titan.placement.figures import Figures

log = get_logger("coordinator")

READERS = 4
PAGE_CACHE_SHARE = 0.8  # of the memory that experts leave: other files want some of it
CACHE_LIMIT_BYTES = 128 << 20  # what MLX may keep of freed temporaries


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the command line adds to hosts.yaml.

    Args:
        name: of the model for clients; empty takes the folder's.
        context: most tokens of prompt and answer; None is the model's own limit, within bounds.
        policy: eviction from the expert cache: lru, lfu, forecast.
        prefetch: off, auto, previous, transition, probe.
        plan: use this one; None makes one.
        measure: plan from measured figures; otherwise by memory alone.
        figures_folder: where figures are kept between starts; None keeps none.
        measure_again: do not use kept figures.
        solve_s: time limit of the solver.
        prompt_cache_bytes: memory for the KV of known prompts; 0 keeps none.
        prompt_cache_folder: where they outlive the process; None for nowhere.
        prompt_cache_disk_bytes: how much of them at most.
        trace: record the router's choices in this file.
    """

    name: str = ""
    context: int | None = None
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS
    policy: str = "lru"
    prefetch: str = "off"
    plan: Plan | None = None
    measure: bool = False
    figures_folder: Path | None = None
    measure_again: bool = False
    solve_s: float = 10.0
    prompt_cache_bytes: int = 0
    prompt_cache_folder: Path | None = None
    prompt_cache_disk_bytes: int = 4 << 30
    trace: Path | None = None


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
        self.model: HostModel | None = None
        self.layers: dict[int, ExpertLayer] = {}
        self.prompt_cache: PromptCache | None = None
        self.report = report
        floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
        self.dtype = compute_dtype(floats)
        self._memory_bytes = memory_budget_bytes()
        self.memory: HostMemory = host_memory(
            checkpoint,
            self.dtype,
            available_bytes=self._memory_bytes,
            experts_bytes=hosts.coordinator.memory,
            context=options.context,
            prompt_cache_bytes=options.prompt_cache_bytes,
        )
        self.store = ExpertStore(checkpoint)
        self._readers = ReaderPool(READERS)
        self.exchange = Exchange()
        self.layer_times: LayerTimes | None = None
        instance_id = secrets.token_hex(8)
        self.links: list[WorkerLink] = []
        if credentials is not None:
            certificates = Certificates(OwnCertificate(credentials))
            self.links = [
                WorkerLink(
                    worker,
                    certificates,
                    hosts.timeouts,
                    checkpoint.shape,
                    self.dtype,
                    instance_id,
                    self.store,
                    hosts.transport,
                    reduced=self.reduced,
                )
                for worker in hosts.workers
            ]
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
        self.greet()
        model = self.load_host()
        self.plan = self.options.plan or self.make_plan()
        self.check_plan(self.plan)
        log_plan(self.plan)
        self.assign(self.plan)
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
            self.costs(self.plan),
            self.hosts.verify,
            reduced=self.reduced,
        )
        self.dispatcher.prefetcher = self.make_prefetcher(model)
        self.dispatcher.routing = RoutingCounts([spec.index for spec in shape.layers], shape.num_experts)
        self._recall()
        self._preload(self.plan)
        model.bind(self.layers, self.dispatcher)
        self.layer_times = LayerTimes(self.dispatcher.executed, self.exchange)
        model.time(self.layer_times)
        if self.options.trace is not None:
            model.record(self.options.trace, self.checkpoint.shape)
        tokenizer = load_tokenizer(self.checkpoint.path)
        self.wait_for_workers()
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

    def worker_status(self) -> Sequence[LinkStatus]:
        return [link.status for link in self.links]

    def close(self) -> None:
        """End sessions and give files and memory back."""
        for link in self.links:
            link.close(self.hosts.timeouts.probe + 2)
        self._readers.close()
        self.store.close()
        self._remember()
        if self.model is not None:
            self.model.close()
        self.layers.clear()
        self.model = None
        self.dispatcher = None
        if self._one_core is not None:
            self._one_core.release()

    # ----------------------------------------------------------------------------------------------------------------

    def _kept_file(self, kind: str) -> Path | None:
        folder = self.options.figures_folder
        return None if folder is None else folder / f"{kind}-{self.checkpoint.shape.fingerprint[:16]}.npz"

    def _recall(self) -> None:
        """Begin with what earlier runs learned about routing."""
        shape, layers = self.checkpoint.shape, list(self.layers.values())
        routing, uses = self._kept_file("routing"), self._kept_file("uses")
        if routing is not None and uses is not None and self.dispatcher is not None:
            recall(routing, shape.fingerprint, layers, self.dispatcher.prefetcher)
            recall_uses(uses, shape.fingerprint, shape.num_experts, layers)

    def _preload(self, plan: Plan) -> None:
        """Fill the cache slots with experts that no node holds, the most used first, as far as that is known."""
        for position, layer in enumerate(self.layers.values()):
            self.report(f"reading local experts: cache of layer {position + 1} of {len(self.layers)}")
            layer.preload(loose_experts(layer, plan, position))

    def _remember(self) -> None:
        """Keep what was learned about routing; a file that cannot be written is no reason to fail."""
        routing, uses = self._kept_file("routing"), self._kept_file("uses")
        if routing is None or uses is None or self.dispatcher is None:
            return
        shape, layers = self.checkpoint.shape, list(self.layers.values())
        try:
            remember(routing, shape.fingerprint, layers, self.dispatcher.prefetcher)
            remember_uses(uses, shape.fingerprint, shape.num_experts, layers)
        except StoreError as error:
            log.warning("what was learned about routing is not kept", error=str(error))

    def greet(self) -> None:
        """Start every keeper; wait until each worker has answered Hello or its first try is over."""
        if not self.links:
            return
        timeouts = self.hosts.timeouts
        self.report(f"greeting {len(self.links)} workers")
        for link in self.links:
            link.start()
        longest = max(len(worker.addresses) for worker in self.hosts.workers)
        deadline = time.monotonic() + longest * (timeouts.connect + timeouts.hello) + 1
        for link in self.links:
            link.wait(("greeted", "installing", "ready", "away", "closed"), deadline)

    def load_host(self) -> HostModel:
        """mlx-lm's model without experts. On the thread that will own MLX."""
        self.report("loading attention, routers and embeddings")
        self.model = load_host_model(self.checkpoint, self.dtype)
        self._one_core = OneCore()
        return self.model

    def make_plan(
        self, *, frequencies: tuple[tuple[float, ...], ...] | None = None, time_limit_s: float | None = None
    ) -> Plan:
        """Plan for the workers that answered Hello, from figures if the options say so.

        On the engine's thread, with the host model loaded and not bound.
        """
        figures = self.measured_figures() if self.options.measure else None
        self.figures, self.frequencies = figures, frequencies
        self.report("planning")
        return self.solve(self.problem(figures, frequencies), time_limit_s)

    def problem(self, figures: Figures | None, frequencies: tuple[tuple[float, ...], ...] | None = None) -> Problem:
        """The placement problem of the workers as they are now."""
        memory = self.worker_memory()
        return make_problem(
            self.checkpoint.shape,
            self.hosts,
            self.dtype,
            self.memory.experts_bytes,
            memory,
            {link.name: link.status.address for link in self.links},
            figures,
            frequencies,
            self._worker_caches(),
            cached=self.reads_cached,
        )

    @property
    def reads_cached(self) -> bool:
        """Whether all experts fit in the memory that is left for the page cache."""
        left = self._memory_bytes - self.memory.experts_bytes
        return self.checkpoint.shape.expert_bytes_total <= PAGE_CACHE_SHARE * left

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Plan:
        """Search when there are figures, else by memory alone."""
        measured = any(node.compute_s for node in problem.nodes)
        method = "search" if measured else "proportional"
        plan = solve(problem, method=method, time_limit_s=time_limit_s or self.options.solve_s)
        return with_caches(plan, self._worker_caches(), self.worker_memory())

    def _worker_caches(self) -> dict[str, int]:
        """Cache slots a layer that hosts.yaml gives to workers that are there with a copy of the checkpoint."""
        found = {}
        for worker, link in zip(self.hosts.workers, self.links, strict=True):
            if worker.cache_slots and link.has_checkpoint:
                found[worker.name] = worker.cache_slots
            elif worker.cache_slots and link.has_checkpoint is False:
                log.warning(
                    "hosts.yaml gives a worker cache slots, and it has no copy of the checkpoint to read from",
                    worker=worker.name,
                )
        return found

    def worker_memory(self) -> dict[str, int]:
        """M_n by worker: what it offered in Hello or hosts.yaml states; 0 for one that is unknown."""
        memory: dict[str, int] = {}
        for worker, link in zip(self.hosts.workers, self.links, strict=True):
            offered = link.memory_budget_bytes if link.memory_budget_bytes is not None else worker.memory
            if offered is None:
                log.warning(
                    "worker is not there and hosts.yaml states no memory for it: the plan leaves it out",
                    worker=worker.name,
                )
            memory[worker.name] = offered or 0
        return memory

    def reply_medians(self) -> dict[str, tuple[int, float]]:
        """Worker -> (pairs, median seconds) of its most frequent size of call, where enough is known."""
        found = {}
        for link in self.links:
            ready = link.ready
            if ready is not None and (typical := ready.times.typical()) is not None:
                found[link.name] = typical
        return found

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
            self._wait_for,
            self.options.figures_folder,
            self.report,
        )
        return calibration.figures(again=self.options.measure_again)

    def check_plan(self, plan: Plan) -> None:
        if plan.fingerprint != self.checkpoint.shape.fingerprint:
            raise PlanError(
                f"the plan is for checkpoint {plan.fingerprint[:12]}, {self.checkpoint.path} is "
                f"{self.checkpoint.shape.fingerprint[:12]}",
                "make a plan for this model",
            )
        names = [node.name for node in plan.nodes]
        wanted = [self.hosts.coordinator.name, *(worker.name for worker in self.hosts.workers)]
        if names != wanted:
            raise PlanError(f"the plan is for nodes {names}, hosts.yaml has {wanted}", "make a plan for these nodes")
        plan.validate()

    def make_prefetcher(self, model: HostModel) -> Prefetcher | None:
        return make_prefetcher(
            self.options.prefetch,
            list(self.layers.values()),
            self.checkpoint.shape.num_experts,
            READERS,
            dict(enumerate(model.routers)),
            remote=HintSender(self.links) if self.links else None,
        )

    def costs(self, plan: Plan) -> Costs | None:
        """What dispatch chooses by; None for a plan that was made without figures."""
        if plan.predicted is None:
            return None
        row_bytes = self.checkpoint.shape.hidden_size * COMPUTE_DTYPES[self.dtype][0].itemsize
        return Costs.of(plan.nodes, row_bytes, reduced=self.reduced)

    def assign(self, plan: Plan) -> None:
        for position, link in enumerate(self.links, start=1):
            held, served = plan.held_by(position), plan.served_by(position)
            pinned = {layer: held[i] for i, layer in enumerate(plan.layers) if held[i]}
            caches = {
                layer: Cache(plan.cache_slots(i, position), served[i])
                for i, layer in enumerate(plan.layers)
                if served[i]
            }
            link.assign(pinned, caches)

    def wait_for_workers(self) -> None:
        for link in self.links:
            self._wait_for(link)

    def _wait_for(self, link: WorkerLink) -> None:
        """Wait for an install that makes progress; a worker that stands still is left to come later."""
        timeouts = self.hosts.timeouts
        patience_s = timeouts.connect + timeouts.hello + timeouts.assign_idle + 2 * timeouts.probe
        seen, since = link.status, time.monotonic()
        while not link.settled:
            status = link.status
            if status != seen:
                seen, since = status, time.monotonic()
            elif time.monotonic() - since > patience_s:
                log.warning("worker stands still: going on without it", worker=link.name, state=status.state)
                return
            done = status.progress
            share = f": {format_bytes(done.bytes_done)} of {format_bytes(done.bytes_total)}" if done else ""
            self.report(f"worker {link.name} is {status.state}{share}")
            link.wait(("away", "closed"), time.monotonic() + 0.1)

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
