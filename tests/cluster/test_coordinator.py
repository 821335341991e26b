"""`titan-coordinator` as a process over worker processes, used through the official openai package.

Run: .venv/bin/pytest tests/cluster/test_coordinator.py
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import openai
import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.processes import CoordinatorProcess, run_module, write_hosts

from titan.common.registry import open_checkpoint
from titan.common.security.authority import init_authority, issue, load_authority
from titan.common.security.identity import Role
from titan.coordinator.demo.cluster import LoopbackCluster
from titan.coordinator.demo.reference import reference_tokens
from titan.deploy import DEMO_MODEL

SCENE = "SCENE II. A street in Verona.\n\n[Enter ROMEO and MERCUTIO.]\n\nROMEO.\n"
FAST = {"timeouts": {"execute": "300ms", "readmit": "100ms", "readmit_max": "500ms", "connect": "1s", "hello": "2s"}}


@pytest.fixture
def duo() -> Iterator[LoopbackCluster]:
    with LoopbackCluster(DEMO_MODEL, settings=FAST) as loopback:
        yield loopback


def test_openai_client_gets_mlx_lms_text_while_a_worker_dies(duo: LoopbackCluster) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(DEMO_MODEL)
    expected = tokenizer.decode(reference_tokens(DEMO_MODEL, tokenizer.encode(SCENE), 60))
    hosts = write_hosts(duo.folder / "hosts.yaml", duo.hosts)
    with CoordinatorProcess(hosts, "--name", "demo") as coordinator:
        url = coordinator.wait_until_ready()
        with openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as client:
            assert [m.id for m in client.models.list().data] == ["demo"]
            text, usage = "", None
            stream = client.completions.create(
                model="demo",
                prompt=SCENE,
                max_tokens=60,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            with stream:
                for chunk in stream:
                    usage = chunk.usage or usage
                    text += "".join(choice.text for choice in chunk.choices)
                    if len(text) > 40 and duo.workers[0].process.poll() is None:
                        duo.workers[0].kill()
            assert text == expected
            assert usage is not None
            assert usage.completion_tokens == 60
            # The same again with one worker, and as a chat.
            again = client.completions.create(model="demo", prompt=SCENE, max_tokens=60, temperature=0)
            assert again.choices[0].text == expected
            answer = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Good morrow, sir."}], temperature=0
            )
            assert answer.choices[0].finish_reason == "stop"
            with pytest.raises(openai.NotFoundError, match="not served here"):
                client.completions.create(model="other", prompt="x")
        assert any("worker-1" in line and "set aside" in line for line in coordinator.log)
        assert coordinator.stop() == 0


def test_serves_alone_when_no_worker_can_be_reached(duo: LoopbackCluster) -> None:
    for worker in duo.workers:
        worker.kill()
    hosts = write_hosts(duo.folder / "hosts.yaml", duo.hosts)
    with CoordinatorProcess(hosts) as coordinator:
        url = coordinator.wait_until_ready()
        with openai.OpenAI(base_url=url, api_key="none", timeout=30, max_retries=0) as client:
            answer = client.completions.create(model="default", prompt=SCENE, max_tokens=8, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 8
        assert any("nothing listens on port" in line for line in coordinator.log)
        assert coordinator.stop() == 0


def test_another_model_on_a_worker_is_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_checkpoint(other, layers=8, experts=32, top_k=4, seed=7)
    with LoopbackCluster(other, names=("worker-1",), own_copies=True) as loopback:
        hosts = write_hosts(loopback.folder / "hosts.yaml", loopback.hosts, model=str(DEMO_MODEL))
        with CoordinatorProcess(hosts) as coordinator:
            coordinator.wait_until_ready()
            ours, theirs = (open_checkpoint(p).shape.fingerprint[:12] for p in (DEMO_MODEL, other))
            refusals = [line for line in coordinator.log if ours in line and theirs in line]
            assert refusals, coordinator.words()
            assert "same model" in refusals[0]


def test_certificates_of_another_cluster_and_plaintext_get_nothing(duo: LoopbackCluster, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    authority = init_authority(stranger)
    issue(authority, "coordinator", role=Role.COORDINATOR, hosts=["localhost"])
    tls = {"ca": str(stranger / "ca.pem"), "cert": str(stranger / "coordinator.pem")}
    hosts = write_hosts(tmp_path / "hosts.yaml", duo.hosts, tls=tls | {"key": str(stranger / "coordinator.key")})
    with CoordinatorProcess(hosts) as coordinator:
        coordinator.wait_until_ready()
        assert any("not issued by this cluster" in line for line in coordinator.log), coordinator.words()
    host, _, port = duo.workers[0].address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        plain.settimeout(10)
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        received = b""
        while piece := plain.recv(4096):
            received += piece
    assert b"titan" not in received.lower()
    assert len(received) <= 64, "a peer without TLS got more than an alert"


def test_expired_certificate_is_refused_before_anything_else(duo: LoopbackCluster) -> None:
    past = datetime.now(UTC) - timedelta(days=100)
    authority = load_authority(duo.certs)
    issue(authority, "old", role=Role.COORDINATOR, hosts=["localhost"], days=30, now=past)
    tls = {"ca": str(duo.certs / "ca.pem"), "cert": str(duo.certs / "old.pem"), "key": str(duo.certs / "old.key")}
    hosts = write_hosts(duo.folder / "hosts.yaml", duo.hosts, tls=tls)
    done = run_module("titan.coordinator", "--hosts", str(hosts))
    assert done.returncode == 1
    assert "expired on" in done.stderr
    assert "titan certs issue" in done.stderr


def test_what_cannot_be_served_ends_with_a_sentence(tmp_path: Path) -> None:
    def start(content: str, *arguments: str) -> tuple[int, str]:
        (tmp_path / "hosts.yaml").write_text(content)
        done = run_module("titan.coordinator", "--hosts", str(tmp_path / "hosts.yaml"), *arguments)
        return done.returncode, done.stderr

    assert run_module("titan.coordinator", "--hosts", str(tmp_path / "none.yaml")).returncode == 2

    status, words = start(f"model: {DEMO_MODEL}\nwokers: []\n")
    assert (status, "workers" in words) == (2, True)

    status, words = start(f"model: {DEMO_MODEL}\ncoordinator: {{memory: 64KiB}}\n")
    assert status == 1
    assert "give it at least" in words

    broken = tmp_path / "truncated"
    shutil.copytree(DEMO_MODEL, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, words = start(f"model: {broken}\n")
    assert status == 1
    assert "model.safetensors" in words

    foreign = tmp_path / "foreign"
    shutil.copytree(DEMO_MODEL, foreign)
    config = (foreign / "config.json").read_text().replace('"olmoe"', '"mixtral"')
    (foreign / "config.json").write_text(config)
    status, words = start(f"model: {foreign}\n")
    assert status == 1
    assert "mixtral" in words

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, words = start(f"model: {DEMO_MODEL}\n", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert status == 1
    assert "in use" in words

    status, words = start(f"model: {DEMO_MODEL}\n", "--listen", "0.0.0.0:0")
    assert status == 2
    assert "key" in words


def test_worker_command_line_errors(tmp_path: Path) -> None:
    done = run_module("titan.worker", "--no-enroll", "--listen", "127.0.0.1:0", "--certs", str(tmp_path))
    assert done.returncode == 2
    assert "titan certs issue" in done.stderr
    # `--listen` alone means the default address.
    done = run_module("titan.worker", "--no-enroll", "--certs", str(tmp_path), "--listen")
    assert "titan certs issue" in done.stderr
    authority = init_authority(tmp_path / "certs")
    issue(authority, "mini", role=Role.WORKER, hosts=["localhost"])
    done = run_module("titan.worker", "--certs", str(tmp_path / "certs"), "--memory", "8G", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "8GiB" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_module("titan.worker", "--certs", str(tmp_path / "certs"), "--listen", address)
    assert done.returncode == 1
    assert "in use" in done.stderr
