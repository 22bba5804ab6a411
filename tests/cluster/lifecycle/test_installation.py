"""Descriptions of the programs on a machine."""

from __future__ import annotations

from mlx_ring.cluster.lifecycle.installation import Installation, different, read_found
from mlx_ring.host.running import Running

VERSIONS = {"mlx-ring": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
OTHER = {**VERSIONS, "mlx": "0.31.0"}
RUNNING = (Running("agent", 7, 1.5, "abc"),)


def description(versions: dict[str, str]) -> str:
    return Installation(versions, "/home/me/state", "mini-7f3a", RUNNING).to_json()


def test_a_description_survives_json() -> None:
    assert Installation.from_json(description(VERSIONS)) == Installation(
        VERSIONS, "/home/me/state", "mini-7f3a", RUNNING
    )


def test_the_program_with_the_same_versions_is_chosen() -> None:
    found = read_found(
        [
            "Welcome to mini",
            f"program\t/old/mlx-ring\t{description(OTHER)}",
            "program\t/broken/mlx-ring\tUsage: mlx-ring",
            f"program\t/new/mlx-ring\t{description(VERSIONS)}",
        ]
    )
    program = found.like(VERSIONS)
    assert program is not None
    assert program.path == "/new/mlx-ring"
    assert found.like({**VERSIONS, "mlx-ring": "0.2.0"}) is None


def test_different_versions_are_named() -> None:
    found = read_found([f"program\t/old/mlx-ring\t{description(OTHER)}"])
    assert different(found, VERSIONS) == "/old/mlx-ring has mlx 0.31.0"
    assert different(read_found([]), VERSIONS) == "mlx-ring is not installed there"
