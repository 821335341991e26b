"""The coordinator's side of a cluster: from hosts.yaml and a checkpoint to a model whose experts live on many nodes.

`Cluster.load` is what the engine's thread runs once: greet the workers, plan, read the local experts, have the workers
install theirs, load the host model. Knows neither HTTP nor requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from titan.common.arrays import compute_dtype
from titan.common.config.hosts import HostsConfig
from titan.common.errors import PlanError
from titan.common.experts import ExpertLayer
from titan.common.log import get_logger
from titan.common.platform import memory_budget_bytes
from titan.common.registry import Checkpoint
from titan.common.security.credentials import Credentials
from titan.common.slots.buffers import slot_bytes
from titan.common.store import ExpertStore
from titan.common.units import format_bytes
from titan.coordinator.generation.model import DEFAULT_PREFILL_STEP_TOKENS, LoadedModel
from titan.coordinator.host.budget import HostMemory, host_memory
from titan.coordinator.host.model import HostModel, build_local_layers, load_host_model
from titan.coordinator.moe.dispatch import Dispatcher
from titan.coordinator.remote.exchange import Exchange
from titan.coordinator.remote.link import LinkStatus, WorkerLink
from titan.placement import Node, Plan, Problem, solve

log = get_logger("coordinator")

READERS = 4
CACHE_LIMIT_BYTES = 128 << 20  # what MLX may keep of freed temporaries


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the command line adds to hosts.yaml."""

    name: str = ""
    context: int | None = None
    prefill_step_tokens: int = DEFAULT_PREFILL_STEP_TOKENS
    policy: str = "lru"
    plan: Plan | None = None


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
        self.hosts = hosts
        self.checkpoint = checkpoint
        self.options = options
        self.plan: Plan | None = None
        self.model: HostModel | None = None
        self.layers: dict[int, ExpertLayer] = {}
        self.report = report
        floats = {t.dtype for t in checkpoint.non_expert_tensors if t.dtype in ("F32", "F16", "BF16")}
        self.dtype = compute_dtype(floats)
        self.memory: HostMemory = host_memory(
            checkpoint,
            self.dtype,
            available_bytes=memory_budget_bytes(),
            experts_bytes=hosts.coordinator.memory,
            context=options.context,
        )
        self.store = ExpertStore(checkpoint)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="titan-reader")
        self.exchange = Exchange()
        instance_id = secrets.token_hex(8)
        self.links: list[WorkerLink] = []
        if credentials is not None:
            self.links = [
                WorkerLink(
                    worker,
                    credentials,
                    hosts.timeouts,
                    checkpoint.shape,
                    self.dtype,
                    instance_id,
                    self.store,
                    hosts.transport,
                )
                for worker in hosts.workers
            ]
        self.dispatcher: Dispatcher | None = None

    def load(self) -> LoadedModel:
        """Everything from greeting to a model that answers. On the engine's thread.

        Raises:
            TitanError: the checkpoint, the memory or the plan does not allow it. Absent workers are no error.
        """
        mx.set_cache_limit(CACHE_LIMIT_BYTES)
        started = time.monotonic()
        self._greet()
        self.plan = self.options.plan or self._solve()
        self._check_plan(self.plan)
        self._assign(self.plan)
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
        self.dispatcher = Dispatcher(
            self.layers, self.links, self.checkpoint.shape.hidden_size, self.dtype, self.exchange
        )
        self.report("loading attention, routers and embeddings")
        self.model = load_host_model(self.checkpoint, self.dtype)
        self.model.bind(self.layers, self.dispatcher)
        tokenizer = load_tokenizer(self.checkpoint.path)
        self._wait_for_workers()
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
        self._readers.shutdown(wait=True)
        self.store.close()
        self.layers.clear()
        self.model = None
        self.dispatcher = None

    # ----------------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
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

    def _solve(self) -> Plan:
        self.report("planning")
        shape = self.checkpoint.shape
        nodes = [Node(self.hosts.coordinator.name, self.memory.experts_bytes, compute_s=0.0)]
        for worker, link in zip(self.hosts.workers, self.links, strict=True):
            memory = link.memory_budget_bytes if link.memory_budget_bytes is not None else worker.memory
            if memory is None:
                log.warning(
                    "worker is not there and hosts.yaml states no memory for it: the plan leaves it out",
                    worker=worker.name,
                )
            nodes.append(Node(worker.name, memory or 0, compute_s=0.0, address=link.status.address or None))
        problem = Problem(
            fingerprint=shape.fingerprint,
            layers=tuple(spec.index for spec in shape.layers),
            expert_bytes=tuple(slot_bytes(spec, self.dtype) for spec in shape.layers),
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            attention_s=(0.0,) * len(shape.layers),
            nodes=tuple(nodes),
        )
        return solve(problem, method="proportional")

    def _check_plan(self, plan: Plan) -> None:
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
        pinned = [len({e for e, who in enumerate(row) if who}) for row in plan.residency]
        log.info(
            "plan installed",
            local=format_bytes(plan.bytes_on(0)),
            **{node.name: format_bytes(plan.bytes_on(i)) for i, node in enumerate(plan.nodes) if i},
            in_memory=f"{sum(pinned)}/{len(pinned) * plan.num_experts}",
        )

    def _assign(self, plan: Plan) -> None:
        for position, link in enumerate(self.links, start=1):
            held = plan.held_by(position)
            link.assign({layer: held[i] for i, layer in enumerate(plan.layers) if held[i]})

    def _wait_for_workers(self) -> None:
        """Wait for installs that make progress; a worker that stands still is left to come later."""
        for link in self.links:
            while link.status.state in ("connecting", "greeted", "installing"):
                done = link.status.progress
                share = f": {format_bytes(done.bytes_done)} of {format_bytes(done.bytes_total)}" if done else ""
                self.report(f"worker {link.name} is {link.status.state}{share}")
                link.wait(("ready", "away", "closed"), time.monotonic() + 0.5)

    def _loaded(self, tokenizer: TokenizerWrapper) -> LoadedModel:
        model = self.model
        assert model is not None
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            context_tokens=self.memory.context_tokens,
            name=self.name,
            make_cache=lambda: make_prompt_cache(model.module),
            close=self.close,
            prefill_step_tokens=self.options.prefill_step_tokens,
            lookahead=all(layer.whole for layer in self.layers.values()),
        )
