"""`titan demo --serve`: the demo's cluster behind HTTP until Ctrl-C."""

from __future__ import annotations

from rich.console import Console

from titan.common.log import setup_logging
from titan.coordinator.api import ApiServer
from titan.coordinator.cluster import Cluster, ClusterOptions
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.serving import run


def serve_demo(loopback: LoopbackCluster, console: Console) -> None:
    """Serve on a free loopback port; prints a `curl` line that works."""
    setup_logging("text", "WARNING")

    def show(server: ApiServer, _cluster: Cluster) -> None:
        console.print(f"[bold]serving on http://{server.address}/v1[/] with two worker processes; Ctrl-C ends all\n")
        console.print(
            f"curl http://{server.address}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            '  -d \'{"model": "titan-demo", "messages": [{"role": "user", "content": "Good morrow, sir."}], '
            '"temperature": 0}\'\n',
            markup=False,
            soft_wrap=True,
        )

    run(loopback.hosts, ClusterOptions(name="titan-demo"), on_listening=show)
