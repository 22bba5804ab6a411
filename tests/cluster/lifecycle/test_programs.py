"""Interpreters that are found on a machine, and machines without a usable one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.cluster.lifecycle.installation import FoundPrograms, Installation, Python, own_versions
from mlx_ring.cluster.lifecycle.programs import any_program, find_program, find_pythons, make_ready
from mlx_ring.cluster.lifecycle.wheels import WheelStore
from mlx_ring.core.errors import HostFailed
from mlx_ring.settings.devices_file import Device

ALPINE = Python("/usr/bin/python3", "linux", "riscv64", "3.12", "musl", (0, 0))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("device", "pythons", "said"),
    [
        (
            Device("mini", "mini"),
            [],
            r"^mini: mlx-ring is not installed there, and no Python from 3\.11 to 3\.14 was found there: install one",
        ),
        (Device("mini", "mini", program="/opt/mlx-ring"), [ALPINE], r"install these versions there\.$"),
        (Device("mini", "mini"), [ALPINE], r"^mini: there are no wheels for Linux with musl on riscv64"),
    ],
)  # fmt: skip
def test_a_machine_without_a_usable_python_is_refused_with_advice(
    device: Device, pythons: list[Python], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:  # fmt: skip
    def find(_machine: Machine, *, identity: bool) -> FoundPrograms:
        assert identity
        return FoundPrograms(())

    def find_interpreters(_machine: Machine) -> list[Python]:
        return pythons

    monkeypatch.setattr("mlx_ring.cluster.lifecycle.programs.find_program", find)
    monkeypatch.setattr("mlx_ring.cluster.lifecycle.programs.find_pythons", find_interpreters)
    store = WheelStore(tmp_path_factory.getbasetemp() / "packages")
    with pytest.raises(HostFailed, match=said):
        make_ready(Machine(device, "mini", is_here=False), store=store, report=lambda _line: None)


@pytest.mark.processes
def test_interpreters_are_found_in_usual_places_and_broken_ones_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home of mine"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path}/no where:/usr/bin:/bin")
    good = write_interpreter(home / ".local/bin/python3.12", "echo linux riscv64 3.12 glibc 2.36")
    managed = write_interpreter(
        home / ".local/share/uv/python/other/bin/python3.13", "echo linux riscv64 3.13 musl 0.0"
    )
    write_interpreter(home / ".pyenv/versions/3.11.7/bin/python3.11", "echo broken; exit 1")
    found = find_pythons(Machine(Device("here", "localhost"), "localhost", is_here=True))
    assert [(python.path, python.version) for python in found if python.machine == "riscv64"] == [
        (str(managed), "3.13"),
        (str(good), "3.12"),
    ]


def write_interpreter(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_this_machine_is_described_and_its_head_asked_without_a_further_process(tmp_path: Path) -> None:
    here = Machine(Device("box", "localhost", state_dir=str(tmp_path)), "localhost", is_here=True)
    found = any_program(here, find_program(here))
    assert found is not None
    assert found.installation == Installation(own_versions(), str(tmp_path), "", ())
    with pytest.raises(
        HostFailed, match=r"^box: No head runs here: start it with `mlx-ring cluster start`\.$"
    ):
        found.ask_head("GET", "/health", "", api_key_file=None, timeout_s=60.0)
    with pytest.raises(HostFailed, match=r"^box: .*keys.* cannot be read"):
        found.ask_head("GET", "/health", "", api_key_file=str(tmp_path / "keys"), timeout_s=60.0)
