"""Shares of a machine's cores, and its identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.host import machine
from mlx_ring.host.machine import linux_identity, machine_identity, share_cores


@pytest.mark.parametrize(
    ("cores", "stages", "threads"), [(8, 1, 7), (8, 2, 3), (2, 1, 1), (1, 1, 1), (1, 4, 1), (3, 9, 1)]
)
def test_stages_share_all_cores_but_one_with_at_least_one_each(
    cores: int, stages: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: cores)
    assert share_cores(stages) == threads


def test_linux_identity_has_model_processor_and_gpus(tmp_path: Path) -> None:
    for name, text in {
        "sys/class/dmi/id/product_name": "NUC13\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA Card\nIRQ: 7\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = linux_identity(tmp_path)
    assert (found.model, found.processor, found.gpus) == ("NUC13", "Some CPU @ 3 GHz", ("NVIDIA Card",))


def test_a_system_without_details_still_has_a_processor(tmp_path: Path) -> None:
    found = linux_identity(tmp_path)
    assert found.model == ""
    assert found.processor
    assert found.gpus == ()


def test_the_identity_of_a_machine_is_stable() -> None:
    assert machine_identity() == machine_identity()
