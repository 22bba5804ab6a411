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


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, shared: Path) -> ReferenceModel:
    return reference_model(request.param, shared)


SPLITS = [("demo", 3, 3), ("qwen3", 2, 2)]
MORE_SPLITS = [("demo", 1, 1), ("qwen3", 3, 4)]
"""Model, number of stages and seed; the latter ones with `--thorough`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the splits."""
    splits = [*SPLITS, *MORE_SPLITS] if metafunc.config.getoption("--thorough") else SPLITS
    metafunc.parametrize(("model", "stages", "seed"), splits, indirect=["model"])


@pytest.mark.timeout(600)
def test_tokens_are_those_of_each_request_alone(
    model: ReferenceModel, stages: int, seed: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    check_concurrent_requests(model, stages, (1.0,), seed, tmp_path, record_property)
