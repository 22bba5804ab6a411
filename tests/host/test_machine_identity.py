"""Identity of a Linux machine."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.host.machine import linux_identity, machine_identity


def test_linux_names_model_processor_and_cards(tmp_path: Path) -> None:
    for name, text in {
        "sys/class/dmi/id/product_name": "NUC13\n",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA Card\nIRQ: 7\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = linux_identity(tmp_path)
    assert (found.model, found.processor, found.gpus) == ("NUC13", "Some CPU @ 3 GHz", ("NVIDIA Card",))


def test_a_system_that_says_nothing_still_has_a_processor(tmp_path: Path) -> None:
    found = linux_identity(tmp_path)
    assert found.model == ""
    assert found.processor
    assert found.gpus == ()


def test_a_machine_is_the_same_when_asked_again() -> None:
    assert machine_identity() == machine_identity()
