"""`mlx-ring models`: models on the disk (`local_models.py`), in a running server's memory, and folders for single stages."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from mlx_ring.cli.head_client import API_KEY, CACERT, URL, ask_head, names_at
from mlx_ring.cli.local_models import list_models, pull, recommend, rm
from mlx_ring.cli.node import head_to_change
from mlx_ring.core.errors import ConfigError, PlanError
from mlx_ring.core.folders import absolute_path
from mlx_ring.core.types import LayerRange
from mlx_ring.host.addresses import is_loopback
from mlx_ring.models.layer_tensors import require_absent, stage_bytes, write_stage_folder
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.model_source import builtin_names, find_model
from mlx_ring.settings.settings_sources import load_settings

_ANSWER_WAIT_S = 24 * 3600.0
"""Time to wait for a load, which may include a download. Ctrl-C ends the wait, not the load."""


def load(
    model: Annotated[
        str,
        typer.Argument(
            help="Built-in name, folder or GGUF file on the server, short name or Hugging Face id, as for `serve`."
        ),
    ],
    url: Annotated[str | None, URL] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Load a model on a running server."""
    url = head_to_change(url, api_key=api_key, cacert=cacert)
    names_at(url, api_key=api_key, cacert=cacert)  # says soon if no server answers
    loaded = _post(url, "/models/load", {"model": name_for(url, model)}, api_key, cacert)
    print(f"{loaded['id']} is loaded.")


