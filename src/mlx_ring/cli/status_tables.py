"""Tables of plans, of known machines, and of the answer of `/cluster/status`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from mlx_ring.cli import report_console

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_ring.planner.plan import Plan

StatusPart = Mapping[str, Any]


def show_status(status: StatusPart, console: Console) -> None:
    """Print the models, the machines, the stages of each instance, and the links."""
    for model in status["models"]:
        reason = f": {model['reason']}" if model["reason"] else ""
        console.print(f"{model['model']} is {model['state']}{reason}")
    console.print()
    console.print(_nodes(status["nodes"]))
    for instance in status["instances"]:
        console.print(f"\n{_headline(instance)}")
        console.print(_stages(instance["stages"]))
    if status["links"]:
        console.print()
        console.print(_links(status["links"]))


def _nodes(nodes: Sequence[StatusPart]) -> Table:
    table = Table("machine", "is", box=None, pad_edge=False)
    for title in ("GB usable", "promised", "used", "free"):
        table.add_column(title, justify="right")
    table.add_column("address")
    for node in nodes:
        memory: StatusPart = node["memory"] or {}
        sizes = (memory.get(f"{name}_bytes") for name in ("usable", "promised", "used", "free"))
        state = "the head's" if node["is_head"] and node["state"] == "attending" else node["state"]
        reason = f", {node['reason']}" if node["reason"] else ""
        table.add_row(node["id"], f"{state}{reason}", *map(_gigabytes, sizes), node["address"] or "")
    return table


def _headline(instance: StatusPart) -> str:
    """Return an instance's name, state, and speed of one stream: predicted and measured."""
    headline = f"{instance['name']} (epoch {instance['epoch']}) is {instance['state']}"
    stream = instance["stream"]
    if stream is None:
        return headline
    speeds = [
        f"{stream[f'{kind}_tokens_per_s']:.1f} tokens/s {kind}"
        for kind in ("predicted", "measured")
        if stream[f"{kind}_tokens_per_s"] is not None
    ]
    return f"{headline}; one stream: {', '.join(speeds)}" if speeds else headline


def _stages(stages: Sequence[StatusPart]) -> Table:
    table = Table("stage", "machine", "layers", "is", box=None, pad_edge=False)
    for title in ("MB promised", "used", "ms a token predicted", "corrected", "measured"):
        table.add_column(title, justify="right")
    for stage in stages:
        first, end = stage["layers"]
        promised, used = stage["memory"]["promised"], stage["memory"]["used"]
        single = next((step for step in stage["times"]["decode"] if step["rows"] == 1), None)
        table.add_row(
            str(stage["stage"]),
            stage["node"],
            f"{first}-{end - 1}",
            _progress(stage),
            _megabytes(promised and promised["total_bytes"]),
            _megabytes(used and used["resident_bytes"]),
            _milliseconds(single and single["predicted_ms"]),
            _milliseconds(single and single.get("corrected_ms")),
            _milliseconds(single and single["measured_ms"]),
        )
    return table


def _progress(stage: StatusPart) -> str:
    if stage["alive"] is False:
        return "dead"
    loading = stage["loading"]
    for done, total in (("bytes_fetched", "bytes_to_fetch"), ("bytes_loaded", "bytes_to_load")):
        if loading["phase"] != "ready" and 0 < loading[total] != loading[done]:
            return f"{loading['phase']} {loading[done] / loading[total]:.0%}"
    return str(loading["phase"])


def _links(links: Sequence[StatusPart]) -> Table:
    table = Table("from", "to", box=None, pad_edge=False)
    for title in ("ms there and back", "Gbit/s"):
        table.add_column(title, justify="right")
    table.add_column("compression")
    for link in links:
        if link["problem"]:
            table.add_row(link["from"], link["to"], "-", "-", link["problem"])
            continue
        table.add_row(
            link["from"],
            link["to"],
            f"{link['round_trip_us'] / 1e3:.2f}",
            f"{8 * link['bytes_per_s'] / 1e9:.2f}",
            f"{'on' if link['compresses'] else 'off'}: {link['why']}",
        )
    return table


def _gigabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.1f}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.0f}"


def _milliseconds(count: float | None) -> str:
    return "-" if count is None else f"{count:.1f}"


# ---- plans

_GIGABYTE = 10**9


