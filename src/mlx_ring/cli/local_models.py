"""Models on this machine's disk: `mlx-ring pull`, `list`, `rm`, and `recommend`, which names those that run well here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from mlx_ring.cli import INTERRUPTED, DownloadBar, table_console
from mlx_ring.cli.flags import KvMemory, given_kv_memory
from mlx_ring.cli.head_client import API_KEY, CACERT, ServedNames, ask_head, heads_here, names_at
from mlx_ring.cli.profile import BUSY
from mlx_ring.core.errors import ConfigError, ExceedsMemory, RequestError
from mlx_ring.core.folders import state_folder
from mlx_ring.host.process import exit_now, usable_memory
from mlx_ring.models.config_limits import gigabytes
from mlx_ring.models.model_source import (
    LocalModel,
    exact_name,
    find_model,
    interrupted_downloads,
    list_local_models,
    must_be_fetched,
    remove_model,
)
from mlx_ring.models.short_names import published_models, short_names_of
from mlx_ring.settings.settings_sources import load_settings

if TYPE_CHECKING:
    from mlx_ring.host.machine_profile import MachineProfile
    from mlx_ring.planner.what_if import Outcome

_GIGABYTE = 10**9
_PLEASANT_TOKENS_PER_S = 5.0
"""About as fast as people read. A slower model is not recommended."""
_LARGE = 10
"""Least number that is shown without decimals."""
_FORCE = typer.Option("--force", help="Download it even if no machine here has the memory for it.")


def pull(
    model: Annotated[str, typer.Argument(help="Short name, such as qwen3:8b, or Hugging Face id.")],
    force: Annotated[bool, _FORCE] = False,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Download a model to this machine, or continue and check a download.

    Sizes and SHA-256 are compared with the hub's. Models that LM Studio, ollama or
    another program with the hub's cache has downloaded are used as they are, and not converted. Gated models need HF_TOKEN, a token from your account on the hub.
    """
    if must_be_fetched(model):
        try:
            found = fetch_here(model, memory_bytes=None if force else memory_here(api_key, cacert))
        except ExceedsMemory as error:
            raise ExceedsMemory(f"{error} Or download it all the same with --force.") from error
        print(f"{found.name} is complete: {_size(found.folder.weight_bytes)} in {found.folder.path}.")
    else:
        found = find_model(model)
        print(
            f"{found.name} is on this machine already ({found.kind}): {found.folder.path}.{_checked(found)}"
        )
    print(f"Chat with it: mlx-ring run {next(iter(short_names_of(found.name)), model)}")


def _checked(found: LocalModel) -> str:
    """Compare a model of the hub's cache with the hub, and return a sentence on the result."""
    if found.kind != "hub":
        return ""
    from mlx_ring.models import hub

    with DownloadBar(found.name) as bar:
        return f" {hub.verify(found.name, bar.report)}"


def fetch_here(model: str, *, must_fit: bool = False, memory_bytes: int | None = None) -> LocalModel:
    """Return a model of this machine. One that must be fetched shows its progress.

    Args:
        model: any name of it.
        must_fit: True to refuse one that this machine's memory cannot hold.
        memory_bytes: memory of the machines that may share it; None for any.

    Raises:
        ModelError, PlanError: as `find_model` does.
    """
    try:
        with DownloadBar(model) as bar:
            return find_model(model, must_fit=must_fit, memory_bytes=memory_bytes, report=bar.report)
    except KeyboardInterrupt:
        print(f"\nStopped. `mlx-ring pull {model}` continues the download.", flush=True)
        # Threads of the fetch would hold the process until their files are complete.
        exit_now(INTERRUPTED)


def memory_here(api_key: str | None = None, cacert: Path | None = None) -> int | None:
    """Return the memory of this machine, or of the cluster of a head that runs on it, if that is more. In bytes.

    None if such a head cannot be asked: its cluster may be of any size.
    """
    clusters = [0]
    for head in heads_here():
        try:
            nodes = ask_head(head.url, "/cluster/status", api_key=api_key, cacert=cacert)["nodes"]
            clusters.append(sum(node["memory"]["total_bytes"] for node in nodes if node["memory"]))
        except (ConfigError, RequestError, LookupError, TypeError):
            return None
    return max(usable_memory().total_bytes, *clusters)


