"""Requests as values. Run: `.venv/bin/pytest tests/coordinator/generation/test_request.py`."""

from __future__ import annotations

from typing import Any

import pytest

from titan.common.errors import ContextTooLong, InvalidRequest
from titan.coordinator.generation.request import GenerationRequest, Sampling, fit_max_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.01),
        ("min_p", -1.0),
        ("top_k", -1),
    ],
)
def test_sampling_out_of_bounds_is_refused_by_name(field: str, value: float) -> None:
    values: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequest, match=field) as caught:
        Sampling(**values)
    assert caught.value.param == field


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1e-9), Sampling(top_p=0)])
def test_no_room_for_chance_is_greedy(sampling: Sampling) -> None:
    assert sampling.greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", {"prompt": ()}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("stop", {"stop": ("x", "")}),
    ],
)
def test_a_request_out_of_bounds_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    base: dict[str, Any] = {"prompt": (1,), "max_tokens": 1}
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(**(base | values))
    assert caught.value.param == field


def test_an_answer_takes_what_fits() -> None:
    assert fit_max_tokens(10, None, 100) == 90
    assert fit_max_tokens(10, None, 100, default=50) == 50
    assert fit_max_tokens(10, 90, 100) == 90
    assert fit_max_tokens(99, None, 100) == 1


def test_what_does_not_fit_says_limit_length_and_what_would() -> None:
    with pytest.raises(ContextTooLong, match=r"10 tokens and max_tokens is 91.*context of 100.*at most 90"):
        fit_max_tokens(10, 91, 100)
    with pytest.raises(ContextTooLong, match=r"100 tokens.*context is 100.*at most 99"):
        fit_max_tokens(100, None, 100)
