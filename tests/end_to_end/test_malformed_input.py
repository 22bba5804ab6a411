"""Malformed input on every port that machines reach: noise, half frames and huge lengths are refused, and others are served."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.loopback_cluster import completion, head_members, running_cluster
from tests.machines import free_pair_of_ports
from tests.malformed_input import message, noise, open_plain, open_tls, read_until_closed, start_of_call
from tests.processes import Server, command_of, listening_addresses

from mlx_ring.core.folders import node_folder
from mlx_ring.rpc.frames import Frame, encode_frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import PROBE
from mlx_ring.rpc.methods import ATTEND, HAVE, LINK, STEPS
from mlx_ring.rpc.protos import worker_pb2

TWO_GB = (1 << 31) - 1
SLACK_BYTES = 256 << 20
"""Allowed growth of a process. A message of two gigabytes would exceed it."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port that other machines reach, and a method that a node may call there."""

    name: str
    number: int
    path: str
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of two machines."""

    server: Server
    certificate: Path
    """Certificate of the second machine, which sends the malformed input."""
    ports: tuple[Port, ...]
    text: str
    """Answer before any malformed input."""

    def is_unharmed(self) -> bool:
        """Return true if the same processes give the same answer."""
        alive = all(port.process.is_running() for port in self.ports)
        return alive and completion(self.server) == self.text

    def call(self, port: Port, content: bytes) -> bytes:
        """Start a call with a valid certificate and this content, and return the bytes up to its end."""
        received = b""
        with open_tls(port.number, self.certificate) as connection:
            connection.sendall(start_of_call(port.path) + content)
            while b"grpc-status" not in received:
                part = connection.recv(65_536)
                assert part, f"The {port.name} port closed the connection without a word."
                received += part
        return received

    def logs(self) -> dict[str, str]:
        """Return the logs of the first machine by process."""
        return {path.stem: path.read_text() for path in (self.server.folder / "logs").glob("*.log")}


@pytest.fixture(scope="module")
def two_machines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("malformed"), free_pair_of_ports()
    with running_cluster(tiny_model, 2, folder, port, "--strategy", "uniform") as server:
        head = psutil.Process(server.process.pid)
        (agent,) = head_members(folder)
        (worker,) = [child for child in agent.children() if "mlx_ring.worker" in command_of(child)]
        (_, control), (_, probes) = listening_addresses(agent)
        (_, data), *_ = listening_addresses(worker)
        ports = (
            Port("cluster", port, ATTEND.path, head),
            Port("agent", control, HAVE.path, agent),
            Port("probes", probes, PROBE.path, agent),
            Port("link", data, LINK.path, worker),
            Port("steps", data, STEPS.path, worker),
        )
        yield Cluster(server, node_folder(folder / "node-1" / "state"), ports, completion(server))
        assert server.stop() == 0


def test_noise_without_tls_ends_the_connection(two_machines: Cluster) -> None:
    for port in two_machines.ports:
        with open_plain(port.number) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(noise(3000))
            read_until_closed(connection)
    assert two_machines.is_unharmed()


def test_connection_without_a_certificate_is_refused(two_machines: Cluster) -> None:
    for port in two_machines.ports:
        with contextlib.suppress(ConnectionError, ssl.SSLError), open_tls(port.number, None) as connection:
            connection.sendall(start_of_call(port.path))
            assert b"grpc-status" not in read_until_closed(connection)
    assert two_machines.is_unharmed()
    logs = two_machines.logs()
    assert all("Refused a connection: it showed no certificate" in logs[name] for name in ("head", "agent"))


def test_noise_of_a_member_ends_its_connection(two_machines: Cluster) -> None:
    for port in two_machines.ports:
        with open_tls(port.number, two_machines.certificate) as connection:
            connection.sendall(noise(3000))
            read_until_closed(connection)
    assert two_machines.is_unharmed()


def test_call_with_noise_as_its_message_is_ended_alone(two_machines: Cluster) -> None:
    for port in two_machines.ports:
        assert b"grpc-status" in two_machines.call(port, message(noise(1000)))
    assert two_machines.is_unharmed()
    logs = two_machines.logs()
    assert "Refused a link from 127.0.0.1" in logs["worker-0-0"]
    assert "Refused a call of /mlx_ring.Worker/Steps" in logs["worker-0-0"]
    assert "Ended a probe from 127.0.0.1" in logs["agent"]
    assert "cannot be parsed" in logs["head"]


def test_incomplete_message_does_not_affect_the_cluster(two_machines: Cluster) -> None:
    for port in two_machines.ports:
        with open_tls(port.number, two_machines.certificate) as connection:
            connection.sendall(start_of_call(port.path) + message(noise(100), announced=1000))
            # The port answers the settings of HTTP/2, so it has read this far.
            assert connection.recv(1)
    assert two_machines.is_unharmed()


def test_message_of_two_gigabytes_is_refused_when_it_is_announced(two_machines: Cluster) -> None:
    before = [port.process.memory_info().rss for port in two_machines.ports]
    for port in two_machines.ports:
        received = two_machines.call(port, message(noise(60_000), announced=TWO_GB))
        assert b"Received message larger than max" in received or b"only the head may" in received
    assert two_machines.is_unharmed()
    for port, rss in zip(two_machines.ports, before, strict=True):
        assert port.process.memory_info().rss < rss + SLACK_BYTES


def test_hello_without_or_with_a_wrong_instance_opens_no_link(two_machines: Cluster) -> None:
    link = next(port for port in two_machines.ports if port.name == "link")
    for hello, sentence in (
        (make_hello(), b"named no instance"),
        (make_hello(instance="another"), b"serves"),
    ):
        greeting = encode_frame(Frame(worker_pb2.FrameHeader(hello=hello)))
        assert sentence in two_machines.call(link, message(greeting))
    assert two_machines.is_unharmed()


def test_malformed_input_leaves_no_traceback_in_any_log(two_machines: Cluster) -> None:
    assert not [name for name, text in two_machines.logs().items() if "Traceback" in text]
