"""Diagnosis of the network: addresses, ports, names, the speed of links, and a head with its certificate.

`examine` does all checks of `mlx-ring doctor`, those of the machine alone first, so that a problem comes before its
consequences.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from mlx_ring.agent.enrolment import shown_certificate
from mlx_ring.cli.doctor import Finding
from mlx_ring.cli.doctor.machine_checks import (
    check_address_space,
    check_descriptors,
    check_disk,
    check_energy,
    check_fast_links,
    check_firewall,
    check_installed,
    check_memory,
    check_mlx,
    check_rdma,
    check_state_folder,
    check_wired_limit,
)
from mlx_ring.core.errors import ConfigError, PeerRefused, RingError, VersionMismatch
from mlx_ring.core.folders import node_folder, state_folder
from mlx_ring.host.addresses import CLUSTER_PORT, LOCAL_NETWORK_DENIED, HeadAddress, is_denied_by_macos
from mlx_ring.host.interfaces import LanAddress, lan_addresses
from mlx_ring.host.running import Running, running_here
from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.hello import Greeted, ask_greeting, make_hello
from mlx_ring.rpc.link_probe import LinkMeasure, ProbeBounds, probe_link
from mlx_ring.rpc.protos import hello_pb2
from mlx_ring.rpc.tls.certificates import carried_authority, fingerprint, needs_renewal
from mlx_ring.rpc.tls.credentials import Anchor, load_credentials
from mlx_ring.rpc.tls.peers import HEAD_NAME
from mlx_ring.settings.config import Settings

_CONNECT_S = 3.0
_TRIES = 5
Purpose = Literal["HTTP", "members of the cluster", "machines that join"]
_SLOW_MS = 5.0
"""Slow round trip. A cable takes a tenth of it; every token crosses each link once."""


def check_lan(addresses: Sequence[LanAddress]) -> Finding:
    """Check that this machine has addresses that others could reach."""
    if not addresses:
        fix = "Connect this machine to a network; a single machine needs none."
        return Finding("warning", "network", "no address that others could reach", fix)
    value = ", ".join(f"{one.address} ({one.interface}, {one.kind})" for one in addresses)
    if all(one.kind in ("wireless", "tunnel") for one in addresses):
        return Finding("warning", "network", value, "Use a cable: Wi-Fi and VPNs slow down every token.")
    return Finding("ok", "network", value)


def check_port(port: int, purpose: Purpose, heads: Sequence[Running] = ()) -> Finding:
    """Check that a head can listen on a port, or already does. `heads` are those known to run on this machine."""
    what = f"port {port}"
    error = next(filter(None, (_cannot_listen(family, host, port) for family, host in _PLACES)), None)
    if error is None:
        return Finding("ok", what, f"free for {purpose}")
    if error.errno != errno.EADDRINUSE:
        return Finding("broken", what, str(error.strerror), f"Choose a port above 1023 for {purpose}.")
    known = next((head.pid for head in heads if purpose == "HTTP" and urlsplit(head.url).port == port), None)
    holder = None if known is not None else _holder(port)
    if holder is not None and _is_ours(holder):
        known = holder.pid
    if known is not None:
        return Finding("ok", what, f"mlx-ring listens there already (pid {known})")
    if holder is not None:
        who = f"{holder.name()} (pid {holder.pid})"
        return Finding("broken", what, f"held by {who}", f"End that process, or give {purpose} another port.")
    return _check_hidden(port, purpose)


def _check_hidden(port: int, purpose: Purpose) -> Finding:
    """Check a port whose holder this user cannot see."""
    what = f"port {port}"
    is_head = _answers_as_head(port, purpose)
    if is_head:
        return Finding("ok", what, "mlx-ring listens there already")
    names_it = f"`sudo lsof -nP -iTCP:{port} -sTCP:LISTEN` names it."
    if is_head is None:
        fix = f"{names_it} If it is not mlx-ring, end it, or give {purpose} another port."
        return Finding("note", what, "held by a process that this user cannot see", fix)
    fix = f"{names_it} End it, or give {purpose} another port."
    return Finding("broken", what, "held by a program that is not mlx-ring", fix)


_PLACES = ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def _cannot_listen(family: int, host: str, port: int) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # Ended connections that the system still remembers do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        # A machine without IPv6 has no address to try.
        return error if error.errno in (errno.EADDRINUSE, errno.EACCES) else None
    return None


def _holder(port: int) -> psutil.Process | None:
    """Return the process that listens on a port; None if the operating system hides it."""
    try:
        return next((psutil.Process(pid) for at, pid in _listeners() if at == port and pid), None)
    except psutil.Error:
        return None


def _listeners() -> Iterator[tuple[int, int | None]]:
    """Yield the port and the process of each socket that listens, as far as this user may know them."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS lists them only to root, but tells each user of their own processes
        for process in psutil.process_iter():
            yield from ((port, process.pid) for port in _ports_of(process))
        return
    for each in found:
        if each.status == psutil.CONN_LISTEN and each.laddr:
            yield each.laddr.port, each.pid


