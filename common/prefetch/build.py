"""Prefetchers by name. `auto` scores every predictor and uses, layer by layer, what pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titan.common.errors import ConfigError
from titan.common.experts import ExpertLayer
from titan.common.prediction import Predictor, PreviousToken, Probe, Transition
from titan.common.prefetch.prefetcher import Prefetcher, Remote, Router

__all__ = ["PREFETCH", "make_prefetcher"]

PREFETCH = ("off", "auto", "previous", "transition", "probe")
DEPTHS = (1, 2, 4)


def make_prefetcher(
    name: str,
    layers: Sequence[ExpertLayer],
    num_experts: int,
    readers: int,
    routers: Mapping[int, Router],
    *,
    forced: int | None = None,
    remote: Remote | None = None,
) -> Prefetcher | None:
    """The prefetcher called `name`; None for "off", or when every layer is whole and nothing is ever read.

    Args:
        routers: layer position -> router.
        remote: workers that read experts themselves.
        forced: always read this many experts ahead (measurements only).

    Raises:
        ConfigError: no prefetcher has this name.
    """
    if name not in PREFETCH:
        raise ConfigError(f"there is no prefetch {name!r}", f"Use one of {', '.join(PREFETCH)}")
    if name == "off" or all(layer.whole for layer in layers):
        return None
    count = len(layers)
    depths = [depth for depth in DEPTHS if depth <= count]
    predictors: list[Predictor] = []
    if name in ("auto", "probe"):
        predictors += [Probe(count, depth) for depth in depths[:2]]
    if name in ("auto", "transition"):
        predictors += [Transition(count, num_experts, depth) for depth in depths]
    if name == "previous":
        predictors += [PreviousToken(count, depth) for depth in depths]
    return Prefetcher(layers, predictors, readers, routers=routers, forced=forced, remote=remote)
