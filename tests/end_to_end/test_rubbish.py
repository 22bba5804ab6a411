"""A machine that sends rubbish, half a frame, or says that a frame of two gigabytes follows: refused, and nobody else is harmed."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.test_cluster import cluster, completion, head_members
from tests.machines import free_pair_of_ports
from tests.malformed_input import message, noise, open_plain, open_tls, read_until_closed, start_of_call
from tests.processes import Server

from mlx_ring.core.cluster_folders import node_folder
from mlx_ring.rpc.frames import Frame, encode_frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_probe import PROBE
from mlx_ring.rpc.methods import ATTEND, HAVE, LINK, STEPS
from mlx_ring.rpc.protos import worker_pb2

TWO_GB = (1 << 31) - 1
SLACK_BYTES = 256 << 20
"""That a process may grow meanwhile; a message of two gigabytes would be more."""


@dataclass(frozen=True, slots=True)
class Port:
    """One that other machines reach, and a method that a node may call there."""

    what: str
    number: int
    path: str
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Serving:
    """A cluster of two machines."""

    server: Server
    certificate: Path
    """Of the second, with which it attacks."""
    ports: tuple[Port, ...]
    text: str

    def is_unharmed(self) -> bool:
        """Whether the same processes give the same answer."""
        alive = all(port.process.is_running() for port in self.ports)
        return alive and completion(self.server) == self.text

    def attack(self, port: Port, content: bytes) -> bytes:
        """Begin a call with a good certificate and this content; what is said until the call is ended."""
        heard = b""
        with open_tls(port.number, self.certificate) as connection:
            connection.sendall(start_of_call(port.path) + content)
            while b"grpc-status" not in heard:
                part = connection.recv(65_536)
                assert part, f"The {port.what} port closed the connection without a word."
                heard += part
        return heard

    def logged(self) -> dict[str, str]:
        """What the processes of the first machine have logged, by process."""
        return {path.stem: path.read_text() for path in (self.server.folder / "logs").glob("*.log")}


@pytest.fixture(scope="module")
def serving_two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder, port = tmp_path_factory.mktemp("rubbish"), free_pair_of_ports()
    with cluster(tiny_model, 2, folder, port, "--strategy", "uniform") as server:
        head = psutil.Process(server.process.pid)
        (agent,) = head_members(folder)
        (worker,) = [child for child in agent.children() if "mlx_ring.worker" in child.cmdline()]
        control, probes = listened(agent)
        ports = (
            Port("cluster", port, ATTEND.path, head),
            Port("agent", control, HAVE.path, agent),
            Port("probes", probes, PROBE.path, agent),
            Port("link", listened(worker)[0], LINK.path, worker),
            Port("steps", listened(worker)[0], STEPS.path, worker),
        )
        yield Serving(server, node_folder(folder / "node-1" / "state"), ports, completion(server))
        assert server.stop() == 0


def listened(process: psutil.Process) -> list[int]:
    """The ports for other machines, in the order in which they were opened."""
    found = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return [one.laddr.port for one in sorted(found, key=lambda one: one.fd)]


def test_noise_without_tls_ends_the_connection(serving_two: Serving) -> None:
    for port in serving_two.ports:
        with open_plain(port.number) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(noise(3000))
            read_until_closed(connection)
    assert serving_two.is_unharmed()


def test_a_stranger_without_a_certificate_is_cut_off(serving_two: Serving) -> None:
    for port in serving_two.ports:
        with contextlib.suppress(ConnectionError, ssl.SSLError), open_tls(port.number, None) as connection:
            connection.sendall(start_of_call(port.path))
            assert b"grpc-status" not in read_until_closed(connection)
    assert serving_two.is_unharmed()
    logged = serving_two.logged()
    assert all("refused a connection: it showed no certificate" in logged[name] for name in ("head", "agent"))


def test_noise_of_a_member_ends_its_connection(serving_two: Serving) -> None:
    for port in serving_two.ports:
        with open_tls(port.number, serving_two.certificate) as connection:
            connection.sendall(noise(3000))
            read_until_closed(connection)
    assert serving_two.is_unharmed()


def test_a_call_whose_message_is_noise_is_ended_alone(serving_two: Serving) -> None:
    for port in serving_two.ports:
        assert b"grpc-status" in serving_two.attack(port, message(noise(1000)))
    assert serving_two.is_unharmed()
    logged = serving_two.logged()
    assert "refused a link from 127.0.0.1" in logged["worker-0-0"]
    assert "refused a call of /mlx_ring.Worker/Steps" in logged["worker-0-0"]
    assert "ended a probe from 127.0.0.1" in logged["agent"]
    assert "cannot be parsed" in logged["head"]


def test_half_a_message_and_then_nothing_harms_nobody(serving_two: Serving) -> None:
    for port in serving_two.ports:
        with open_tls(port.number, serving_two.certificate) as connection:
            connection.sendall(start_of_call(port.path) + message(noise(100), announced=1000))
            # The answer to the greeting of HTTP/2: it has been read so far.
            assert connection.recv(1)
    assert serving_two.is_unharmed()


def test_a_message_of_two_gigabytes_is_refused_when_it_is_announced(serving_two: Serving) -> None:
    before = [port.process.memory_info().rss for port in serving_two.ports]
    for port in serving_two.ports:
        heard = serving_two.attack(port, message(noise(60_000), announced=TWO_GB))
        assert b"Received message larger than max" in heard or b"only the head may" in heard
    assert serving_two.is_unharmed()
    for port, rss in zip(serving_two.ports, before, strict=True):
        assert port.process.memory_info().rss < rss + SLACK_BYTES


def test_a_member_that_greets_as_nobody_or_as_another_opens_no_link(serving_two: Serving) -> None:
    link = next(port for port in serving_two.ports if port.what == "link")
    for hello, sentence in (
        (make_hello(), b"named no instance"),
        (make_hello(instance="another"), b"serves"),
    ):
        greeting = encode_frame(Frame(worker_pb2.FrameHeader(hello=hello)))
        assert sentence in serving_two.attack(link, message(greeting))
    assert serving_two.is_unharmed()


def test_whatever_came_each_log_has_lines_and_no_stack(serving_two: Serving) -> None:
    assert not [name for name, text in serving_two.logged().items() if "Traceback" in text]