def _ports_of(process: psutil.Process) -> list[int]:
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return []
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN and each.laddr]


_HEALTH_FIELDS = frozenset(("status", "world_size", "pipeline", "version"))


def _answers_as_head(port: int, purpose: Purpose) -> bool | None:
    """Return True if a head answers at a port of this machine, False if another program does, None if nothing does."""
    host = "127.0.0.1"
    if purpose == "HTTP":
        plain = _answers_health(f"http://{host}:{port}/health")
        return plain or _answers_health(f"https://{host}:{port}/health") or plain
    try:
        carried_authority(shown_certificate(HeadAddress(host, port - 1)))
    except RingError:
        return None
    return True


def _answers_health(url: str) -> bool | None:
    import httpx  # slow to import, and rarely needed here

    try:
        # It sends nothing secret, and a head's own certificate need not be trusted by this machine.
        answer = httpx.get(url, timeout=_CONNECT_S, verify=False, trust_env=False).json()  # noqa: S501 - see above
    except httpx.HTTPError:
        return None
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.keys() >= _HEALTH_FIELDS


_OUR_PROGRAM = re.compile(r"(^|/)mlx-ring$|^mlx_ring(\.|$)|^from mlx_ring")


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any(_OUR_PROGRAM.search(word) for word in process.cmdline()[:4])
    except psutil.Error:
        return False


def check_name(host: str) -> Finding:
    """Check that a host name resolves to an address."""
    what = f"name {host}"
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Check the spelling, give the address instead, or put the name into /etc/hosts."
        return Finding("broken", what, f"does not resolve ({reason})", fix)
    value = ", ".join(sorted(found))
    if host != "localhost" and all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        fix = f"Other machines cannot reach {value}: give the head's address on the LAN."
        return Finding("note", what, f"{value}, which is this machine itself", fix)
    return Finding("ok", what, value)


def check_round_trip(host: str, port: int) -> Finding:
    """Measure the round trip as the shortest time to open a TCP connection."""
    place = HeadAddress(host, port).cluster
    what = f"way to {place}"
    try:
        milliseconds = min(_connect_ms(host, port) for _ in range(_TRIES))
    except TimeoutError:
        fix = f"Open TCP port {port} in that machine's firewall, and check that it is on and on this network."
        return Finding("broken", what, f"no answer in {_CONNECT_S:g} s", fix)
    except ConnectionRefusedError:
        fix = f"Start mlx-ring there (`mlx-ring serve` or `mlx-ring join`), or check the port {port}."
        return Finding("broken", what, "refused: nothing listens there", fix)
    except OSError as error:
        if is_denied_by_macos(error.errno, host):
            return Finding("broken", what, error.strerror or str(error), f"{LOCAL_NETWORK_DENIED}.")
        fix = "Check the address, and that both machines are on the same network."
        return Finding("broken", what, error.strerror or str(error), fix)
    if milliseconds > _SLOW_MS:
        fix = "Use a cable: Wi-Fi and VPNs slow down every token."
        return Finding("warning", what, f"{milliseconds:.1f} ms", fix)
    return Finding("ok", what, f"{milliseconds:.2f} ms")


def _connect_ms(host: str, port: int) -> float:
    begin = time.perf_counter()
    with closing(socket.create_connection((host, port), timeout=_CONNECT_S)):
        return (time.perf_counter() - begin) * 1000


_BOUNDS = ProbeBounds(largest_bytes=1 << 20)
"""The head takes no messages over 2 MiB."""
_SLOW_BYTES_S, _LONG_TRIP_S = 50e6, 5e-3
_USE_A_CABLE = "Use a cable, gigabit Ethernet or better, between the machines, and stop other traffic."


