"""The workers of a cluster together: greeted, assigned, waited for, and what they offer.

One `WorkerLink` a worker of hosts.yaml, in its order. Knows neither the model nor how a plan is made.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from titan.common.config.hosts import HostsConfig
from titan.common.log import get_logger
from titan.common.registry import ModelShape
from titan.common.security.credentials import Credentials
from titan.common.security.own import OwnCertificate
from titan.common.units import format_bytes
from titan.coordinator.certificates import Certificates
from titan.coordinator.remote.install import ReadBytes
from titan.coordinator.remote.link import LinkStatus, WorkerLink
from titan.coordinator.remote.share import Cache
from titan.placement import Plan

log = get_logger("coordinator")

ENOUGH_READS = 256  # of a worker while serving: fewer say less than calibration


class Workers:
    """Links to the workers of hosts.yaml.

    Args:
        credentials: this coordinator's; None when there are no workers.
        read_bytes: reads the experts that they have to be given.
        report: told what is waited for.
    """

    def __init__(
        self,
        hosts: HostsConfig,
        credentials: Credentials | None,
        shape: ModelShape,
        dtype: str,
        read_bytes: ReadBytes,
        report: Callable[[str], None],
    ) -> None:
        self._hosts, self._report = hosts, report
        self.links: list[WorkerLink] = []
        if credentials is None:
            return
        certificates = Certificates(OwnCertificate(credentials))
        instance_id = secrets.token_hex(8)
        self.links = [
            WorkerLink(
                worker,
                certificates,
                hosts.timeouts,
                shape,
                dtype,
                instance_id,
                read_bytes,
                hosts.transport,
                reduced=hosts.precision == "reduced",
            )
            for worker in hosts.workers
        ]

    def greet(self) -> None:
        """Start every keeper; wait until each worker has answered Hello or its first try is over."""
        if not self.links:
            return
        timeouts = self._hosts.timeouts
        self._report(f"greeting {len(self.links)} workers")
        for link in self.links:
            link.start()
        longest = max(len(worker.addresses) for worker in self._hosts.workers)
        deadline = time.monotonic() + longest * (timeouts.connect + timeouts.hello) + 1
        for link in self.links:
            link.wait(("greeted", "installing", "ready", "away", "closed"), deadline)

    def assign(self, plan: Plan) -> None:
        """Have each worker hold what the plan gives it; returns at once."""
        for position, link in enumerate(self.links, start=1):
            held, served = plan.held_by(position), plan.served_by(position)
            pinned = {layer: held[i] for i, layer in enumerate(plan.layers) if held[i]}
            caches = {
                layer: Cache(plan.cache_slots(i, position), served[i])
                for i, layer in enumerate(plan.layers)
                if served[i]
            }
            link.assign(pinned, caches)

    def wait(self) -> None:
        """Wait until each worker holds what it was assigned, or is away."""
        for link in self.links:
            self.wait_for(link)

    def wait_for(self, link: WorkerLink) -> None:
        """Wait for an install that makes progress; a worker that stands still is left to come later."""
        timeouts = self._hosts.timeouts
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
            self._report(f"worker {link.name} is {status.state}{share}")
            link.wait(("away", "closed"), time.monotonic() + 0.1)

    def close(self) -> None:
        """End the sessions."""
        for link in self.links:
            link.close(self._hosts.timeouts.probe + 2)

    # ----------------------------------------------------------------------------------------------------------------

    def status(self) -> list[LinkStatus]:
        return [link.status for link in self.links]

    def memory(self) -> dict[str, int]:
        """M_n by worker: what it offered in Hello or hosts.yaml states; 0 for one that is unknown."""
        memory: dict[str, int] = {}
        for worker, link in zip(self._hosts.workers, self.links, strict=True):
            offered = link.memory_budget_bytes if link.memory_budget_bytes is not None else worker.memory
            if offered is None:
                log.warning(
                    "worker is not there and hosts.yaml states no memory for it: the plan leaves it out",
                    worker=worker.name,
                )
            memory[worker.name] = offered or 0
        return memory

    def caches(self) -> dict[str, int]:
        """Cache slots a layer that hosts.yaml gives to workers that are there with a copy of the checkpoint."""
        found = {}
        for worker, link in zip(self._hosts.workers, self.links, strict=True):
            if worker.cache_slots and link.reads:
                found[worker.name] = worker.cache_slots
            elif worker.cache_slots and link.has_checkpoint is False:
                log.warning(
                    "hosts.yaml gives a worker cache slots, and it has nothing on its disk to read from",
                    worker=worker.name,
                )
        return found

    def disks(self) -> dict[str, float | None]:
        """Workers that are there and read from their own disks: mean seconds of a read, where they served enough."""
        known = [link for link in self.links if link.reads]
        return {link.name: link.fetch_s if link.demanded >= ENOUGH_READS else None for link in known}

    def reply_medians(self) -> dict[str, tuple[int, float]]:
        """Worker -> (pairs, median seconds) of its most frequent size of call, where enough is known."""
        found = {}
        for link in self.links:
            ready = link.ready
            if ready is not None and (typical := ready.times.typical()) is not None:
                found[link.name] = typical
        return found
