"""The OpenAPI page against the server's behaviour, by schemathesis (short here; docs/server.md has the long run).

Run: `.venv/bin/pytest tests/coordinator/api/test_openapi.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from fixtures.api_server import RunningApi
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

PATHS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/titan/cluster"),
    ("GET", "/metrics"),
    ("GET", "/ready"),
)
checks.load_all_checks()
CHECKS = checks.CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


def test_the_page_names_every_endpoint(api: RunningApi) -> None:
    page = api.http.get("/openapi.json").json()
    found = {(method.upper(), path) for path, item in page["paths"].items() for method in item}
    assert set(PATHS) <= found
    schema = page["components"]["schemas"]["ChatRequest"]
    assert {"messages", "tools", "response_format", "temperature", "stop"} <= set(schema["properties"])


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_behaviour_is_as_the_page_says(api: RunningApi, method: str, path: str) -> None:
    page = schemathesis.openapi.from_dict(api.http.get("/openapi.json").json())
    operation = page[path][method]
    short = settings(
        max_examples=25 if method == "POST" else 5,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )

    @short
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["max_tokens"] = case.body["max_output_tokens"] = 2  # short answers
            if "responses" in path:
                del case.body["max_tokens"]
            else:
                del case.body["max_output_tokens"]
        case.call_and_validate(base_url=api.url, checks=CHECKS, timeout=20)

    run()
