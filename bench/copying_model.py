"""Write a Llama that copies: it repeats whatever followed the current token before. Nothing is trained.

    python bench/copying_model.py [--output FOLDER]

Two attention heads form an induction head (Olsson et al. 2022, arXiv:2209.11895). One part of the residual stream
holds the token's own vector. A head of layer 0 attends to the previous position and writes that token's vector into a
second part. A head of layer 1 attends to a position whose previous token equals the current one. It writes the token
found there into a third part, which the output head reads. The fast rotary frequencies select the distance of one;
the slow ones leave content unchanged. All other weights are random and have their full size, so that a pass has its
real cost. They are too small to change the output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from random_model import CACHE, DEMO, write_safetensors, write_tokenizer

Matrix = np.ndarray[Any, np.dtype[np.float32]]

_ROPE_BASE = 1e12
_FIRST_SLOW_PAIR = 24
"""First pair of dimensions in which 4,000 positions rotate a vector by less than an eighth of a radian."""
_WHISPER = 1e-5
_POSITION_SHARPNESS = 30.0
_CONTENT_SHARPNESS = 80.0
_LOGIT_SCALE = 2.0


@dataclass(frozen=True)
class CopyingShape:
    """Sizes of the model: 117 M parameters."""

    layers: int = 8
    hidden: int = 1024
    intermediate: int = 3072
    heads: int = 8
    head_dim: int = 128
    vocabulary: int = 4096
    seed: int = 0

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 16384,
            "rope_theta": _ROPE_BASE,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }


def make_copying(shape: CopyingShape | None = None, *, output: Path | None = None) -> Path:
    """Return the model's folder; create it if it does not exist."""
    shape = shape or CopyingShape()
    folder = output or CACHE / f"copying-{shape.hidden}x{shape.layers}-{shape.seed}"
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        write_tokenizer(DEMO, unfinished, shape.vocabulary)
        (unfinished / "config.json").write_text(json.dumps(shape.config(), indent=2))
        write_safetensors(unfinished / "model.safetensors", _tensors(shape))
        shutil.move(unfinished, folder)
    return folder


def _tensors(shape: CopyingShape) -> dict[str, Matrix]:
    random = np.random.default_rng(shape.seed)
    content = shape.head_dim - 2 * _FIRST_SLOW_PAIR
    own, before, found = (slice(part * 128, part * 128 + content) for part in range(3))
    constant = shape.hidden - 1
    vectors = random.standard_normal((shape.vocabulary, content), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    embedding = np.zeros((shape.vocabulary, shape.hidden), np.float32)
    embedding[:, own], embedding[:, constant] = vectors, 1.0
    head = np.zeros_like(embedding)
    head[:, found] = _LOGIT_SCALE * vectors
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(shape.hidden, np.float32),
    }
    for layer in range(shape.layers):
        for name, matrix in _layer(shape, random).items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix
    # The norm before a layer divides by the stream's root mean square: sqrt(parts / hidden).
    scales = [float(np.sqrt(parts / shape.hidden)) for parts in (2, 3)]
    first, second = (
        {name: tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"}
        for layer in (0, 1)
    )
    _attend_to_the_token_before(first, shape, constant, scales[0])
    _attend_to_equal_content(second, shape, own, before, scales[1])
    for weights, target, scale in ((first, before, scales[0]), (second, found, scales[1])):
        weights["v"][: shape.head_dim] = 0
        weights["v"][:content, own] = scale * np.eye(content, dtype=np.float32)
        weights["o"][target, :content] += np.eye(content, dtype=np.float32)
    return tensors


def _layer(shape: CopyingShape, random: np.random.Generator) -> dict[str, Matrix]:
    inner = shape.heads * shape.head_dim

    def weights(rows: int, columns: int, spread: float = 0.02) -> Matrix:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)

    return {
        "input_layernorm": np.ones(shape.hidden, np.float32),
        "post_attention_layernorm": np.ones(shape.hidden, np.float32),
        "self_attn.q_proj": weights(inner, shape.hidden),
        "self_attn.k_proj": weights(inner, shape.hidden),
        "self_attn.v_proj": weights(inner, shape.hidden),
        "self_attn.o_proj": weights(shape.hidden, inner, _WHISPER),
        "mlp.gate_proj": weights(shape.intermediate, shape.hidden),
        "mlp.up_proj": weights(shape.intermediate, shape.hidden),
        "mlp.down_proj": weights(shape.hidden, shape.intermediate, _WHISPER),
    }


def _attend_to_the_token_before(
    weights: dict[str, Matrix], shape: CopyingShape, constant: int, scale: float
) -> None:
    """Set equal queries and keys, rotated by one step: their product is largest at a distance of one."""
    half = shape.head_dim // 2
    angles = _ROPE_BASE ** (-np.arange(half) / half)
    size = scale * np.sqrt(_POSITION_SHARPNESS * np.sqrt(shape.head_dim))
    for name in "qk":
        weights[name][: shape.head_dim] = 0
    weights["q"][:half, constant] = size
    weights["k"][:half, constant] = size * np.cos(angles)
    weights["k"][half : shape.head_dim, constant] = size * np.sin(angles)


def _attend_to_equal_content(
    weights: dict[str, Matrix], shape: CopyingShape, own: slice, before: slice, scale: float
) -> None:
    """Set the query to the token's own vector and the key to the previous token's, in the slow dimensions."""
    half = shape.head_dim // 2
    slow = np.concatenate(
        [np.arange(_FIRST_SLOW_PAIR, half), np.arange(half + _FIRST_SLOW_PAIR, shape.head_dim)]
    )
    size = scale * np.sqrt(_CONTENT_SHARPNESS * np.sqrt(shape.head_dim))
    for name, part in (("q", own), ("k", before)):
        weights[name][: shape.head_dim] = 0
        weights[name][slow, part] = size * np.eye(len(slow), dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in asdict(CopyingShape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    print(make_copying(CopyingShape(**arguments), output=output))


if __name__ == "__main__":
    main()
