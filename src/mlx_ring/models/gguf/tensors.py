"""Tensors of GGUF files as mlx-lm has them: names, order of rows, and which are rounded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.models.gguf import GgufFile, GgufTensor, shown

ROUNDED = {
    "Q4_K": "scales exact in float32, rounded in half precision",
    "Q5_K": "scales exact in float32, rounded in half precision",
    "Q6_K": "half of the groups of 16 rounded to a quarter of a step, to share 8-bit groups of 32",
}
"""Rounding of types that are not served exactly."""
_IN_BLOCK = re.compile(r"blk\.(?P<number>\d{1,5})\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
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
class Architecture:
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


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _ATTENTION | _DENSE, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _ATTENTION | _DENSE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _ATTENTION | _DENSE | _HEAD_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_experts("mlp"), "ffn_norm": "post_attention_layernorm"},
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma3": Architecture(
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
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**_ATTENTION, **_DENSE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
}
MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {**_ATTENTION, **_experts("block_sparse_moe"), "ffn_norm": "post_attention_layernorm"},
    interleaved=True,
)
"""Llama with experts, which has no name of its own in GGUF."""
_INTERLEAVED = frozenset(each.model_type for each in (*ARCHITECTURES.values(), MIXTRAL) if each.interleaved)
_WITH_OFFSET = {each.model_type: each.norm_offset for each in ARCHITECTURES.values() if each.norm_offset}


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
    known = {each.model_type: each for each in (*ARCHITECTURES.values(), MIXTRAL)}
    if model_type not in known:
        raise ModelUnsupported(unknown_architecture(file.path, model_type))
    names = known[model_type].names
    for name, tensor in file.tensors.items():
        if name in ROPE_FACTORS:
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


def unknown_architecture(path: Path, name: str) -> str:
    return (
        f"{path} is a GGUF file of the architecture {shown(name)}, which is not read; {', '.join(ARCHITECTURES)} are. Serve "
        "the model from a folder with safetensors."
    )
