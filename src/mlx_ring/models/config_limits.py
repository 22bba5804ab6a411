"""Limits of a model: sizes in its configuration, kinds of quantized weights that mlx-lm loads, and a machine's memory.

A wrong size ends in a sentence and not in endless work. No real model comes near the limits of sizes. Only sizes that
mlx-ring reads itself are checked; mlx-lm checks the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported, PlanError
from mlx_ring.host.process import usable_memory
from mlx_ring.models.architectures import language_module, module_of

_LARGEST_JSON = 1 << 28
"""Most bytes of a JSON file. The largest are indexes and vocabularies, of some tens of megabytes."""
LAYER_NAMES = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers")
HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "dim", "model_dim")
HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_NAMES = ("num_key_value_heads", "n_kv_heads")
VOCABULARY_NAMES = ("vocab_size", "padded_vocab_size", "num_vocab")
CONTEXT_NAMES = (
    *("max_position_embeddings", "max_seq_len", "max_sequence_length", "model_max_length"),
    *("max_context_length", "n_positions", "n_ctx", "seq_length"),
)
_LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(LAYER_NAMES, (1, 10_000)),
    **dict.fromkeys(HIDDEN_NAMES, (1, 1 << 20)),
    **dict.fromkeys(VOCABULARY_NAMES, (1, 1 << 24)),
    **dict.fromkeys(CONTEXT_NAMES, (1, (1 << 31) - 1)),
    **dict.fromkeys(HEAD_NAMES, (1, 1 << 16)),
    **dict.fromkeys((*KV_HEAD_NAMES, "head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), (1, 1 << 24)),
    **dict.fromkeys(("shared_expert_intermediate_size", "kv_lora_rank", "qk_rope_head_dim"), (0, 1 << 24)),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), (0, 1 << 16)
    ),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "experts_per_token"), (0, 1 << 16)),
    **dict.fromkeys(("first_k_dense_replace", "decoder_sparse_step"), (0, 10_000)),
    **dict.fromkeys(("moe_layer_freq", "full_attention_interval", "_sliding_window_pattern"), (0, 10_000)),
    **dict.fromkeys(("top_k_experts", "moe_topk", "moe_top_k", "moe_k", "moe_num_experts"), (0, 1 << 16)),
    **dict.fromkeys(("o_groups", "index_n_heads", "num_global_key_value_heads"), (0, 1 << 16)),
    **dict.fromkeys(("global_head_dim", "index_head_dim", "qk_nope_head_dim", "v_head_dim"), (0, 1 << 16)),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), (0, 1 << 16)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (0, 1 << 16)),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "expert_intermediate_size", "index_topk"), (0, 1 << 24)),
    **dict.fromkeys(("sliding_window",), (0, (1 << 31) - 1)),
    **dict.fromkeys(("sliding_window_pattern",), (1, 10_000)),
}
"""Smallest and largest value of each size, by its names."""
_WHOLE = frozenset((*LAYER_NAMES, *HIDDEN_NAMES, *VOCABULARY_NAMES, *CONTEXT_NAMES))
"""Sizes of the whole model. Others may be lists, with a value for each layer."""
_PATTERNS = frozenset({"sliding_window_pattern"})
"""Sizes that some models write as a text instead, such as `LLLG`."""
_QUANTIZATION = {"bits": (1, 64), "group_size": (-1, 1 << 20)}
"""Limits of a quantization's numbers. A group size of -1 is a whole row."""
_SHOWN = 60


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Check the sizes of a configuration, and of the language model's part of it.

    Raises:
        ModelCorrupt: a size is no whole number, or beyond its limits. The error names the file, the size and its value.
    """
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if not isinstance(part, Mapping):
            continue
        sizes = cast("Mapping[str, object]", part)
        for name, limits in _LIMITS.items():
            for value in _values(name, sizes.get(name)):
                _check(file, name, value, limits)
        for kind in ("quantization", "quantization_config"):
            _check_quantization(file, kind, sizes.get(kind))
        _check_layer_types(file, sizes)


def _values(name: str, value: object) -> Iterator[object]:
    """Yield the values to check: none of a missing size, and each layer's of a list."""
    if value is None or (name in _PATTERNS and isinstance(value, str)):
        return
    if isinstance(value, list) and name not in _WHOLE:
        # A layer without such a part may have a 0 or a null.
        yield from (each for each in cast("list[object]", value) if each is not None and each != 0)
    else:
        yield value


def _check(file: Path, name: str, value: object, limits: tuple[int, int]) -> None:
    least, most = limits
    if type(value) is not int or not least <= value <= most:
        shown = repr(value)
        raise ModelCorrupt(
            f"{file} gives {name} as {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '…'}; it must be a whole "
            f"number from {least} to {most}. Correct the file, or fetch the model again."
        )


