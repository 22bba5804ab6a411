"""Reports of a failed handshake: an error for the client, a log line on the server."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import IO

import grpc
import pytest
from tests.machines import node_credentials
from tests.processes import clean_environment

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused
from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.failures import channel_error
from mlx_ring.rpc.methods import STOP
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.credentials import Anchor
from mlx_ring.rpc.tls.handshakes import handshake_error, loggable_line, refused_handshake
from mlx_ring.rpc.tls.peers import HEAD_NAME

SERVER = """
import sys, os
from pathlib import Path
from mlx_ring.core.environment import enable_grpc_logs, quieten_grpc
quieten_grpc()
enable_grpc_logs()
from mlx_ring.core.logs import configure_logging
from mlx_ring.rpc.tls.handshakes import log_refused_handshakes
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.rpc.channels import add_secure_port, make_server
configure_logging(process="head", node="here", rank=None, level="info", log_dir=None)
log_refused_handshakes()
server = make_server(1)
port = add_secure_port(server, "127.0.0.1:0", Authority.open(Path(sys.argv[1])).head_credentials().for_server())
server.start()
os.write(2, b"somebody else's line\\n")
print(port, flush=True)
sys.stdin.read()
server.stop(None)
"""


def _find_line(lines: IO[str], pattern: str) -> str:
    """Return the next line that matches; fail if a line before it has gRPC's own format."""
    for line in lines:
        assert not re.match(r"[IWE]\d{4} ", line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"The server ended without the line {pattern!r}.")


def test_a_server_logs_each_refused_connection_with_the_reason(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "ours")
    foreign = node_credentials(Authority.open(tmp_path / "theirs"), "mini-1")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "ours")],
        env=clean_environment() | {"GRPC_VERBOSITY": "NONE"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdin, process.stdout, process.stderr:
        port = int(process.stdout.readline())
        _find_line(process.stderr, r"^somebody else's line$")
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            _find_line(process.stderr, "WARNING node=here .*Refused a connection: it .*HTTP")
        with open_channel(f"127.0.0.1:{port}", Anchor(authority.pem), HEAD_NAME) as channel:
            with pytest.raises(grpc.RpcError):
                STOP.unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
            _find_line(process.stderr, "WARNING node=here .*Refused a connection: it showed no certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        foreign.save(tmp_path / "stranger")
        context.load_cert_chain(tmp_path / "stranger" / "certificate.pem", tmp_path / "stranger" / "key.pem")
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            contextlib.suppress(OSError),
            context.wrap_socket(plain) as connection,
        ):
            # An alert, a reset or the end, whichever comes first.
            connection.recv(1)
        _find_line(
            process.stderr, "WARNING node=here .*Refused a connection: its certificate belongs to another"
        )
        process.stdin.close()
        process.wait(30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE: x", "Refused a connection: it showed no certificate"),
        ("WRONG_VERSION_NUMBER: x", "Refused a connection: it did not speak TLS"),
        ("SOMETHING_NEW", "Refused a connection: SOMETHING_NEW"),
    ],
)
def test_a_handshake_error_of_grpc_becomes_a_sentence(text: str, message: str) -> None:
    line = f"I1121 13:17:08.055926 4454 ssl_transport_security.cc:2563] Handshake failed with error {text}"
    assert refused_handshake(line) == message


def test_other_lines_report_no_refused_handshake() -> None:
    assert refused_handshake("I1121 13:17:08.055926 4454 server.cc:1] started") == ""
    assert refused_handshake("Handshake failed with error is what a user may write too") == ""


def test_grpc_log_lines_are_left_out_of_a_workers_log() -> None:
    line = "I1121 13:17:08.055926 4454 ssl_transport_security.cc:2563] Handshake failed with error HTTP_REQUEST: x"
    assert loggable_line(line) == "Refused a connection: it spoke plain HTTP"
    assert loggable_line("I1121 13:17:08.055926 4454 server.cc:1] started") == ""
    assert loggable_line("Fatal Python error: Aborted") == "Fatal Python error: Aborted"


def test_other_errors_are_no_handshake_errors() -> None:
    assert handshake_error(TimeoutError("slow"), "The peer") is None
    assert handshake_error(ConnectionRefusedError("nobody"), "The peer") is None
    with open_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as caught:
        STOP.unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
    assert handshake_error(caught.value, "The peer") is None


def test_a_connection_closed_after_its_handshake_is_no_handshake_error() -> None:
    # The error of a stream whose server was killed.
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
    assert handshake_error(error, "The peer") is None


@pytest.mark.parametrize(
    "said", ["Socket closed", "recvmsg:Connection reset by peer", "Handshake read failed"]
)
def test_a_connection_closed_in_its_handshake_is_lost_and_not_refused(said: str) -> None:
    # The errors of a head that is frozen and then killed, and of one that does not accept a certificate, are the same.
    nothing = grpc.aio.Metadata()
    text = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:50051: {said}"
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, text)
    assert handshake_error(error, "The peer") is None
    assert "closed the connection during the handshake" in str(channel_error(error, "The peer"))


def test_an_ssl_error_is_explained() -> None:
    error = ssl.SSLCertVerificationError("certificate verify failed: Hostname mismatch")
    mapped = handshake_error(error, "mini-1")
    assert isinstance(mapped, PeerRefused)
    assert str(mapped) == "There is no trusted connection to mini-1: its certificate is for another name."
