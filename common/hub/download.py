"""Get a checkpoint from a hub: refuse early what Titan cannot run or the disk cannot hold, then fetch what is needed.

huggingface_hub does the fetching, the resuming and the cache; nothing but weights, configuration and tokenizer is
taken, and never code. Knows no MLX.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import huggingface_hub.constants
from huggingface_hub import DryRunFileInfo, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from titan.common.errors import CheckpointMissing, ConfigError, DiskFull, DownloadFailed
from titan.common.hub.names import is_repository
from titan.common.registry import Checkpoint, open_checkpoint
from titan.common.registry.bounded_json import read_object
from titan.common.registry.families import family_of
from titan.common.units import format_bytes

__all__ = ["Repository", "Source", "download", "look"]

CONFIG = "config.json"
WANTED = (
    CONFIG,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)
MAX_CONFIG_BYTES = 4 << 20
SPARE_BYTES = 1 << 30  # left free on the disk
ANSWER_S = 10.0  # the hub's answer to a question; data that stops coming has huggingface_hub's own limit


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint comes from and goes to.

    Args:
        name: `org/name`.
        revision: branch, tag or commit.
        folder: put the files here; None for the Hugging Face cache.
        endpoint: another hub's URL; None for huggingface_hub's own setting.
    """

    name: str
    revision: str = "main"
    folder: Path | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    """What would be fetched: files, bytes in all, and bytes that are not here yet."""

    family: str
    files: int
    total_bytes: int
    absent_bytes: int


def look(source: Source) -> Repository:
    """Ask what the repository holds, and refuse what would be fetched in vain.

    Raises:
        ConfigError: no name of a repository.
        DownloadFailed: the hub does not answer, or does not give it.
        UnsupportedFamily: not in the verified table.
        CheckpointMissing: no configuration or no weights in mlx's format.
        DiskFull: not enough room.
    """
    if not is_repository(source.name):
        raise ConfigError(f"{source.name[:200]!r} is no repository", "Write org/name as the hub shows it")
    files = _snapshot(source, dry_run=True)
    assert isinstance(files, list)
    config = next((file for file in files if file.filename == CONFIG), None)
    if config is None or not any(file.filename.endswith(".safetensors") for file in files):
        raise CheckpointMissing(
            f"{source.name} holds {'no model*.safetensors' if config is not None else 'no ' + CONFIG}",
            "Choose a repository with safetensors, for instance one of mlx-community's",
        )
    family = _family(source, config)
    absent = sum(file.file_size or 0 for file in files if file.will_download)
    _check_room(source, absent)
    return Repository(family, len(files), sum(file.file_size or 0 for file in files), absent)


def download(source: Source) -> Checkpoint:
    """Fetch what is not here yet (resuming what was interrupted), then open it.

    Raises:
        DownloadFailed: the hub stopped giving it; what came is kept.
        CheckpointError: what came is no checkpoint that Titan runs.
    """
    return open_checkpoint(Path(str(_snapshot(source, dry_run=False))))


def _snapshot(source: Source, *, dry_run: bool) -> str | list[DryRunFileInfo]:
    """The folder with what is wanted of a repository, fetched; or, dry, what that would take."""
    with _explained(source):
        return snapshot_download(
            source.name,
            revision=source.revision,
            local_dir=source.folder,
            endpoint=source.endpoint,
            allow_patterns=list(WANTED),
            etag_timeout=ANSWER_S,
            dry_run=dry_run,
        )


def _family(source: Source, config: DryRunFileInfo) -> str:
    """The family by the repository's config.json, which is fetched for it."""
    size_bytes = config.file_size or 0
    if size_bytes > MAX_CONFIG_BYTES:
        raise CheckpointMissing(
            f"{CONFIG} of {source.name} has {format_bytes(size_bytes)}", "That is no model's configuration"
        )
    with _explained(source):
        path = hf_hub_download(
            source.name,
            CONFIG,
            revision=source.revision,
            local_dir=source.folder,
            endpoint=source.endpoint,
            etag_timeout=ANSWER_S,
        )
    return family_of(read_object(Path(path), "Choose another repository")).model_type


def _check_room(source: Source, absent_bytes: int) -> None:
    place = source.folder or Path(huggingface_hub.constants.HF_HUB_CACHE)
    existing = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if absent_bytes + SPARE_BYTES > free:
        raise DiskFull(
            f"{source.name} needs {format_bytes(absent_bytes)} more, {existing} has {format_bytes(free)} free",
            f"Free space (Titan leaves {format_bytes(SPARE_BYTES)}), or give --to a folder on another disk",
        )


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn what the library raises into Titan's sentences."""
    try:
        yield
    except HFValidationError as error:
        raise ConfigError(f"{source.name[:200]!r} is no repository ({error})", "Write org/name") from error
    except (OSError, DryRunError, httpx2.HTTPError) as error:
        raise _sentence(source, error) from error


def _sentence(source: Source, error: BaseException) -> DownloadFailed:
    while isinstance(error, (DryRunError, LocalEntryNotFoundError)) and error.__cause__ is not None:
        error = error.__cause__  # what the hub said, behind what that meant for the cache
    hub = source.endpoint or huggingface_hub.constants.ENDPOINT
    again = "Try again: what has come is kept"
    if isinstance(error, GatedRepoError):
        return DownloadFailed(
            f"{source.name} is given to those who accepted its terms", f"Accept them on {hub}, then `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return DownloadFailed(
            f"{hub} has no repository {source.name} for you", "Check the name; a private one needs `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return DownloadFailed(f"{source.name} has no revision {source.revision[:80]!r}", "Check --revision")
    if isinstance(error, HfHubHTTPError):
        return DownloadFailed(f"{hub} answers {error.response.status_code} for {source.name}", again)
    if isinstance(error, httpx2.HTTPError):
        return DownloadFailed(f"{hub} does not answer ({type(error).__name__}: {error})", again)
    return DownloadFailed(f"{source.name} cannot be fetched from {hub} ({error})", again)
