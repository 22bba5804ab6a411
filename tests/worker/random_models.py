"""Folders of tiny random models, as `save_pretrained` would write them, without the tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}

QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def write_random_model(
    folder: Path, config: dict[str, Any], seed: int = 0, *, spread: float = 0.3, norm: float = 0.0
) -> Path:
    """Make the model of `config` with seeded normal weights in float32 and write its folder.

    Args:
        spread: standard deviation of the weights.
        norm: mean of the norms' weights. In deeper models, 1.0 and a smaller spread keep numbers in bounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model_class, arguments_class = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
    mx.random.seed(seed)
    model = model_class(arguments_class.from_dict(config))
    shapes = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
    weights = {
        name: (norm if "norm" in name else 0.0) + spread * mx.random.normal(value.shape)
        for name, value in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- folders in the formats of other programs

Stored = tuple[str, tuple[int, ...], bytes]
"""Type, shape and bytes of a tensor in a safetensors file."""
BLOCK = 128
_FP8_SCALE = 0.01


def write_in_format(
    folder: Path, config: dict[str, Any], kind: Literal["fp8 blocks", "fp8 tensors", "int4", "bfloat16"]
) -> Path:
    """Write a random model as other programs publish it: with a matrix for each expert, and quantized or in bfloat16.

    The weights of all kinds but "int4" are numbers that FP8 with these scales has, so they load alike.
    """
    write_random_model(folder, config, spread=0.05, norm=1.0)
    file = folder / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(file)))
    stored: dict[str, Stored] = {}
    for name, array in _as_published(weights, config):
        is_packed = array.ndim == 2 and not any(
            part in name for part in ("embed", "lm_head", ".gate.", "kv_b")
        )
        if is_packed and kind == "int4":
            if "experts" in name:
                stored |= _packed(name, array)
            else:
                stored[name] = _stored(array.astype(mx.bfloat16))
        elif is_packed:
            codes = mx.to_fp8(array / _FP8_SCALE)
            decoded = (mx.from_fp8(codes, mx.bfloat16) * mx.array(_FP8_SCALE)).astype(mx.bfloat16)
            shape = () if kind == "fp8 tensors" else tuple(-(-size // BLOCK) for size in array.shape)
            if kind == "bfloat16":
                stored[name] = _stored(decoded)
            else:
                stored[name] = ("F8_E4M3", array.shape, np.array(codes).tobytes())
                stored[f"{name}_scale_inv"] = ("F32", shape, np.full(shape, _FP8_SCALE, np.float32).tobytes())
        else:
            stored[name] = _stored(array.astype(mx.bfloat16))
    write_tensors(file, stored)
    given: dict[str, Any] | None = {
        "fp8 blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        "fp8 tensors": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "int4": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
        },
        "bfloat16": None,
    }[kind]
    quantized = {} if given is None else {"quantization_config": given}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16", **quantized}))
    return folder


def write_tensors(file: Path, stored: Mapping[str, Stored]) -> None:
    """Write a safetensors file with tensors of any type, also of those that MLX does not write."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in stored.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *(data for *_, data in stored.values())]))


def _as_published(
    weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> Iterator[tuple[str, mx.array]]:
    """Yield weights with a matrix for each expert, and one for all heads of latent attention."""
    names = (
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"} if config["model_type"] == "minimax" else {}
    )
    for name, array in weights.items():
        module, _, rest = name.partition(".switch_mlp.")
        if rest:
            matrix = rest.removesuffix(".weight")
            for number in range(array.shape[0]):
                yield f"{module}.experts.{number}.{names.get(matrix, matrix)}.weight", array[number]
        elif "embed_q" in name:
            heads = mx.concatenate(
                [array.swapaxes(-1, -2), weights[name.replace("embed_q", "unembed_out")]], 1
            )
            yield name.replace("embed_q", "kv_b_proj"), heads.reshape(-1, heads.shape[-1])
        elif "unembed_out" not in name:
            yield name, array


def _packed(name: str, array: mx.array) -> dict[str, Stored]:
    integers, scales, _ = mx.quantize(array, group_size=32, bits=4)
    shape = np.array(array.shape, np.int32)
    return {
        f"{name}_packed": ("I32", integers.shape, np.array(integers).tobytes()),
        f"{name}_scale": _stored(scales.astype(mx.bfloat16)),
        f"{name}_shape": ("I32", shape.shape, shape.tobytes()),
    }


def _stored(array: mx.array) -> Stored:
    return "BF16", array.shape, np.array(array.view(mx.uint16)).tobytes()
