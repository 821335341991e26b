"""The doctor on a real worker, and each of its checks with what it can meet.

Run: .venv/bin/pytest tests/coordinator/doctor
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from fixtures.certificates import Cluster, make_cluster
from typer.testing import CliRunner

from titan.common.config import HostsConfig, Worker
from titan.common.errors import CertificateMissing
from titan.common.network import Listener, Route
from titan.common.power import SleepSetting
from titan.common.security import Credentials, Role, load_credentials
from titan.common.security.revoke import revoke
from titan.common.versions import MLX_VERSION, SOFTWARE_VERSION
from titan.coordinator.demo.processes import WorkerProcess
from titan.coordinator.doctor import machine
from titan.coordinator.doctor.certificates import check_certificates, check_modes
from titan.coordinator.doctor.cli import examine, register
from titan.coordinator.doctor.finding import Finding, worst
from titan.coordinator.doctor.machine import DiskSpeed, measure_disk
from titan.coordinator.doctor.workers import Answers, check_workers, compare
from titan.deploy import DEMO_MODEL
from titan.proto.titan.v1 import trust_pb2, worker_pb2

GIB = 1 << 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    made = make_cluster(tmp_path_factory.mktemp("doctor") / "certs")
    made.member("mini", days=60)
    made.member("coordinator", Role.COORDINATOR, [], days=60)
    return made


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[WorkerProcess]:
    with WorkerProcess("mini", cluster.folder, 64 << 20) as process:
        process.wait_until_listening()
        yield process


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _hosts(folder: Path, cluster: Cluster, *addresses: str, memory: str = "32MiB") -> Path:
    path = folder / "hosts.yaml"
    path.write_text(
        f"model: {DEMO_MODEL}\ncoordinator: {{memory: 1MiB, listen: '127.0.0.1:{_free_port()}'}}\n"
        f"workers: [{{name: mini, addresses: [{', '.join(repr(a) for a in addresses)}], memory: {memory}}}]\n"
        f"tls: {{ca: {cluster.folder}/ca.pem, cert: {cluster.folder}/coordinator.pem, "
        f"key: {cluster.folder}/coordinator.key}}\ntimeouts: {{connect: 5s}}\n"
    )
    return path


def _run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)  # a typer application of one command takes no name
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "220"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_a_cluster_that_is_well(cluster: Cluster, worker: WorkerProcess, tmp_path: Path) -> None:
    hosts = _hosts(tmp_path, cluster, worker.address)
    status, output = _run("--hosts", str(hosts), "--json")
    report = json.loads(output)
    levels = {(f["check"], f["subject"]): f["level"] for f in report["findings"]}
    assert (status, report["ok"]) == (0, True), output
    for key in (
        ("hosts.yaml", str(hosts)),
        ("certificates", "coordinator"),
        ("certificates", "mini"),
        ("key modes", str(cluster.folder)),
        ("connection", f"mini {worker.address}"),
        ("network", f"mini {worker.address}"),
        ("clock", "mini"),
        ("version", "mini"),
        ("memory", "mini"),
        ("port", hosts.read_text().split("listen: '")[1].split("'")[0]),
        ("open files", "this machine"),
    ):
        assert levels[key] == "ok", (key, output)
    assert {("disk", str(DEMO_MODEL)), ("sleep", "this machine"), ("device", "this machine")} <= set(levels)
    shown_status, shown = _run("--hosts", str(hosts))
    assert shown_status == 0
    assert "worker mini answers in" in shown


def test_what_is_wrong_is_said_with_its_mend(cluster: Cluster, worker: WorkerProcess, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{_free_port()}"
    hosts = _hosts(tmp_path, cluster, nobody, memory="1GiB")
    status, output = _run("--hosts", str(hosts))
    assert status == 1
    assert "refused" in output
    assert "Start titan-worker there" in output
    # With another address that answers, the first is only to be looked at.
    both = _hosts(tmp_path, cluster, nobody, worker.address, memory="1GiB")
    status, output = _run("--hosts", str(both), "--json")
    assert status == 0
    found = {(f["check"], f["subject"]): f for f in json.loads(output)["findings"]}
    assert found["connection", f"mini {nobody}"]["level"] == "warn"
    assert found["memory", "mini"]["level"] == "warn"
    assert "the worker offers 64 MiB" in found["memory", "mini"]["text"]


def test_without_hosts_yaml_and_with_a_broken_one(cluster: Cluster, tmp_path: Path) -> None:
    status, output = _run("--hosts", str(tmp_path / "none.yaml"), "--certs", str(tmp_path / "none"))
    assert status == 0
    assert "only this machine was looked at" in output
    findings = list(examine(tmp_path / "none.yaml", cluster.folder))
    assert any(f.check == "certificates" and f.subject == "mini" for f in findings)
    (tmp_path / "hosts.yaml").write_text("wokers: []\n")
    status, output = _run("--hosts", str(tmp_path / "hosts.yaml"), "--certs", str(tmp_path / "none"))
    assert status == 1
    assert "did you mean 'workers'" in output
    (tmp_path / "hosts.yaml").write_text("model: nowhere\nworkers: [{name: mini, addresses: [mini.local]}]\n")
    status, output = _run("--hosts", str(tmp_path / "hosts.yaml"))
    assert status == 1
    assert "certs/ca.pem does not exist" in output.replace("\n", "")


def test_certificates_on_this_machine(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path / "certs")
    now = datetime.now(UTC)

    def levels(days: int, issued: datetime = now, at: datetime = now) -> dict[tuple[str, str], str]:
        made = cluster.member("coordinator", Role.COORDINATOR, [], days=days, now=issued)
        load = load_credentials
        found = check_certificates(
            lambda: load(made.ca_path, made.cert_path, made.key_path, now=at), cluster.folder, Role.COORDINATOR, now=at
        )
        return {(f.check, f.subject): f.level for f in found}

    assert set(levels(60).values()) == {"ok"}
    assert levels(20)["certificates", "coordinator"] == "warn"
    assert levels(1, at=now + timedelta(days=3))["certificates", str(cluster.folder)] == "fail"
    later = now + timedelta(days=3650 - 365 - 100)  # the authority is ten years old soon
    assert levels(60, later, later)["certificates", str(cluster.folder / "ca.pem")] == "warn"

    def missing() -> Credentials:
        raise CertificateMissing("ca.pem does not exist", "Make it")

    first, second = check_certificates(missing, cluster.folder, Role.COORDINATOR)
    assert (first.level, first.mend) == ("fail", "Make it")
    assert second.check == "key modes"


def test_modes(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    folder.mkdir(mode=0o700)
    key = folder / "mini.key"
    key.write_text("")
    key.chmod(0o640)
    (finding,) = check_modes(folder)
    assert finding.level == "fail"
    assert "mini.key" in finding.text
    key.chmod(0o600)
    folder.chmod(0o777)
    (finding,) = check_modes(folder)
    assert "chmod 700" in finding.mend
    folder.chmod(0o700)
    (finding,) = check_modes(folder)
    assert finding.level == "ok"
    (finding,) = check_modes(tmp_path / "none")
    assert finding.level == "fail"


def _answers(cluster: Cluster, **changes: object) -> Answers:
    described = trust_pb2.DescribeReply(software_version=SOFTWARE_VERSION, mlx_version=MLX_VERSION, device="cpu")
    skew_s = float(str(changes.pop("skew_s", 0.01)))
    for key, value in changes.items():
        setattr(described, key, value)
    status = worker_pb2.StatusReply(memory_budget_bytes=8 * GIB)
    return Answers(cluster.member("peer", days=60).identity, status, described, skew_s, 0.001)


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({}, "", "ok"),
        ({"skew_s": 45.0}, "clock", "warn"),
        ({"skew_s": -900.0}, "clock", "fail"),
        ({"software_version": "9.9"}, "version", "warn"),
        ({"mlx_version": "9.9"}, "version", "fail"),
        ({"device": "gpu"}, "device", "fail"),
    ],
)
def test_a_worker_that_is_out_of_step(cluster: Cluster, changes: dict, check: str, level: str) -> None:
    credentials = cluster.member("desk", Role.COORDINATOR, [])
    worker = Worker(name="mini", addresses=("a:1",), memory=4 * GIB)
    found = list(compare(worker, _answers(cluster, **changes), credentials, "cpu"))
    assert worst(found) == level
    if check:
        (finding,) = [f for f in found if f.level != "ok"]
        assert (finding.check, finding.level) == (check, level)
        assert finding.mend


def test_a_worker_with_an_old_list(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path / "certs")
    cluster.member("gone")
    credentials = cluster.member("desk", Role.COORDINATOR, [])
    revoke(cluster.authority, "gone")
    worker = Worker(name="mini", addresses=("a:1",))
    found = [f for f in compare(worker, _answers(cluster), credentials, "cpu") if f.level != "ok"]
    assert ["list 0 of revoked" in f.text for f in found] == [True]


def test_wifi_is_named(cluster: Cluster, worker: WorkerProcess) -> None:
    config = HostsConfig.model_validate(
        {"model": "m", "workers": [{"name": "mini", "addresses": [worker.address]}], "timeouts": {"connect": "5s"}}
    )
    credentials = cluster.member("desk", Role.COORDINATOR, [])
    found = list(check_workers(config, credentials, "cpu", route=lambda *_: Route("en1", "Wi-Fi", True)))
    (finding,) = [f for f in found if f.check == "network"]
    assert finding.level == "warn"
    assert "Wi-Fi (en1)" in finding.text
    assert list(check_workers(HostsConfig(model=Path("m")), credentials, "cpu")) == []


def test_this_machine() -> None:
    def memory(wanted: int | None, spare: int) -> str:
        return machine.check_memory(wanted, budget=lambda: spare, total=lambda: 16 * GIB).level

    assert [memory(None, GIB), memory(GIB, GIB), memory(2 * GIB, GIB), memory(None, 0)] == ["ok", "ok", "warn", "fail"]
    assert machine.check_open_files(limit=lambda: 8192).level == "ok"
    assert "ulimit" in machine.check_open_files(limit=lambda: 256).mend
    asleep = SleepSetting(True, "sleeps after 10 min without use")
    assert "pmset" in machine.check_sleep(setting=lambda: asleep, platform="darwin").mend
    assert "systemctl mask" in machine.check_sleep(setting=lambda: asleep, platform="linux").mend
    assert machine.check_sleep(setting=lambda: SleepSetting(False, "off")).level == "ok"
    assert machine.check_sleep(setting=lambda: None).level == "warn"
    holders = {8080: Listener(7, "nginx"), 8081: Listener(), 8082: None}
    shown = [machine.check_port(f"127.0.0.1:{port}", listener=holders.get) for port in holders]
    assert ["nginx (pid 7)" in shown[0].text, "somebody else" in shown[1].text, shown[2].level == "ok"] == [True] * 3


def test_the_disk_under_the_model(tmp_path: Path) -> None:
    assert machine.check_disk(tmp_path / "none").level == "fail"
    assert machine.check_disk(tmp_path).level == "fail"
    (tmp_path / "model.safetensors").write_bytes(bytes(9 << 20))
    (tmp_path / "small.safetensors").write_bytes(b"x")
    measured = measure_disk(tmp_path)
    assert measured is not None
    assert (measured.path.name, measured.read_bytes) == ("model.safetensors", 9 << 20)
    bounded = measure_disk(tmp_path, most_bytes=1 << 20)
    assert bounded is not None
    assert bounded.read_bytes == 1 << 20
    slow, fast = (DiskSpeed(tmp_path, 100 << 20, seconds) for seconds in (1.0, 0.01))
    assert machine.check_disk(tmp_path, measure=lambda _: slow).level == "warn"
    assert machine.check_disk(tmp_path, measure=lambda _: fast).level == "ok"
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "small.safetensors").write_bytes(b"")
    assert machine.check_disk(tmp_path).level == "fail"


def test_the_worst_counts() -> None:
    def finding(level: str) -> Finding:
        return Finding("x", "y", level, "z")  # type: ignore[arg-type]

    assert worst([]) == "ok"
    assert worst([finding("warn"), finding("ok")]) == "warn"
    assert worst([finding("warn"), finding("fail"), finding("ok")]) == "fail"
