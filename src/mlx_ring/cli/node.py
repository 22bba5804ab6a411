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
    """List the nodes that have joined, until when their certificates hold, and who is left out of plans for a while."""
    from mlx_ring.cluster.quarantine_book import QuarantineBook  # noqa: PLC0415 - brings pydantic's models in
    from mlx_ring.cluster.security.members import Members  # noqa: PLC0415 - as above

    folder = cluster_folder(state_dir)
    left_out = QuarantineBook(folder).held()
    table = Table("node", "joined", "certificate until", "left out until", box=None, pad_edge=False)
    for node, member in sorted(Members(folder).list().items()):
        ends = max((held.expires_s for held in member.certificates), default=0.0)
        until = local_time(left_out[node].until_s) if node in left_out else ""
        table.add_row(node, local_time(member.joined_s), local_time(ends), until)
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


@app.command("readmit")
def readmit_node(
    node: Annotated[str, typer.Argument(help="Its id, from `mlx-ring node list`.")],
    state_dir: Annotated[str | None, STATE_DIR] = None,
) -> None:
    """Use a node again, from the next plan on, that is left out because it has failed again and again."""
    from mlx_ring.cluster.quarantine_book import QuarantineBook  # noqa: PLC0415 - brings pydantic's models in

    QuarantineBook(cluster_folder(state_dir)).readmit(node)
    print(f"{node} counts as any other node again.")
