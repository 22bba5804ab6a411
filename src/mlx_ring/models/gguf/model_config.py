"""Models of GGUF files as mlx-lm has them: names of tensors, order of rows, configuration."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.models.gguf import GROUP, QUANTIZED, GgufFile, GgufTensor, read_range, shown

_IN_BLOCK = re.compile(r"blk\.(?P<number>\d{1,5})\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that become part of the configuration."""
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_DENSE = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _experts(path: str) -> dict[str, str]:
    return {"ffn_gate_inp": f"{path}.gate"} | {
        f"ffn_{name}_exps": f"{path}.switch_mlp.{name}_proj" for name in ("gate", "up", "down")
    }


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One of GGUF's architectures as mlx-lm has it."""

    model_type: str
    model_class: str
    names: Mapping[str, str]
    """mlx-lm's names of a layer's modules, by GGUF's."""
    interleaved: bool = False
    """True if the rows of queries and keys are in another order: the two halves of each head alternate."""
    norm_offset: int = 0
    """Number that GGUF adds to the weights of norms, and mlx-lm when it computes."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of the configuration that the metadata lacks."""


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _ATTENTION | _DENSE, interleaved=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _ATTENTION | _DENSE),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _ATTENTION | _DENSE | _HEAD_NORMS),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_experts("mlp"), "ffn_norm": "post_attention_layernorm"},
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **_ATTENTION,
            **_HEAD_NORMS,
            **_DENSE,
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1,
    ),
    "phi3": _Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**_ATTENTION, **_DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}
