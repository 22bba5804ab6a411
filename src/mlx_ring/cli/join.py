"""`mlx-ring join`: make this machine a node of a cluster. `mlx-ring heads`: list the clusters that it can join."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlx_ring.cli import table_console
from mlx_ring.cli.flags import with_settings
from mlx_ring.core.environment import enable_grpc_logs, quieten_grpc, restart_without, take_variable
from mlx_ring.core.errors import ConfigError, HandshakeFailed, PeerRefused
from mlx_ring.core.folders import node_folder, state_folder
from mlx_ring.host.addresses import HeadAddress, parse_head_address, scoped_host
from mlx_ring.host.head_announcement import LISTEN_S, FoundHead, HeadPlace
from mlx_ring.host.machine import share_cores
from mlx_ring.host.private_files import read_private, write_private
from mlx_ring.host.process import unblocked_output
from mlx_ring.settings.config import Settings
from mlx_ring.settings.process_settings import MemberSettings, names_of, select_settings
from mlx_ring.settings.settings_sources import load_settings

log = logging.getLogger(__name__)

_HEAD_FILE = "head"
TOKEN_VARIABLE = "MLX_RING_JOIN_TOKEN"  # noqa: S105 - a name, not a secret
"""Variable for a join token, which does not appear in a list of processes as a flag does."""
_GIVEN = "MLX_RING_GIVEN_JOIN_TOKEN"
"""The same for the token of a flag, when this process has started itself again without that."""
_TRY_S = 2.0
_LONGEST_S = 300.0
NONE_FOUND = """No head was found on this LAN. Check that
  - `mlx-ring serve MODEL --nodes N` runs on the head's machine, and both are on the same network
  - no firewall on either machine blocks mDNS (UDP port 5353)
  - the network carries multicast: guest networks, some Wi-Fi access points, VPNs and containers do not
