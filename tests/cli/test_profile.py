"""`mlx-ring profile` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.test_main import complaint
from tests.processes import run_cli

from mlx_ring.host.machine_profile import MachineProfile


def test_a_profile_is_measured_shown_and_saved(tmp_path: Path) -> None:
    state = {"XDG_DATA_HOME": str(tmp_path / "state")}
    first = run_cli("profile", "--blas-threads", "1", "--json", folder=tmp_path, environment=state)
    assert first.returncode == 0, first.stderr
    profile = MachineProfile.from_json(first.stdout)
    assert profile.blas_threads == 1
    assert (tmp_path / "state" / "mlx-ring" / "profile.json").is_file()

    again = run_cli("profile", "--blas-threads", "1", folder=tmp_path, environment=state)
    assert again.returncode == 0, again.stderr
    assert f"bounded by {profile.memory_limited_by}" in again.stdout
    for rate in profile.rates:
        (line,) = [line for line in again.stdout.splitlines() if line.startswith(rate.weights)]
        assert f"{rate.bandwidth / 1e9:,.2f}" in line, "as it was measured before"


def test_a_saved_profile_is_shown_unless_again_is_given(tmp_path: Path) -> None:
    options = ("profile", "--json", "--blas-threads", "1", "--state-dir", "state")
    first, second, third = (
        json.loads(run_cli(*options, *more, folder=tmp_path).stdout) for more in ((), (), ("--again",))
    )
    assert first == second
    assert first["seconds"] != third["seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blas", "mkl"], "--blas is mkl; it must be auto or off."),
        (["--blas-threads", "-1"], "--blas-threads is -1; it must be from 0 to 1024."),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in complaint("profile", *arguments, folder=tmp_path)
