"""The committed stubs are what the .proto files give.

Run: .venv/bin/pytest tests/proto
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import titan.proto

PROTO = Path(titan.proto.__file__).resolve().parent


def test_stubs_match_the_proto_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROTO / "generate.py"), str(tmp_path)], check=True, timeout=60)
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*_pb2*.py*"))
    assert len(made) >= 3
    for path in made:
        assert (PROTO / path).read_text() == (tmp_path / path).read_text(), f"{path} is stale: run `make proto`"
