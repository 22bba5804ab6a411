"""Published speeds and sizes of models, as the planner's own profiles: for the fit of its catalogue and for tests.

The data are in `tests/planner`: `golden_speeds.tsv`, whose header has the rule that splits it into a fitted half and a
held-out one, `published_model_bytes.tsv`, and `published_configs.yaml`.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.planner.layer_parts import layer_matrices
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.profiles import ModelProfile

DATA = Path(__file__).parents[1] / "tests" / "planner"
Row = Mapping[str, str]
_QUANTIZED = re.compile(r"(\d)-?bits?(?:-gs(\d+))?", re.IGNORECASE)
_MXFP4: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8: dict[str, Any] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
_Q8: dict[str, Any] = {"group_size": 64, "bits": 8}


def rows_of(name: str) -> Sequence[Row]:
    """Return the rows of a table by its columns' names."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if not line.startswith("#")]
    return list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


def is_fitted(row: Row) -> bool:
    """Return True if predictions may be fitted to a row, by the rule in the file's header."""
    return zlib.crc32(f"44 {row['publisher']}/{row['machine']}".encode()) % 2 == 0


@cache
def configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations of published models by name."""
    return yaml.safe_load((DATA / "published_configs.yaml").read_text(encoding="utf-8"))


def config_of(model: str) -> dict[str, Any] | None:
    """Return the configuration of a model or of a conversion of it; None if it is not among them."""
    name = model.rpartition("/")[2].lower()
    found = max((known for known in configs() if known.lower() in name), key=len, default=None)
    return None if found is None else dict(configs()[found])


def folder_of(config: Mapping[str, Any]) -> ModelFolder:
    """Return a model without files."""
    return ModelFolder(Path(), config, {}, ())


def with_format(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Return a configuration with what it says about the format of its weights, by the format's name."""
    said = form.lower()
    if "mxfp4" in said and "q8" in said:
        given = _MXFP4 | _beside_experts(config, value=_Q8)
    elif "fp4 and fp8" in said:
        given = (
            _MXFP4 | _beside_experts(config, value=_MXFP8) | {"lm_head": False, "model.embed_tokens": False}
        )
    elif "mxfp4" in said or "mxfp8" in said:
        given = _MXFP4 if "mxfp4" in said else _MXFP8
    elif "int4 and bf16" in said:
        groups = {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
        given = {"quant_method": "compressed-tensors", "config_groups": {"group_0": groups}}
        given |= _beside_experts(config, value=False)
    elif "bitsandbytes" in said:
        given = {"quant_method": "bitsandbytes", "load_in_8bit": "8 bit" in said}
        return {**config, "quantization_config": given}
    elif found := _QUANTIZED.search(said):
        given = {"group_size": int(found[2] or 64), "bits": int(found[1])}
    else:
        return {**config, "torch_dtype": "float32" if "f32" in said else "bfloat16"}
    return {**config, "quantization": given}


def _beside_experts(config: Mapping[str, Any], *, value: object) -> dict[str, object]:
    """Return this value for every matrix that is not of an expert."""
    folder = folder_of(config)
    names = [
        matrix.name
        for index in range(folder.num_layers)
        for matrix in layer_matrices(folder, index)
        if matrix.role != "experts"
    ]
    return dict.fromkeys([*names, "lm_head", "model.embed_tokens"], value)


def profile_of(model: str, form: str) -> ModelProfile | None:
    """Return the planner's profile of a model in a format; None if its configuration is not known."""
    config = config_of(model)
    return None if config is None else profile_folder(folder_of(with_format(config, form)), model)


def resized(model: ModelProfile, nbytes: float) -> ModelProfile:
    """Return the model with weights that have this many bytes in all, in proportion."""
    ratio = nbytes / model.weight_bytes
    return replace(
        model,
        layers=tuple(
            replace(
                layer,
                weight_bytes=int(layer.weight_bytes * ratio),
                read_bytes=int(layer.read_bytes * ratio),
                attention_bytes=int(layer.attention_bytes * ratio),
                whole_bytes=int(layer.whole_bytes * ratio),
            )
            for layer in model.layers
        ),
        embedding_bytes=int(model.embedding_bytes * ratio),
        head_bytes=int(model.head_bytes * ratio),
        widened=None,
        with_scales=None,
        dequantized=None,
    )