def unload(
    model: Annotated[str, typer.Argument(help="Name, as the server lists it.")],
    url: Annotated[str | None, URL] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Unload even a busy model; its requests end with an error.")
    ] = False,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Free the memory of a model on a running server. The next request for it loads it again."""
    url = head_to_change(url, api_key=api_key, cacert=cacert)
    unloaded = _post(url, "/models/unload", {"model": model, "force": force}, api_key, cacert)
    print(f"{unloaded['id']} is unloaded.")


def _post(
    url: str, path: str, body: dict[str, object], api_key: str | None, cacert: Path | None
) -> dict[str, object]:
    return ask_head(url, path, body, api_key=api_key, cacert=cacert, timeout_s=_ANSWER_WAIT_S)


app = typer.Typer(help="Pull, list, recommend, remove, load, unload and split models.", no_args_is_help=True)


@app.callback()
def _models() -> None:  # pyright: ignore[reportUnusedFunction] - typer calls it, and needs it to make `list` a command
    """Pull, list, recommend, remove, load, unload and split models."""


app.command()(pull)
app.command()(recommend)
app.command()(rm)


app.command("list")(list_models)
app.command()(load)
app.command()(unload)


@app.command()
def preshard(
    model: Annotated[str, typer.Argument(help="Built-in name, folder, GGUF file or Hugging Face id.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for stage-0, stage-1 and so on.")],
    stages: Annotated[
        str | None, typer.Option(metavar="N", help="Number of stages, split as `serve --stages N` does.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="A-B,B-C", help="Or the layers of each stage, ends excluded, such as 0-7,7-14."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Or the stages of a plan that `mlx-ring plan MODEL --json` printed."
        ),
    ] = None,
) -> None:
    """Write one folder per stage, with its own tensors only, to copy to its machine.

    The files keep their sizes and are mostly holes. Copy them with `rsync --sparse` or `tar --sparse`.
    """
    if [stages, layers, plan].count(None) != 2:  # noqa: PLR2004 - one of the three
        raise ConfigError("Give exactly one of --stages, --layers and --plan.")
    folder = find_model(model).folder
    if plan is not None:
        planned = read_plan(plan, folder.num_layers)
        for number, (node, _) in enumerate(planned):
            print(f"stage-{number} is for {node}")
        ranges: Sequence[LayerRange] = [layers_of for _, layers_of in planned]
    else:
        ranges = _cut(folder, stages) if layers is None else parse_layers(layers, folder.num_layers)
    out = out.expanduser().absolute()
    targets = [out / f"stage-{number}" for number in range(len(ranges))]
    for target in targets:
        require_absent(target)
    sizes = [stage_bytes(folder, stage) for stage in ranges]
    _check_room(out, sum(sizes))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        for target, stage, size in zip(targets, ranges, sizes, strict=True):
            task = shown.add_task(target.name, total=size)
            write_stage_folder(folder, stage, target, lambda count, task=task: shown.advance(task, count))
            print(f"{target}: layers {stage.start}-{stage.end}, {size:,} bytes")


def parse_layers(text: str, num_layers: int) -> tuple[LayerRange, ...]:
    """Read half-open ranges such as `0-7,7-14`.

    Raises:
        ConfigError: they do not cover every layer once.
    """
    found = [re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", part) for part in text.split(",")]
    ranges = [LayerRange(int(part[1]), int(part[2])) for part in found if part]
    ends = [0, *(stage.end for stage in ranges)]
    in_order = [stage.start for stage in ranges] == ends[:-1] and ends[-1] == num_layers
    if len(ranges) < len(found) or not in_order or any(a >= b for a, b in itertools.pairwise(ends)):
        raise ConfigError(
            f"--layers is {text}; it must be ranges that cover the model's {num_layers} layers in order, each "
            f"starting where the one before ends, such as {_example(num_layers)}."
        )
    return tuple(ranges)


def _example(num_layers: int) -> str:
    half = num_layers // 2
    return f"0-{half},{half}-{num_layers}" if half else "0-1"


class _Layers(BaseModel):
    start: int = Field(ge=0)
    end: int = Field(ge=1)


class _Stage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    node: str
    layers: _Layers
    ranks: list[object] = Field(default_factory=list[object])


class _Plan(BaseModel):
    model_config = ConfigDict(extra="ignore")
    stages: list[_Stage] = Field(min_length=1)


_PLAN = TypeAdapter(_Plan)


def read_plan(file: Path, num_layers: int) -> tuple[tuple[str, LayerRange], ...]:
    """Return the node and layers of each stage, in the pipeline's order.

    Args:
        file: output of `mlx-ring plan MODEL --json` for one replica.
        num_layers: number of the model's layers, which the stages must cover.

    Raises:
        ConfigError: the file cannot be read, is no plan, one whose machines share layers, or one for another number of
            layers.
    """
    try:
        plan = _PLAN.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--plan is {file}, which cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        raise ConfigError(
            f"--plan is {file}, which is not a plan of one replica from `mlx-ring plan MODEL --json`."
        ) from error
    if shared := next((stage for stage in plan.stages if len(stage.ranks) > 1), None):
        raise ConfigError(
            f"--plan is {file}, in which {len(shared.ranks)} machines share layers {shared.layers.start} to "
            f"{shared.layers.end - 1}; shares of layers cannot be written. Copy the whole model to these machines."
        )
    ends = [0, *(stage.layers.end for stage in plan.stages)]
    starts = [stage.layers.start for stage in plan.stages]
    if starts != ends[:-1] or ends[-1] != num_layers or any(a >= b for a, b in itertools.pairwise(ends)):
        raise ConfigError(f"--plan is {file}, whose stages do not cover the model's {num_layers} layers.")
    return tuple((stage.node, LayerRange(stage.layers.start, stage.layers.end)) for stage in plan.stages)


def _cut(folder: ModelFolder, stages: str | None) -> Sequence[LayerRange]:
    from mlx_ring.head.placing import cut_layers  # imports the whole server

    return cut_layers(folder, load_settings({"stages": stages}))


def _check_room(out: Path, needed_bytes: int) -> None:
    there = next(path for path in (out, *out.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise PlanError(
            f"The stages need {needed_bytes / 1e9:.1f} GB and {there} has {free / 1e9:.1f} GB free: free some space, or "
            "choose another folder with --out."
        )


def name_for(url: str, model: str) -> str:
    """Return the name of a model for a head: the absolute path of a folder or file, if the head runs on this machine.

    It runs in another working folder.
    """
    if not model or not is_loopback(urlsplit(url).hostname or "") or model in builtin_names():
        return model
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path, or the home of an unknown user
        path = Path(model).expanduser()
        return str(absolute_path(path)) if path.exists() else model
    return model
