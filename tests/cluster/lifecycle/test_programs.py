"""For which interpreter of a machine the program is sent, and when it cannot be."""

from __future__ import annotations

import pytest

from mlx_ring.cluster.lifecycle.about import Found
from mlx_ring.cluster.lifecycle.places import Place
from mlx_ring.cluster.lifecycle.programs import make_ready
from mlx_ring.cluster.lifecycle.systems import Python
from mlx_ring.cluster.lifecycle.wheels import WheelStore
from mlx_ring.cluster.planner.devices_file import Device
from mlx_ring.core.errors import HostFailed

ALPINE = Python("/usr/bin/python3", "linux", "riscv64", "3.12", "musl", (0, 0))


@pytest.mark.parametrize(
    ("device", "found", "said"),
    [
        (
            Device("mini", "mini"),
            Found(()),
            r"^mini: mlx-ring is not installed there, and no Python from 3\.11 to 3\.14 was found there: install one",
        ),
        (Device("mini", "mini", program="/opt/mlx-ring"), Found((), (ALPINE,)), r"install these there\.$"),
        (Device("mini", "mini"), Found((), (ALPINE,)), r"^mini: there are no wheels for Linux with musl on riscv64"),
    ],
)  # fmt: skip
def test_a_machine_that_nothing_can_be_sent_to_is_refused_with_what_to_do(
    device: Device, found: Found, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:  # fmt: skip
    def find(_place: Place, *, identity: bool) -> Found:
        assert identity
        return found

    monkeypatch.setattr("mlx_ring.cluster.lifecycle.programs.find_program", find)
    store = WheelStore(tmp_path_factory.getbasetemp() / "packages")
    with pytest.raises(HostFailed, match=said):
        make_ready(Place(device, "mini", is_here=False), store=store, tell=lambda _told: None)
