"""`mlx-ring heads`: list the heads that announce themselves on this LAN."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.head_announcement import LISTEN_S, FoundHead

_LONGEST_S = 300.0
_TABLE_WIDTH = 300
NONE_FOUND = """No head was found on this LAN. Check that
  - `mlx-ring serve MODEL --nodes N` runs on the head's machine, and both are on the same network
  - no firewall on either machine blocks mDNS (UDP port 5353)
  - the network carries multicast: guest networks, some Wi-Fi access points, VPNs and containers do not
An address always works: mlx-ring join HEAD --token TOKEN"""


def heads(
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to listen.")] = LISTEN_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the heads that this machine could join. Exit code 1 where there is none."""
    if not 0 < timeout <= _LONGEST_S:
        raise ConfigError(f"--timeout is {timeout:g}; it must be a number above 0, at most {_LONGEST_S:g}.")
    from mlx_ring.agent.discovery import find_heads  # the other commands do without zeroconf

    found = find_heads(timeout)
    if as_json:
        print(json.dumps([head.as_json() for head in found], indent=1))
    elif found:
        show_heads(found)
    if not found:
        print(NONE_FOUND, file=sys.stderr)
        raise typer.Exit(1)


def show_heads(found: Sequence[FoundHead]) -> None:
    """The table, an address a line; what is in it came from strangers."""
    table = Table("cluster", "machine", "mlx-ring", "authority", "address", box=None, pad_edge=False)
    for head in found:
        told = head.announcement
        first, *more = map(str, head.joinable or ("none that can be reached",))
        table.add_row(*map(escape, (told.cluster, told.node, told.version, told.authority, first)))
        for address in more:
            table.add_row("", "", "", "", escape(address))
    # Wide enough for all that a record may hold: an address that is cut is none.
    Console(width=_TABLE_WIDTH, soft_wrap=True, highlight=False).print(table)