def _check_quantization(file: Path, name: str, given: object) -> None:
    if isinstance(given, Mapping):
        numbers = cast("Mapping[str, object]", given)
        for key, limits in _QUANTIZATION.items():
            if numbers.get(key) is not None:
                _check(file, f"{name}.{key}", numbers[key], limits)
    elif given is not None:
        raise ModelCorrupt(
            f"{file} gives {name} as {repr(given)[:_SHOWN]}; it must be an object. Correct the file, or fetch the model "
            "again."
        )


def _check_layer_types(file: Path, sizes: Mapping[str, object]) -> None:
    kinds, layers = sizes.get("layer_types"), next(filter(None, map(sizes.get, LAYER_NAMES)), None)
    if isinstance(kinds, list) and isinstance(layers, int) and len(cast("list[object]", kinds)) < layers:
        raise ModelCorrupt(
            f"{file} has {len(cast('list[object]', kinds))} layer_types for {layers} layers; it must have one for each. "
            "Correct the file, or fetch the model again."
        )


# ---- files


def read_json(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        ModelCorrupt: it is another file.
    """
    try:
        if (size := path.stat().st_size) > _LARGEST_JSON:
            raise ModelCorrupt(f"{path} has {size} bytes, too many for a JSON file: fetch it again.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelCorrupt(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelCorrupt(f"{path} holds a {type(value).__name__}, not an object.")
    return cast("dict[str, Any]", value)


def read_config(file: Path) -> dict[str, Any]:
    """Read and check a configuration, and what ModelOpt states beside it.

    Raises:
        ModelCorrupt: it is no model's configuration.
    """
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelCorrupt(f"{file} names no model_type: give the folder of a model, with its config.json.")
    stated = file.with_name(QUANTIZATION_FILE)
    config = _with_stated_quantization(config, read_json(stated) if stated.is_file() else {})
    check_config(file, config)
    return config


# ---- kinds of quantized weights

QUANTIZATION_FILE = "hf_quant_config.json"
"""File of NVIDIA's ModelOpt beside config.json, which mlx-lm reads too."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_BLOCK = [128, 128]
_AWQ_BITS = _INTEGER_BITS = 4


@dataclass(frozen=True, slots=True)
class QuantizationKind:
    """Kind of quantized weights, as a `quantization_config` states it."""

    name: str
    modules: frozenset[str] | None = None
    """mlx-lm's modules that load it; None for all."""
    becomes: Literal["stored", "half precision", "with biases", "AWQ"] = "stored"
    """Form in memory: as stored, FP8 as bfloat16, or affine groups, for whose biases loading makes tensors."""
    may_be_plain: bool = False
    """True if mlx-lm ignores the statement, so that weights that are not quantized load all the same."""


_DECODES_BLOCKS = frozenset(
    {"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k25", "mimo_v2_flash", "minimax", "mistral4"}
)
_DECODES_TENSORS = frozenset({"ministral3", "mistral4"})
"""Modules that take a scale for each tensor. For Ministral 3, `worker/weights.py` decodes the numbers first."""
_KEEPS_FP8 = frozenset({"deepseek_v41", "minimax_m3_vl"})
_PACKED_INTEGERS = frozenset({"deepseek_v3", "kimi_k25", "mistral4"})
_PACKED_MXFP4 = frozenset({"kimi_k3"})
_MODELOPT = frozenset({"muse_spark"})
_NONE = frozenset[str]()


def quantization_kind(given: Mapping[str, Any]) -> QuantizationKind | None:
    """Return the kind that a `quantization_config` states; None if mlx-lm loads it for all families as it is stored."""
    method = str(given.get("quant_method") or "")
    if method in ("bitnet", "mxfp4", "mxfp8"):
        return None
    if method == "fp8":
        return _kind_of_fp8(given)
    if method == "compressed-tensors":
        return _kind_of_compressed(given)
    if method == "modelopt":
        settings = cast("object", given.get("quantization"))
        named = cast("Mapping[str, object]", settings if isinstance(settings, Mapping) else given)
        algorithm = named.get("quant_algo")
        return QuantizationKind(f"modelopt {algorithm}", _MODELOPT if algorithm == "NVFP4" else _NONE)
    if method == "awq":
        bits, version = given.get("bits", _AWQ_BITS), str(given.get("version") or "gemm").lower()
        fits = bits == _AWQ_BITS and version == "gemm"
        return QuantizationKind(f"AWQ of {bits} bits ({version})", None if fits else _NONE, "AWQ")
    # GPTQ has another layout than AWQ, for which mlx-lm takes it.
    return QuantizationKind(method or _without_method(given), _NONE, may_be_plain=method not in ("", "gptq"))


def _without_method(given: Mapping[str, Any]) -> str:
    """Return the name of a kind that states no method, as in ModelOpt's own file."""
    settings = cast("object", given.get("quantization"))
    algorithm = (
        cast("Mapping[str, object]", settings).get("quant_algo") if isinstance(settings, Mapping) else None
    )
    return f"modelopt {algorithm} without a quant_method" if algorithm else "unknown without a quant_method"


def _kind_of_fp8(given: Mapping[str, Any]) -> QuantizationKind:
    block = given.get("weight_block_size", _BLOCK)
    if given.get("scale_fmt") == "ue8m0" and block == [32, 32]:
        return QuantizationKind("fp8 with blocks of 32 and scales of one byte", _KEEPS_FP8)
    if block is None:
        return QuantizationKind(
            "fp8 with a scale for each tensor", _DECODES_TENSORS, "half precision", may_be_plain=True
        )
    modules = _DECODES_BLOCKS if block == _BLOCK else _NONE
    return QuantizationKind(f"fp8 in blocks of {block}", modules, "half precision", may_be_plain=True)


def _kind_of_compressed(given: Mapping[str, Any]) -> QuantizationKind:
    form = given.get("format")
    name = f"compressed-tensors {form}"
    if form == "mxfp4-pack-quantized":
        return QuantizationKind(name, _PACKED_MXFP4)
    if form != "pack-quantized":
        return QuantizationKind(name, _NONE)
    groups = cast("object", given.get("config_groups"))
    for group in cast("Mapping[str, Any]", groups if isinstance(groups, Mapping) else {}).values():
        weights = cast("object", group.get("weights")) if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        stated = cast("Mapping[str, object]", weights)
        bits, is_symmetric = stated.get("num_bits"), stated.get("symmetric", True)
        if bits != _INTEGER_BITS or not is_symmetric:
            asymmetric = "" if is_symmetric else ", asymmetric"
            return QuantizationKind(f"{name} of {bits} bits{asymmetric}", _NONE)
    return QuantizationKind(name, _PACKED_INTEGERS, "with biases")


def _with_stated_quantization(config: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with what ModelOpt's own file states, if it says nothing itself, as mlx-lm does."""
    text = cast("object", config.get("text_config"))
    parts = (config, cast("Mapping[str, object]", text if isinstance(text, Mapping) else {}))
    if not stated or any("quantization_config" in part for part in parts):
        return config
    return {**config, "quantization_config": dict(stated)}


def _stated_kind(config: Mapping[str, Any]) -> QuantizationKind | None:
    """Return the kind of a model's weights, where mlx-lm looks for it."""
    if config.get("quantization"):
        return None
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            given = cast("Mapping[str, object]", part).get("quantization_config")
            if isinstance(given, Mapping) and given:
                return quantization_kind(cast("Mapping[str, Any]", given))
    return None


def require_loadable(path: Path, config: Mapping[str, Any], dtypes: Iterable[str] | None = None) -> None:
    """Refuse weights that are quantized in a way that mlx-lm does not load for the model's family.

    Args:
        path: the model's folder or file, for the message.
        config: its configuration.
        dtypes: types of its tensors; None if they are not known. Then a kind that may be plain is accepted.

    Raises:
        ModelUnsupported: the error names the kind, and what to choose instead.
    """
    kind = _stated_kind(config)
    if kind is None or kind.modules is None:
        return
    classes = cast("object", config.get("architectures"))
    listed = tuple(map(str, cast("list[object]", classes))) if isinstance(classes, list) else ()
    own = {module_of(str(config.get("model_type")), listed), language_module(config)}
    is_plain = dtypes is None or all(dtype in _FLOATS for dtype in dtypes)
    if own.isdisjoint(kind.modules) and not (kind.may_be_plain and is_plain):
        raise ModelUnsupported(
            f"{path} has weights of the kind {kind.name}, which mlx-lm does not load for {config.get('model_type')!r} "
            "models: choose one in MLX's format or in bfloat16, or a GGUF file."
        )


def loading_of(config: Mapping[str, Any], dtypes: Mapping[str, str]) -> Mapping[str, tuple[str, int]]:
    """Return the tensors of which mlx-lm makes others: by name, the type of these, and their bytes for each stored byte.

    Args:
        config: the model's configuration.
        dtypes: types of its tensors, by name.
    """
    kind = _stated_kind(config)
    if kind is None or kind.becomes == "stored":
        return {}
    if kind.becomes == "half precision":
        return {
            name: ("BF16", 2)
            for name, dtype in dtypes.items()
            if dtype in _FP8 and f"{name}_scale_inv" in dtypes
        }
    if kind.becomes == "with biases":
        return {name: (dtype, 2) for name, dtype in dtypes.items() if name.endswith(".weight_scale")}
    # A zero point of 4 bits becomes a bias of 16.
    return {name: ("F16", 4) for name in dtypes if name.endswith(".qzeros")}


# ---- memory


def check_memory(name: str, needed_bytes: int) -> None:
    """Refuse a model that this machine could only serve by swapping.

    Raises:
        PlanError: weights larger than the memory.
    """
    total = usable_memory().total_bytes
    if needed_bytes > total:
        raise PlanError(
            f"{name} needs {gigabytes(needed_bytes)} of memory for its weights, but this machine has "
            f"{gigabytes(total)}: choose a smaller or more strongly quantized model."
        )


def gigabytes(count: int) -> str:
    """Write a number of bytes as people do."""
    return f"{count / 1e9:.1f} GB"
