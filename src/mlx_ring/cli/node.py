"""`mlx-ring node`, `mlx-ring token` and `mlx-ring replan`: machines of the cluster, their join tokens, and their layers.

All but `node drain` and `replan` work on the state folder, so that the head need not run.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mlx_ring.cli import table_console
from mlx_ring.cli.flags import setting_option
from mlx_ring.cli.head_client import API_KEY, CACERT, DEFAULT_URL, URL, ask_head, lasting_heads, names_at
from mlx_ring.core.errors import ConfigError, RequestError, shown_text
from mlx_ring.core.folders import authority_folder, node_folder, state_folder
from mlx_ring.settings.settings_sources import load_settings

token_app = typer.Typer(
    help="Create, list and revoke join tokens, which let machines into the cluster.", no_args_is_help=True
)

STATE_DIR = setting_option("state_dir")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 365 * 86400
_MOST_USES = 1024
_LONGEST_MOVE_S = 3600.0


def cluster_folder(state_dir: str | None) -> Path:
    """Return the folder of the cluster's authority, tokens and members."""
    return authority_folder(state_folder(load_settings({"state_dir": state_dir}).state_dir))


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="Name in the list.", metavar="NAME")] = "",
    expires: Annotated[
        str, typer.Option(help="Time until it expires, such as 30m, 24h or 7d.", metavar="TIME")
    ] = "24h",
    uses: Annotated[
        str | None,
        typer.Option(help="Maximum machines that may join with it; unlimited by default.", metavar="N"),
    ] = None,
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Print a new join token.

    It is shown only once, because the head keeps only a hash of its secret.
    """
    life_s, most = _duration_s(expires), _uses(uses)
    if shown_text(name) != name:
        raise ConfigError(f"--name is {name!r}; it must have up to 60 printable characters.")
    folder = cluster_folder(state_dir)
    from mlx_ring.cluster.security.authority import Authority  # imports gRPC, which is slow
    from mlx_ring.cluster.security.records import TokenStore

    fingerprint = Authority.open(folder).fingerprint
    token = TokenStore(folder).create(fingerprint, name=name, life_s=life_s, uses=most)
    print(token)
    typer.echo("Run on the machine that joins: mlx-ring join HEAD --token TOKEN", err=True)


@token_app.command("list")
def list_tokens(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the join tokens, without their secrets."""
    from mlx_ring.cluster.security.records import TokenStore  # slow to import

    now_s, records = time.time(), TokenStore(cluster_folder(state_dir)).list()
    if not records:
        print("There is no join token. Make one with: mlx-ring token create")
        return
    table = Table("id", "name", "state", "expires", box=None, pad_edge=False)
    for title in ("used", "left"):
        table.add_column(title, justify="right")
    for record in records:
        left = "any" if record.uses_left is None else str(record.uses_left)
        moment = local_time(record.expires_s)
        table.add_row(record.id, record.name, record.state(now_s), moment, str(record.uses), left)
    table_console().print(table)


