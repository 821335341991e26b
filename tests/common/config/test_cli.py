"""`titan hosts check`. Run: `.venv/bin/pytest tests/common/config/test_cli.py`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import typer
from fixtures.certificates import Cluster, make_cluster
from typer.testing import CliRunner, Result

from titan.common.config import Worker, load_hosts
from titan.common.config.cli import check_hosts, register
from titan.common.config.probe import Prober, ProbeResult
from titan.common.errors import CertificateMissing, ConfigError, RoleRefused
from titan.common.security import Credentials, Role, grpc_server_credentials
from titan.proto.titan.v1 import worker_pb2 as pb
from titan.proto.titan.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = make_cluster(tmp_path / "certs")
    made.member("coordinator", Role.COORDINATOR, [])
    return made


def _run(*arguments: str, prober: Prober | None = None) -> Result:
    app = typer.Typer()
    register(app, prober=prober)
    return CliRunner().invoke(app, ["hosts", "check", *arguments], env={"COLUMNS": "200"})


def _hosts(folder: Path, *workers: str) -> Path:
    path = folder / "hosts.yaml"
    path.write_text("model: m\nworkers:\n" + "".join(f"- {w}\n" for w in workers) if workers else "model: m\n")
    return path


class _Status(WorkerServicer):
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        return pb.StatusReply(software_version="9.9", state="ready", memory_budget_bytes=8 << 30, expert_bytes=1 << 30)


@contextlib.contextmanager
def _worker(credentials: Credentials, servicer: WorkerServicer) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_WorkerServicer_to_server(servicer, server)
        port = server.add_secure_port("127.0.0.1:0", grpc_server_credentials(credentials))
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(10)


def test_a_worker_that_answers_gives_status_0(cluster: Cluster, tmp_path: Path) -> None:
    with _worker(cluster.member("mini"), _Status()) as address:
        path = str(_hosts(tmp_path, f"{{name: mini, addresses: ['{address}']}}"))
        shown, as_json = _run(path), _run(path, "--json")
    assert (shown.exit_code, as_json.exit_code) == (0, 0), shown.output
    assert address in shown.output
    assert "worker mini" in shown.output
    assert "version 9.9 (this machine has" in shown.output
    assert "memory 1 GiB of 8 GiB used" in shown.output
    assert "holds no model yet" in shown.output
    (entry,) = json.loads(as_json.stdout)["addresses"]
    assert entry["status"] == "ok"
    assert entry["peer"]["name"] == "mini"
    assert entry["peer"]["role"] == "worker"
    assert entry["details"]["state"] == "ready"


def test_tls_is_not_enough(cluster: Cluster, tmp_path: Path) -> None:
    """A member's port that answers no Status: another program, or a worker that hangs."""
    with _worker(cluster.member("mini"), WorkerServicer()) as address:
        path = str(_hosts(tmp_path, f"{{name: mini, addresses: ['{address}']}}"))
        result = _run(path, "--json")
    assert result.exit_code == 1
    (entry,) = json.loads(result.stdout)["addresses"]
    assert entry["status"] == "status_failed"
    assert "same version of titan-moe" in entry["mend"]
    assert entry["peer"]["name"] == "mini"


def test_a_worker_that_does_not_gives_status_1(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.folder.exists()
    path = str(_hosts(tmp_path, "{name: mini, addresses: ['nowhere.invalid', '[::1]:1']}"))
    shown, as_json = _run(path), _run(path, "--json")
    assert (shown.exit_code, as_json.exit_code) == (1, 1)
    assert "[::1]:1" in shown.output  # brackets are not taken for markup
    assert "name unknown" in shown.output
    report = json.loads(as_json.stdout)
    assert report["ok"] is False
    assert report["addresses"][0]["status"] == "name_unknown"
    assert report["addresses"][1]["status"] in ("refused", "unreachable")  # unreachable where there is no IPv6


def test_no_workers_is_fine(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.folder.exists()
    result = _run(str(_hosts(tmp_path)))
    assert result.exit_code == 0
    assert "No workers" in result.output


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_or_certificate_that_is_wrong_is_said_before_any_connection(tmp_path: Path, as_json: bool) -> None:
    def never(*_: object) -> ProbeResult:
        pytest.fail("connected")

    flags = ["--json"] if as_json else []
    path = _hosts(tmp_path, "{name: mini, addresses: [mini.local]}")
    results = [
        (_run(str(tmp_path / "absent.yaml"), *flags, prober=never), ConfigError, 2),
        (_run(str(path), *flags, prober=never), CertificateMissing, 2),
    ]
    make_cluster(tmp_path / "certs").member("coordinator", Role.WORKER)
    results.append((_run(str(path), *flags, prober=never), RoleRefused, 1))
    for result, kind, status in results:
        if as_json:
            assert result.exit_code == status
            report = json.loads(result.stdout)
            assert report["ok"] is False
            assert report["error"]["code"] == kind("").code
            assert report["error"]["mend"]
        else:
            assert isinstance(result.exception, kind)


def test_another_prober_can_say_more(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.folder.exists()

    def hello(worker: Worker, address: str, credentials: Credentials) -> ProbeResult:
        assert credentials.identity.role is Role.COORDINATOR
        return ProbeResult(worker.name, address, "ok", details={"model": f"olmoe on {worker.name}"})

    path = _hosts(tmp_path, *(f"{{name: w{i}, addresses: [a{i}, b{i}]}}" for i in range(12)))
    config = load_hosts(path)
    result = _run(str(path), prober=hello)
    assert result.exit_code == 0
    assert "w11 b11:7077: model olmoe on w11" in result.output
    listed = check_hosts(config, cluster.member("coordinator", Role.COORDINATOR, []), hello)
    assert [(r.worker, r.address) for r in listed] == [(w.name, a) for w in config.workers for a in w.addresses]
