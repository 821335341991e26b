"""Plans for one cluster as it is now: its problem, the search, and whether a plan that was given fits.

Reads what this machine and the workers offer; pure otherwise. Knows neither how figures are measured nor how a plan is
installed.
"""

from __future__ import annotations

from titan.common.arrays import COMPUTE_DTYPES
from titan.common.config.hosts import HostsConfig
from titan.common.errors import PlanError
from titan.common.registry import Checkpoint
from titan.coordinator.cluster_options import ClusterOptions
from titan.coordinator.host.budget import HostMemory
from titan.coordinator.planning import make_problem, with_caches
from titan.coordinator.remote.workers import Workers
from titan.placement import Plan, Problem, solve
from titan.placement.cost import Costs
from titan.placement.figures import Figures
from titan.placement.reuse import Reuse

PAGE_CACHE_SHARE = 0.8  # of the memory that experts leave: other files want some of it


class Planner:
    """Makes and checks plans.

    Args:
        memory: what node 0 gives to what.
        available_bytes: all that this process may use.
    """

    def __init__(
        self,
        hosts: HostsConfig,
        checkpoint: Checkpoint,
        dtype: str,
        memory: HostMemory,
        available_bytes: int,
        workers: Workers,
        options: ClusterOptions,
    ) -> None:
        self.memory = memory
        self._hosts, self._checkpoint, self._shape, self._dtype = hosts, checkpoint, checkpoint.shape, dtype
        self._available_bytes, self._workers, self._options = available_bytes, workers, options

    def problem(
        self,
        figures: Figures | None,
        frequencies: tuple[tuple[float, ...], ...] | None = None,
        reuse: Reuse | None = None,
    ) -> Problem:
        """The placement problem of the workers as they are now; `frequencies` and `reuse` of routing where known."""
        memory = self._workers.memory()
        return make_problem(
            self._shape,
            self._hosts,
            self._dtype,
            self.memory.experts_bytes,
            memory,
            {status.name: status.address for status in self._workers.status()},
            figures,
            frequencies,
            self._workers.caches(),
            cached=self.reads_cached,
            reuse=reuse,
            disks=self._workers.disks(),
        )

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Plan:
        """Search when there are figures, else by memory alone."""
        measured = any(node.compute_s for node in problem.nodes)
        method = "search" if measured else "proportional"
        plan = solve(problem, method=method, time_limit_s=time_limit_s or self._options.solve_s)
        return with_caches(plan, self._workers.caches(), self._workers.memory())

    def check(self, plan: Plan) -> None:
        """Raises PlanError for a plan of another checkpoint or other nodes, or one that violates a constraint."""
        if plan.fingerprint != self._shape.fingerprint:
            raise PlanError(
                f"the plan is for checkpoint {plan.fingerprint[:12]}, {self._checkpoint.path} is "
                f"{self._shape.fingerprint[:12]}",
                "make a plan for this model",
            )
        names = [node.name for node in plan.nodes]
        wanted = [self._hosts.coordinator.name, *(worker.name for worker in self._hosts.workers)]
        if names != wanted:
            raise PlanError(f"the plan is for nodes {names}, hosts.yaml has {wanted}", "make a plan for these nodes")
        plan.validate()

    def costs(self, plan: Plan) -> Costs | None:
        """What dispatch chooses by; None for a plan that was made without figures."""
        if plan.predicted is None:
            return None
        row_bytes = self._shape.hidden_size * COMPUTE_DTYPES[self._dtype][0].itemsize
        return Costs.of(plan.nodes, row_bytes, reduced=self._hosts.precision == "reduced")

    @property
    def reads_cached(self) -> bool:
        """Whether all experts fit in the memory that is left for the page cache."""
        left = self._available_bytes - self.memory.experts_bytes
        return self._shape.expert_bytes_total <= PAGE_CACHE_SHARE * left
