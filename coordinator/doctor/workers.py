"""Each worker at each address: reachable, itself, in step with this machine. One question over TLS, three over gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from titan.common.config.address import split_address
from titan.common.config.hosts import HostsConfig, Timeouts, Worker
from titan.common.config.probe import ProbeResult
from titan.common.config.probe_status import ask_status, probe_status
from titan.common.errors import TitanError
from titan.common.network import Route, route_to
from titan.common.security.channel import describe, open_channel
from titan.common.security.credentials import Credentials
from titan.common.security.identity import Identity
from titan.common.security.revocation import load_revocations
from titan.common.units import format_bytes, format_seconds
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.coordinator.doctor.certificates import check_expiry
from titan.coordinator.doctor.finding import Finding, failed
from titan.proto.titan.v1 import trust_pb2, worker_pb2

PARALLEL = 16
SKEW_WARN_S, SKEW_FAIL_S = 30.0, 240.0  # a new certificate is valid from five minutes ago
MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker said, and who it is.

    Args:
        skew_s: its clock less this machine's, in seconds; `uncertain_s` is half the time the question took.
    """

    peer: Identity
    status: worker_pb2.StatusReply
    described: trust_pb2.DescribeReply
    skew_s: float
    uncertain_s: float


def check_workers(
    config: HostsConfig,
    credentials: Credentials,
    device: str,
    *,
    route: Callable[[str, int], Route | None] = route_to,
) -> Iterator[Finding]:
    """Findings for all workers, in the file's order.

    Args:
        device: kind of this machine's MLX device, as workers state theirs.
    """
    pairs = [(worker, address) for worker in config.workers for address in worker.addresses]
    if not pairs:
        return
    with ThreadPoolExecutor(min(PARALLEL, len(pairs)), thread_name_prefix="doctor") as pool:
        results = list(pool.map(lambda pair: _probe(pair[0], pair[1], credentials, config.timeouts), pairs))
    for worker in config.workers:
        own = [result for (w, _), result in zip(pairs, results, strict=True) if w is worker]
        answering = [result.address for result in own if result.ok]
        for result in own:
            yield _connection(result, bool(answering))
            yield from _wifi(worker, result.address, route)
        if answering:
            try:
                answers = ask(worker, answering[0], credentials, config.timeouts)
            except TitanError as error:
                yield failed("worker", worker.name, error)
            else:
                yield from compare(worker, answers, credentials, device)


def _probe(worker: Worker, address: str, credentials: Credentials, timeouts: Timeouts) -> ProbeResult:
    return probe_status(worker, address, credentials, connect_s=timeouts.connect, status_s=timeouts.probe)


def _connection(result: ProbeResult, reached: bool) -> Finding:
    subject = f"{result.worker} {result.address}"
    if result.ok:
        peer = result.peer
        assert peer is not None
        return Finding("connection", subject, "ok", f"{peer} answers in {format_seconds(result.seconds)}")
    kind = result.status.replace("_", " ")
    return Finding("connection", subject, "warn" if reached else "fail", f"{kind}: {result.cause}", result.mend)


def _wifi(worker: Worker, address: str, route: Callable[[str, int], Route | None]) -> Iterator[Finding]:
    way = route(*split_address(address))
    if way is None:
        return
    if not way.wifi:
        yield Finding("network", f"{worker.name} {address}", "ok", f"over {way.kind} ({way.interface})")
        return
    mend = "Use a cable, Thunderbolt best, and put that address first in hosts.yaml"
    text = f"over Wi-Fi ({way.interface}), where a layer's round trip takes milliseconds"
    yield Finding("network", f"{worker.name} {address}", "warn", text, mend)


def ask(worker: Worker, address: str, credentials: Credentials, timeouts: Timeouts) -> Answers:
    """Status, Describe, and how far the clocks are apart.

    Raises:
        ClusterError, SecurityError: it does not answer.
    """
    times = {"connect_s": timeouts.connect, "status_s": timeouts.probe}
    status = ask_status(worker.name, address, credentials, **times)
    with open_channel(worker.name, address, credentials, timeout_s=timeouts.connect) as channel:
        describe(channel, timeout_s=timeouts.probe)  # the connection is open from here on
        before, start = time.time(), time.monotonic()
        described = describe(channel, timeout_s=timeouts.probe)
        took_s = time.monotonic() - start
    return Answers(channel.peer, status, described, described.unix_time_s - (before + took_s / 2), took_s / 2)


def compare(worker: Worker, answers: Answers, credentials: Credentials, device: str) -> Iterator[Finding]:
    """What a worker said against this machine and hosts.yaml."""
    name, status, described = worker.name, answers.status, answers.described
    skew_s, sure = abs(answers.skew_s), f"± {format_seconds(answers.uncertain_s)}"
    level = "fail" if skew_s > SKEW_FAIL_S else "warn" if skew_s > SKEW_WARN_S else "ok"
    ahead = "ahead of" if answers.skew_s > 0 else "behind"
    yield Finding(
        "clock", name, level, f"{format_seconds(skew_s)} {ahead} this machine's ({sure})",
        "" if level == "ok" else "Set both clocks by NTP: new certificates are refused when they differ by minutes",
    )  # fmt: skip
    same = described.software_version == SOFTWARE_VERSION
    shown = described.software_version[:MAX_SHOWN_CHARS]
    yield Finding(
        "version", name, "ok" if same else "warn", f"Titan {shown}, here {SOFTWARE_VERSION}",
        "" if same else "Install the same version of titan-moe on both",
    )  # fmt: skip
    if described.mlx_version != MLX_VERSION:
        text = f"mlx {described.mlx_version[:MAX_SHOWN_CHARS]}, here {MLX_VERSION}: their results may differ"
        yield Finding("version", name, "fail", text, "Install the same version of mlx on both")
    if described.device != device:
        text = f"computes on {described.device[:MAX_SHOWN_CHARS]}, this machine on {device}"
        yield Finding("device", name, "fail", text, "Use machines with the same kind of device: results are exact")
    budget = status.memory_budget_bytes
    if worker.memory is not None and worker.memory > budget:
        text = f"hosts.yaml wants {format_bytes(worker.memory)}, the worker offers {format_bytes(budget)}"
        yield Finding("memory", name, "warn", text, "Lower `memory`, or start titan-worker with a larger --memory")
    else:
        yield Finding(
            "memory", name, "ok", f"{format_bytes(budget)} for experts, {format_bytes(status.expert_bytes)} used"
        )
    known = load_revocations(credentials.ca_path, credentials.ca_pem).number
    if described.revocation_number < known:
        text = f"has list {described.revocation_number} of revoked certificates, this machine {known}"
        yield Finding("certificates", name, "warn", text, "A coordinator tells it when it next connects; start one")
    yield check_expiry(answers.peer, datetime.now(UTC))
