"""`mlx-ring node`: the machines of the cluster. Works while the head runs, and while it does not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.cli.token import STATE_DIR, cluster_folder, local_time

app = typer.Typer(help="The machines of the cluster.", no_args_is_help=True)


@app.command("list")
def list_nodes(state_dir: Annotated[str | None, STATE_DIR] = None) -> None:
    """List the nodes that have joined, and until when their certificates hold."""
    from mlx_ring.cluster.security.members import Members  # noqa: PLC0415 - brings pydantic's models in

    table = Table("node", "joined", "certificate until", box=None, pad_edge=False)
    for node, member in sorted(Members(cluster_folder(state_dir)).list().items()):
        ends = max((held.expires_s for held in member.certificates), default=0.0)
        table.add_row(node, local_time(member.joined_s), local_time(ends))
    Console(soft_wrap=True).print(table)


@app.command("remove")
def remove_node(
    node: Annotated[str, typer.Argument(help="Its id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Refuse a node from now on: its certificate opens nothing any more."""
    from mlx_ring.cluster.security.members import Members  # noqa: PLC0415 - brings pydantic's models in

    Members(cluster_folder(state_dir)).remove(node)
    print(f"{node} is no node of this cluster any more. It needs a new token to join again.")
