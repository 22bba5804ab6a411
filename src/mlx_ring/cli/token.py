"""`mlx-ring token`: the texts that let machines join. Works while the head runs, and while it does not."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.core.cluster_folders import authority_folder
from mlx_ring.core.config import state_folder
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.settings_sources import load_settings

app = typer.Typer(help="Join tokens: what lets other machines into the cluster.", no_args_is_help=True)

STATE_DIR = typer.Option(
    "--state-dir", metavar="DIR", help="The head's state folder, where it is not the usual one."
)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 365 * 86400
_MOST_USES = 1024


def cluster_folder(state_dir: str | None) -> Path:
    """Where the cluster's authority, tokens and members lie."""
    return authority_folder(state_folder(load_settings({"state_dir": state_dir})))


@app.command("create")
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
    from mlx_ring.cluster.security.authority import Authority  # noqa: PLC0415 - gRPC, for one command
    from mlx_ring.cluster.security.tokens import TokenStore  # noqa: PLC0415 - as above

    fingerprint = Authority.open(folder).fingerprint
    token = TokenStore(folder).create(fingerprint, name=name, life_s=life_s, uses=most)
    print(token)
    typer.echo("On the machine that is to join: mlx-ring join HEAD --token TOKEN", err=True)


@app.command("list")
def list_tokens(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the tokens, without their secrets."""
    from mlx_ring.cluster.security.tokens import TokenStore  # noqa: PLC0415 - the program's start is for all commands

    now_s = time.time()
    table = Table("id", "name", "state", "expires", box=None, pad_edge=False)
    for title in ("used", "left"):
        table.add_column(title, justify="right")
    for record in TokenStore(cluster_folder(state_dir)).list():
        left = "any" if record.uses_left is None else str(record.uses_left)
        moment = local_time(record.expires_s)
        table.add_row(record.id, record.name, record.state(now_s), moment, str(record.uses), left)
    Console(soft_wrap=True).print(table)


@app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Its id or name, from the list.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Make a token useless. Machines that have joined with it stay members."""
    from mlx_ring.cluster.security.tokens import TokenStore  # noqa: PLC0415 - the program's start is for all commands

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
