"""Answers of a form: JSON, or JSON of a schema, by llguidance. Knows tokens and grammars; no model and no HTTP."""

from __future__ import annotations

import json
import threading
from typing import Any

import llguidance.numpy
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.common.errors import InvalidRequest
from titan.common.log import get_logger

__all__ = ["GrammarProcessor", "Grammars", "json_grammar"]

log = get_logger("coordinator.engine")


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """The grammar of JSON values that `schema` allows.

    Raises:
        InvalidRequest: llguidance cannot enforce it; says where.
    """
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_flexible": False, "lenient": False}
        )
    except ValueError as error:
        raise InvalidRequest(f"the JSON schema cannot be enforced ({error})", "change the schema") from error


class Grammars:
    """What grammars need of a model's tokenizer; made when the first one is asked for. For every thread."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    @property
    def end_tokens(self) -> list[int]:
        return sorted(self._tokenizer.eos_token_ids)

    def check(self, grammar: str, param: str) -> None:
        """Raise InvalidRequest unless `grammar` can be followed with this tokenizer."""
        problem = LLMatcher.validate_grammar(grammar, self.tokenizer())
        if problem:
            raise InvalidRequest(
                f"{param} asks for a form that cannot be enforced ({problem[:500]})", "change it", param=param
            )

    def tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                text = self._tokenizer.backend_tokenizer.to_str()
                self._made = LLTokenizer(text, eos_token=self.end_tokens)
            return self._made


class GrammarProcessor:
    """Lets only tokens through that the grammar allows next; its end allows the end of text alone."""

    needs_tokens = True

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        tokenizer = grammars.tokenizer()
        self._ends = grammars.end_tokens
        self._matcher = LLMatcher(tokenizer, grammar)
        self._mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the form of the answer cannot be followed ({self._matcher.get_error()[:500]})",
                "change the schema",
                param="response_format",
            )

    def __call__(self, logits: mx.array) -> mx.array:
        """logits: [1, vocabulary]; what is forbidden becomes -inf."""
        if self._matcher.is_stopped() or self._matcher.is_error():
            self._mask[:] = 0
        else:
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little").astype(bool)
        vocabulary = logits.shape[-1]
        if allowed.size < vocabulary:
            allowed = np.pad(allowed, (0, vocabulary - allowed.size))
        allowed = allowed[:vocabulary]
        if not allowed.any():
            allowed[self._ends] = True
        return mx.where(mx.array(allowed[None]), logits, mx.array(-float("inf"), logits.dtype))

    def accept(self, token: int) -> None:
        if self._matcher.is_stopped() or self._matcher.is_error():
            return
        self._matcher.consume_token(token)
        if self._matcher.is_error():  # the answer ends here: only the end of text is allowed from now on
            log.warning("a grammar refused its own token", reason=self._matcher.get_error()[:500])
