"""What `titan chat`, `titan top` and `titan bench serve` need of a coordinator's HTTP API. Knows no MLX."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from titan.common.config.api_key import read_api_key
from titan.common.errors import ClusterError, ConfigError, WorkerUnreachable

__all__ = ["base_of", "connect", "get", "stream_chat"]

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def connect(url: str, key_file: Path | None) -> httpx.Client:
    """A client of the coordinator at `url`; close it."""
    headers = {} if key_file is None else {"Authorization": f"Bearer {read_api_key(os.fspath(key_file))}"}
    return httpx.Client(base_url=base_of(url), headers=headers, timeout=TIMEOUT)


def base_of(url: str) -> str:
    """The coordinator's root for what people paste: with or without `http://`, a trailing slash, or `/v1`."""
    base = url if "://" in url else f"http://{url}"
    return base.rstrip("/").removesuffix("/v1")


def get(client: httpx.Client, path: str) -> Any:
    """The JSON at `path`.

    Raises:
        ClusterError: nobody answers there, or with an error.
    """
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error
    _check(response)
    return response.json()


def stream_chat(client: httpx.Client, body: dict[str, Any]) -> Generator[dict[str, Any]]:
    """The chunks of a streamed chat; closing the iterator cancels it. Raises as `get` does."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                response.read()
                _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ClusterError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk
    except httpx.HTTPError as error:
        raise _unreachable(client, error) from error


def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    kind = ConfigError if response.status_code in (401, 403, 404) else ClusterError
    raise kind(f"{response.url} answers {response.status_code}: {message}")


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> WorkerUnreachable:
    return WorkerUnreachable(
        f"the coordinator at {client.base_url} does not answer ({error})", "start titan-coordinator, or give --url"
    )