@token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Id or name, from `mlx-ring token list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Revoke a token. Machines that joined with it stay members."""
    from mlx_ring.cluster.security.records import TokenStore  # slow to import

    record = TokenStore(cluster_folder(state_dir)).revoke(token)
    print(f"Token {record.id} is revoked.")


def local_time(moment_s: float) -> str:
    """Return a time in this machine's time zone, to the minute."""
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


node_app = typer.Typer(help="List, drain, remove and readmit machines of the cluster.", no_args_is_help=True)


@node_app.command("list")
def list_nodes(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the nodes of the cluster, when their certificates expire, and which are quarantined until when."""
    from mlx_ring.cluster.quarantine import QuarantineList  # slow to import
    from mlx_ring.cluster.security.records import Members

    folder = cluster_folder(state_dir)
    left_out, members = QuarantineList(folder).held(), Members(folder).list()
    if not members:
        print("No machine has joined. To let one join, run here: mlx-ring token create")
        return
    table = Table("node", "joined", "certificate until", "excluded until", box=None, pad_edge=False)
    for node, member in sorted(members.items()):
        ends = max((held.expires_s for held in member.certificates), default=0.0)
        until = local_time(left_out[node].until_s) if node in left_out else ""
        table.add_row(node, local_time(member.joined_s), local_time(ends), until)
    table_console().print(table)


@node_app.command("remove")
def remove_node(
    node: Annotated[str, typer.Argument(help="Id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Remove a node from the cluster. Its certificate is refused from now on."""
    from mlx_ring.cluster.security.records import Members, TokenStore  # slow to import
    from mlx_ring.rpc.tls.peers import kept_id

    folder = cluster_folder(state_dir)
    members = Members(folder)
    if node == kept_id(node_folder(folder.parent)) and node in members.list():
        raise ConfigError(
            f"{node} is this machine, which has the head and stays a member. To take its layers away, run "
            f"`mlx-ring node drain {node}`."
        )
    members.remove(node)
    now_s, removed = time.time(), f"{node} is removed from this cluster."
    try:
        valid = [record.id for record in TokenStore(folder).list() if record.state(now_s) == "valid"]
    except ConfigError:
        print(removed, flush=True)
        raise
    print(
        removed,
        _how_to_keep_out(valid, "" if state_dir is None else f" --state-dir {shlex.quote(state_dir)}"),
    )


def _how_to_keep_out(tokens: Sequence[str], place: str) -> str:
    """Return how a machine that was removed can join again, given the ids of the valid tokens and a flag for commands."""
    match tokens:
        case []:
            return "It needs a new token to join again."
        case [token]:
            which, revoke = "a token that is still valid", f"`mlx-ring token revoke {token}{place}`"
        case _:
            which = f"any of {len(tokens)} tokens that are still valid"
            revoke = (
                f"`mlx-ring token revoke ID{place}` for each that `mlx-ring token list{place}` shows as valid"
            )
    return f"It could join again with {which}: to prevent that, run {revoke}."


def head_to_change(url: str | None, *, api_key: str | None = None, cacert: Path | None = None) -> str:
    """Return the address of the head that a command may change: a given one, or the only one here.

    Of several, it is that at the usual address; without any, whatever answers there.

    Raises:
        ConfigError: none of several answers at the usual address, so that any of them may be meant.
    """
    own = lasting_heads() if url is None else []
    if url is not None or not own:
        return url or DEFAULT_URL
    others = [each for each in own if each != DEFAULT_URL]
    if DEFAULT_URL in own:
        try:
            names_at(DEFAULT_URL, api_key=api_key, cacert=cacert)
        except RequestError:
            return DEFAULT_URL
        except ConfigError:
            pass
        else:
            return DEFAULT_URL
    if len(others) > 1:
        raise ConfigError(f"Heads run on this machine at {' and '.join(others)}: choose one with --url.")
    return next(iter(others), DEFAULT_URL)


@node_app.command("drain")
def drain_node(
    node: Annotated[str, typer.Argument(help="Name or id of the machine.")],
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let plans use the machine again.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Take its layers even if no other machine has room; answers then wait."),
    ] = False,
    url: Annotated[str | None, URL] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Move all layers away from a machine while the model serves. It gets none until it leaves the cluster.

    Ctrl-C on `mlx-ring join` does the same, and then ends.
    """
    if undo and force:
        raise ConfigError("--undo and --force are given; leave one of them out.")
    url = head_to_change(url, api_key=api_key, cacert=cacert)
    if undo:
        ask_head(url, "/cluster/readmit", {"node": node}, api_key=api_key, cacert=cacert)
        print(f"{node} may get layers again: the next plan may use it.")
        return
    typer.echo(f"Moving the layers of {node} to other machines ...", err=True)
    answer = ask_head(
        url,
        "/cluster/drain",
        {"node": node, "force": force},
        api_key=api_key,
        cacert=cacert,
        timeout_s=_LONGEST_MOVE_S,
    )
    for moved in answer["moved"]:
        print(_moved(moved))
    print(f"{node} has no layers. It gets none until it leaves, or `mlx-ring node drain {node} --undo`.")


@node_app.command("readmit")
def readmit_node(
    node: Annotated[str, typer.Argument(help="Id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """End the quarantine of a node that failed repeatedly, and of its links. The next plan may use them."""
    from mlx_ring.cluster.quarantine import QuarantineList  # slow to import
    from mlx_ring.cluster.security.records import Members

    folder = cluster_folder(state_dir)
    try:
        QuarantineList(folder).readmit(node)
    except ConfigError:
        Members(folder).require(node)
        raise
    print(f"{node} and its links are readmitted: the next plan may use them.")


def replan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Name of the model; only needed if the head serves several."),
    ] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the best split.")] = False,
    pause: Annotated[
        bool,
        typer.Option("--pause", help="Move also if answers have to pause for long, while layers are loaded."),
    ] = False,
    url: Annotated[str | None, URL] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of `/cluster/replan`.")] = False,
) -> None:
    """Move a model to the best split of its layers for the machines as they are now, while it serves.

    Speeds are those of the last steps. Where memory allows, the other split is loaded beside the present one, and no answer
    pauses. Otherwise, workers load only the layers that they gain, if they can, and answers pause for a moment.
    """
    if dry_run and pause:
        raise ConfigError("--dry-run and --pause are given; leave one of them out.")
    body = {"dry_run": dry_run, "pause": pause} | ({} if model is None else {"model": model})
    url = head_to_change(url, api_key=api_key, cacert=cacert)
    if not dry_run and not as_json:
        typer.echo("Looking for the best split, and moving to it ...", err=True)
    answer = ask_head(url, "/cluster/replan", body, api_key=api_key, cacert=cacert, timeout_s=_LONGEST_MOVE_S)
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    proposal = answer["proposal"]
    if proposal is None:
        print(f"{answer['model']} has the best split for its machines as they are now.")
        return
    _show_splits(proposal)
    for moved in [] if answer["moved"] is None else [answer["moved"]]:
        print(_moved(moved))
    if dry_run:
        if proposal["fetch_s"] >= 1:
            print(f"Machines fetch weights that they lack, in about {proposal['fetch_s']:.0f} s.")
        _show_way(proposal)


def _show_splits(proposal: Mapping[str, Any]) -> None:
    table = Table("split", "layers", box=None, pad_edge=False)
    for title in ("tokens/s", "first token", "request"):
        table.add_column(title, justify="right")
    for name, split in (("now", proposal["loaded"]), ("best", proposal["planned"])):
        if split is None:
            table.add_row(name, "more memory than the machines have now", "", "", "")
            continue
        layers = ", ".join(
            f"{' and '.join(stage['nodes'])} {stage['layers'][0]}-{stage['layers'][1] - 1}"
            for stage in split["stages"]
        )
        seconds = (f"{split[key]:.2f} s" for key in ("first_token_s", "request_s"))
        table.add_row(name, layers, f"{split['tokens_per_s']:.1f}", *seconds)
    table_console().print(table)
    if proposal["unused"]:
        print(f"Without layers now: {', '.join(proposal['unused'])}. They need no gain.")
    if proposal["gain"] is not None:
        print(f"Predicted gain: {proposal['gain']:.0%}")


def _show_way(proposal: Mapping[str, Any]) -> None:
    if proposal["way"] == "beside":
        print(
            f"`mlx-ring replan {proposal['model']}` loads it beside the present one, so that no answer pauses."
        )
        return
    pause_s = proposal["pause_s"]
    pause = "" if pause_s is None else f" for about {max(1.0, pause_s):.0f} s"
    option = " --pause" if proposal["needs_pause"] else ""
    loads = ""
    if proposal["gained_bytes"] is not None:
        loads = f"Workers stay, and load {proposal['gained_bytes'] / 1e6:.0f} MB of layers that they gain. "
    print(
        f"{loads}`mlx-ring replan {proposal['model']}{option}` moves to it, and answers pause{pause}: {proposal['why']}"
    )


def _moved(moved: Mapping[str, Any]) -> str:
    requests = f"{moved['requests']} {'request' if moved['requests'] == 1 else 'requests'}"
    if moved["way"] == "beside":
        how = f"{requests} moved without a pause"
    else:
        how = f"{requests} paused for {moved['pause_s']:.1f} s, because no second instance could be loaded beside the first"
        if moved["loaded_bytes"] is not None:
            how += f", and workers loaded {moved['loaded_bytes'] / 1e6:.0f} MB"
        how += f": {moved['why'].removesuffix('.')}" if moved["why"] else ""
    return f"{moved['model']}: {how}, in {moved['seconds']:.1f} s."
