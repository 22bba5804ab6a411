"""Clients that stall, disconnect or send invalid HTTP: the server serves others, and answers with an error if it can."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
from collections.abc import Generator, Iterator

import httpx
import pytest
from tests.api.clients import serving
from tests.api.test_streaming import ENDLESS, open_requests
from tests.api.twins import TwinService
from tests.certificates import write_certificate
from tests.default_settings import make_api_settings
from tests.eventually import eventually

from mlx_ring.head.uvicorn_connection import ConnectionLimits

WAIT_S = 20.0
BRIEF = ConnectionLimits(stall_s=0.3)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@contextlib.contextmanager
def connected(url: str, source: str = "127.0.0.1") -> Generator[socket.socket]:
    address = httpx.URL(url)
    with socket.create_connection(
        (address.host, address.port or 0), WAIT_S, source_address=(source, 0)
    ) as connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """Return the bytes that arrive until the server ends the connection."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def status_and_code(answer: bytes) -> tuple[int, str]:
    """Return the status and the code of an error in OpenAI's format."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"x-request-id: req_" in head.lower()
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


@pytest.fixture(scope="module")
def impatient() -> Iterator[str]:
    """Run a server with short time limits, and yield its URL."""
    with serving(TwinService(), make_api_settings(client_timeout_s=0.3), limits=BRIEF) as url:
        yield url


def test_connection_without_a_request_is_closed(impatient: str) -> None:
    with connected(impatient) as connection:
        assert read_to_end(connection) == b""


@pytest.mark.parametrize("before", [b"", b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_incomplete_request_head_is_408(impatient: str, before: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(before + b"GET /health HTTP/1.1\r\nx-slow: ")
        answers = read_to_end(connection)
    assert answers.startswith(b"HTTP/1.1 200") == bool(before)
    assert status_and_code(answers[answers.rindex(b"HTTP/1.1") :]) == (408, "request_timeout")


@pytest.mark.parametrize(
    "framing", [b"content-length: 999\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_incomplete_body_is_408(impatient: str, framing: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(HEAD + framing)
        assert status_and_code(read_to_end(connection)) == (408, "body_timeout")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (HEAD + b"content-length: -1\r\n\r\n", 400, "bad_request"),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}", 400, "bad_request"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "bad_request"),
        (
            HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            400,
            "bad_request",
        ),
        (b"GET / HTTP/1.1\r\nx-long: " + b"x" * 100_000, 431, "headers_too_large"),
        (HEAD + b"connection: close\r\nx-long: " + b"x" * 16_384 + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_invalid_http_is_refused_with_status_and_code(
    impatient: str, sent: bytes, status: int, code: str
) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        assert status_and_code(read_to_end(connection)) == (status, code)


def test_sending_most_of_a_body_at_once_extends_no_time_limit(impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(HEAD + b"content-length: 2000000\r\n\r\n" + b"x" * 1_999_999)
        assert status_and_code(read_to_end(connection)) == (408, "body_timeout")


def test_connection_is_usable_after_head_of_an_endless_stream() -> None:
    with serving(TwinService()) as url, connected(url) as connection:
        for path in (b"/cluster/events", b"/health/live"):
            connection.sendall(b"HEAD %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_connection_serves_consecutive_requests_and_ends_when_idle() -> None:
    with serving(TwinService(), limits=ConnectionLimits(idle_s=0.3)) as url, connected(url) as connection:
        for _ in range(3):
            connection.sendall(b"HEAD /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert read_to_end(connection) == b""


@pytest.mark.slow
def test_answer_that_is_not_read_is_aborted_and_others_are_served() -> None:
    service = TwinService(context=10**9)
    body = json.dumps(ENDLESS).encode()
    with serving(service, limits=BRIEF) as url, connected(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        eventually(lambda: open_requests(service) == 1)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        eventually(lambda: open_requests(service) == 0)
        assert service.engine.stats().finished["abort"] == 1


def test_longest_idle_connection_ends_over_the_limit() -> None:
    live = b"HEAD /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        serving(TwinService(), limits=ConnectionLimits(connections=2)) as url,
        connected(url) as first,
        connected(url) as second,
    ):
        for each in (first, second):
            each.sendall(live)
            assert each.recv(65536).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"{url}/health/live").status_code == 200
        assert read_to_end(first) == b""
        second.sendall(live)
        assert second.recv(65536).startswith(b"HTTP/1.1 200")


def test_503_with_retry_after_when_all_connections_are_busy() -> None:
    service = TwinService(automatic=False)
    with (
        serving(service, limits=ConnectionLimits(connections=1)) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS),
    ):
        refusal = httpx.get(f"{url}/health/live")
        assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "5")
        assert refusal.json()["error"]["code"] == "too_many_connections"
        other = httpx.post(f"{url}/v1/messages", json={})
        assert other.json()["error"]["type"] == "overloaded_error"
        assert other.json()["request_id"] == other.headers["x-request-id"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_busy_connection_of_the_address_with_most_is_shed_for_another_address() -> None:
    live = b"HEAD /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with (
        serving(TwinService(automatic=False), limits=ConnectionLimits(connections=3)) as url,
        contextlib.ExitStack() as opened,
    ):
        greedy = [opened.enter_context(connected(url)) for _ in range(3)]
        for each in greedy:
            each.sendall(HEAD + b"content-length: 99\r\nexpect: 100-continue\r\n\r\n")
            assert each.recv(65536).startswith(b"HTTP/1.1 100")
        other = opened.enter_context(connected(url, "127.0.0.2"))
        other.sendall(live)
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        answer = read_to_end(greedy[2])
        assert status_and_code(answer) == (503, "too_many_connections")
        assert b"retry-after: 5" in answer
        for each in greedy[:2]:
            each.sendall(b"x")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client that trusts it."""
    certificate, key = write_certificate(tmp_path_factory.mktemp("tls"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


def test_connection_without_a_tls_handshake_is_closed_and_one_with_is_served(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, trusting = tls
    limits = ConnectionLimits(handshake_s=0.3)
    with serving(TwinService(), limits=limits, tls=server) as url, connected(url) as silent:
        assert read_to_end(silent) == b""
        with connected(url) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in read_to_end(plain)
        with httpx.Client(verify=trusting) as client:
            for _ in range(2):
                assert client.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_stalled_handshakes_count_as_connections_and_are_shed(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    server, trusting = tls
    with (
        serving(TwinService(), limits=ConnectionLimits(connections=3), tls=server) as url,
        contextlib.ExitStack() as opened,
    ):
        stalled = [opened.enter_context(connected(url)) for _ in range(5)]
        assert [read_to_end(each) for each in stalled[:2]] == [b"", b""]
        assert httpx.get(f"{url}/health/live", verify=trusting).status_code == 200
        assert read_to_end(stalled[2]) == b""
