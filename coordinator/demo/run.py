"""One answer from a throw-away cluster, compared with mlx-lm's. Knows no command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from titan.common.errors import TitanError
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.reference import reference_tokens
from titan.coordinator.generation.engine import Engine
from titan.coordinator.generation.events import Finished, TextDelta
from titan.coordinator.generation.request import GenerationRequest, Sampling

STOP_S = 20.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker at the end: what it held, how many (row, expert) pairs it executed."""

    name: str
    address: str
    state: str
    experts: int
    executed: int
    killed: bool


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The answer, the reference, and who executed what ((row, expert) pairs)."""

    text: str
    tokens: list[int]
    reference_tokens: list[int]
    identical: bool
    workers: list[WorkerReport]
    executed: dict[str, int]
    tokens_per_s: float
    first_token_s: float
    killed: str | None = None
    fallbacks: int = 0
    details: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)


async def wait_until_ready(engine: Engine, on_phase: Callable[[str], None]) -> None:
    """Wait for the model; raises the error that loading ended with."""
    while (status := engine.status()).state == "loading":
        on_phase(status.phase)
        await asyncio.sleep(POLL_S)
    engine.served()  # raises what loading failed with


async def run_demo(
    loopback: LoopbackCluster,
    prompt: str,
    *,
    chat: bool,
    max_tokens: int,
    kill_after: int | None,
    on_phase: Callable[[str], None],
    on_text: Callable[[str], None],
    on_kill: Callable[[str], None],
) -> DemoReport:
    """Answer `prompt` greedily over the cluster; kill a worker after `kill_after` tokens if asked."""
    cluster: Cluster = loopback.coordinator(ClusterOptions(name="titan-demo"))
    engine = Engine(cluster.load)
    cluster.report = engine.report_phase
    engine.start()
    try:
        await wait_until_ready(engine, on_phase)
        tokenizer = engine.served().tokenizer
        if chat:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(prompt)
        room = engine.served().context_tokens - len(ids)
        max_tokens = min(max_tokens, room)
        request = GenerationRequest(tuple(ids), max_tokens, Sampling(temperature=0))
        handle = engine.submit(request)
        text, tokens, killed = "", [], None
        finished: Finished | None = None
        async for event in handle:
            if isinstance(event, TextDelta):
                text += event.text
                tokens += event.tokens
                on_text(event.text)
                if kill_after is not None and killed is None and len(tokens) >= kill_after:
                    victim = loopback.workers[0]
                    victim.kill()
                    killed = victim.name
                    on_kill(victim.name)
            else:
                finished = event
        assert finished is not None
        assert cluster.dispatcher is not None
        assert cluster.plan is not None
        executed = cluster.dispatcher.executed
        plan = cluster.plan
        reports = [
            WorkerReport(
                name=worker.name,
                address=worker.address,
                state=next(s.state for s in cluster.workers.status() if s.name == worker.name),
                experts=sum(len(row) for row in plan.held_by(position)),
                executed=executed.remote.get(worker.name, 0),
                killed=worker.name == killed,
            )
            for position, worker in enumerate(loopback.workers, start=1)
        ]
        counts = {"local": executed.local, "remote": sum(executed.remote.values()), "ssd": executed.ssd}
        fallbacks = executed.fallbacks
    finally:
        if not await asyncio.to_thread(engine.stop, STOP_S):
            raise TitanError("the engine did not stop in time")
    on_phase("asking mlx-lm for the same answer")
    checkpoint = loopback.checkpoint
    expected = await asyncio.to_thread(
        reference_tokens, checkpoint.path, list(ids), max_tokens, checkpoint.config_defaults
    )
    timings = finished.timings
    return DemoReport(
        text=text,
        tokens=tokens,
        reference_tokens=expected,
        identical=tokens == expected,
        workers=reports,
        executed=counts,
        tokens_per_s=round((len(tokens) - 1) / timings.decode_s, 2) if len(tokens) > 1 and timings.decode_s else 0.0,
        first_token_s=round(timings.prefill_s, 4),
        killed=killed,
        fallbacks=fallbacks,
    )
