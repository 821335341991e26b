"""Defaults that the command line shows and the engine shares, without importing it."""

from __future__ import annotations

DEFAULT_MAX_SEQUENCES = 8  # requests that decode together
DEFAULT_PREFILL_STEP_TOKENS = 2048  # of a prompt in one forward pass
