"""Bytes of single tokens. Run: `.venv/bin/pytest tests/coordinator/generation/test_vocabulary.py`."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from titan.coordinator.generation.vocabulary import Vocabulary

TEXT = "Wherefore art thou\n\tRomeo \u2014 \u5c71 \U0001f3ad?"


def test_byte_level_tokens_join_to_the_text(tokenizer: TokenizerWrapper) -> None:
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer.encode(TEXT)
    assert b"".join(vocabulary.token_bytes(t) for t in tokens) == TEXT.encode()
    assert any("\ufffd" in vocabulary.token_text(t) for t in tokens)


def test_special_tokens_are_their_own_text(tokenizer: TokenizerWrapper) -> None:
    vocabulary = Vocabulary(tokenizer)
    (token,) = tokenizer.encode("<|user|>")
    assert vocabulary.token_bytes(token) == b"<|user|>"


def test_every_id_below_the_size_has_bytes_and_none_above(tokenizer: TokenizerWrapper) -> None:
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.size == 2048
    assert all(vocabulary.token_bytes(t) for t in range(vocabulary.size))
    assert vocabulary.token_bytes(vocabulary.size) == b""


@pytest.mark.parametrize("detokenizer", [SPMStreamingDetokenizer, NaiveStreamingDetokenizer])
def test_sentencepiece_tokens(detokenizer: type) -> None:
    words = ["<unk>", "a", ",", "b", "\u2581", "\u2581Hello", "<0xE5>", "<0xB1>", "<0xB1>x", "world"]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]  # type: ignore[list-item]
    )
    wrapper = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=core), detokenizer)
    vocabulary = Vocabulary(wrapper)
    assert vocabulary.token_bytes(words.index("\u2581Hello")) == b" Hello"
    assert vocabulary.token_bytes(words.index("world")) == b"world"
    if detokenizer is SPMStreamingDetokenizer:
        assert vocabulary.token_bytes(words.index("<0xE5>")) == b"\xe5"
