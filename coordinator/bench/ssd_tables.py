"""The figures of `titan bench ssd` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from titan.common.units import format_bytes
from titan.coordinator.bench.install import InstallFigures
from titan.coordinator.bench.ssd_variant import VariantFigures

__all__ = ["show_installs", "show_layers", "show_variants"]


def show_installs(console: Console, installs: Iterable[InstallFigures]) -> None:
    table = Table(title="Installing one expert (medians)")
    for column in ("how", "bytes", "µs", "÷ bare preadv", "GB/s"):
        table.add_column(column, justify="left" if column == "how" else "right")
    for row in installs:
        table.add_row(row.how, format_bytes(row.nbytes), f"{row.us:.0f}", f"{row.over_bare:.2f}", f"{row.gb_per_s:.2f}")
    console.print(table)


def show_variants(console: Console, title: str, rows: Sequence[VariantFigures]) -> None:
    """Means a token. "÷ expected": token ÷ (resident + unavoidable stall); "÷ first": ÷ the first row of the same C."""
    first = rows[0]
    table = Table(
        title=f"Decode, a token: {title}",
        box=SIMPLE_HEAD,
        caption=f"{first.tokens} tokens, reuse {first.reuse:.2f}; expected: all-resident decode "
        f"({first.resident_ms:.1f} ms) + the stall that the policy cannot avoid; "
        f"an expert's read alone {first.fetch_ms:.2f} ms",
    )
    for column in ("C", "variant", "ms", "÷ expected", "÷ first", "hits", "loads", "ahead", "used", "stall"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for r in rows:
        table.add_row(
            str(r.variant.slots),
            r.name if r.identical else f"{r.name} TOKENS DIFFER",
            f"{r.token_ms:.1f}",
            f"{r.over_expected:.2f}±{r.over_expected_error:.2f}",
            f"{r.over_first:.2f}±{r.over_first_error:.2f}",
            f"{r.hit_rate:.2f}",
            *(f"{n:.1f}" for n in (r.loads, r.prefetched, r.useful, r.stall_ms)),
        )
    console.print(table)


def show_layers(console: Console, rows: Iterable[VariantFigures]) -> None:
    for r in rows:
        table = Table(title=f"C = {r.variant.slots}, {r.name}")
        for column in ("layer", "hits", "loads", "late", "stall ms"):
            table.add_column(column, justify="right")
        for layer in r.layers:
            table.add_row(
                str(layer.layer),
                f"{layer.hit_rate:.3f}",
                f"{layer.loads:.2f}",
                f"{layer.late:.2f}",
                f"{layer.stall_ms:.3f}",
            )
        console.print(table)
