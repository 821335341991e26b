"""`titan`: the operator's command. Mounts what each package offers; knows no command's insides."""

from __future__ import annotations

import typer

from titan import __version__
from titan.common.config import cli as hosts_cli
from titan.common.console import run_command
from titan.common.hub import cli as download_cli
from titan.common.pack import cli as pack_cli
from titan.common.registry import cli as registry_cli
from titan.common.security import cli as certs_cli
from titan.coordinator import calibrate_cli, chat_cli, enroll_cli, keys_cli, plan_cli, stats_cli, top_cli
from titan.coordinator.bench import cli as bench_cli
from titan.coordinator.bench import prompts_cli, remote_cli, serve_cli, ssd_cli
from titan.coordinator.demo import cli as demo_cli
from titan.coordinator.doctor import cli as doctor_cli
from titan.placement import cli as placement_cli

app = typer.Typer(
    help="Run Mixture-of-Experts models on the Macs you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, within one run, and print ratios.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


PACKAGES = (
    demo_cli,
    hosts_cli,
    certs_cli,
    enroll_cli,
    doctor_cli,
    download_cli,
    registry_cli,
    pack_cli,
    calibrate_cli,
    plan_cli,
    keys_cli,
    chat_cli,
    top_cli,
    stats_cli,
)
for package in PACKAGES:
    package.register(app)
bench_cli.register_bench(bench)
serve_cli.register_bench(bench)
ssd_cli.register_bench(bench)
prompts_cli.register_bench(bench)
placement_cli.register_bench(bench)
remote_cli.register_bench(bench)


def main() -> None:
    """Entry point of `titan`."""
    run_command(app, "titan")


if __name__ == "__main__":
    main()