_MIXTRAL = _Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {**_ATTENTION, **_experts("block_sparse_moe"), "ffn_norm": "post_attention_layernorm"},
    interleaved=True,
)
"""Llama with experts, which has no name of its own in GGUF."""
_INTERLEAVED = frozenset(each.model_type for each in (*_ARCHITECTURES.values(), _MIXTRAL) if each.interleaved)
_WITH_OFFSET = {each.model_type: each.norm_offset for each in _ARCHITECTURES.values() if each.norm_offset}
_LAYERS_OF_GEMMA_27B = 62
"""Number of layers of the Gemma 3 model whose attention is scaled by another width than the head's."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of all published Llama 3 models. GGUF has only the factors that follow from them."""
_NEUTRAL = {
    **dict.fromkeys(("attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0.0, 1.0)),
}
"""Numbers that mlx-lm's models of these architectures do not have, with the values that change nothing."""
_TOLERANCE = 1e-3
_MOST_LAYERS = 100_000
"""Most values of a number that is given for each layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Difference between a tensor's stored rows and mlx-lm's."""

    heads: int = 0
    """Number of heads whose rows are interleaved; 0 if the rows are in order."""
    offset: int = 0
    """Number to subtract from each weight."""


def layout_of(config: Mapping[str, Any], name: str) -> Layout:
    """Return the layout of a tensor of a GGUF file, by its name in mlx-lm."""
    model_type, module = str(config["model_type"]), name.rpartition(".")[0]
    if model_type in _INTERLEAVED and module.endswith((".q_proj", ".k_proj")):
        counted = "num_attention_heads" if module.endswith(".q_proj") else "num_key_value_heads"
        return Layout(heads=int(config[counted]))
    return Layout(offset=_WITH_OFFSET.get(model_type, 0) if module.endswith("norm") else 0)


def named_tensors(file: GgufFile, model_type: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a file's tensors with mlx-lm's names.

    Raises:
        ModelUnsupported: one of them is none of the architecture's.
    """
    known = {each.model_type: each for each in (*_ARCHITECTURES.values(), _MIXTRAL)}
    if model_type not in known:
        raise ModelUnsupported(_unknown_architecture(file.path, model_type))
    names = known[model_type].names
    for name, tensor in file.tensors.items():
        if name in _ROPE_FACTORS:
            continue
        found = _IN_BLOCK.fullmatch(name)
        module = names.get(found["name"]) if found else None
        if found and module:
            yield f"model.layers.{int(found['number'])}.{module}.{found['kind']}", tensor
        elif name in _OUTSIDE:
            yield _OUTSIDE[name], tensor
        else:
            raise ModelUnsupported(
                f"{file.path} has a tensor {shown(name)}, which mlx-lm's {model_type} models do not have: serve the "
                "model from a folder with safetensors."
            )


def config_of(headers: Sequence[GgufFile]) -> dict[str, Any]:
    """Return the configuration without the tokenizer's entries.

    Args:
        headers: the file's, or those of its parts in order.

    Raises:
        ModelCorrupt, ModelUnsupported: The model cannot be served.
    """
    return _Metadata(headers).config()


def small_files_of(headers: Sequence[GgufFile]) -> dict[str, object]:
    """Return the contents of the JSON files that a model's folder has beside its weights; see `config_of`."""
    from mlx_ring.models.gguf.tokenizer import make_tokenizer  # only the first time

    config = config_of(headers)
    for header in headers:
        _ = list(named_tensors(header, str(config["model_type"])))
    tokenizer = make_tokenizer(headers[0])
    config["eos_token_id"] = tokenizer.ends
    config["bos_token_id"] = tokenizer.begin
    return {
        "config.json": config,
        "tokenizer.json": tokenizer.content,
        "tokenizer_config.json": {**tokenizer.config, "model_max_length": config["max_position_embeddings"]},
    }


class _Metadata:
    """Reader of the values that become a configuration."""

    def __init__(self, headers: Sequence[GgufFile]) -> None:
        self._file = file = headers[0]
        self._files: dict[str, Path] = {}
        self._tensors: dict[str, GgufTensor] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                if name in self._tensors:
                    raise ModelCorrupt(
                        f"{header.path} has tensor {shown(name)}, as another part has. Fetch it again."
                    )
                self._tensors[name], self._files[name] = tensor, header.path
        tensors = self._tensors
        kind = file.value("general.type", str) or "model"
        self._prefix = file.value("general.architecture", str) or ""
        if kind != "model" or "token_embd.weight" not in tensors:
            raise ModelUnsupported(
                f"{file.path} has a {shown(kind)} of {shown(self._prefix)} with {len(tensors)} tensors, not a language "
                "model: give the file of the model itself."
            )
        has_experts = self._prefix == "llama" and self._integer("expert_count")
        found = _MIXTRAL if has_experts else _ARCHITECTURES.get(self._prefix)
        if found is None:
            raise ModelUnsupported(_unknown_architecture(file.path, self._prefix))
        self._architecture = found

    def config(self) -> dict[str, Any]:
        """Return the configuration, as mlx-lm reads it."""
        heads = self._require("attention.head_count")
        hidden = self._require("embedding_length")
        head_dim = self._integer("attention.key_length") or hidden // max(heads, 1)
        config: dict[str, Any] = {
            "model_type": self._architecture.model_type,
            "architectures": [self._architecture.model_class],
            "hidden_size": hidden,
            "num_hidden_layers": self._require("block_count"),
            "intermediate_size": self._integer("feed_forward_length")
            or self._require("expert_feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv") or heads,
            "head_dim": head_dim,
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon") or 1e-5,
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "rope_theta": self._float("rope.freq_base") or 10000.0,
            "max_position_embeddings": self._require("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "torch_dtype": self._dtype(),
            **self._architecture.fixed,
        }
        if (value_dim := self._integer("attention.value_length")) not in (None, head_dim):
            raise self._unsupported(f"keys of {head_dim} and values of {value_dim} numbers")
        self._check_neutral()
        config |= self._experts() | self._special(config) | self._rope(config)
        self._check_attention(config)
        if (bits := self._bits()) is not None:
            config["quantization"] = {"group_size": GROUP, "bits": bits}
        return config

    def _check_neutral(self) -> None:
        """Refuse numbers that would change results and are none of mlx-lm's."""
        for name, neutral in _NEUTRAL.items():
            if (found := self._float(name)) is not None and found not in neutral:
                raise self._unsupported(f"{self._prefix}.{name} {found:g}")

    def _check_attention(self, config: Mapping[str, Any]) -> None:
        """Refuse another scale than mlx-lm's, and a window where mlx-lm's model has none.

        Phi-3's window is ignored by mlx-lm, as by llama.cpp.
        """
        width = config.get("query_pre_attn_scalar", config["head_dim"])
        scale = self._float("attention.scale") or width**-0.5
        if abs(scale - width**-0.5) > _TOLERANCE * width**-0.5:
            raise self._unsupported(f"{self._prefix}.attention.scale {scale:g}")
        window = self._integer("attention.sliding_window") or 0
        is_used = "sliding_window" not in config and self._prefix != "phi3"
        if is_used and 0 < window < config["max_position_embeddings"]:
            raise self._unsupported(f"{self._prefix}.attention.sliding_window {window}")

    def _experts(self) -> dict[str, Any]:
        count = self._integer("expert_count")
        if not count:
            return {}
        name = "num_local_experts" if self._architecture is _MIXTRAL else "num_experts"
        size = self._integer("expert_feed_forward_length")
        return {
            name: count,
            "num_experts_per_tok": self._require("expert_used_count"),
            **({} if size is None else {"moe_intermediate_size": size}),
        }

    def _special(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of single architectures."""
        rotated = self._integer("rope.dimension_count") or config["head_dim"]
        if self._prefix == "phi3":
            return {"partial_rotary_factor": rotated / config["head_dim"]}
        if rotated != config["head_dim"]:
            raise self._unsupported(f"rotations of {rotated} of a head's {config['head_dim']} numbers")
        if self._prefix != "gemma3":
            return {}
        is_largest = config["num_hidden_layers"] == _LAYERS_OF_GEMMA_27B
        return {
            "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
            if is_largest
            else config["head_dim"],
            "sliding_window": self._require("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": self._float("rope.freq_base_swa") or 10000.0,
            "rope_theta": self._float("rope.freq_base") or 1_000_000.0,
        }

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scaling of rotations."""
        kind = self._file.value(f"{self._prefix}.rope.scaling.type", str) or "none"
        factor = self._float("rope.scaling.factor")
        factor = self._float("rope.scale_linear") if factor is None else factor
        factor = 1.0 if factor == 0 else factor
        original = self._integer("rope.scaling.original_context_length")
        if (long := self._floats("rope_factors_long.weight")) is not None:
            short = self._floats("rope_factors_short.weight") or long
            scaling: dict[str, Any] = {"type": "longrope", "long_factor": long, "short_factor": short}
            original = original or config["max_position_embeddings"]
            scaling["original_max_position_embeddings"] = original
            return {"rope_scaling": scaling, "original_max_position_embeddings": original}
        if (factors := self._floats("rope_freqs.weight")) is not None and set(factors) != {1.0}:
            return {"rope_scaling": self._llama3(factors, config)}
        if (kind == "none" and factor is None) or (kind in ("none", "linear") and factor == 1):
            return {}
        if kind in ("none", "linear") and factor is not None:
            return {"rope_scaling": {"type": "linear", "factor": factor}}
        if kind == "yarn" and factor is not None and self._prefix != "phi3":
            scaling = {"type": "yarn", "factor": factor}
            given = {
                "original_max_position_embeddings": original,
                "beta_fast": self._float("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._float("rope.scaling.yarn_beta_slow"),
            }
            return {
                "rope_scaling": scaling | {name: value for name, value in given.items() if value is not None}
            }
        raise self._unsupported(f"a scaling of rotations of type {shown(kind)} with factor {factor}")

    def _llama3(self, factors: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scaling whose factors a file has. Published models differ in the largest factor only."""
        factor, half = max(factors), len(factors)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        for index, found in enumerate(factors):
            turns = _LLAMA3["original_max_position_embeddings"] / (
                2 * math.pi * config["rope_theta"] ** (index / half)
            )
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            expected = 1 / ((1 - smooth) / factor + smooth)
            if abs(found - expected) > _TOLERANCE * expected:
                raise self._unsupported(
                    f"a factor {found:g} of rotation {index}, where Llama 3 has {expected:g}"
                )
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _dtype(self) -> str:
        """Return the half precision to compute in. Gemma's activations exceed float16."""
        has_brain = any(tensor.kind.name == "BF16" for tensor in self._tensors.values())
        return "bfloat16" if has_brain or self._prefix == "gemma3" else "float16"

    def _bits(self) -> int | None:
        """Return the bits of most weights; mlx-lm finds those of the others by their sizes."""
        counts: Counter[int] = Counter()
        for tensor in self._tensors.values():
            if tensor.kind.name in QUANTIZED:
                counts[tensor.kind.bits] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0] if counts else None

    def _integer(self, name: str) -> int | None:
        key = f"{self._prefix}.{name}"
        values = self._file.values(key, _MOST_LAYERS) if self._file.is_array(key) else None
        if values is None:
            return self._file.value(key, int)
        if len(set(values)) != 1 or type(values[0]) is not int:
            raise self._unsupported(f"{key} {shown(values)}, which differ by layer")
        return values[0]

    def _require(self, name: str) -> int:
        found = self._integer(name)
        if found is None or found < 1:
            raise ModelCorrupt(
                f"{self._file.path} gives {self._prefix}.{name} as {found}; it must be 1 or more. Fetch the file again."
            )
        return found

    def _float(self, name: str) -> float | None:
        """Return a number with the digits that float32 has: 1e-05 instead of 9.999999747378752e-06."""
        key = f"{self._prefix}.{name}"
        found = self._file.value(key, float)
        if found is not None and found < 0:
            raise ModelCorrupt(
                f"{self._file.path} gives {key} as {found:g}; it must be 0 or more. Fetch the file again."
            )
        return None if found is None else _shortest(found)

    def _floats(self, name: str) -> list[float] | None:
        """Return the numbers of a small tensor."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.kind.name != "F32" or len(tensor.shape) != 1:
            raise self._unsupported(f"a tensor {name} of {tensor.kind.name} {list(tensor.shape)}")
        data = read_range(self._files[name], tensor.offset, tensor.nbytes)
        values = [_shortest(value) for value in struct.unpack(f"<{tensor.shape[0]}f", data)]
        wrong = next((value for value in values if not 0 < value < math.inf), None)
        if wrong is not None:
            raise ModelCorrupt(f"{self._files[name]} has {wrong} in {name}. Fetch the file again.")
        return values

    def _unsupported(self, what: str) -> ModelUnsupported:
        return ModelUnsupported(
            f"{self._file.path} has {what}, which is not supported: serve the model from a folder with safetensors."
        )


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that rounds to the same float32."""
    forms = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((form for form in forms if c_float(form).value == c_float(value).value), value)


def _unknown_architecture(path: Path, name: str) -> str:
    return (
        f"{path} is a GGUF file of the architecture {shown(name)}, which is not read; {', '.join(_ARCHITECTURES)} are. Serve "
        "the model from a folder with safetensors."
    )
