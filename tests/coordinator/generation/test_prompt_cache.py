"""Known beginnings of prompts. Run: `.venv/bin/pytest tests/coordinator/generation/test_prompt_cache.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fixtures.generation import DEADLINE_S, PROMPTS, ProbedEngine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from titan.coordinator.generation import Finished, GenerationRequest, Sampling, TextDelta
from titan.coordinator.generation.prompt_cache import BLOCK_TOKENS, DiskBlocks, PromptCache, setting_name
from titan.coordinator.generation.prompt_cache.blocks import block_names
from titan.coordinator.generation.prompt_cache.file import FileBlock, decode_block, encode_block

SETTING = setting_name("a model", "float32")
PLENTY = 64 << 20
BLOCK_BYTES = 8 * 2 * 128 * 4 * BLOCK_TOKENS  # the demo model's: 8 layers of keys and values of 128 float32


def ids(tokenizer: TokenizerWrapper, blocks: int) -> list[int]:
    tokens = tokenizer.encode(PROMPTS[3] * 4)
    return (tokens * 4)[: blocks * BLOCK_TOKENS + 9]


def engine(**values: Callable[[], PromptCache]) -> ProbedEngine:
    return ProbedEngine(prefill_step_tokens=48, **values)


async def ask(probed: ProbedEngine, prompt: list[int], max_tokens: int = 12) -> tuple[list[object], Finished]:
    """Tokens and log-probabilities, and the end."""
    handle = probed.engine.submit(GenerationRequest(tuple(prompt), max_tokens, Sampling(temperature=0), top_logprobs=2))
    tokens: list[object] = []
    logprobs: list[object] = []
    async with asyncio.timeout(DEADLINE_S):
        async for event in handle:
            if isinstance(event, TextDelta):
                tokens.extend(event.tokens)
                logprobs.extend(event.logprobs)
            else:
                return tokens + logprobs, event
    raise AssertionError("no end")


async def test_a_known_beginning_is_not_run_again_and_changes_no_bit(tokenizer: TokenizerWrapper) -> None:
    first, other = ids(tokenizer, 4), [*ids(tokenizer, 3)[:-9], 5, 6, 7, 8]
    with ProbedEngine(prefill_step_tokens=48) as plain:
        expected = [await ask(plain, prompt) for prompt in (first, other)]
    with engine(prompt_cache=lambda: PromptCache(SETTING, PLENTY)) as probed:
        await ask(probed, first)
        probed.probe.reset()
        for prompt, (tokens, _), cached in zip((first, other), expected, (4, 3), strict=True):
            found, finished = await ask(probed, prompt)
            assert found == tokens
            assert finished.usage.cached_tokens == cached * BLOCK_TOKENS
            assert finished.usage.prompt_tokens == len(prompt)
        assert sum(n for n in probed.probe.call_tokens if n > 1) < 2 * BLOCK_TOKENS


async def test_a_conversation_continues_from_its_own_answer(tokenizer: TokenizerWrapper) -> None:
    prompt = ids(tokenizer, 1)
    with engine(prompt_cache=lambda: PromptCache(SETTING, PLENTY)) as probed, ProbedEngine() as plain:
        answer, _ = await ask(probed, prompt, 150)
        tokens = [t for t in answer if isinstance(t, int)]
        following = [*prompt, *tokens, 9, 10, 11]
        found, finished = await ask(probed, following)
        assert finished.usage.cached_tokens >= (len(prompt) + len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert found == (await ask(plain, following))[0]


async def test_the_whole_prompt_is_never_skipped(tokenizer: TokenizerWrapper) -> None:
    prompt = ids(tokenizer, 2)[: 2 * BLOCK_TOKENS]
    with engine(prompt_cache=lambda: PromptCache(SETTING, PLENTY)) as probed:
        expected, _ = await ask(probed, [*prompt, 3])
        await ask(probed, prompt)
        found, finished = await ask(probed, prompt)
        assert finished.usage.cached_tokens == BLOCK_TOKENS
        assert len(found) == len(expected)


async def test_memory_is_bounded_and_beginnings_outlive_ends(tokenizer: TokenizerWrapper) -> None:
    caches: list[PromptCache] = []

    def make() -> PromptCache:
        caches.append(PromptCache(SETTING, 3 * BLOCK_BYTES))
        return caches[0]

    with engine(prompt_cache=make) as probed:
        long = ids(tokenizer, 6)
        await ask(probed, long)
        assert caches[0].nbytes <= 3 * BLOCK_BYTES
        assert (await ask(probed, long))[1].usage.cached_tokens == 3 * BLOCK_TOKENS
        await ask(probed, [7] * (2 * BLOCK_TOKENS + 1))
        assert caches[0].nbytes <= 3 * BLOCK_BYTES
        assert (await ask(probed, long))[1].usage.cached_tokens == BLOCK_TOKENS
        assert caches[0].counts.evicted_blocks >= 2


def on_disk(folder: Path, setting: bytes = SETTING, max_bytes: int = PLENTY) -> Callable[[], PromptCache]:
    return lambda: PromptCache(setting, PLENTY, DiskBlocks(folder, max_bytes))


async def test_it_survives_a_restart(tokenizer: TokenizerWrapper, tmp_path: Path) -> None:
    prompt = ids(tokenizer, 5)
    with engine(prompt_cache=on_disk(tmp_path)) as probed:
        expected, _ = await ask(probed, prompt)
    files = list(tmp_path.iterdir())
    assert len(files) == 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    with engine(prompt_cache=on_disk(tmp_path)) as probed:
        found, finished = await ask(probed, prompt)
        assert found == expected
        assert finished.usage.cached_tokens == 5 * BLOCK_TOKENS
        assert sum(probed.probe.call_tokens) < BLOCK_TOKENS
    with engine(prompt_cache=on_disk(tmp_path, setting_name("another model", "float32"))) as probed:
        assert (await ask(probed, prompt))[1].usage.cached_tokens == 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "swap"])
async def test_a_damaged_block_is_dropped_and_never_used(
    tokenizer: TokenizerWrapper, tmp_path: Path, damage: str
) -> None:
    prompt = ids(tokenizer, 4)
    with engine(prompt_cache=on_disk(tmp_path)) as probed:
        expected, _ = await ask(probed, prompt)
    names = block_names(SETTING, prompt[:-1])
    victim = tmp_path / f"{names[2].hex()}.kv"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[-1000] ^= 1
    elif damage == "truncate":
        del data[-1:]
    elif damage == "empty":
        data.clear()
    else:
        data = bytearray((tmp_path / f"{names[1].hex()}.kv").read_bytes())
    victim.write_bytes(data)
    with engine(prompt_cache=on_disk(tmp_path)) as probed:
        found, finished = await ask(probed, prompt)
        assert found == expected
        assert finished.usage.cached_tokens == 2 * BLOCK_TOKENS
    assert victim.exists(), "it is written again"
    assert decode_block(names[2], victim.read_bytes()) is not None


def block(value: int) -> FileBlock:
    content = np.full((2, 1, BLOCK_TOKENS, 4), value, np.uint16)
    return FileBlock("bfloat16", content, content + 1)


def test_disk_is_bounded_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    size = len(encode_block(b"x" * 16, block(1)))
    names = [bytes([i]) * 16 for i in range(5)]
    disk = DiskBlocks(tmp_path, 3 * size)
    for name in names[:3]:
        disk.write(name, block(name[0]))
    disk.flush()
    disk.touch(names[0])
    disk.write(names[3], block(3))
    disk.flush()
    assert [name in disk for name in names] == [True, False, True, True, False]
    assert disk.nbytes == sum(file.stat().st_size for file in tmp_path.iterdir()) == 3 * size
    stored = disk.read(names[0])
    assert stored is not None
    assert np.array_equal(stored.keys, block(0).keys)
    assert np.array_equal(stored.values, block(0).values)
    disk.close()
    (tmp_path / "half.tmp").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    again = DiskBlocks(tmp_path, 2 * size)
    assert [name in again for name in names] == [True, False, False, True, False], "0 was used after 2"
    assert not (tmp_path / "half.tmp").exists()
    assert (tmp_path / "notes.txt").exists()
    again.close()
    assert not any(thread.name == "titan-prompt-cache" for thread in threading.enumerate())


def test_a_disk_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    disk = DiskBlocks(tmp_path / "cache", PLENTY)
    (tmp_path / "cache").rmdir()
    disk.write(b"x" * 16, block(1))
    disk.flush()
    assert disk.dropped_writes == 1
    assert disk.read(b"x" * 16) is None
    disk.close()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_blocks_keep_their_bits_on_disk(tmp_path: Path, dtype: mx.Dtype) -> None:
    keys = mx.random.normal((2, 3, BLOCK_TOKENS, 4), key=mx.random.key(1)).astype(dtype)
    disk = DiskBlocks(tmp_path, PLENTY)
    cache = PromptCache(SETTING, PLENTY, disk)
    tokens = list(range(BLOCK_TOKENS))
    cache.insert(tokens, lambda start, end: [(layer[:, start:end], -layer[:, start:end]) for layer in keys])
    disk.flush()
    cache.clear()
    (name,) = cache.match([*tokens, 1])
    loaded = cache.load(name)
    assert loaded is not None
    assert loaded.keys.dtype == dtype
    assert mx.array_equal(loaded.keys, keys)
    assert mx.array_equal(loaded.values, -keys)
    cache.close()
