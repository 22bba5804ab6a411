"""`mlx-ring node`: the machines of the cluster. Works while the head runs, and while it does not.

`mlx-ring token`: the texts that let machines join. Works while the head runs, and while it does not.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.core.cluster_folders import authority_folder
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import state_folder
from mlx_ring.settings.settings_sources import load_settings

token_app = typer.Typer(help="Join tokens: what lets other machines into the cluster.", no_args_is_help=True)

STATE_DIR = typer.Option(
    "--state-dir", metavar="DIR", help="The head's state folder, where it is not the usual one."
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 365 * 86400
_MOST_USES = 1024


def cluster_folder(state_dir: str | None) -> Path:
    """Where the cluster's authority, tokens and members lie."""
    return authority_folder(state_folder(load_settings({"state_dir": state_dir})))


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="What to call it in the list.", metavar="NAME")] = "",
    expires: Annotated[str, typer.Option(help="How long it works: 30m, 24h, 7d.", metavar="TIME")] = "24h",
    uses: Annotated[
        str | None, typer.Option(help="How many machines it lets in; any number otherwise.", metavar="N")
    ] = None,
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Print a new join token. It is shown this once; the head keeps only a hash of its secret."""
    life_s, most = _duration_s(expires), _uses(uses)
    folder = cluster_folder(state_dir)
    from mlx_ring.cluster.security.authority import Authority  # gRPC, for one command
    from mlx_ring.cluster.security.tokens import TokenStore

    fingerprint = Authority.open(folder).fingerprint
    token = TokenStore(folder).create(fingerprint, name=name, life_s=life_s, uses=most)
    print(token)
    typer.echo("On the machine that is to join: mlx-ring join HEAD --token TOKEN", err=True)


@token_app.command("list")
def list_tokens(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the tokens, without their secrets."""
    from mlx_ring.cluster.security.tokens import TokenStore  # the program's start is for all commands

    now_s = time.time()
    table = Table("id", "name", "state", "expires", box=None, pad_edge=False)
    for title in ("used", "left"):
        table.add_column(title, justify="right")
    for record in TokenStore(cluster_folder(state_dir)).list():
        left = "any" if record.uses_left is None else str(record.uses_left)
        moment = local_time(record.expires_s)
        table.add_row(record.id, record.name, record.state(now_s), moment, str(record.uses), left)
    Console(soft_wrap=True).print(table)


@token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Its id or name, from the list.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Make a token useless. Machines that have joined with it stay members."""
    from mlx_ring.cluster.security.tokens import TokenStore  # the program's start is for all commands

    record = TokenStore(cluster_folder(state_dir)).revoke(token)
    print(f"Token {record.id} opens nothing any more.")


def local_time(moment_s: float) -> str:
    """A moment in this machine's time zone, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment_s))


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"(\d{1,8})\s*([smhd])", text.strip().lower())
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise ConfigError(f"--expires is {text}; it must be a time from 1s to 365d, such as 30m, 24h or 7d.")
    return seconds


def _uses(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MOST_USES:
        raise ConfigError(f"--uses is {text}; it must be a whole number from 1 to {_MOST_USES}.")
    return int(text)


node_app = typer.Typer(help="The machines of the cluster.", no_args_is_help=True)


@node_app.command("list")
def list_nodes(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the nodes that have joined, until when their certificates hold, and who is left out of plans for a while."""
    from mlx_ring.cluster.quarantine import QuarantineList  # brings pydantic's models in
    from mlx_ring.cluster.security.members import Members

    folder = cluster_folder(state_dir)
    left_out = QuarantineList(folder).held()
    table = Table("node", "joined", "certificate until", "left out until", box=None, pad_edge=False)
    for node, member in sorted(Members(folder).list().items()):
        ends = max((held.expires_s for held in member.certificates), default=0.0)
        until = local_time(left_out[node].until_s) if node in left_out else ""
        table.add_row(node, local_time(member.joined_s), local_time(ends), until)
    Console(soft_wrap=True).print(table)


@node_app.command("remove")
def remove_node(
    node: Annotated[str, typer.Argument(help="Its id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Refuse a node from now on: its certificate opens nothing any more."""
    from mlx_ring.cluster.security.members import Members  # brings pydantic's models in

    Members(cluster_folder(state_dir)).remove(node)
    print(f"{node} is no node of this cluster any more. It needs a new token to join again.")


@node_app.command("readmit")
def readmit_node(
    node: Annotated[str, typer.Argument(help="Its id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Use a node again, from the next plan on, that is left out because it has failed again and again."""
    from mlx_ring.cluster.quarantine import QuarantineList  # brings pydantic's models in

    QuarantineList(cluster_folder(state_dir)).readmit(node)
    print(f"{node} counts as any other node again.")
