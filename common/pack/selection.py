"""Which experts a pack is to hold, read from a plan file: those that a named node holds pinned.

Reads the plan's JSON by its documented field names and nothing else of it, since `common` does not know `placement`.
"""

from __future__ import annotations

from pathlib import Path

from titan.common.errors import PlanError
from titan.common.registry.bounded_json import read_object
from titan.common.registry.shape import ModelShape

__all__ = ["read_selection"]

_MEND = "Give a plan that `titan plan --out` wrote for this model"


def read_selection(path: Path, node: str | None, shape: ModelShape) -> dict[int, tuple[int, ...]]:
    """Layer -> experts that `node` holds in the plan at `path`.

    Args:
        node: may be left out when the plan has two nodes (the coordinator and one worker).

    Raises:
        CheckpointMissing, CheckpointTruncated: the file is absent, or no JSON object.
        PlanError: not a plan, of another checkpoint, or without such a node.
    """
    raw = read_object(path, _MEND)
    if raw.get("fingerprint") != shape.fingerprint:
        raise PlanError(
            f"{path} is for checkpoint {str(raw.get('fingerprint'))[:12]}, this one is {shape.fingerprint[:12]}", _MEND
        )
    try:
        nodes, layers, residency = raw["nodes"], raw["layers"], raw["residency"]
        if not (isinstance(nodes, list) and isinstance(layers, list) and isinstance(residency, list)):
            raise ValueError("nodes, layers or residency")
        names = [entry["name"] for entry in nodes]
        if node is None and len(names) == 2:
            node = names[1]
        if node not in names:
            raise PlanError(
                f"{path} has the nodes {', '.join(str(name)[:40] for name in names[:16])}",
                "Name one of them with --node",
            )
        number = names.index(node)
        return {
            int(layer): tuple(e for e, holders in enumerate(row) if number in holders)
            for layer, row in zip(layers, residency, strict=True)
        }
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is not a plan ({type(error).__name__}: {error})", _MEND) from error
