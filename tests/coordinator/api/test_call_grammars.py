"""What a grammar of calls lets through, mlx-lm's parser reads.

Run: `.venv/bin/pytest tests/coordinator/api/test_call_grammars.py`.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import llguidance.numpy
import numpy as np
import pytest
from fixtures.generation import demo_tokenizer
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.api.call_grammars import call_grammar
from titan.coordinator.generation.grammar import Grammars

FORMS = ("json_tools", "kimi_k2", "mistral", "qwen3_coder", "glm47", "longcat", "minimax_m2")
ENDINGS = (
    "\n</parameter>",
    "</parameter>",
    "</arg_value>",
    "</longcat_arg_value>",
    '"',
    "}",
    ",",
)  # of what has no end
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "town": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "scale": {"enum": ["C", "F"]},
            "wind": {"$ref": "#/$defs/flag"},
        },
        "required": ["town", "days"],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    },
}
SLEEP: dict[str, Any] = {
    "name": "sleep",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tokenizer_of(form: str, *, marks: bool) -> TokenizerWrapper:
    plain = demo_tokenizer()
    module = importlib.import_module(f"mlx_lm.tool_parsers.{form}")
    inner: Any = plain._tokenizer
    if marks:
        inner.add_tokens([mark for mark in (module.tool_call_start, module.tool_call_end, "[ARGS]") if mark])
    return TokenizerWrapper(
        inner,
        eos_token_ids=plain.eos_token_ids,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
    )


def drawn(tokenizer: TokenizerWrapper, grammar: str, seed: int) -> str:
    """A text of the grammar as chance has it; what may end, ends soon."""
    grammars = Grammars(tokenizer)
    grammars.check(grammar, "tools")
    matcher = LLMatcher(grammars.tokenizer(), grammar)
    mask = llguidance.numpy.allocate_token_bitmask(1, grammars.tokenizer().vocab_size)
    draw = random.Random(seed)
    tokens: list[int] = []
    endings = [tokenizer.encode(text, add_special_tokens=False) for text in ENDINGS]
    while not matcher.is_stopped():
        fitting = [ending for ending in endings if matcher.validate_tokens(ending) == len(ending)]
        if fitting and draw.random() < 0.4:
            chosen = draw.choice(fitting)
        else:
            llguidance.numpy.fill_next_token_bitmask(matcher, mask)
            chosen = [draw.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())]
        assert matcher.consume_tokens(chosen)
        tokens.extend(token for token in chosen if token not in tokenizer.eos_token_ids)
        assert len(tokens) < 1000, tokenizer.decode(tokens)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("marks", [False, True])
def test_the_parser_reads_what_the_grammar_allows(form: str, marks: bool) -> None:
    tokenizer = tokenizer_of(form, marks=marks)
    tools = [{"type": "function", "function": function} for function in (WEATHER, SLEEP)]
    grammar = call_grammar(tokenizer, [WEATHER, SLEEP])
    start, end, parser = tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser
    assert grammar is not None
    assert start is not None
    assert end is not None
    assert parser is not None
    names = set()
    for seed in range(12):
        text = drawn(tokenizer, grammar, seed)
        inside = text.removeprefix(start).removesuffix(end)
        assert len(inside) < len(text)
        found = parser(inside, tools)
        (call,) = found if isinstance(found, list) else [found]
        names.add(call["name"])
        if call["name"] == "sleep":
            assert call["arguments"] == {}
            continue
        arguments = call["arguments"]
        assert set(arguments) - {"scale", "wind"} == {"town", "days"}
        assert isinstance(arguments["town"], str | None)
        assert 1 <= arguments["days"] <= 9
        assert arguments.get("scale") in (None, "C", "F")
        assert arguments.get("wind") in (None, True, False, "true", "false")  # some parsers follow no reference
    assert names == {"weather", "sleep"}


def test_a_form_without_a_grammar_has_none() -> None:
    assert call_grammar(tokenizer_of("pythonic", marks=False), [WEATHER]) is None
    assert call_grammar(demo_tokenizer(), [WEATHER]) is None
