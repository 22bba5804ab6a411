"""Shares of memory, as files state them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.devices_file import read_share

NOTHING: Mapping[str, object] = {}


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"gpu_memory_utilization": None}, None),
        ({"memory_utilization": 0.7}, 0.7),
        ({"gpu_memory_utilization": 1}, 1.0),
        ({"gpu-memory-utilization": 0.5}, 0.5),
    ],
)
def test_a_share_is_found_under_each_name_and_in_each_place(
    fields: Mapping[str, object], share: float | None
) -> None:
    assert read_share("mini", "cluster.json", fields, NOTHING) == share
    assert read_share("mini", "cluster.json", NOTHING, fields) == share


@pytest.mark.parametrize("value", [0, -0.1, 1.01, 90, "0.9", True, float("nan"), [0.9]])
def test_what_is_no_share_is_refused_with_file_machine_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_share("mini", "cluster.json", {"gpu_memory_utilization": value})
    said = (
        f"cluster.json: gpu_memory_utilization of mini is {value!r}; it must be a number above 0, at most 1."
    )
    assert str(caught.value) == said


def test_a_share_that_stands_in_two_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="of mini stands there twice, as memory_utilization and gpu_"):
        read_share("mini", "cluster.json", {"memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5})
