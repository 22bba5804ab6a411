"""Tables of the answer of `/cluster/status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

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
