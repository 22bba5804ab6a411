"""However requests are batched, chunked, cached, speculated on or cancelled, each gets the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.scheduled_requests import (
    ReferenceModel,
    check_concurrent_requests,
    reference_model,
)


@pytest.fixture(scope="module", params=["demo", "qwen3"])
def model(request: pytest.FixtureRequest, shared: Path) -> ReferenceModel:
    return reference_model(request.param, shared)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stages", "seed"), [(1, 1), (2, 2), (3, 3)])
def test_tokens_are_those_of_each_request_alone(
    model: ReferenceModel, stages: int, seed: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    check_concurrent_requests(model, stages, (1.0,), seed, tmp_path, record_property)