def check_throughput(head: HeadAddress, folder: Path) -> Finding:
    """Measure the throughput to a head in a second or two; `folder` is this machine's `node_folder`."""
    what = f"throughput to {head}"
    try:
        credentials = load_credentials(folder)
        if credentials is None:
            return Finding("note", what, "not measured: this machine has not joined", _JOIN)
        with open_channel(head.cluster, credentials, HEAD_NAME) as channel:
            measure = probe_link(channel, make_hello(), f"The head at {head}", _BOUNDS)
    except PeerRefused as error:
        return Finding("broken", what, str(error), _JOIN)
    except VersionMismatch as error:
        return Finding("note", what, f"not measured: {error}", "Install the same versions first.")
    except RingError as error:
        fix = f"Check that TCP port {head.port} is open along the whole route, and that the head runs."
        return Finding("broken", what, str(error), fix)
    return judge_link(what, measure)


_JOIN = "Join with a token from `mlx-ring token create` on the head."


def judge_link(what: str, measure: LinkMeasure) -> Finding:
    """Judge a link, which carries kilobytes per token and megabytes per prompt."""
    value = (
        f"{measure.bandwidth / 1e6:,.0f} MB/s ({8e-9 * measure.bandwidth:.2f} Gbit/s), a round trip over TLS of "
        f"{1e3 * measure.round_trip_s:.2f} ms"
    )
    if measure.bandwidth < _SLOW_BYTES_S or measure.round_trip_s > _LONG_TRIP_S:
        return Finding("warning", what, value, _USE_A_CABLE)
    return Finding("ok", what, value)


# ---- a head, and certificates

_CLOCK_WARNING_S, _CLOCK_BROKEN_S = 5.0, 1800.0
"""Limits of the clocks' difference. A new certificate is valid from one hour before its creation."""
_SET_CLOCK = (
    "Set both clocks from the network: `timedatectl set-ntp true`, or Date & Time in a Mac's settings."
)


def check_head(head: HeadAddress, folder: Path) -> list[Finding]:
    """Compare this machine with the head at an address; `folder` is this machine's `node_folder`."""
    what = f"head {head}"
    try:
        leaf = shown_certificate(head)
        authority = carried_authority(leaf)
        known = _check_cluster(what, authority, folder)
        dates = check_dates(f"certificate of {what}", x509.load_der_x509_certificate(leaf), datetime.now(UTC))
        if dates.level == "broken":
            return [
                known,
                dates,
                Finding(
                    "note", "clock", "not compared: the head's certificate is not valid", "Fix that first."
                ),
            ]
        greeted = ask_greeting(head.enrolment, Anchor(authority.public_bytes(Encoding.PEM)))
    except RingError as error:
        return [
            Finding("broken", what, str(error), "Check the address, and that `mlx-ring serve` runs there."),
            Finding("note", "clock", "not compared: the head does not report its time", "Fix that first."),
        ]
    return [known, dates, *check_versions(greeted.hello, make_hello()), check_clock(greeted)]


def _check_cluster(what: str, authority: x509.Certificate, folder: Path) -> Finding:
    """Check that the head belongs to the cluster that this machine has joined."""
    value = f"authority {fingerprint(authority).hex()[:16]}"
    try:
        kept = load_credentials(folder)
    except RingError:
        return Finding("note", what, value)
    if kept is None:
        fix = "To join it: mlx-ring join HEAD --token TOKEN, with a token from `mlx-ring token create` there."
        return Finding("note", what, f"{value}; this machine has not joined it yet", fix)
    if fingerprint(x509.load_pem_x509_certificate(kept.authority)) != fingerprint(authority):
        fix = "Check the address, or join that cluster: mlx-ring join HEAD --token TOKEN."
        return Finding("broken", what, f"{value}, but this machine belongs to another cluster", fix)
    return Finding("ok", what, value)


def check_versions(theirs: hello_pb2.Hello, ours: hello_pb2.Hello) -> list[Finding]:
    """Compare the versions that must be equal on every machine."""
    if theirs.protocol != ours.protocol:
        value = f"{theirs.protocol} on the head, {ours.protocol} here"
        return [Finding("broken", "protocol", value, "Install the same mlx-ring on both.")]
    packages = (("mlx-ring", "mlx_ring"), ("mlx", "mlx"), ("mlx-lm", "mlx_lm"))
    return [_check_version(name, getattr(theirs, field), getattr(ours, field)) for name, field in packages]


