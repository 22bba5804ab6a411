"""`mlx-ring profile` as a person types it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cli.test_main import complaint
from tests.processes import run_cli, run_in_process

from mlx_ring.host.machine_profile import MachineProfile

OPTIONS = ("profile", "--blas-threads", "1")


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile that the command has measured."""

    data_home: Path
    printed: str
    """Profile as JSON, from standard output."""

    @property
    def state(self) -> Path:
        """Folder with the saved profile."""
        return self.data_home / "mlx-ring"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Measure this machine once, into a data folder that the environment names."""
    folder = tmp_path_factory.mktemp("profile")
    done = run_cli(*OPTIONS, "--json", folder=folder, environment={"XDG_DATA_HOME": str(folder / "data")})
    assert done.returncode == 0, done.stderr
    return Measured(folder / "data", done.stdout)


def test_a_profile_is_measured_saved_and_shown_as_a_table(measured: Measured, tmp_path: Path) -> None:
    profile = MachineProfile.from_json(measured.printed)
    assert profile.blas_threads == 1
    assert (measured.state / "profile.json").is_file()
    environment = {"XDG_DATA_HOME": str(measured.data_home)}
    shown = run_in_process(*OPTIONS, folder=tmp_path, environment=environment)
    assert shown.returncode == 0, shown.stderr
    assert f"limited by {profile.memory_limited_by}" in shown.stdout
    for rate in profile.rates:
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(rate.weights)]
        assert f"{rate.bandwidth / 1e9:,.2f}" in line, "as it was measured before"


def test_a_saved_profile_is_shown_unless_again_is_given(measured: Measured, tmp_path: Path) -> None:
    shutil.copytree(measured.state, tmp_path / "state")
    options = (*OPTIONS, "--json", "--state-dir", "state")
    first = json.loads(measured.printed)
    second = json.loads(run_in_process(*options, folder=tmp_path).stdout)
    third = json.loads(run_cli(*options, "--again", folder=tmp_path).stdout)
    assert first == second
    assert first["seconds"] != third["seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blas", "mkl"], "--blas is mkl; it must be auto, openblas or off."),
        (["--blas-threads", "-1"], "--blas-threads is -1; it must be a whole number from 0 to 1024."),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in complaint("profile", *arguments, folder=tmp_path)
