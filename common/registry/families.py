"""The verified table: which model families open. A new family is a file in `known` and its rows in the tests.

Knows config values, not files.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from titan.common.errors import UnsupportedFamily
from titan.common.registry.family import Config, Family
from titan.common.registry.known.deepseek_v3 import DEEPSEEK_V3
from titan.common.registry.known.glm4_moe import GLM4_MOE
from titan.common.registry.known.gpt_oss import GPT_OSS
from titan.common.registry.known.minimax import MINIMAX
from titan.common.registry.known.mixtral import MIXTRAL
from titan.common.registry.known.olmoe import OLMOE
from titan.common.registry.known.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "family_of"]

_KNOWN = (OLMOE, QWEN3_MOE, MIXTRAL, GLM4_MOE, DEEPSEEK_V3, MINIMAX, GPT_OSS)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _KNOWN}
_BY_NAME: Mapping[str, Family] = FAMILIES | {alias: family for family in _KNOWN for alias in family.aliases}


def family_of(config: Config) -> Family:
    """The family of a config.

    Raises:
        UnsupportedFamily: not in the table, or the checkpoint brings its own code.
    """
    model_type = config.get("model_type")
    opened = ", ".join(sorted(_BY_NAME))
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedFamily("config.json names no model_type", f"Titan opens {opened}")
    if config.get("model_file") is not None:
        raise UnsupportedFamily(
            "config.json names a model_file, which is code of its own", f"Titan runs mlx-lm's classes only: {opened}"
        )
    family = _BY_NAME.get(model_type)
    if family is not None:
        return family
    raise UnsupportedFamily(
        f"the model family {model_type[:60]!r} is not in Titan's verified table "
        f"({'mlx-lm itself runs it' if _mlx_lm_knows(model_type) else 'mlx-lm does not know it either'})",
        f"Titan opens {opened}; another one needs an entry in common/registry/known "
        "(layers, names, routing) verified against its class in mlx-lm",
    )


def _mlx_lm_knows(module: str) -> bool:
    spec = find_spec("mlx_lm")  # finds the package without importing it
    locations = spec.submodule_search_locations or [] if spec is not None else []
    return module.isidentifier() and any((Path(place) / "models" / f"{module}.py").is_file() for place in locations)
