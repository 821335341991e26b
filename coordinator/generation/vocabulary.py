"""The bytes of single tokens, for log-probabilities and for checking token ids.

Text of an answer comes from mlx-lm's streaming detokenizer; this knows one token at a time, and no model.
"""

from __future__ import annotations

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

__all__ = ["Vocabulary"]

_SPM_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), inverted.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """Token ids of a tokenizer: how many there are and what bytes each one stands for."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._special = {int(i) for i in tokenizer.added_tokens_decoder}
        detokenizer = tokenizer.detokenizer
        self._byte_level = _byte_alphabet() if isinstance(detokenizer, BPEStreamingDetokenizer) else None
        self._sentencepiece = isinstance(detokenizer, SPMStreamingDetokenizer)
        self.size = len(tokenizer)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to a text; they need not be whole UTF-8 characters."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._special:
            return piece.encode()
        if self._byte_level is not None and all(c in self._byte_level for c in piece):
            return bytes(self._byte_level[c] for c in piece)
        if self._sentencepiece:
            if len(piece) == 6 and piece.startswith("<0x"):
                return bytes.fromhex(piece[3:5])
            return piece.replace(_SPM_SPACE, " ").encode()
        return self._tokenizer.decode([token]).encode()

    def token_text(self, token: int) -> str:
        """`token` as text, with U+FFFD where its bytes are no whole characters."""
        return self.token_bytes(token).decode("utf-8", "replace")
