"""Reader of the stages of a plan that `mlx-ring plan --json` wrote."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import LayerRange


class _Layers(BaseModel):
    start: int = Field(ge=0)
    end: int = Field(ge=1)


class _Stage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    node: str
    layers: _Layers


class _Plan(BaseModel):
    model_config = ConfigDict(extra="ignore")
    stages: list[_Stage] = Field(min_length=1)


_READER = TypeAdapter(_Plan)


def read_plan(file: Path, num_layers: int) -> tuple[tuple[str, LayerRange], ...]:
    """Return the node and layers of each stage, in the pipeline's order.

    Args:
        file: output of `mlx-ring plan MODEL --json` for one replica.
        num_layers: number of the model's layers, which the stages must cover.

    Raises:
        ConfigError: the file cannot be read, is no plan, or one for another number of layers.
    """
    try:
        plan = _READER.validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--plan is {file}, which cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        raise ConfigError(
            f"--plan is {file}, which is not a plan of one replica from `mlx-ring plan MODEL --json`."
        ) from error
    ends = [0, *(stage.layers.end for stage in plan.stages)]
    starts = [stage.layers.start for stage in plan.stages]
    if starts != ends[:-1] or ends[-1] != num_layers or any(a >= b for a, b in pairwise(ends)):
        raise ConfigError(f"--plan is {file}, whose stages do not cover the model's {num_layers} layers.")
    return tuple((stage.node, LayerRange(stage.layers.start, stage.layers.end)) for stage in plan.stages)
