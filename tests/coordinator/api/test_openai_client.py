"""The official client against the real server: on one machine, and over workers that die and come back meanwhile.

Run: `.venv/bin/pytest tests/coordinator/api/test_openai_client.py`.
"""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from fixtures.api_server import RunningApi
from fixtures.generation import CONTEXT_TOKENS, PROMPTS, demo_model
from mlx_lm.generate import stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

CHAT: list[Any] = [
    {"role": "system", "content": "Thou art a player."},
    {"role": "user", "content": [{"type": "text", "text": "Who art "}, {"type": "text", "text": "thou?"}]},
]


class Reference:
    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._model = demo_model()

    def __call__(self, prompt: list[int], max_tokens: int) -> tuple[str, str | None]:
        """Text and finish reason of mlx-lm's greedy answer."""
        responses = list(
            stream_generate(self._model, self._tokenizer, prompt, max_tokens=max_tokens, prefill_step_size=16)
        )
        return "".join(r.text for r in responses), responses[-1].finish_reason


@pytest.fixture(params=["session_api", "losing_api"], ids=["one machine", "workers die"])
def api(request: pytest.FixtureRequest) -> RunningApi:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(tokenizer: TokenizerWrapper) -> Reference:
    return Reference(tokenizer)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_equal_mlx_lm(
    api: RunningApi, tokenizer: TokenizerWrapper, reference: Reference, prompt: str
) -> None:
    tokens = tokenizer.encode(prompt)
    answer = api.openai.completions.create(model="demo", prompt=prompt, max_tokens=30, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == reference(tokens, 30)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_equals_mlx_lm_whole_and_streamed(
    api: RunningApi, tokenizer: TokenizerWrapper, reference: Reference
) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Thou art a player."}, {"role": "user", "content": "Who art thou?"}],
        add_generation_prompt=True,
    )
    text, reason = reference(prompt, 40)
    whole = api.openai.chat.completions.create(model="demo", messages=CHAT, max_tokens=40, temperature=0)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, reason)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        api.openai.chat.completions.create(
            model="default",
            messages=CHAT,
            max_completion_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_streamed_completions_of_several_prompts_are_choices_with_their_numbers(
    api: RunningApi, tokenizer: TokenizerWrapper, reference: Reference
) -> None:
    prompts = [tokenizer.encode(p) for p in PROMPTS[:3]]
    texts = [reference(p, 8)[0] for p in prompts]
    whole = api.openai.completions.create(model="demo", prompt=prompts, max_tokens=8, temperature=0)
    assert [(c.index, c.text) for c in whole.choices] == list(enumerate(texts))
    streamed = ["", "", ""]
    order, usage = [], None
    for chunk in api.openai.completions.create(
        model="demo", prompt=prompts, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            order.append(choice.index)
        usage = chunk.usage
    assert streamed == texts
    assert set(order) == {0, 1, 2}
    assert usage == whole.usage


def test_stop_strings_end_the_answer(api: RunningApi, tokenizer: TokenizerWrapper, reference: Reference) -> None:
    text, _ = reference(tokenizer.encode(PROMPTS[0]), 30)
    stop = text[9:13]
    before = text[: text.index(stop)]
    answer = api.openai.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=30, temperature=0, stop=["\u5c71", stop]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 30
    streamed = "".join(
        c.choices[0].text
        for c in api.openai.completions.create(
            model="demo", prompt=PROMPTS[0], max_tokens=30, temperature=0, stop=stop, stream=True
        )
    )
    assert streamed == before


def test_a_seed_is_reproducible(api: RunningApi) -> None:
    def ask(seed: int) -> str | None:
        answer = api.openai.chat.completions.create(
            model="demo", messages=CHAT, max_tokens=20, temperature=1.4, top_p=0.95, seed=seed
        )
        return answer.choices[0].message.content

    first, other, again = ask(1), ask(2), ask(1)
    assert first == again
    assert first != other


def test_chat_logprobs(api: RunningApi) -> None:
    answer = api.openai.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content).lstrip() == answer.choices[0].message.content
    for entry in logprobs.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    streamed = [
        entry
        for chunk in api.openai.chat.completions.create(
            model="demo", messages=CHAT, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3, stream=True
        )
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == logprobs.content


def test_completion_logprobs(api: RunningApi) -> None:
    answer = api.openai.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=8, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(8)]
    assert logprobs.top_logprobs is not None
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True):
        assert max(top.values()) == top[token] == logprob
        assert len(top) == 2
    plain = api.openai.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=8, temperature=0)
    assert plain.choices[0].logprobs is None


def test_an_answer_fills_the_context_unless_told_otherwise(api: RunningApi, tokenizer: TokenizerWrapper) -> None:
    prompt = tokenizer.encode(PROMPTS[3])
    prompt = (prompt * 20)[: CONTEXT_TOKENS - 5]
    answer = api.openai.completions.create(model="demo", prompt=prompt, temperature=0)
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_models(api: RunningApi) -> None:
    assert [model.id for model in api.openai.models.list()] == ["demo"]
    assert api.openai.models.retrieve("demo").owned_by == "titan"
    with pytest.raises(openai.NotFoundError):
        api.openai.models.retrieve("other/model")


def test_the_clients_own_errors_are_raised(api: RunningApi) -> None:
    with pytest.raises(openai.NotFoundError, match="'demo'") as unknown:
        api.openai.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="1024 tokens") as long:
        api.openai.chat.completions.create(model="demo", messages=CHAT, max_tokens=CONTEXT_TOKENS)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as hot:
        api.openai.chat.completions.create(model="demo", messages=CHAT, temperature=2.5)
    assert hot.value.param == "temperature"


def test_token_ids_come_when_asked(api: RunningApi, tokenizer: TokenizerWrapper) -> None:
    extra = {"return_token_ids": True}
    answer = api.openai.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=9, temperature=0, extra_body=extra
    )
    ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert len(ids) == 9
    assert tokenizer.decode(ids) == answer.choices[0].text
