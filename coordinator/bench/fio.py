"""What fio, where it is installed, gets from a file: the reference for sequential reads. Knows no experts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

__all__ = ["fio_bytes_per_s"]

RUN_S = 10
TIMEOUT_S = 60.0


def fio_bytes_per_s(file: Path, block_bytes: int, readers: int, *, direct: bool = True) -> float | None:
    """Bytes a second of sequential reads of `file`: `readers` threads, each one block at a time in a part of its own.

    As a pool of as many readers reads it: positional reads (psync), past the page cache when `direct`.

    Returns:
        None where fio is not installed, or does not say.
    """
    program = shutil.which("fio")
    if program is None:
        return None
    part_bytes = file.stat().st_size // readers // block_bytes * block_bytes
    if not part_bytes:
        return None
    command = [
        program,
        "--name=titan",
        f"--filename={file}",
        "--readonly",
        "--rw=read",
        "--ioengine=psync",
        "--thread",
        f"--direct={int(direct)}",
        f"--bs={block_bytes}",
        f"--numjobs={readers}",
        f"--size={part_bytes}",
        f"--offset_increment={part_bytes}",
        f"--runtime={RUN_S}",
        "--group_reporting",
        "--output-format=json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True, stdin=subprocess.DEVNULL)
        jobs = json.loads(done.stdout)["jobs"]
        return float(jobs[0]["read"]["bw_bytes"]) or None
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, IndexError, TypeError):
        return None
