"""From tokens to text. Run: `.venv/bin/pytest tests/coordinator/generation/test_sequence.py`."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.generation.events import TextDelta, TokenLogprob
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.sequence import Sequence
from titan.coordinator.generation.step import Step


def feed(tokenizer: TokenizerWrapper, tokens: list[int], **request: Any) -> tuple[list[TextDelta], Sequence]:
    values: dict[str, Any] = {"prompt": (1,), "max_tokens": 1000} | request
    sequence = Sequence(tokenizer, GenerationRequest(**values))
    deltas = []
    for token in tokens:
        deltas.append(sequence.push(Step(token, TokenLogprob(token, -1.0))))
        if sequence.reason is not None:
            break
    deltas.append(sequence.finish())
    return [d for d in deltas if d is not None], sequence


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(d.text for d in deltas)


def test_no_piece_splits_a_character(tokenizer: TokenizerWrapper) -> None:
    text = "Wherefore \u2014 \u5c71\u4e0b \U0001f3ad!"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text), "the test needs characters of several tokens"
    deltas, _ = feed(tokenizer, tokens)
    assert text_of(deltas) == text
    assert all("\ufffd" not in d.text for d in deltas)
    assert [t for d in deltas for t in d.tokens] == tokens
    assert [entry.token for d in deltas for entry in d.logprobs] == tokens


def test_half_a_character_at_the_end_is_given_out_as_a_replacement(tokenizer: TokenizerWrapper) -> None:
    tokens = tokenizer.encode("x\u5c71")[:-1]
    deltas, sequence = feed(tokenizer, tokens, max_tokens=len(tokens))
    assert sequence.reason == "length"
    assert text_of(deltas) == "x\ufffd"


def test_end_of_text_ends_with_stop_and_is_not_text(tokenizer: TokenizerWrapper) -> None:
    end = min(tokenizer.eos_token_ids)
    deltas, sequence = feed(tokenizer, [*tokenizer.encode("Exit."), end])
    assert (text_of(deltas), sequence.reason) == ("Exit.", "stop")
    assert end not in [t for d in deltas for t in d.tokens]
    assert sequence.generated_tokens == len(tokenizer.encode("Exit.")) + 1


@pytest.mark.parametrize("stop", ["question", ": that", "tion.\n", "not to be:"])
def test_a_stop_string_across_token_borders(tokenizer: TokenizerWrapper, stop: str) -> None:
    text = "To be, or not to be: that is the question.\nWhether"
    deltas, sequence = feed(tokenizer, tokenizer.encode(text), stop=("never", stop))
    assert (text_of(deltas), sequence.reason) == (text.split(stop)[0], "stop")


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_out(tokenizer: TokenizerWrapper) -> None:
    tokens = tokenizer.encode("to be, or not")
    end = min(tokenizer.eos_token_ids)
    deltas, sequence = feed(tokenizer, [*tokens, end], stop=("or nothing",))
    assert (text_of(deltas), sequence.reason) == ("to be, or not", "stop")
    assert deltas[-1].text.endswith("or not"), "was given out before it was certain"


def test_a_stop_string_completed_by_the_last_token_is_a_stop(tokenizer: TokenizerWrapper) -> None:
    tokens = tokenizer.encode("to be")
    deltas, sequence = feed(tokenizer, tokens, stop=("be",), max_tokens=len(tokens))
    assert (text_of(deltas), sequence.reason) == ("to ", "stop")


def test_a_sequence_that_is_cut_off_gives_out_what_it_held(tokenizer: TokenizerWrapper) -> None:
    deltas, sequence = feed(tokenizer, tokenizer.encode("to be, or not"), stop=("or nothing",))
    assert text_of(deltas) == "to be, or not"
    assert sequence.reason is None
