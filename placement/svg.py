"""A picture of a plan: one bar a layer, as many units wide as it has experts, coloured by who holds them.

Experts of a layer are grouped by holder, so that whole layers, spread layers and what only the SSD has are seen at a
glance. It knows finished plans.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from titan.placement.plan import Plan

COLOURS = ("#2f6690", "#e07a1f", "#3a9d5d", "#b13e53", "#7a5195", "#c9a227", "#17a2b8", "#8d6e63", "#5c6bc0", "#9ccc65")
CACHE, SSD = "#9fc5e8", "#d9d9d9"
LEFT, TOP, WIDTH, LEGEND = 56, 56, 720, 190


def plan_svg(plan: Plan) -> str:
    """The picture as SVG text. Experts with replicas are drawn lighter; node 0's unpinned, cached ones pale blue."""
    count = len(plan.layers)
    bar = max(3.0, min(14.0, 560 / count))
    height = int(TOP + bar * count + 60)
    legend_rows = len(plan.nodes) + 2
    height = max(height, TOP + 20 * legend_rows + 40)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + LEGEND}" height="{height}" '
        f'viewBox="0 0 {LEFT + WIDTH + LEGEND} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="20" font-size="14">{_title(plan)}</text>',
        f'<text x="{LEFT}" y="{TOP - 10}" fill="#555">experts of a layer, grouped by holder</text>',
    ]
    every = max(1, round(14 / bar))
    for position, index in enumerate(plan.layers):
        y = TOP + position * bar
        if position % every == 0:
            out.append(f'<text x="{LEFT - 6}" y="{y + bar * 0.85:.1f}" text-anchor="end" fill="#555">{index}</text>')
        out += _bar(plan, position, y, bar)
    out += _legend(plan)
    out.append("</svg>")
    return "\n".join(out) + "\n"


def colour(node: int) -> str:
    return COLOURS[node % len(COLOURS)]


def _title(plan: Plan) -> str:
    text = f"{len(plan.layers)} MoE layers × {plan.num_experts} experts on {len(plan.nodes)} nodes"
    if plan.predicted is not None:
        text += f": {1 / plan.predicted.step_s:.1f} tokens/s predicted at batch 1"
    return escape(text)


def _bar(plan: Plan, position: int, y: float, bar: float) -> list[str]:
    row = plan.residency[position]
    kinds: Counter[tuple[int, bool]] = Counter()
    for holders in row:
        kinds[(holders[0], len(holders) > 1) if holders else (len(plan.nodes) + 1, False)] += 1
    ssd = kinds.pop((len(plan.nodes) + 1, False), 0)
    cached = min(ssd, plan.cache_slots(position))
    parts = [(colour(n), 0.55 if copies else 1.0, k, n) for (n, copies), k in sorted(kinds.items())]
    names = [node.name for node in plan.nodes]
    labelled = [(c, o, k, f"{names[n]}: {k}") for c, o, k, n in parts]
    labelled.insert(sum(n == 0 for *_, n in parts), (CACHE, 1.0, cached, f"{names[0]}'s cache: {cached}"))
    labelled.append((SSD, 1.0, ssd - cached, f"SSD: {ssd - cached}"))
    out, x = [], float(LEFT)
    for fill, opacity, number, label in labelled:
        if number <= 0:
            continue
        width = WIDTH * number / plan.num_experts
        out.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{bar * 0.9:.2f}" fill="{fill}" '
            f'fill-opacity="{opacity}"><title>layer {plan.layers[position]}, {escape(label)}</title></rect>'
        )
        x += width
    return out


def _legend(plan: Plan) -> list[str]:
    entries = [(colour(i), n.name) for i, n in enumerate(plan.nodes)]
    entries[1:1] = [(CACHE, f"{plan.nodes[0].name}'s cache")]
    entries.append((SSD, "read from SSD"))
    if any(len(h) > 1 for row in plan.residency for h in row):
        entries.append(("#bbbbbb", "lighter: has a replica"))
    out, x = [], LEFT + WIDTH + 16
    for i, (fill, name) in enumerate(entries):
        y = TOP + 20 * i
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/>')
        out.append(f'<text x="{x + 18}" y="{y + 10}">{escape(name[:22])}</text>')
    return out
