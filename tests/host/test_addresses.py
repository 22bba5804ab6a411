"""Address of a head as a user types it."""

from __future__ import annotations

import socket
import sys

import psutil
import pytest
from tests.eventually import eventually
from tests.namespaces import lan, skip_without_namespaces

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import (
    HeadAddress,
    bare_host,
    is_link_local,
    listening_sockets,
    listening_url,
    local_url,
    parse_head_address,
    plain_url,
    scoped_host,
)
from mlx_ring.host.machine import listen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mini.local", HeadAddress("mini.local", 50051)),
        ("192.168.1.7:6000", HeadAddress("192.168.1.7", 6000)),
        (" mini:6000 ", HeadAddress("mini", 6000)),
        ("fe80::1", HeadAddress("fe80::1", 50051)),
        ("[fe80::1%en0]:6000", HeadAddress("fe80::1%en0", 6000)),
        ("[::1]", HeadAddress("::1", 50051)),
        ("[fe80::1%25en0]:6000", HeadAddress("fe80::1%en0", 6000)),
        ("fe80::1%25en0", HeadAddress("fe80::1%en0", 50051)),
        ("fe80::1%25", HeadAddress("fe80::1%25", 50051)),
        ("[fe80::1%254]:6000", HeadAddress("fe80::1%254", 6000)),
    ],
)
def test_host_names_and_ipv4_and_ipv6_addresses_are_parsed(text: str, expected: HeadAddress) -> None:
    assert parse_head_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "mini:",
        "mini:0",
        "mini:65535",
        "mini:http",
        "[::1",
        "a:b:c",
        "a..b",
        "x" * 64,
        "me@mini",
        "a/b",
        "a\x1bb",
    ],
)
def test_an_invalid_address_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_head_address(text)
    assert str(caught.value).startswith(f"{text!r} is no address of a head")


def test_the_enrolment_port_is_the_next_one() -> None:
    assert parse_head_address("mini:6000").enrolment == "mini:6001"
    assert parse_head_address("::1").enrolment == "[::1]:50052"


def test_urls_have_an_encoded_scope_and_requests_a_plain_one() -> None:
    url = local_url("fe80::1", 8100, scope="en0")
    assert url == "http://[fe80::1%25en0]:8100"
    assert plain_url(f"{url}/v1/models?a=%25b") == "http://[fe80::1%en0]:8100/v1/models?a=%25b"
    for other in ("http://[fe80::1%en0]:8100/%25", "http://mini.local:8100/%25a", "http://[::1]:8100"):
        assert plain_url(other) == other


@pytest.mark.parametrize("text", ["fe80::1%en0", "[fe80::1%en0]", "[fe80::1%25en0]", " fe80::1%25en0"])
def test_a_host_may_have_brackets_and_an_encoded_scope(text: str) -> None:
    assert bare_host(text) == "fe80::1%en0"
    assert is_link_local(text)


def test_a_link_local_address_without_an_interface_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        listen("fe80::1", 0)
    assert str(caught.value) == (
        "--host is fe80::1, a link-local address, which needs one of this machine's interfaces: fe80::1%en0, for example."
    )


@pytest.mark.parametrize("scope", ["nowhere7", "4000000", f"{2**80}"])
def test_an_interface_that_this_machine_does_not_have_is_refused_with_those_that_it_has(scope: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scoped_host(f"[fe80::1%{scope}]", "--host")
    assert str(caught.value).startswith(
        f"--host is [fe80::1%{scope}], but this machine has no interface {scope}: it has "
    )
    index, name = socket.if_nameindex()[0]
    assert f" {name}" in str(caught.value)
    for own in (name, str(index)):
        assert scoped_host(f"fe80::1%{own}", "--host") == f"fe80::1%{own}"


@pytest.mark.parametrize("text", ["::1", "fd00::1", "169.254.0.1", "mini.local", ""])
def test_other_hosts_need_no_interface(text: str) -> None:
    assert not is_link_local(text)


def test_a_server_listens_on_a_link_local_address_and_says_with_which_scope() -> None:
    skip_without_namespaces()

    def local_addresses() -> list[str]:
        return [each.address for each in psutil.net_if_addrs()["eth0"] if each.address.startswith("fe80")]

    def serve() -> tuple[str, str]:
        own, *_ = eventually(local_addresses)  # the system gives it when the cable is plugged in
        with listen(f"[{own.replace('%', '%25')}]", 0) as server:
            port = server.getsockname()[1]
            with socket.create_connection((own, port), timeout=30):
                return listening_url(server, "http"), f"http://[{own.replace('%', '%25')}]:{port}"

    with lan(1) as (host,), host.threads() as threads:
        url, expected = threads.submit(serve).result()
    assert url == expected
    assert "%25eth0]" in url


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_socket_for_every_address_is_for_both_families_where_there_are_both(
    monkeypatch: pytest.MonkeyPatch, *, has_ipv6: bool
) -> None:
    both = has_ipv6 and socket.has_dualstack_ipv6()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: both)
    (listening,) = listening_sockets("[::]:0", 2)
    with listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1")[: 1 + both]:
            socket.create_connection((host, port), 60).close()


def test_a_socket_for_one_address_is_for_that_alone() -> None:
    (listening,) = listening_sockets("127.0.0.1:0", 1)
    with listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening_sockets(f"127.0.0.1:{port}", 1)


def test_a_name_is_for_all_addresses_that_this_machine_has_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    other = "127.0.0.2" if sys.platform == "linux" else "::1"
    hosts = ["127.0.0.1", "192.0.2.1", "127.0.0.1", other]

    def found(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        assert host == "mini.local"
        return [each for one in hosts for each in real(one, port, **options)]  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    sockets = listening_sockets("mini.local:0", 1)
    try:
        port = sockets[0].getsockname()[1]
        assert [each.getsockname()[:2] for each in sockets] == [("127.0.0.1", port), (other, port)]
        hosts[:] = ["192.0.2.1"]
        with pytest.raises(OSError, match="assign"):
            listening_sockets("mini.local:0", 1)
    finally:
        for each in sockets:
            each.close()
