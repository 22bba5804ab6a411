"""GGUF files for tests: any header, and models of mlx-lm's folders as llama.cpp's converter writes them."""

# pyright: reportPrivateUsage=false
# A file is copied with all its values.
from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_ring.models.gguf import TYPES, GgufFile, read_gguf
from mlx_ring.models.model_folder import read_model_folder

F32, F16, BF16, Q4_1, Q5_1 = 0, 1, 30, 3, 7
_TEXT, _ARRAY = 8, 9
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
Array = NDArray[Any]


@dataclass(frozen=True)
class Typed:
    """A value of a certain type of GGUF's."""

    kind: int
    value: Any


Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float] | Typed


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file. `shape` is slowest axis first."""

    kind: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None
    """Offset that the header gives, if not the true one."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def encode(value: Value) -> bytes:
    """Encode a value with its type."""
    if isinstance(value, Typed):
        return struct.pack("<I", value.kind) + struct.pack("<" + _FORMS[value.kind], value.value)
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + text(value)
    if isinstance(value, Sequence):
        kind = _kind(value[0]) if value else 4
        begin = struct.pack("<IIQ", _ARRAY, 5 if kind == 4 else kind, len(value))
        if kind == _TEXT:
            return begin + b"".join(text(cast("str", each)) for each in value)
        return begin + struct.pack(f"<{len(value)}{_FORMS[5 if kind == 4 else kind]}", *value)
    return encode(Typed(_kind(value), value))


def _kind(value: object) -> int:
    return next(
        kind for type_, kind in ((bool, 7), (int, 4), (float, 6), (str, _TEXT)) if isinstance(value, type_)
    )


def gguf_bytes(
    metadata: Mapping[str, Value], tensors: Mapping[str, Stored], *, version: int = 3, alignment: int = 32
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + encode(value) for key, value in metadata.items())
    body = bytearray()
    for name, tensor in tensors.items():
        body += b"\0" * (-len(body) % alignment)
        header += text(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", tensor.kind, len(body) if tensor.offset is None else tensor.offset)
        body += tensor.data
    return b"".join((header, b"\0" * (-len(header) % alignment), body))


def write_with(source: Path, target: Path, replaced: Mapping[str, Stored]) -> Path:
    """Write a file with the metadata and tensors of another, some of which are replaced."""
    file = read_gguf(source)
    data = source.read_bytes()
    numbers = {kind.name: number for number, kind in TYPES.items()}
    stored = {
        name: Stored(numbers[old.kind.name], old.shape, data[old.offset : old.offset + old.nbytes])
        for name, old in file.tensors.items()
    }
    metadata = {
        key: cast("Value", file.values(key) if file.is_array(key) else _single(file, key))
        for key in file._spans
    }
    target.write_bytes(gguf_bytes(metadata, stored | dict(replaced)))
    return target


def _single(file: GgufFile, key: str) -> Value:
    return cast("Value", file._decode(key, file._spans[key]))


_COMMON = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = {
    **_COMMON,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""GGUF's name of each of mlx-lm's model types."""


def metadata_of(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the metadata of a model, by its configuration."""
    kind = ARCHITECTURES[config["model_type"]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own: dict[str, Value] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1)),
    }
    others = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
    }
    own |= {there: config[here] for here, there in others.items() if here in config}
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in own.items()}}


TOKENIZER: dict[str, Value] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<|pad|>", "<|end|>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 1,
}
"""The smallest tokenizer that can be read."""


def write_gguf_of(
    folder: Path,
    target: Path,
    metadata: Mapping[str, Value] | None = None,
    *,
    parts: int = 1,
) -> Path:
    """Write the model of mlx-lm's folder, with the same weights: groups of 4 and 5 bits as Q4_1 and Q5_1.

    Return the file, or the first of its parts.
    """
    model = read_model_folder(folder)
    arrays: dict[str, mx.array] = {}
    for file in model.weight_files:
        arrays |= cast("dict[str, mx.array]", mx.load(str(folder / file.name)))
    config = model.config
    names = _GEMMA if config["model_type"] == "gemma3_text" else _COMMON
    tensors: dict[str, Stored] = {}
    for name in sorted(arrays):
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        stored = _stored(config, name, arrays)
        if module in _OUTSIDE:
            tensors[f"{_OUTSIDE[module]}.{part}"] = stored
        else:
            number, _, rest = module.removeprefix("model.layers.").partition(".")
            rest = rest.replace("block_sparse_moe", "mlp")
            tensors[f"blk.{number}.{names[rest]}.{part}"] = stored
    whole: dict[str, Value] = {**metadata_of(config), **TOKENIZER, **(metadata or {})}
    if parts == 1:
        target.write_bytes(gguf_bytes(whole, tensors))
        return target
    files = [
        target.with_name(f"{target.stem}-{number:05}-of-{parts:05}.gguf") for number in range(1, parts + 1)
    ]
    for number, file in enumerate(files):
        own = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % parts == number}
        file.write_bytes(gguf_bytes({**(whole if number == 0 else {}), "split.no": number}, own))
    return files[0]


def _stored(config: Mapping[str, Any], name: str, arrays: Mapping[str, mx.array]) -> Stored:
    array, module = arrays[name], name.rpartition(".")[0]
    heads = 0
    if config["model_type"] in ("llama", "mixtral") and module.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
    if f"{module}.scales" in arrays and name.endswith(".weight"):
        scales, biases = (
            _array(arrays[f"{module}.{part}"].astype(mx.float16)) for part in ("scales", "biases")
        )
        bits = array.shape[-1] * 32 // (scales.shape[-1] * 32)
        shape = (*array.shape[:-1], scales.shape[-1] * 32)
        blocks = _blocks(_array(array), scales, biases, bits)
        return Stored(
            Q4_1 if bits == 4 else Q5_1, shape, _interleave(blocks.reshape(shape[0], -1), heads).tobytes()
        )
    plain = array + 1 if config["model_type"] == "gemma3_text" and "norm" in module else array
    if array.dtype == mx.bfloat16:
        rows = _array(plain.view(mx.uint16))
        return Stored(BF16, array.shape, _interleave(rows, heads).tobytes())
    kind = F16 if array.dtype == mx.float16 else F32
    return Stored(kind, array.shape, _interleave(_array(plain), heads).tobytes())


def _array(array: mx.array) -> Array:
    return np.array(cast("Any", array))


def _interleave(rows: Array, heads: int) -> Array:
    """Put the rows in the order of llama.cpp's converter: the two halves of each head alternate."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _blocks(words: Array, scales: Array, biases: Array, bits: int) -> Array:
    """Return blocks of Q4_1 or Q5_1, one by one, from MLX's packed integers."""
    stream = np.unpackbits(
        words.astype("<u4").view(np.uint8).reshape(-1, 4 * bits), axis=1, bitorder="little"
    )
    values = (stream.reshape(-1, 32, bits) << np.arange(bits)).sum(axis=2)
    parts = [number.astype("<f2").reshape(-1, 1).view(np.uint8) for number in (scales, biases)]
    if bits == 5:
        parts.append(np.packbits((values >> 4).astype(np.uint8), axis=1, bitorder="little"))
    low = (values & 15).astype(np.uint8)
    return np.concatenate([*parts, low[:, :16] | low[:, 16:] << 4], axis=1).reshape(-1)
