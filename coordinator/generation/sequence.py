"""One answer in the making: from tokens to text that is final. Knows no model and no threads.

State of one request that any decode loop can feed, one token at a time, alone or in a batch.
"""

from __future__ import annotations

from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.generation.events import TextDelta, TokenLogprob
from titan.coordinator.generation.request import GenerationRequest
from titan.coordinator.generation.step import Step
from titan.coordinator.generation.stops import StopFilter

__all__ = ["Sequence"]


class Sequence:
    """Detokenises an answer, looks for its end, and keeps tokens with the text they made.

    `reason` is None until the answer has ended by itself: "stop" at the end-of-text token or a stop string, "length"
    at `max_tokens`.
    """

    def __init__(self, tokenizer: TokenizerWrapper, request: GenerationRequest) -> None:
        self._request = request
        self._end_tokens = frozenset() if request.ignore_end else frozenset(tokenizer.eos_token_ids)
        self._detokenizer = tokenizer.detokenizer
        self._filter = StopFilter(request.stop)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.generated_tokens = 0
        self.reason: Literal["stop", "length"] | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._filter.found

    def push(self, step: Step) -> TextDelta | None:
        """Take the next token; return what became final, or None when nothing did."""
        self.generated_tokens += 1
        if step.token in self._end_tokens:
            self.reason = "stop"
            return self._finish()
        self._tokens.append(step.token)
        if step.logprob is not None:
            self._logprobs.append(step.logprob)
        self._detokenizer.add_token(step.token)
        text = self._filter.push(self._detokenizer.last_segment)
        if self._filter.stopped:
            self.reason = "stop"
        elif self.generated_tokens == self._request.max_tokens:
            self.reason = "length"
            return self._finish(text)
        elif not text:
            return None
        return self._take(text)

    def finish(self) -> TextDelta | None:
        """The answer is cut off here: give out what was held back."""
        return None if self.reason is not None else self._finish()

    def _finish(self, text: str = "") -> TextDelta | None:
        self._detokenizer.finalize()
        text += self._filter.push(self._detokenizer.last_segment)
        if self._filter.stopped:
            self.reason = "stop"
        else:
            text += self._filter.flush()
        return self._take(text)

    def _take(self, text: str) -> TextDelta | None:
        if not text and not self._tokens:
            return None
        delta = TextDelta(text, tuple(self._tokens), tuple(self._logprobs))
        self._tokens.clear()
        self._logprobs.clear()
        return delta