def _check_version(package: str, theirs: str, ours: str) -> Finding:
    if theirs == ours:
        return Finding("ok", package, f"{ours} on both")
    fix = f"Install {package} {theirs} here, as on the head, or another on both."
    return Finding("broken", package, f"{theirs} on the head, {ours} here", fix)


def check_clock(greeted: Greeted) -> Finding:
    """Compare both clocks, with the round trip's uncertainty subtracted."""
    apart_s = max(0.0, abs(greeted.skew_s) - greeted.uncertain_s)
    value = f"the head's is {abs(greeted.skew_s):.3f} s {'ahead' if greeted.skew_s > 0 else 'behind'}"
    if apart_s > _CLOCK_WARNING_S:
        return Finding("broken" if apart_s > _CLOCK_BROKEN_S else "warning", "clock", value, _SET_CLOCK)
    return Finding("ok", "clock", value)


def check_own_certificate(folder: Path) -> Sequence[Finding]:
    """Check this machine's certificate, if it has joined a cluster."""
    what = "certificate of this machine"
    try:
        kept = load_credentials(folder)
    except RingError as error:
        return (Finding("broken", what, str(error), f"Remove {folder} and join again with a token."),)
    if kept is None:
        return ()
    return (check_dates(what, x509.load_pem_x509_certificate(kept.certificate), datetime.now(UTC)),)


def check_dates(what: str, certificate: x509.Certificate, now: datetime) -> Finding:
    """Check that a certificate is valid now by this machine's clock."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        value = f"valid only from {begins:%Y-%m-%d %H:%M} UTC on, but this clock shows {now:%Y-%m-%d %H:%M}"
        return Finding("broken", what, value, _SET_CLOCK)
    if now > ends:
        fix = f"Join again with a token from `mlx-ring token create`, or correct this clock, which shows {now:%Y-%m-%d}."
        return Finding("broken", what, f"expired on {ends:%Y-%m-%d}", fix)
    value = f"valid until {ends:%Y-%m-%d}"
    if needs_renewal(certificate, now):
        fix = "Nothing: it is renewed automatically while the head can be reached."
        return Finding("note", what, f"{value}, to be renewed", fix)
    return Finding("ok", what, value)


# ---- all checks


def examine(settings: Settings, head: HeadAddress | None, peers: Sequence[HeadAddress]) -> Iterator[Finding]:
    """Yield the result of each check; some checks take seconds."""
    state = state_folder(settings.state_dir)
    yield check_installed()
    yield from check_mlx()
    yield check_memory()
    yield check_address_space()
    yield from check_wired_limit()
    yield check_energy()
    yield check_descriptors(settings.file_descriptor_limit)
    yield check_state_folder(state)
    yield check_disk(state)
    yield from check_own_certificate(node_folder(state))
    yield from _examine_network(settings.port, _heads(state))
    if head is not None:
        yield from _examine_head(head, node_folder(state))
    for peer in peers:
        yield from _examine_route(peer, (peer.port,))


def _heads(state: Path) -> list[Running]:
    try:
        return [each for each in running_here(state) if each.kind == "head"]
    except ConfigError:
        return []


def _examine_network(http_port: int, heads: Sequence[Running]) -> Iterator[Finding]:
    addresses = lan_addresses()
    yield check_lan(addresses)
    yield check_fast_links(addresses)
    yield from check_rdma()
    if http_port:
        yield check_port(http_port, "HTTP", heads)
    yield check_port(CLUSTER_PORT, "members of the cluster", heads)
    yield check_port(CLUSTER_PORT + 1, "machines that join", heads)
    yield check_firewall((CLUSTER_PORT, CLUSTER_PORT + 1))


def _examine_head(head: HeadAddress, folder: Path) -> Iterator[Finding]:
    findings = list(_examine_route(head, (head.port, head.enrolment_port)))
    yield from findings
    if any(finding.level == "broken" for finding in findings):
        yield Finding(
            "note", f"head {head}", "neither compared nor measured, because it was not reached", _MEND
        )
    else:
        yield from check_head(head, folder)
        yield check_throughput(head, folder)


_MEND = "Fix the connection to it first."


def _examine_route(address: HeadAddress, ports: Sequence[int]) -> Iterator[Finding]:
    name = check_name(address.host)
    yield name
    if name.level != "broken":
        yield from (check_round_trip(address.host, port) for port in ports)
