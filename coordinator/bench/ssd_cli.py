"""`titan bench ssd`: the SSD tier's figures as tables or JSON. Measures nothing itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from titan.common.errors import ConfigError
from titan.common.units import format_bytes
from titan.deploy import DEMO_MODEL

if TYPE_CHECKING:
    from titan.coordinator.bench.install import InstallFigures
    from titan.coordinator.bench.ssd import Variant, VariantFigures

FEATURES = ("packed", "direct", "forecast", "transition", "probe", "auto", "overlap")


def register_bench(app: typer.Typer) -> None:
    """Mount the command under `titan bench`."""
    app.command("ssd")(ssd_command)


def ssd_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    pack: Annotated[Path | None, typer.Option(help="Its pack; by default one is made and removed again.")] = None,
    slots: Annotated[str, typer.Option(help="Slots a layer (C), several with commas.")] = "8,16",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens a variant.")] = 100,
    warm: Annotated[int, typer.Option(min=0, max=100_000, help="Tokens before them that do not count.")] = 40,
    features: Annotated[
        str, typer.Option(help=f"Compare these with the plain way: {', '.join(FEATURES)}.")
    ] = "packed,direct,forecast,transition,probe,auto",
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer of every variant.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Installing experts and decoding with too few slots, each feature on and off; the tokens are compared."""
    from titan.common.pack import write_pack  # loads MLX
    from titan.common.registry import open_checkpoint
    from titan.coordinator.bench.install import bench_install
    from titan.coordinator.bench.ssd import SsdBench

    wanted = _names(features)
    checkpoint = open_checkpoint(model)
    capacities = [_capacity(text, checkpoint.shape.top_k, checkpoint.shape.num_experts) for text in slots.split(",")]
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder, err.status("packing") as status:
        packed = open_checkpoint(pack) if pack is not None else write_pack(checkpoint, Path(folder) / "pack")
        status.update("measuring installs")
        installs = bench_install(checkpoint, packed)
        status.update("decoding with everything at home")
        bench = SsdBench(checkpoint, packed, tokens, warm)
        bench.run_resident()
        variants = [variant for c in capacities for variant in _variants(c, wanted)]
        rows: list[VariantFigures] = []
        for number, variant in enumerate(variants, 1):
            status.update(f"variant {number} of {len(variants)}: C = {variant.slots}, {variant.name}")
            rows.append(bench.run(variant))
    if as_json:
        typer.echo(json.dumps({"install": [asdict(i) for i in installs], "decode": [asdict(r) for r in rows]}))
        return
    console = Console()
    _show_installs(console, installs)
    _show(console, rows)
    if layers:
        _show_layers(console, rows)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FEATURES:
            raise ConfigError(f"there is no feature {name!r} to measure", f"Use {', '.join(FEATURES)}")
    return names


def _capacity(text: str, top_k: int, experts: int) -> int:
    if not text.strip().isdecimal() or not top_k <= int(text) <= experts:
        raise ConfigError(f"--slots has {text!r}", f"Give numbers in {top_k}..{experts}, with commas")
    return int(text)


def _variants(slots: int, features: list[str]) -> Iterable[Variant]:
    """The plain way in the page cache, then with each feature; what predicts runs on packed, direct reads."""
    from titan.common.store import CacheMode
    from titan.coordinator.bench.ssd import Variant

    yield Variant(slots)
    if "packed" in features:
        yield Variant(slots, packed=True)
    if "direct" in features:
        yield Variant(slots, cache=CacheMode.DIRECT)
        yield Variant(slots, cache=CacheMode.DIRECT, packed=True)
    if "overlap" in features:
        yield Variant(slots, cache=CacheMode.DIRECT, packed=True, overlap=True)
    if "forecast" in features:
        yield Variant(slots, "forecast", cache=CacheMode.DIRECT, packed=True)
    for name in ("transition", "probe"):
        if name in features:
            yield Variant(slots, "forecast", name, 2, cache=CacheMode.DIRECT, packed=True)
    if "auto" in features:
        yield Variant(slots, "forecast", "auto", cache=CacheMode.DIRECT, packed=True)
        yield Variant(slots, "forecast", "auto", packed=True)


def _show_installs(console: Console, installs: Iterable[InstallFigures]) -> None:
    table = Table(title="Installing one expert (medians)")
    for column in ("how", "bytes", "µs", "÷ bare preadv", "GB/s"):
        table.add_column(column, justify="left" if column == "how" else "right")
    for row in installs:
        table.add_row(row.how, format_bytes(row.nbytes), f"{row.us:.0f}", f"{row.over_bare:.2f}", f"{row.gb_per_s:.2f}")
    console.print(table)


def _show(console: Console, rows: list[VariantFigures]) -> None:
    table = Table(title="Decode, a token (resident is measured beside each variant)")
    for column in (
        "C",
        "variant",
        "ms",
        "resident",
        "unavoidable",
        "÷ both",
        "hits",
        "Belady",
        "loads",
        "ahead",
        "useful",
        "late",
        "stall ms",
        "λ ms",
        "w",
    ):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for r in rows:
        name = r.name if r.identical else f"{r.name} TOKENS DIFFER"
        numbers = (r.loads, r.prefetched, r.useful, r.late, r.stall_ms)
        table.add_row(
            str(r.variant.slots),
            name,
            f"{r.token_ms:.2f}",
            f"{r.resident_ms:.2f}",
            f"{r.unavoidable_ms:.2f}",
            f"{r.over_expected:.2f}",
            f"{r.hit_rate:.3f}",
            f"{r.belady_hit_rate:.3f}",
            *(f"{n:.1f}" for n in numbers),
            f"{r.fetch_ms:.3f}",
            str(r.readers),
        )
    console.print(table)


def _show_layers(console: Console, rows: list[VariantFigures]) -> None:
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
