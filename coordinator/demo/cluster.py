"""A throw-away cluster on loopback: certificates in a temporary folder, worker processes, and a coordinator's parts.

Everything it makes is gone when the `with` block ends, also after an error. Used by the demo and by tests.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from titan.common.arrays import compute_dtype
from titan.common.config.hosts import HostsConfig
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.security.authority import init_authority, issue
from titan.common.security.credentials import Credentials, load_credentials_dir
from titan.common.security.identity import Role
from titan.common.slots.buffers import slot_bytes
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.processes import PROGRAM, WorkerProcess


class LoopbackCluster:
    """Worker processes and what a coordinator needs to use them.

    Args:
        model: checkpoint folder.
        names: of the workers.
        worker_bytes: memory of each for experts; None divides all experts with some room to spare.
        home_bytes: the coordinator's; None is top-k slots in every layer and a quarter of the layers whole.
        own_copies: workers read the checkpoint themselves instead of being sent their experts.
        kept: instead, they keep so much of what they are sent on their disks ("1GiB"), and serve it from there.
        reads: cache mode of the workers' reads.
        settings: further keys of hosts.yaml.
        program: what runs instead of titan-worker, with the same options.
    """

    def __init__(
        self,
        model: Path,
        names: tuple[str, ...] = ("worker-1", "worker-2"),
        *,
        worker_bytes: int | None = None,
        home_bytes: int | None = None,
        own_copies: bool = False,
        kept: str | None = None,
        reads: str = "page-cache",
        settings: dict[str, Any] | None = None,
        program: tuple[str, ...] = PROGRAM,
    ) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self.workers: list[WorkerProcess] = []
        self.folder = Path()
        self.hosts = HostsConfig(model=model)
        self._names = names
        self._own_copies, self._kept, self._reads = own_copies, kept, reads
        self._settings = settings or {}
        self._program = program
        self._stack = ExitStack()
        layer_bytes = self._layer_bytes()
        shape = self.checkpoint.shape
        if home_bytes is None:
            whole = len(layer_bytes) // 4
            home_bytes = sum(layer_bytes) * shape.top_k + sum(layer_bytes[:whole]) * (shape.num_experts - shape.top_k)
        if worker_bytes is None:
            worker_bytes = sum(layer_bytes) * shape.num_experts * 5 // (4 * max(1, len(names)))
        self.home_bytes, self.worker_bytes = home_bytes, worker_bytes

    @property
    def certs(self) -> Path:
        return self.folder / "certs"

    def kept_by(self, name: str) -> Path:
        """Folder in which a worker keeps what it was sent."""
        return self.folder / f"kept-{name}"

    @property
    def credentials(self) -> Credentials:
        return load_credentials_dir(self.certs, role=Role.COORDINATOR)

    def __enter__(self) -> LoopbackCluster:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="titan-demo-")))
            authority = init_authority(self.certs)
            issue(authority, "coordinator", role=Role.COORDINATOR, hosts=["localhost"], days=30)
            for name in self._names:
                issue(authority, name, role=Role.WORKER, hosts=["localhost"], days=30)
            self.workers = [stack.enter_context(self._process(name)) for name in self._names]
            addresses = [worker.wait_until_listening() for worker in self.workers]
            self.hosts = HostsConfig.model_validate(
                {
                    "model": str(self.checkpoint.path),
                    "coordinator": {"memory": self.home_bytes, "listen": "127.0.0.1:0"},
                    "workers": [
                        {"name": name, "addresses": [address]}
                        for name, address in zip(self._names, addresses, strict=True)
                    ],
                    "tls": {
                        "ca": str(self.certs / "ca.pem"),
                        "cert": str(self.certs / "coordinator.pem"),
                        "key": str(self.certs / "coordinator.key"),
                    },
                    **self._settings,
                }
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def coordinator(self, options: ClusterOptions | None = None, **more: Any) -> Cluster:
        """The coordinator's side; `load` it on the thread that will own MLX."""
        return Cluster(self.hosts, self.checkpoint, self.credentials, options or ClusterOptions(), **more)

    def restart(self, index: int) -> WorkerProcess:
        """Start an ended worker again, with its certificate, on its port."""
        ended = self.workers[index]
        ended.stop()
        port = int(ended.address.rpartition(":")[2])
        worker = self._stack.enter_context(self._process(ended.name, port))
        worker.wait_until_listening()
        self.workers[index] = worker
        return worker

    def _process(self, name: str, port: int = 0) -> WorkerProcess:
        model = self.checkpoint.path if self._own_copies else None
        arguments = ("--reads", self._reads) if self._reads != "page-cache" else ()
        if self._kept is not None:
            arguments += ("--cache", str(self.kept_by(name)), "--cache-size", self._kept)
        return WorkerProcess(name, self.certs, self.worker_bytes, model, port, self._program, arguments)

    def _layer_bytes(self) -> list[int]:
        """Bytes of one expert in memory, per MoE layer."""
        shape = self.checkpoint.shape
        dtype = compute_dtype(
            {c.dtype for s in shape.layers for m in s.matrices for c in m.components if c.dtype[0] != "U"}
        )
        return [slot_bytes(spec, dtype) for spec in shape.layers]
