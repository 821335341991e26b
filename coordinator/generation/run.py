"""Runs one request from prompt to last token, alone on the model. Knows no queue and starts no thread.

Batching replaces this file: `decode` becomes a loop over many sequences, `Sequence` and `Job` stay as they are.
"""

from __future__ import annotations

import contextlib
import time

from titan.coordinator.generation.decode import decode
from titan.coordinator.generation.events import Finished, Timings, Usage
from titan.coordinator.generation.handle import Job
from titan.coordinator.generation.model import LoadedModel
from titan.coordinator.generation.sampling import make_sampler
from titan.coordinator.generation.sequence import Sequence

__all__ = ["run_request"]


def run_request(loaded: LoadedModel, job: Job, started_s: float) -> Finished:
    """Run one request to its end on the calling thread, delivering text as it becomes final."""
    request = job.request
    sequence = Sequence(loaded.tokenizer, request)

    def prefilled(tokens: int) -> None:
        job.prefilled_tokens = tokens

    steps = decode(
        loaded.model,
        request.prompt,
        loaded.make_cache(),
        sampler=make_sampler(request.sampling),
        max_tokens=request.max_tokens,
        top_logprobs=request.top_logprobs,
        prefill_step_tokens=loaded.prefill_step_tokens,
        lookahead=loaded.lookahead,
        cancelled=lambda: job.cancelled,
        on_prefill=prefilled,
    )
    first_token_s = None
    with contextlib.closing(steps):
        for step in steps:
            if first_token_s is None:
                first_token_s = time.monotonic()
                job.prefilled_tokens = len(request.prompt)
            delta = sequence.push(step)
            job.generated_tokens = sequence.generated_tokens
            if delta is not None:
                job.deliver(delta)
            if sequence.reason is not None:
                break
    if sequence.reason is None and (rest := sequence.finish()) is not None:
        job.deliver(rest)
    ended_s = time.monotonic()
    first_token_s = ended_s if first_token_s is None else first_token_s
    return Finished(
        sequence.reason or "cancelled",
        Usage(len(request.prompt), sequence.generated_tokens),
        Timings(started_s - job.submitted_s, first_token_s - started_s, ended_s - first_token_s),
    )