An address always works: mlx-ring join HEAD --token TOKEN"""


@with_settings(("state_dir", *names_of(MemberSettings)))
def join(
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="HEAD[:PORT]",
            help="Address of the head. By default the last one, or the only one on this LAN.",
        ),
    ] = None,
    *,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Join token that `mlx-ring serve --nodes N` or `token create` prints; needed once. "
            f"{TOKEN_VARIABLE} by default, as long as this machine is no member.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on for the cluster.")
    ] = "[::]",
    flags: dict[str, object],
) -> None:
    """Join a cluster and compute for it until Ctrl-C.

    The first time needs a token. Later this machine joins without one, and rejoins when the head restarts.
    """
    if token is not None:
        restart_without(token, "--token", _GIVEN)
    given, for_first_time = take_variable(_GIVEN), take_variable(TOKEN_VARIABLE)
    token = given or token
    settings = load_settings(flags)
    quieten_grpc()
    enable_grpc_logs()
    # gRPC reads its log level on import, and these modules import it.
    from mlx_ring.agent.enrolment import join as enrol
    from mlx_ring.rpc.tls.credentials import load_credentials
    from mlx_ring.rpc.tls.handshakes import log_refused_handshakes

    log_refused_handshakes()  # and keeps the library's own lines from the terminal
    state = state_folder(settings.state_dir)
    folder = node_folder(state)
    address = _head_address(head, folder)
    if token is None and load_credentials(folder) is None:
        token = for_first_time
        if not token:
            raise ConfigError(
                "This machine is not a member yet: give --token, which `mlx-ring token create` prints on the head."
            )
    place, waits = _place_of(address, folder), False
    if token is not None:
        before = load_credentials(folder)
        is_known = address == _kept_address(folder)
        waits = enrol(str(address), token, folder, is_known=is_known) == before
    try:
        _serve(settings, state, place, listen)
    except PeerRefused as error:
        if token is not None and waits and not (place.has_answered or isinstance(error, HandshakeFailed)):
            # It was removed before, and its head does not know the token yet.
            enrol(str(place.address), token, folder)
            _serve(settings, state, place, listen)
            return
        if token is None and for_first_time:
            raise PeerRefused(
                f"{error} {TOKEN_VARIABLE} is not read by a machine that has joined before: give --token."
            ) from error
        raise


def _head_address(given: str | None, folder: Path) -> HeadAddress:
    """Return the address given, else the last one used, else that of the only head on this LAN."""
    if given is not None:
        address = parse_head_address(given)
        scoped_host(address.host, "The head's address")
        return address
    if (kept := _kept_address(folder)) is not None:
        return kept
    from mlx_ring.cluster.announcement import find_heads  # zeroconf is slow to import

    found = find_heads()
    if not found:
        raise ConfigError(NONE_FOUND)
    if len(found) > 1:
        show_heads(found)
        raise ConfigError(f"{len(found)} heads were found on this LAN: name one of these addresses.")
    return _reachable(found[0])


def _kept_address(folder: Path) -> HeadAddress | None:
    """Return the last address at which the head has answered; None if it never has."""
    kept = read_private(folder / _HEAD_FILE)
    return None if kept is None else parse_head_address(kept.decode().strip())


def _first_answering(addresses: Iterable[HeadAddress]) -> HeadAddress | None:
    """Return the first address that accepts a connection; None if none does."""
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), _TRY_S):
            return address
    return None


def _reachable(head: FoundHead) -> HeadAddress:
    """Return the first address of a head that accepts a connection."""
    if (address := _first_answering(head.joinable)) is not None:
        return address
    show_heads([head])
    raise ConfigError(
        "A head was found on this LAN, but none of its addresses can be reached from this machine."
    )


def _place_of(head: HeadAddress, folder: Path) -> HeadPlace:
    place: HeadPlace = HeadPlace(
        head,
        look=lambda lost: find_again(folder, lost, tuple(place.refused)),
        keep=lambda address: _keep_address(folder, address),
    )
    return place


def _serve(settings: Settings, state: Path, place: HeadPlace, listen: str) -> None:
    from mlx_ring.agent.member import run_member
    from mlx_ring.rpc.tls.peers import open_identity

    with unblocked_output():
        run_member(
            place,
            open_identity(node_folder(state)).node,
            state,
            select_settings(MemberSettings, settings, blas_threads=settings.blas_threads or share_cores(1)),
            listen=listen,
            to_stderr=settings.log_stderr == "on",
        )


def find_again(folder: Path, lost: HeadAddress, refused: Collection[HeadAddress] = ()) -> HeadAddress | None:
    """Return an address, none of the refused ones, of a head that announces the cluster of this machine's certificate.

    None if it answers at the lost one again: another one may be of a slower network.
    """
    from cryptography import x509

    from mlx_ring.cluster.announcement import find_heads  # zeroconf is slow to import
    from mlx_ring.rpc.tls.certificates import fingerprint
    from mlx_ring.rpc.tls.credentials import load_credentials

    kept = load_credentials(folder)
    if kept is None:
        return None
    authority = fingerprint(x509.load_pem_x509_certificate(kept.authority)).hex()
    try:
        heads = [head for head in find_heads() if authority.startswith(head.announcement.authority or "none")]
    except ConfigError:  # no multicast here
        return None
    found = _first_answering(address for head in heads for address in head.joinable if address not in refused)
    return None if found is None or _first_answering([lost]) is not None else found


def _keep_address(folder: Path, head: HeadAddress) -> None:
    """Keep the address of a head that has answered, for later joins without an address."""
    try:
        write_private(folder / _HEAD_FILE, f"{head}\n".encode())
    except (OSError, ConfigError) as error:
        log.warning("The head's address cannot be kept, so the next `mlx-ring join` must name it: %s", error)


def heads(
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time to listen.")] = LISTEN_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the heads on this LAN that this machine can join.

    The exit code is 1 if none is found.
    """
    if not 0 < timeout <= _LONGEST_S:
        raise ConfigError(f"--timeout is {timeout:g}; it must be a number above 0, at most {_LONGEST_S:g}.")
    from mlx_ring.cluster.announcement import find_heads  # zeroconf is slow to import

    found = find_heads(timeout)
    if as_json:
        print(json.dumps([head.as_json() for head in found], indent=1))
    elif found:
        show_heads(found)
    if not found:
        print(NONE_FOUND, file=sys.stderr)
        raise typer.Exit(1)


def show_heads(found: Sequence[FoundHead]) -> None:
    """Print a table with one address per line. Its texts come from the network, so they are no markup."""
    from rich.table import Table  # a machine that joins by an address prints no table

    table = Table("cluster", "machine", "mlx-ring", "authority", "address", box=None, pad_edge=False)
    for head in found:
        announced = head.announcement
        first, *more = map(str, head.joinable or ("none that can be reached",))
        table.add_row(announced.cluster, announced.node, announced.version, announced.authority, first)
        for address in more:
            table.add_row("", "", "", "", address)
    table_console().print(table)
