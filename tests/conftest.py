"""Shared fixtures. Run everything: `make test`; one file: `.venv/bin/pytest tests/common/test_shape.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
