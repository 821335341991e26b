"""Files that ship with Titan: the demo checkpoint and service definitions."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo-model"
