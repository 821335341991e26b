"""`titan registry PATH [--json]`: show what a checkpoint holds, or what is refused and why.

Turns a Checkpoint into a table or JSON; decides nothing about it.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from titan.common.errors import TitanError
from titan.common.registry.checkpoint import Checkpoint, open_checkpoint
from titan.common.registry.shape import LayerSpec, MatrixSpec
from titan.common.units import format_bytes

__all__ = ["describe", "register", "registry"]


def register(app: typer.Typer) -> None:
    """Mount `registry` on the operator's tool."""
    app.command()(registry)


def registry(
    path: Annotated[Path, typer.Argument(help="Model directory, or org/name from the local Hugging Face cache.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")] = False,
) -> None:
    """Show what a checkpoint holds: layers, experts, bytes, quantization, routing, fingerprint."""
    try:
        checkpoint = open_checkpoint(path)
    except TitanError as error:
        if not json:
            raise
        value = {"code": error.code, "message": str(error), "cause": error.cause, "mend": error.mend}
        typer.echo(json_module.dumps({"error": value}))
        raise typer.Exit(error.exit_status) from error
    if json:
        typer.echo(json_module.dumps(describe(checkpoint), indent=2))
    else:
        _show(checkpoint, Console(highlight=False))


def describe(checkpoint: Checkpoint) -> dict[str, object]:
    """What `--json` prints: bytes as numbers, layers grouped where they are alike."""
    shape = checkpoint.shape
    return {
        "path": str(checkpoint.path),
        "family": shape.family,
        "fingerprint": shape.fingerprint,
        "hidden_size": shape.hidden_size,
        "layers": {
            "total": shape.num_layers,
            "moe": [layer.index for layer in shape.layers],
            "dense": list(checkpoint.dense_layers),
        },
        "experts": {
            "per_layer": shape.num_experts,
            "top_k": shape.top_k,
            "bytes_total": checkpoint.expert_bytes_total,
            "kinds": [
                {
                    "layers": [layer.index for layer in layers],
                    "layout": "stacked" if checkpoint.is_stacked(layers[0].index) else "per-expert",
                    "bytes_each": layers[0].expert_bytes,
                    "reads_each": sum(len(m.components) for m in layers[0].matrices),
                    "matrices": [_matrix(m) for m in layers[0].matrices],
                }
                for layers in _alike(checkpoint)
            ],
        },
        "routing": {
            "scoring": checkpoint.routing.scoring,
            "top_k": checkpoint.routing.top_k,
            "normalise": checkpoint.routing.normalise,
            "shared_experts": checkpoint.routing.shared_experts,
        },
        "non_expert_bytes": checkpoint.non_expert_bytes,
        "config_defaults": dict(checkpoint.config_defaults),
        "shards": [{"name": shard.path.name, "bytes": shard.nbytes} for shard in checkpoint.shards],
    }


def _matrix(matrix: MatrixSpec) -> dict[str, object]:
    return {
        "name": matrix.name,
        "in_features": matrix.in_features,
        "out_features": matrix.out_features,
        "bits": matrix.bits,
        "group_size": matrix.group_size,
        "mode": matrix.mode,
        "components": {c.name: {"dtype": c.dtype, "shape": list(c.shape)} for c in matrix.components},
    }


def _alike(checkpoint: Checkpoint) -> list[list[LayerSpec]]:
    """MoE layers grouped by equal matrices and layout, in the order of their first layer."""
    groups: dict[object, list[LayerSpec]] = {}
    for layer in checkpoint.shape.layers:
        groups.setdefault((layer.matrices, checkpoint.is_stacked(layer.index)), []).append(layer)
    return list(groups.values())


def _show(checkpoint: Checkpoint, console: Console) -> None:
    shape, routing = checkpoint.shape, checkpoint.routing
    rows = [
        ("path", str(checkpoint.path)),
        ("family", shape.family),
        ("fingerprint", shape.fingerprint),
        ("layers", f"{shape.num_layers}: {len(shape.layers)} MoE" + _dense(checkpoint.dense_layers)),
        ("experts", f"{shape.num_experts} a layer, top-{shape.top_k}, {format_bytes(checkpoint.expert_bytes_total)}"),
    ]
    for layers in _alike(checkpoint):
        rows.append(("one expert", _expert(layers, checkpoint)))
        rows.extend(("", f"{', '.join(names)}: {kind}") for kind, names in _kinds(layers[0]).items())
    rows += [
        ("routing", f"{routing.scoring} over all experts, then top-{routing.top_k}, {_normalised(routing.normalise)}"),
        ("the rest", f"{format_bytes(checkpoint.non_expert_bytes)} in {len(checkpoint.non_expert_tensors)} tensors"),
        ("shards", f"{len(checkpoint.shards)}, {format_bytes(sum(s.nbytes for s in checkpoint.shards))}"),
    ]
    if checkpoint.config_defaults:
        rows.append(("defaults", ", ".join(f"{k}: {v}" for k, v in checkpoint.config_defaults.items())))
    for name, value in rows:
        # soft_wrap: a pipe must get whole lines, the fingerprint above all.
        console.print(Text.assemble((f"{name:<13}", "bold"), value), soft_wrap=True)


def _dense(layers: tuple[int, ...]) -> str:
    return f", {len(layers)} dense ({ranges(layers)})" if layers else ", none dense"


def _normalised(normalise: bool) -> str:
    return "scores renormalised" if normalise else "scores not renormalised"


def _expert(layers: list[LayerSpec], checkpoint: Checkpoint) -> str:
    first = layers[0]
    where = "" if len(layers) == len(checkpoint.shape.layers) else f" (layers {ranges(la.index for la in layers)})"
    size = f"{first.matrices[0].in_features} x {first.matrices[0].out_features}"
    layout = "stacked" if checkpoint.is_stacked(first.index) else "one tensor an expert"
    return f"{format_bytes(first.expert_bytes)}{where}, {size}, {layout}"


def _kinds(layer: LayerSpec) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for matrix in layer.matrices:
        kinds.setdefault(_quantization(matrix), []).append(matrix.name)
    return kinds


def _quantization(matrix: MatrixSpec) -> str:
    if matrix.mode is None:
        return f"unquantized {matrix.components[0].dtype}"
    scales = next(c.dtype for c in matrix.components if c.name == "scales")
    return f"{matrix.bits}-bit {matrix.mode}, group {matrix.group_size}, {scales} scales"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as people write them: [0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)
