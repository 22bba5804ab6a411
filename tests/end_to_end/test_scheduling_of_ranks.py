"""Where ranks share layers, each request gets the tokens that it gets alone, however it is scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.scheduled_requests import check_concurrent_requests, reference_model

pytestmark = pytest.mark.alone(loops=True)
MODELS = ("qwen3", "demo")
"""Models; only the first without `--thorough`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the models."""
    metafunc.parametrize("name", MODELS if metafunc.config.getoption("--thorough") else MODELS[:1])


@pytest.mark.timeout(600)
def test_tokens_of_two_ranks_are_those_of_each_request_alone(
    name: str, shared: Path, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    model = reference_model(name, shared)
    check_concurrent_requests(model, 1, (1.0, 1.0), 4, tmp_path, record_property)
