"""Configuration files: `hosts.yaml` as checked, frozen values."""

from __future__ import annotations

from titan.common.config.address import is_loopback, normalise_address, split_address
from titan.common.config.api_key import read_api_key
from titan.common.config.checked import load_yaml
from titan.common.config.hosts import (
    CoordinatorSection,
    HostsConfig,
    Timeouts,
    TlsPaths,
    Worker,
    load_hosts,
)

__all__ = [
    "CoordinatorSection",
    "HostsConfig",
    "Timeouts",
    "TlsPaths",
    "Worker",
    "is_loopback",
    "load_hosts",
    "load_yaml",
    "normalise_address",
    "read_api_key",
    "split_address",
]
