"""Published models by short name, and dense models by their number of parameters: `known_models.yaml` as configurations. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_ring.core.errors import ModelNotFound
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.short_names import (
    conversions_of,
    find_name,
    known_models,
    parts_of,
    published_models,
    split_format,
)
from mlx_ring.planner.layer_parts import layer_matrices

MXFP4: Mapping[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8: Mapping[str, Any] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
Q8: Mapping[str, Any] = {"group_size": 64, "bits": 8}
_QUANTIZED = re.compile(r"(\d)-?bits?(?:-gs(\d+))?", re.IGNORECASE)
_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)b")
_USUAL_FORM = "4-bit"
_USUAL_CONTEXT = 32768
_BILLION = 10**9
_HEAD, _KV_HEADS, _VOCABULARY, _WIDTH = 128, 8, 128256, 3.5
"""Shape of Llama 3: numbers of a head, KV heads, vocabulary, and the feed-forward layers' width relative to the model's."""
_HIDDEN = ((1.2, 2048), (3.2, 3072), (8.0, 4096), (70.6, 8192), (405.9, 16384))
"""Width of Llama's models by billions of parameters."""
_WIDTH_STEPS = 16
"""Parts of the model's width to which that of the feed-forward layers is rounded, so that ranks can share them."""
_LEAST_BILLIONS, _MOST_BILLIONS = 0.5, 2000.0
_TRIED = (
    "folder, GGUF file, hub id such as Qwen/Qwen3-0.6B, short name or number of parameters such as 70B-4bit"
)
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose sizes follow from its configuration, in one format of weights."""

    name: str
    """Name with the format, as `Llama-3.3-70B 4-bit`."""
    folder: ModelFolder
    remark: str
    """Sentence that says which model is meant."""


def configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configurations of published models by name, without formats of weights."""
    return known_models()["configs"]


def popular_models() -> Iterator[KnownModel]:
    """List popular models in each format in which a conversion is published, small ones first."""
    for name, entry in _popular().items():
        for form in _forms(entry):
            yield _known_model(name, form, name)


def _popular() -> Mapping[str, Mapping[str, Any]]:
    return known_models()["popular"]


def _forms(entry: Mapping[str, Any]) -> list[str]:
    return list(conversions_of(entry))


def find_known_model(text: str, tried: str = _TRIED, form: str = "") -> KnownModel:
    """Return the model that a short name or a number of parameters means.

    The short name has parts of the model's name, and perhaps a format: `qwen3-30b-a3b-4bit`, `llama-70b`. It means the model
    that `find_name` finds. Of several others with these parts, popular ones come first, then those with fewer other parts,
    then the last in the file. A number of parameters, as `70B-4bit`, means a dense model of Llama's shape. Without a format, it is the first published one,
    or 4 bits.

    Args:
        text: the name; the hub's id of a listed conversion means that one.
        tried: what else the caller takes it for, for the error.
        form: format of the weights instead of that of the name.

    Raises:
        ModelNotFound: no model has these parts, several may be meant, or the format is unknown.
    """
    for model in published_models():
        for published, hub_id in model.conversions.items():
            if hub_id == text:
                return _known_model(model.name, form or published, text)
    stem, named = split_format(text)
    form = form or named
    if number := _PARAMETERS.fullmatch(stem):
        return _dense(float(number[1]), form or _USUAL_FORM, text)
    name = find_name(text)
    parts = frozenset(parts_of(stem))
    alike = [name for name in configs() if parts and parts <= frozenset(parts_of(name))]
    if not alike:
        raise ModelNotFound(_unknown(text, stem, tried))
    popular, last = _popular(), list(configs())
    name = name or min(alike, key=lambda name: (name not in popular, len(parts_of(name)), -last.index(name)))
    return _known_model(name, form or _forms(popular.get(name, {_USUAL_FORM: ""}))[0], text)


def _unknown(text: str, stem: str, tried: str) -> str:
    names = {name.lower(): name for name in [*configs(), *_popular()]}
    close = difflib.get_close_matches(stem, names, n=_NEAREST, cutoff=0.4)
    nearest = f" The nearest are {', '.join(names[name] for name in close)}." if close else ""
    return f"There is no model {text!r}: it is no {tried}.{nearest}"


