"""`titan bench ssd`: the SSD tier's figures as tables or JSON. Measures nothing itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from titan.common.errors import ConfigError
from titan.common.units import format_seconds, parse_duration
from titan.deploy import DEMO_MODEL

if TYPE_CHECKING:
    from titan.coordinator.bench.ssd import SsdBench
    from titan.coordinator.bench.ssd_variant import Variant, VariantFigures

FEATURES: dict[str, dict] = {
    "unpacked": {"packed": False},
    "page-cache": {"cache": "page-cache"},
    "unpacked-page-cache": {"packed": False, "cache": "page-cache"},
    "overlap": {"overlap": True},
    "lfu": {"policy": "lfu"},
    "forecast": {"policy": "forecast"},
    "previous": {"prefetch": "previous", "forced": 2},
    "transition": {"prefetch": "transition", "forced": 2},
    "probe": {"prefetch": "probe", "forced": 2},
    "auto": {"prefetch": "auto"},
    "forecast-auto": {"policy": "forecast", "prefetch": "auto"},
}
MAX_DELAY_S = 1.0
WIDTH = 110  # columns that the tables need


def register_bench(app: typer.Typer) -> None:
    """Mount the command under `titan bench`."""
    app.command("ssd")(ssd_command)


def ssd_command(
    model: Annotated[Path, typer.Option(help="Checkpoint to measure; the demo model by default.")] = DEMO_MODEL,
    pack: Annotated[Path | None, typer.Option(help="Its pack; by default one is made and removed again.")] = None,
    slots: Annotated[str, typer.Option(help="Slots a layer (C), several with commas.")] = "8,16",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens a variant at most.")] = 120,
    warm: Annotated[int, typer.Option(min=0, max=100_000, help="Tokens before them that do not count.")] = 40,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="Longest time for one table of one C.")] = 60,
    features: Annotated[
        str, typer.Option(help="Compare these with LRU, packed, direct: " + ", ".join(FEATURES) + "; empty for none.")
    ] = ",".join(FEATURES),
    read_delay: Annotated[
        str, typer.Option(help="Compare them once more with every expert's read this much longer: a slower disk.")
    ] = "",
    reuse: Annotated[
        str,
        typer.Option(help="Also: experts drawn at random, these shares of them the previous token's, e.g. 0.25,0.5"),
    ] = "",
    install: Annotated[bool, typer.Option("--install/--no-install", help="Measure single installs too.")] = True,
    layers: Annotated[bool, typer.Option("--layers", help="Show every layer of every variant.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Installing experts and decoding with too few slots, each feature on and off; the tokens are compared.

    Takes at most SECONDS for each C with features, twice that with a delay, and SECONDS for each share of reuse; plus
    loading, packing and installs.
    """
    from titan.common.pack import write_pack  # loads MLX
    from titan.common.registry import open_checkpoint
    from titan.coordinator.bench.install import bench_install
    from titan.coordinator.bench.ssd import SsdBench

    wanted = _names(features)
    shares = _shares(reuse)
    delay_s = _delay(read_delay)
    checkpoint = open_checkpoint(model)
    capacities = [_capacity(text, checkpoint.shape.top_k, checkpoint.shape.num_experts) for text in slots.split(",")]
    tables: dict[str, list[VariantFigures]] = {}
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder, err.status("packing") as status:
        packed = open_checkpoint(pack) if pack is not None else write_pack(checkpoint, Path(folder) / "pack")
        status.update("measuring installs")
        installs = bench_install(checkpoint, packed) if install else []
        status.update("loading")
        bench = SsdBench(checkpoint, packed, tokens, warm, seconds)
        if wanted:
            for delay in [0.0, delay_s] if delay_s else [0.0]:
                title = f"reads {format_seconds(delay)} longer (a slower disk)" if delay else "the disk as it is"
                tables[title] = [
                    row for c in capacities for row in _compare(bench, c, wanted, delay, title, status.update)
                ]
        for share in shares:
            title = f"experts drawn with reuse {share:g}"
            tables[title] = _decode(bench, [_variant(c) for c in capacities], share, title, status.update)
    if as_json:
        found = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
        typer.echo(json.dumps({"install": [asdict(i) for i in installs], "decode": found}))
        return
    _show(tables, installs, layers)


def _show(tables: dict[str, list[VariantFigures]], installs: list, layers: bool) -> None:
    from titan.coordinator.bench.ssd_tables import show_installs, show_layers, show_variants

    console = Console()
    console.width = max(console.width, WIDTH)
    if installs:
        show_installs(console, installs)
    for title, rows in tables.items():
        show_variants(console, title, rows)
        if layers:
            show_layers(console, rows)


def _compare(
    bench: SsdBench, slots: int, names: list[str], delay_s: float, title: str, update: Callable[[str], None]
) -> list[VariantFigures]:
    variants = [_variant(slots, read_delay_s=delay_s)]
    variants += [_variant(slots, read_delay_s=delay_s, **FEATURES[name]) for name in names]
    return _decode(bench, variants, None, f"{title}, C = {slots}", update)


def _decode(
    bench: SsdBench, variants: list[Variant], reuse: float | None, title: str, update: Callable[[str], None]
) -> list[VariantFigures]:
    def on_token(done: int, most: int) -> None:
        update(f"{title}: token {done} of at most {most}, {len(variants)} variants in turns")

    return bench.run(variants, reuse, on_token)


def _variant(slots: int, **different: object) -> Variant:
    from titan.common.store import CacheMode
    from titan.coordinator.bench.ssd_variant import Variant

    if "cache" in different:
        different["cache"] = CacheMode(different["cache"])
    return Variant(slots, **different)  # type: ignore[arg-type]  # names and values as in FEATURES


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


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise ConfigError(f"--reuse is {text!r}", "Give numbers in 0..1, with commas")
    return shares


def _delay(text: str) -> float:
    delay_s = parse_duration(text, allow_zero=True) if text else 0.0
    if delay_s > MAX_DELAY_S:
        raise ConfigError(f"--read-delay is {text!r}", f"Give at most {format_seconds(MAX_DELAY_S)}, e.g. 2ms")
    return delay_s
