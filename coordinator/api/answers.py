"""Follows the engine's work for one HTTP request, and ends it when the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from titan.common.errors import EngineNotReady, TitanError
from titan.coordinator.generation import Event, Finished, Handle, TextDelta, TokenLogprob

__all__ = ["Answer", "Client", "collect", "collect_all", "followed", "merged", "require_whole"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: Finished


@dataclass(slots=True)
class Client:
    gone: bool = False


@contextlib.asynccontextmanager
async def followed(handles: Sequence[Handle], receive: Receive) -> AsyncIterator[Client]:
    """While inside, a client that disconnects cancels `handles`; on the way out all that still run are cancelled.

    Args:
        receive: the request's ASGI receive, its body already read.
    """
    client = Client()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.gone = True
        for handle in handles:
            handle.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield client
    finally:
        for handle in handles:
            handle.cancel()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def collect(handle: Handle) -> Answer:
    """Wait for the whole answer; raises what the engine raises."""
    texts: list[TextDelta] = []
    async for event in handle:
        if isinstance(event, Finished):
            return Answer(
                "".join(t.text for t in texts),
                tuple(token for t in texts for token in t.tokens),
                tuple(entry for t in texts for entry in t.logprobs),
                event,
            )
        texts.append(event)
    raise AssertionError("a handle ends with Finished or an error")


async def collect_all(handles: Sequence[Handle], receive: Receive) -> list[Answer] | None:
    """Every answer, or None when the client has gone meanwhile."""
    async with followed(handles, receive) as client:
        answers = [await collect(handle) for handle in handles]
        if client.gone:
            return None
    for answer in answers:
        require_whole(answer.finished)
    return answers


async def merged(handles: Sequence[Handle]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several answers as they come, each with its number; raises what any of them raises."""
    if len(handles) == 1:
        async for event in handles[0]:
            yield 0, event
        return
    arrived: asyncio.Queue[tuple[int, Event | TitanError]] = asyncio.Queue()

    async def follow(index: int, handle: Handle) -> None:
        try:
            async for event in handle:
                arrived.put_nowait((index, event))
        except TitanError as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(follow(i, handle)) for i, handle in enumerate(handles)]
    try:
        running = len(tasks)
        while running:
            index, event = await arrived.get()
            if isinstance(event, TitanError):
                raise event
            running -= isinstance(event, Finished)
            yield index, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def require_whole(finished: Finished) -> None:
    """Raise EngineNotReady for an answer that the engine cut off because it is stopping."""
    if finished.reason == "cancelled":
        raise EngineNotReady("the coordinator is stopping and cut this answer off", "try again when it is back")