def rm(
    model: Annotated[str, typer.Argument(help="Name of a downloaded model, as `mlx-ring list` shows it.")],
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Remove a downloaded model from this machine's disk. One that is served stays."""
    hub_id = exact_name(model)
    for head in heads_here():
        names: Mapping[str, ServedNames] = {}
        with contextlib.suppress(ConfigError, RequestError, LookupError, TypeError):
            names = names_at(head.url, api_key=api_key, cacert=cacert)
        if any({hub_id, model} & each.names for each in names.values()):
            body = {"model": hub_id}
            freed = ask_head(head.url, "/models/delete", body, api_key=api_key, cacert=cacert)["freed_bytes"]
            break
    else:
        hub_id, freed = remove_model(model)
    print(f"{hub_id} is removed, which frees {_size(freed)}.")


def recommend(
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File that describes machines, as for `plan`.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Known machine, such as m4-mac-mini-16. Repeat it for several."),
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="NAME", help="Link between the machines, such as tb5-rdma.")
    ] = None,
    kv_cache_memory: KvMemory = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Head whose cluster counts; by default one on this machine."),
    ] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that run well here, by predicted speed: with 5 tokens/s or more.

    "Here" is the cluster of a head that runs on this machine, or else this machine alone, which is measured if it was
    not yet. The memory of other loaded models is free for a recommended one.
    """
    outcomes, where = _outcomes(cluster, machine, link, kv_cache_memory, url, cacert, api_key)
    good = sorted(
        (each for each in outcomes if each.fits and each.tokens_per_s >= _PLEASANT_TOKENS_PER_S),
        key=lambda each: (-each.memory_bytes, each.model),
    )
    if as_json:
        print(json.dumps([_recommended(each) for each in good], indent=1))
    elif good:
        _show_recommended(good, where)
    else:
        print(_none_recommended(outcomes, where, _PLEASANT_TOKENS_PER_S))


def _outcomes(
    cluster: Path | None,
    machine: list[str] | None,
    link: str | None,
    kv_cache_memory: str | None,
    url: str | None,
    cacert: Path | None,
    api_key: str | None,
) -> tuple[Sequence[Outcome], str]:
    """Return the predictions for popular models, and the machines that they are for."""
    from mlx_ring.cli.planning import check_uses, given_machines
    from mlx_ring.cli.what_if import Asked, ask_planner, ask_running
    from mlx_ring.planner.cluster_file import remarks_on_described
    from mlx_ring.planner.profiles import ClusterProfile, measured_node
    from mlx_ring.planner.request import USUAL_CONTEXT, Demand, PlanRequest
    from mlx_ring.planner.what_if import Question

    demand = Demand(USUAL_CONTEXT, 1, kv_memory_bytes=given_kv_memory(kv_cache_memory))
    request = PlanRequest(demand)
    # Prompt and answer fill the usual context, as a running head takes them for popular models.
    request = replace(request, prompt_tokens=USUAL_CONTEXT - request.answer_tokens)
    asked = Asked(None, Question(request=request), None, what_fits=True)
    is_given = cluster is not None or bool(machine)
    check_uses(link, url, cacert, adds=bool(machine), is_given=is_given, api_key=api_key, adding="--machine")
    if is_given:
        machines, _ = given_machines(cluster, machine, link)
        for remark in remarks_on_described(machines.nodes):
            print(remark, file=sys.stderr)
        return ask_planner(machines, asked).outcomes, " and ".join(each.name for each in machines.nodes)
    heads = [url] if url is not None else [head.url for head in heads_here()]
    if heads and kv_cache_memory is not None:
        raise ConfigError(
            f"--kv-cache-memory is {kv_cache_memory}, but the head at {heads[0]} plans with its own; leave it out."
        )
    for place in heads:
        try:
            return ask_running(place, asked, {}, cacert, api_key).outcomes, f"the cluster of {place}"
        except ConfigError as error:
            # A head that is loading its model has measured no machine yet.
            if url is not None:
                raise
            print(f"{error} These predictions are for this machine alone.", file=sys.stderr)
    profile = asyncio.run(_own_profile())
    if not profile.is_steady:
        print(BUSY, file=sys.stderr)
    node = measured_node(profile, "this machine")
    return ask_planner(ClusterProfile((node,)), asked).outcomes, "this machine"


async def _own_profile() -> MachineProfile:
    # It imports gRPC, which `serve` configures first.
    from mlx_ring.agent.profiling import ProfileOptions, ProfileStore, recall_or_measure
    from mlx_ring.host.machine import share_cores

    settings = load_settings({})
    options = ProfileOptions(settings.blas, settings.blas_threads or share_cores(1))
    store = ProfileStore(state_folder(settings.state_dir).expanduser().absolute())
    return await recall_or_measure(store, options, accepts_noise=False)


@dataclass(frozen=True, slots=True)
class _Popular:
    """Popular model as it is recommended."""

    name: str
    """Short name."""
    hub_id: str
    abilities: tuple[str, ...]


def _popular(label: str) -> _Popular:
    """Return a popular model by its name and format."""
    for each in published_models():
        for form, hub_id in each.conversions.items():
            if label == f"{each.name} {form}":
                return _Popular(next(iter(short_names_of(hub_id)), hub_id), hub_id, each.abilities)
    return _Popular(label, label, ())


def _recommended(one: Outcome) -> dict[str, object]:
    return {**asdict(_popular(one.model)), **asdict(one)}


def _show_recommended(good: Sequence[Outcome], where: str) -> None:
    here = {model.name for model in list_local_models()}
    table = Table(Column("model", overflow="fold"), box=None, pad_edge=False, collapse_padding=True)
    for title in ("tokens/s", "first token\nat 8k, s", "memory"):
        table.add_column(title, justify="right")
    for title in ("on\ndisk", "supports"):
        table.add_column(title)
    for one in good:
        known = _popular(one.model)
        table.add_row(
            known.name,
            _between(one.tokens_per_s_range),
            _between(one.first_token_s_range),
            gigabytes(one.memory_bytes),
            "yes" if known.hub_id in here else "",
            ", ".join(known.abilities),
        )
    console = table_console()
    console.print(f"Models that run well on {where}, the largest first:\n")
    console.print(table)
    console.print(f"\nPredicted, for one user. Chat with one: mlx-ring run {_popular(good[0].model).name}")


def _between(ends: tuple[float, float]) -> str:
    return " to ".join(f"{end:.0f}" if end >= _LARGE else f"{end:.2g}" for end in ends)


def _none_recommended(outcomes: Sequence[Outcome], where: str, least: float) -> str:
    fitting = [each for each in outcomes if each.fits]
    if not fitting:
        return f"None of the {len(outcomes)} listed models fits the memory of {where}."
    fastest = max(fitting, key=lambda each: each.tokens_per_s)
    return (
        f"None: no listed model is predicted at {least:g} tokens/s or more on {where}. The fastest that fits is "
        f"{_popular(fastest.model).name}, with {fastest.tokens_per_s:.2g} tokens/s."
    )


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models on this machine: built-in ones, those of the Hugging Face cache, LM Studio and ollama, and GGUF files."""
    if as_json:
        print(json.dumps(_listed(), indent=1))
        return
    table = Table(Column("model", overflow="fold"), "short name", "from", "kind", box=None, pad_edge=False)
    for title in ("size", "layers", "context"):
        table.add_column(title, justify="right")
    remarks: list[str] = []
    for model in list_local_models():
        folder = model.folder
        if folder.rounding:
            remarks.append(f"{model.name}: {folder.rounding}.")
        table.add_row(
            model.name,
            next(iter(short_names_of(model.name)), ""),
            model.kind,
            folder.model_type,
            _size(folder.weight_bytes),
            str(folder.num_layers),
            f"{folder.context_length:,}",
        )
    for name, size in interrupted_downloads().items():
        table.add_row(name, next(iter(short_names_of(name)), ""), "hub", "incomplete", _size(size))
        remarks.append(f"{name} is incomplete: `mlx-ring pull {name}` continues the download.")
    table_console().print(table)
    print(*remarks, sep="\n", end="\n" * bool(remarks))
    print(
        "\nServe one with `mlx-ring serve MODEL`; a folder, a GGUF file, a short name or any hub id works too."
    )


def _listed() -> list[Mapping[str, object]]:
    """Return the models on this machine for programs; interrupted downloads have no path."""
    complete = [
        {
            "name": model.name,
            "short_names": short_names_of(model.name),
            "from": model.kind,
            "kind": model.folder.model_type,
            "bytes": model.folder.weight_bytes,
            "layers": model.folder.num_layers,
            "context_length": model.folder.context_length,
            "path": str(model.folder.path),
        }
        for model in list_local_models()
    ]
    incomplete = [
        {
            "name": name,
            "short_names": short_names_of(name),
            "from": "hub",
            "kind": "incomplete",
            "bytes": size,
        }
        for name, size in interrupted_downloads().items()
    ]
    return [*complete, *incomplete]


def _size(count: int) -> str:
    return gigabytes(count) if count >= _GIGABYTE else f"{count / 1e6:,.0f} MB"
