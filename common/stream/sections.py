"""How a layer's missing experts are divided into sequential sections. Pure functions over expert numbers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["last_chosen", "sections"]

BRIDGE_BYTES = 128 << 10  # a disk reads this much in the time that one more request costs


def sections(missing: Iterable[int], width: int, expert_bytes: int) -> list[list[int]]:
    """Ascending experts to read together, at most `width` a section.

    A hole of unneeded experts that is smaller than BRIDGE_BYTES is read too, so that a section stays one run.

    Args:
        missing: distinct experts that are needed.
        width: experts that a buffer holds.
        expert_bytes: on disk.
    """
    bridge = BRIDGE_BYTES // expert_bytes
    found: list[list[int]] = []
    for expert in sorted(missing):
        last = found[-1] if found else []
        hole = range(last[-1] + 1, expert) if last else range(0)
        if last and len(hole) <= bridge and len(last) + len(hole) < width:
            last.extend((*hole, expert))
        elif last and len(last) < width:
            last.append(expert)
        else:
            found.append([expert])
    return found


def last_chosen(experts: Iterable[int], count: int) -> list[int]:
    """The `count` distinct experts that were chosen last; `experts` in reverse order of the rows."""
    found: dict[int, None] = {}
    for expert in experts:
        if len(found) == count:
            break
        found[expert] = None
    return list(found)
