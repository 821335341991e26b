"""`hosts.yaml`: the machines of a cluster and how they talk, as frozen values. Opens no connection, reads no model.

Paths in the file are relative to the file's own folder; `~` is the user's home.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from titan.common.config.address import DEFAULT_WORKER_PORT, is_loopback, normalise_address, split_address
from titan.common.config.api_key import read_api_key
from titan.common.config.checked import FOUND_IN_TREE, load_yaml
from titan.common.config.yaml_source import Problem, Tree
from titan.common.errors import ConfigError
from titan.common.hub.names import is_repository
from titan.common.units import Duration, Size, format_seconds

MAX_WORKERS = 64
MAX_CACHE_SLOTS = 4096
MAX_ADDRESSES = 8
NAME_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MISSING_MEND = "Create one, see `hosts.yaml` in the README"


def _path(value: object, info: ValidationInfo) -> object:
    """An absolute path: `~` expanded, the rest relative to the folder of the file that names it."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise PydanticCustomError("path", "is not a path")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # ~nobody
        raise PydanticCustomError(
            "path", "{reason}", {"reason": f"has a home folder that is not known ({error})"}
        ) from error
    folder = (info.context or {}).get("folder") or Path.cwd()
    return Path(os.path.normpath(folder / path))


def _model(value: object, info: ValidationInfo) -> object:
    """A folder, or `org/name` where there is no such folder beside the file: a repository of the local hub cache."""
    path = _path(value, info)
    if isinstance(path, Path) and is_repository(str(value)) and not path.exists():
        return Path(str(value))
    return path


def _name(value: str) -> str:
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is not a name. Use 1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or digit"
        )
    return value


def _address(value: object, *, default_port: int, any_port: bool = False) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("address", "is not an address. Write HOST:PORT")
    try:
        return normalise_address(value, default_port, any_port=any_port)
    except ConfigError as error:
        raise PydanticCustomError("address", "{reason}", {"reason": str(error)}) from error


ModelPath = Annotated[Path, BeforeValidator(_model)]
ConfigPath = Annotated[Path, BeforeValidator(_path)]
Name = Annotated[str, AfterValidator(_name)]
WorkerAddress = Annotated[str, BeforeValidator(lambda v: _address(v, default_port=DEFAULT_WORKER_PORT))]
ListenAddress = Annotated[str, BeforeValidator(lambda v: _address(v, default_port=8080, any_port=True))]


class Section(BaseModel):
    """What every mapping of the file has in common: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: object) -> object:
        return {} if value is None else value  # `timeouts:` with every line below commented out


class CoordinatorSection(Section):
    """The machine that runs attention, router and KV cache, and serves HTTP."""

    name: Name = "coordinator"
    memory: Size | None = None
    """Bytes for expert slots here; None leaves it to `platform.memory_budget_bytes`."""
    listen: ListenAddress = "127.0.0.1:8080"
    api_key_file: ConfigPath | None = Field(default=None, validate_default=True)
    """Needed when `listen` can be reached from other machines."""

    @field_validator("api_key_file")
    @classmethod
    def _key_off_loopback(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        listen = info.data.get("listen")
        if value is None and listen is not None and not is_loopback(split_address(listen)[0]):
            raise ValueError(
                f"is missing, and listen: {listen} can be reached from other machines. "
                "Name a file with a key, or listen on 127.0.0.1"
            )
        if value is not None:
            try:
                read_api_key(value)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return value


class Worker(Section):
    """A machine that holds experts."""

    name: Name
    addresses: tuple[WorkerAddress, ...] = Field(min_length=1, max_length=MAX_ADDRESSES)
    """`host:port` in normal form, in order of preference; port 7077 when the file gives none."""
    memory: Size | None = None
    """Bytes of experts it may hold; None takes what the worker offers in Hello."""
    cache_slots: int = Field(default=0, ge=0, le=MAX_CACHE_SLOTS)
    """Slots a layer, out of that memory, for experts that it reads from its own copy of the checkpoint when asked."""


class TlsPaths(Section):
    """Files of the coordinator's certificate; `load_credentials(tls.ca, tls.cert, tls.key)` checks them."""

    ca: ConfigPath = Field(default=Path("certs/ca.pem"), validate_default=True)
    cert: ConfigPath = Field(default=Path("certs/coordinator.pem"), validate_default=True)
    key: ConfigPath = Field(default=Path("certs/coordinator.key"), validate_default=True)


