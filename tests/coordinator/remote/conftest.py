"""A worker over a small checkpoint, in this process but behind its real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.worker_server import RunningWorker, running_worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "mini"
    make_checkpoint(path, layers=2, experts=8, hidden=128, width=64)
    return path


@pytest.fixture
def worker(tmp_path: Path, model: Path) -> Iterator[RunningWorker]:
    with running_worker(tmp_path / "certs", model) as running:
        yield running