def list_machines() -> None:
    """Print the known machines."""
    from mlx_ring.planner.catalogue import chips, known_machines  # a status is shown without the planner

    table = Table("machine", "memory, GB", box=None, pad_edge=False)
    table.add_column("GB/s", justify="right")
    table.add_column("teraflops", justify="right")
    for known in known_machines().values():
        for name, sizes in known.bins.items():
            chip = chips()[name]
            table.add_row(known.name, ", ".join(map(str, sizes)), f"{chip.gb_s:,.0f}", f"{chip.tflops:.1f}")
    console = report_console()
    console.print(table)
    console.print(
        "\nName some: `mlx-ring plan MODEL --machine m4-mac-mini-16 --machine m2-max-mac-studio-64`, "
        "or describe yours in a file for --cluster.",
        highlight=False,
    )


def show_plans(made: Sequence[Plan], sequences: int) -> None:
    """Print one table for each replica, and their total speed with so many sequences."""
    for number, each in enumerate(made, start=1):
        if len(made) > 1:
            print(f"{chr(10) * (number > 1)}Replica {number} of {len(made)}:")
        show_plan(each)
    if len(made) > 1:
        from mlx_ring.planner.replicas import total_tokens_per_s

        together = total_tokens_per_s(made, sequences)
        print(f"\n{together:.1f} tokens/s for {sequences} sequences over {len(made)} replicas together.")


def show_plan(made: Plan) -> None:
    """Print a plan as a table, with its prediction."""
    console = report_console()
    are_shared = any(stage.is_shared for stage in made.stages)
    table = Table(Column("machine", no_wrap=True), "layers", box=None, pad_edge=False)
    for title in (*["share"] * are_shared, "weights", "memory", "of", "ms a token"):
        table.add_column(title, justify="right")
    table.add_column("why")
    for stage in made.stages:
        for place, rank in enumerate(stage.ranks):
            layers = f"{stage.layers.start}-{stage.layers.end - 1}"
            # The stage's own values stand beside its first rank.
            texts = (f"{1e3 * stage.token_s:.1f}", stage.why) if place == 0 else ("", "")
            sizes = map(_size, (rank.weight_bytes, rank.memory_bytes, rank.usable_bytes))
            table.add_row(rank.node, layers, *[f"{rank.share:.0%}"] * are_shared, *sizes, *texts)
    console.print(table)
    for names, count, why in left_out_together((left.node, left.why) for left in made.left_out):
        console.print(
            f"{names} {'gets' if count == 1 else 'get'} no layers: {why}.", highlight=False, markup=False
        )
    prediction = made.prediction
    console.print(
        f"\n{made.model}, {made.sequences} x {made.context_tokens} tokens, strategy {made.strategy}: "
        f"{1 / prediction.token_s:.1f} tokens/s {_whose(prediction.users)}, {prediction.tokens_per_s:.1f} for {made.sequences}; "
        f"{prediction.first_token_s:.2f} s to the first token of a prompt of {prediction.prompt_tokens}, "
        f"{prediction.request_s:.2f} s with an answer of {prediction.answer_tokens}.",
        highlight=False,
    )
    for remark in made.remarks:
        console.print(remark, highlight=False)


def left_out_together(left_out: Iterable[tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    """Yield names, number and reason of machines without layers. Those with the same reason are joined.

    Args:
        left_out: name and reason of each machine.
    """
    from mlx_ring.planner.cluster_file import named_together

    together: dict[str, list[str]] = {}
    for name, why in left_out:
        together.setdefault(why, []).append(name)
    for why, names in together.items():
        yield named_together(names), len(names), why


def _whose(users: int) -> str:
    return "for one stream" if users == 1 else f"for each of {users} users"


def expectation(made: Sequence[Plan]) -> str:
    """Return what to expect of machines that were not measured, as ranges."""
    from mlx_ring.planner.catalogue import accuracy

    decode, prefill = accuracy("decode"), accuracy("prefill")
    slowest = max(made, key=lambda each: each.prediction.token_s).prediction
    speed, first_s = 1 / slowest.token_s, slowest.first_token_s
    return (
        f"Not measured: expect {_figure(speed / decode, 3)} to {_figure(speed * decode, 3)} tokens/s {_whose(slowest.users)} and "
        f"{_figure(first_s / prefill, 2)} to {_figure(first_s * prefill, 2)} s to the first token. "
        f"Predictions are off by factors of {decode:.2f} and {prefill:.2f} on average, where others have published measurements."
    )


def _figure(value: float, digits: int) -> str:
    """Write a number with the given number of significant digits."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= _GIGABYTE else f"{nbytes / 1e6:.0f} MB"