def _share(value: object) -> float:
    """`1%` or 0.01 -> 0.01."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = float("nan")
    if isinstance(value, bool) or len(text) > 20 or not 0 <= share <= 1:
        raise PydanticCustomError("share", "is not a share. Write a percentage such as 1%, or a number from 0 to 1")
    return share


def _between(low_s: float, high_s: float) -> AfterValidator:
    def check(value: float) -> float:
        if not low_s <= value <= high_s:
            raise ValueError(
                f"{format_seconds(value)} is out of bounds. Use {format_seconds(low_s)} to {format_seconds(high_s)}"
            )
        return value

    return AfterValidator(check)


class Timeouts(Section):
    """How long each wait may last, in seconds. In the file: `250ms`, `2s`, `5m`."""

    connect: Annotated[Duration, _between(0.01, 60)] = 2.0
    """TCP connection and TLS handshake to one address."""
    hello: Annotated[Duration, _between(0.01, 600)] = 5.0
    """Answer to Hello, in which a worker may open its checkpoint."""
    execute: Annotated[Duration, _between(0.001, 600)] = 0.5
    """One layer's reply; then the local SSD replaces it."""
    assign_idle: Annotated[Duration, _between(0.1, 3600)] = 30.0
    """Silence between two progress messages of Assign."""
    read: Annotated[Duration, _between(0.1, 600)] = 30.0
    """One read from the disk of this machine; then another copy, a worker that has the expert, or an error."""
    probe: Annotated[Duration, _between(0.01, 60)] = 2.0
    """Answer to Probe and Status."""
    readmit: Annotated[Duration, _between(0.01, 600)] = 1.0
    """First delay before a lost worker is tried again; it doubles up to `readmit_max`."""
    readmit_max: Annotated[Duration, _between(0.01, 3600)] = 30.0
    drain: Annotated[Duration, _between(0.01, 3600)] = 10.0
    """Requests under way at shutdown."""

    @field_validator("readmit_max")
    @classmethod
    def _not_below_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("readmit", 0.0):
            raise ValueError(f"{format_seconds(value)} is shorter than readmit")
        return value


class HostsConfig(Section):
    """All of `hosts.yaml`."""

    model: ModelPath
    """The checkpoint's folder on the coordinator."""
    coordinator: CoordinatorSection = Field(default_factory=CoordinatorSection)
    workers: tuple[Worker, ...] = Field(default=(), max_length=MAX_WORKERS)
    tls: TlsPaths = Field(default_factory=dict, validate_default=True)  # type: ignore[arg-type]
    timeouts: Timeouts = Field(default_factory=Timeouts)
    verify: Annotated[float, BeforeValidator(_share)] = 0.0
    """Share of workers' answers that the coordinator computes again and compares: `1%`, or a number in 0..1."""
    transport: Literal["auto", "lane", "grpc"] = "auto"
    """What carries a layer's request: `auto` measures both at the start of a session and takes the faster."""
    precision: Literal["exact", "reduced"] = "exact"
    """What a worker answers: every expert's output, or their score-weighted sum a row, which is top-k times smaller and
    rounded once more. `exact` gives mlx-lm's tokens."""

    @field_validator("workers", mode="before")
    @classmethod
    def _none_is_no_worker(cls, value: object) -> object:
        return () if value is None else value

    @model_validator(mode="after")
    def _no_clashes(self) -> Self:
        problems = list(_clashes(self.model_dump(include={"coordinator", "workers"})))
        if problems:
            raise PydanticCustomError(FOUND_IN_TREE, "{reason}", {"reason": "; ".join(p.reason for p in problems)})
        return self

    def worker(self, name: str) -> Worker:
        """The worker called `name`; KeyError when there is none."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise KeyError(name)


def load_hosts(path: str | os.PathLike[str]) -> HostsConfig:
    """Read and check a `hosts.yaml`, with the API key's file when it names one. Certificates are not looked at.

    Raises:
        ConfigError: lists every problem with its line, as `hosts.yaml:12: workers[1].addresses[0]: reason`.
    """
    return load_yaml(path, HostsConfig, missing_mend=_MISSING_MEND, check=_clashes)


def _clashes(tree: Tree | dict[str, Any]) -> Iterator[Problem]:
    """Names and addresses that two machines share. Works on a tree that may hold anything; others check its form."""
    if not isinstance(tree, dict):
        return
    coordinator, workers = tree.get("coordinator"), tree.get("workers")
    own_name = (coordinator.get("name") if isinstance(coordinator, dict) else None) or "coordinator"
    names: dict[str, str] = {str(own_name): "the coordinator"}
    addresses: dict[str, str] = {}
    for index, worker in enumerate(workers if isinstance(workers, (list, tuple)) else ()):
        if not isinstance(worker, dict):
            continue
        owner = f"workers[{index}]"
        name = worker.get("name")
        if isinstance(name, str) and names.setdefault(name, owner) != owner:
            yield Problem(("workers", index, "name"), f"{name!r} is already the name of {names[name]}")
        listed = worker.get("addresses")
        for position, text in enumerate(listed if isinstance(listed, (list, tuple)) else ()):
            try:
                address = normalise_address(text, DEFAULT_WORKER_PORT) if isinstance(text, str) else None
            except ConfigError:
                continue
            place = f"{owner}.addresses[{position}]"
            if address and addresses.setdefault(address, place) != place:
                location = ("workers", index, "addresses", position)
                yield Problem(location, f"{address} is already {addresses[address]}")
