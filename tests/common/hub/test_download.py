"""`titan download` as a process against a hub on loopback. Run: .venv/bin/pytest tests/common/hub"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.hub_server import NAME, Hub, hub_of

from titan.common.config.hosts import load_hosts
from titan.common.registry import open_checkpoint

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "model", shards=2)


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[Hub]:
    folder = shutil.copytree(model, tmp_path / "served")
    (folder / "README.md").write_text("about")
    (folder / "modeling_custom.py").write_text("raise SystemExit('code was run')")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with hub_of(folder) as running:
        yield running


@pytest.fixture
def titan(hub: Hub, tmp_path: Path) -> Run:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def run(*arguments: str, name: str = NAME) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "titan.cli", "download", name, "--endpoint", hub.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)

    return run


def test_a_checkpoint_comes_into_the_cache_without_code(hub: Hub, titan: Run, model: Path, tmp_path: Path) -> None:
    done = titan()
    assert done.returncode == 0, done.stderr
    assert f"In hosts.yaml: `model: {NAME}`" in done.stdout
    snapshot = next((tmp_path / "hf" / "hub").glob("models--*/snapshots/*"))
    assert open_checkpoint(snapshot).shape == open_checkpoint(model).shape
    assert not {"README.md", "modeling_custom.py", "pytorch_model.bin"} & {file.name for file in snapshot.iterdir()}
    before = dict(hub.sent)
    again = titan()
    assert again.returncode == 0, again.stderr
    assert "0 B of it not here yet" in again.stdout
    assert hub.sent == before, "what was here came again"


def test_into_a_folder(titan: Run, model: Path, tmp_path: Path) -> None:
    done = titan("--to", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "here").shape == open_checkpoint(model).shape


def test_looking_fetches_the_configuration_only(hub: Hub, titan: Run) -> None:
    done = titan("--look")
    assert done.returncode == 0, done.stderr
    assert "olmoe" in done.stdout
    assert set(hub.sent) == {"config.json"}


def test_what_cannot_be_run_is_refused_before_it_comes(hub: Hub, titan: Run) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps({**config, "model_type": "llama4"}))
    done = titan()
    assert done.returncode == 1
    assert "'llama4' is not in Titan's verified table" in done.stderr
    assert set(hub.sent) == {"config.json"}


def test_a_disk_that_cannot_hold_it(hub: Hub, titan: Run) -> None:
    shard = next(hub.folder.glob("model*.safetensors"))
    hub.sizes[shard.name] = 1 << 60
    done = titan()
    assert done.returncode == 1
    assert "1024 PiB more, " in done.stderr
    assert "--to a folder on another disk" in done.stderr
    assert set(hub.sent) == {"config.json"}


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, titan: Run, model: Path, tmp_path: Path) -> None:
    hub.break_after = 20_000
    done = titan("--to", str(tmp_path / "here"))
    if done.returncode:  # the library gave up: the command says so, and goes on from there
        assert "what has come is kept" in done.stderr
        done = titan("--to", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "here").shape == open_checkpoint(model).shape
    assert hub.break_after is None, "nothing broke"


@pytest.mark.parametrize(
    ("status", "said"),
    [(503, "answers 503"), (401, "answers 401")],
)
def test_a_hub_that_does_not_give_it(hub: Hub, titan: Run, status: int, said: str) -> None:
    hub.status = status
    done = titan()
    assert done.returncode == 1
    assert said in done.stderr


def test_names_and_revisions_that_are_none(titan: Run) -> None:
    assert "is no repository" in titan(name="../../etc").stderr
    assert "no repository someone/absent" in titan(name="someone/absent").stderr
    assert "no revision 'gone'" in titan("--revision", "gone").stderr


def test_no_hub_at_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan.cli", "download", NAME, "--endpoint", "http://127.0.0.1:9"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr


def test_hosts_yaml_may_name_a_repository(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(f"model: {NAME}\n")
    assert load_hosts(tmp_path / "hosts.yaml").model == Path(NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert load_hosts(tmp_path / "hosts.yaml").model == tmp_path / NAME
