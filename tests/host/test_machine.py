"""Shares of a machine's cores, and its identity."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
from tests.machines import free_pair_of_ports

from mlx_ring.core.errors import AddressInUse, ConfigError
from mlx_ring.host import machine
from mlx_ring.host.machine import NodePorts, ProcessPorts, linux_identity, machine_identity, share_cores


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


def test_a_port_of_a_range_belongs_to_one_process_until_it_ends() -> None:
    first = free_pair_of_ports()
    ports = NodePorts((first, first + 1))
    one, other = ProcessPorts(ports), ProcessPorts(ports)
    assert [one.at("127.0.0.1"), other.at("127.0.0.1")] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    # Neither listens yet.
    with pytest.raises(AddressInUse, match=r"all of these ports are taken on 127\.0\.0\.1"):
        ProcessPorts(ports).at("127.0.0.1")
    for _ in range(2):
        one.give_back()
    assert ports.at("127.0.0.1") == f"127.0.0.1:{first}"


def test_ports_on_which_others_listen_are_skipped() -> None:
    first = free_pair_of_ports()
    with socket.create_server(("127.0.0.1", first)):
        assert NodePorts((first, first + 1)).take("[::]") == first + 1, "IPv6 covers IPv4"


def test_a_system_without_ipv6_names_the_address_and_looks_at_the_ports_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FourOnly(socket.socket):
        def __init__(self, family: int = -1, *more: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *more)

    monkeypatch.setattr("socket.socket", FourOnly)
    with pytest.raises(ConfigError, match="--host is ::, but this machine cannot open such an address"):
        machine.listen("::", 0)
    first = free_pair_of_ports()
    with socket.create_server(("127.0.0.1", first)):
        assert NodePorts((first, first + 1)).take("[::]") == first + 1


def test_a_range_without_a_free_port_is_refused_with_what_to_do() -> None:
    first = free_pair_of_ports()
    ports = NodePorts((first, first + 1))
    with (
        socket.create_server(("127.0.0.1", first)),
        socket.create_server(("127.0.0.1", first + 1)),
        pytest.raises(AddressInUse) as caught,
    ):
        ports.take("127.0.0.1")
    assert str(caught.value) == (
        f"--node-ports is {first}-{first + 1}, and all of these ports are taken on 127.0.0.1. End what listens there, or give "
        "more ports: two for the agent, and two for each worker."
    )


def test_without_a_range_the_system_picks_the_port() -> None:
    assert NodePorts(()).at("[::]") == "[::]:0"
