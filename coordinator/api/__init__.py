"""The HTTP API in OpenAI's shape, and the server it runs on."""

from titan.coordinator.api.app import create_app
from titan.coordinator.api.auth import ApiKeys
from titan.coordinator.api.limits import Limits
from titan.coordinator.api.server import ApiServer
from titan.coordinator.api.service import Readiness

__all__ = ["ApiKeys", "ApiServer", "Limits", "Readiness", "create_app"]