def _known_model(name: str, form: str, text: str) -> KnownModel:
    entry = _popular().get(name, {})
    length = entry.get("context") or known_models()["contexts"].get(name)
    assumed = "" if length else f" Its longest context is assumed to be {_USUAL_CONTEXT:,} tokens."
    context = {"max_position_embeddings": length or _USUAL_CONTEXT}
    published = f" ({entry[form]})" if form in entry else ""
    folder = folder_of(with_format({**context, **configs()[name]}, form))
    return KnownModel(f"{name} {form}", folder, f"{text} is taken as {name} in {form}{published}.{assumed}")


def _dense(billions: float, form: str, text: str) -> KnownModel:
    """Return a dense model of Llama's shape; the feed-forward layers' width makes up for whole layers."""
    if not _LEAST_BILLIONS <= billions <= _MOST_BILLIONS:
        raise ModelNotFound(
            f"{text} has {billions:g} billion parameters; give a number from {_LEAST_BILLIONS:g} to {_MOST_BILLIONS:g}."
        )
    hidden = _hidden(billions)
    tied = billions < _HIDDEN[1][0]
    tables = _VOCABULARY * hidden * (1 if tied else 2)
    attention = 2 * hidden * (hidden + _KV_HEADS * _HEAD)
    each = attention + 3 * _WIDTH * hidden * hidden
    rest = max(billions * _BILLION - tables, each)
    layers = max(1, round(rest / each))
    step = hidden // _WIDTH_STEPS
    width = max(step, round((rest / layers - attention) / (3 * hidden) / step) * step)
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // _HEAD,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "intermediate_size": width,
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
    }
    remark = (
        f"{text} is taken as a dense model of Llama's shape in {form}: {layers} layers of {hidden:,} numbers, "
        f"{config['num_key_value_heads']} KV heads of {_HEAD}, {_VOCABULARY:,} tokens."
    )
    return KnownModel(f"{billions:g}B {form}", folder_of(with_format(config, form)), remark)


def _hidden(billions: float) -> int:
    """Return a width between those of Llama's models, whose heads can be shared by as many ranks as there are KV heads."""
    (less, narrow), (more, wide) = next(
        ((one, other) for one, other in pairwise(_HIDDEN) if billions <= other[0]),
        _HIDDEN[-2:],
    )
    share = (billions**0.5 - less**0.5) / (more**0.5 - less**0.5)
    step = _KV_HEADS * _HEAD
    return max(step, round((narrow + share * (wide - narrow)) / step) * step)


# ---- formats by name


def folder_of(config: Mapping[str, Any]) -> ModelFolder:
    """Return a model without files."""
    return ModelFolder(Path(), config, {}, ())


def with_format(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Return a configuration with what it says about the format of its weights, by the format's name."""
    said = form.lower()
    if "mxfp4" in said and "q8" in said:
        given = {**MXFP4, **beside_experts(config, value=Q8)}
    elif "fp4 and fp8" in said:
        ends = {"lm_head": False, "model.embed_tokens": False}
        given = {**MXFP4, **beside_experts(config, value=_MXFP8), **ends}
    elif "mxfp4" in said or "mxfp8" in said:
        given = dict(MXFP4 if "mxfp4" in said else _MXFP8)
    elif "int4 and bf16" in said:
        groups = {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
        given = {"quant_method": "compressed-tensors", "config_groups": {"group_0": groups}}
        given |= beside_experts(config, value=False)
    elif "bitsandbytes" in said:
        given = {"quant_method": "bitsandbytes", "load_in_8bit": "8 bit" in said}
        return {**config, "quantization_config": given}
    elif found := _QUANTIZED.search(said):
        given = {"group_size": int(found[2] or 64), "bits": int(found[1])}
    else:
        return {**config, "torch_dtype": "float32" if "f32" in said or "float32" in said else "bfloat16"}
    return {**config, "quantization": given}


def beside_experts(config: Mapping[str, Any], *, value: object) -> dict[str, object]:
    """Return this value for every matrix that is not of an expert."""
    folder = folder_of(config)
    names = [
        matrix.name
        for index in range(folder.num_layers)
        for matrix in layer_matrices(folder, index)
        if matrix.role != "experts"
    ]
    return dict.fromkeys([*names, "lm_head", "model.embed_tokens"], value)
