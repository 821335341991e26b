"""The HTTP API in OpenAI's shape, and the server it runs on."""

from titan.coordinator.api.app import create_app
from titan.coordinator.api.auth import ApiKeys
from titan.coordinator.api.keyfile import read_keys
from titan.coordinator.api.limits import Limits
from titan.coordinator.api.operations import Operations
from titan.coordinator.api.server import ApiServer
from titan.coordinator.api.service import Readiness

__all__ = ["ApiKeys", "ApiServer", "Limits", "Operations", "Readiness", "create_app", "read_keys"]
