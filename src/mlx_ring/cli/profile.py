"""`mlx-ring profile`: measure this machine's speed and memory."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.table import Table

from mlx_ring.cli import report_console
from mlx_ring.cli.flags import with_settings
from mlx_ring.core.folders import state_folder
from mlx_ring.host.machine import share_cores
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.settings.settings_sources import load_settings

BUSY = "The machine was busy when it was measured: times vary widely. Measure again with `mlx-ring profile --again`."


@with_settings(("blas", "blas_threads", "state_dir"))
def profile(
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure again, even if a profile is kept.")] = False,
    *,
    flags: dict[str, object],
) -> None:
    """Measure this machine as a worker uses it: memory, bandwidth, matrix products, and the cost of a step.

    It takes some seconds. The profile is kept until the machine or a version changes.
    """
    # It imports gRPC, which `serve` configures first.
    from mlx_ring.agent.profiling import (
        ProfileOptions,
        ProfileStore,
        recall_or_measure,
    )

    settings = load_settings(flags)
    options = ProfileOptions(settings.blas, settings.blas_threads or share_cores(1))
    store = ProfileStore(state_folder(settings.state_dir).expanduser().absolute())
    found = asyncio.run(recall_or_measure(store, options, again=again))
    if as_json:
        print(found.model_dump_json(indent=1))
        return
    _show(found)


def _show(found: MachineProfile) -> None:
    console = report_console()
    threads = f"{found.blas_threads} thread{'s' * (found.blas_threads > 1)}"
    cores = f"{found.cores} usable core{'s' * (found.cores > 1)}"
    on = f"{found.blas}, {threads}, {cores}" if found.device == "cpu" else "as a GPU"
    console.print(f"{found.device_name}: {on}; MLX {found.mlx}")
    if found.cpu_share is not None and found.cpu_period_s is not None:
        console.print(
            f"processors: {found.cpu_share:g} cores of time are granted in each {1e3 * found.cpu_period_s:g} ms; "
            "with less than one core for one thread, the values below are for that share"
        )
    console.print(
        f"memory: {found.memory_bytes / 1e9:.1f} GB are usable, limited by {found.memory_limited_by}; "
        f"{found.memory_available_bytes / 1e9:.1f} GB were left\n",
        markup=False,
    )
    console.print(_rates(found))
    costs = found.costs
    console.print(
        f"\nbesides, a step takes {1e3 * costs.step_s:.2f} ms, a layer {1e3 * costs.layer_s:.2f} ms "
        f"({1e3 * costs.quantized_layer_s:.2f} ms with quantized weights), "
        f"drawing tokens {1e3 * costs.draw_s:.2f} ms; "
        f"1,000 tokens of context {1e9 * costs.attention_s:.2f} ms for each 1,000 numbers of a layer's queries"
    )
    if not found.is_steady:
        console.print(BUSY)


def _rates(found: MachineProfile) -> Table:
    table = Table("weights", box=None, pad_edge=False)
    for title in ("GB/s", "+- %", "ns a row", "gigaflops"):
        table.add_column(title, justify="right")
    for rate in found.rates:
        table.add_row(
            rate.weights,
            f"{rate.bandwidth / 1e9:,.2f}",
            f"{50 * rate.spread:.1f}",
            f"{1e9 * rate.row_s:,.0f}",
            f"{rate.flops / 1e9:,.1f}",
        )
    return table
