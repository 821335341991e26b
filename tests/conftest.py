"""Shared fixtures. Run everything: `make test`; one file: `.venv/bin/pytest tests/common/test_shape.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parent))

# The same cases in every run, and no record of them on disk; tests/fuzz/run.py looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("ci")
