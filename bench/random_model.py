"""Write a Qwen3 with seeded random weights as a Hugging Face folder, tensor by tensor.

    python bench/random_model.py [--layers 8] [--hidden 1024] [--dtype bfloat16] [--seed 0] ...

The folder is written to a cache (or `--output`), and is reused if its settings are the same. Prints its path. The
tokenizer is the demo model's, padded to the vocabulary so that every id has its own text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path.home() / ".cache" / "mlx-ring" / "bench"
DEMO = Path(__file__).parents[1] / "src" / "mlx_ring" / "builtin_models" / "demo"
_SPREAD = 0.02
_BLOCK = 1 << 22
"""Numbers generated at a time, which limits memory for any size of model."""
BYTES = {"bfloat16": 2, "float32": 4}
_SAFETENSORS_NAME = {"bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3. The defaults give 281 M parameters: most of a small model's layers, and a real vocabulary."""

    layers: int = 8
    hidden: int = 1024
    intermediate: int = 3072
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    dtype: str = "bfloat16"
    seed: int = 0

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes in the order of the file; the embedding is tied to the output head."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer().items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)

    def _layer(self) -> dict[str, tuple[int, ...]]:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 16384,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "torch_dtype": self.dtype,
        }


def make(shape: Shape, *, output: Path | None = None, tokenizer: Path = DEMO) -> Path:
    """Return the model's folder; create it if it does not exist."""
    said = json.dumps(asdict(shape), sort_keys=True).encode()
    digest = hashlib.sha256(said + (tokenizer / "tokenizer.json").read_bytes()).hexdigest()[:12]
    folder = output or CACHE / f"qwen3-{shape.parameters // 1_000_000}m-{digest}"
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "model"
        unfinished.mkdir()
        write_tokenizer(tokenizer, unfinished, shape.vocabulary)
        demo_config = json.loads((tokenizer / "config.json").read_text())
        ends = {key: demo_config[key] for key in ("bos_token_id", "eos_token_id") if key in demo_config}
        (unfinished / "config.json").write_text(json.dumps(shape.config() | ends, indent=2))
        _write_weights(unfinished / "model.safetensors", shape)
        unfinished.rename(folder)
    return folder


def write_tokenizer(source: Path, folder: Path, vocabulary: int) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder)
    definition = json.loads((source / "tokenizer.json").read_text())
    known: dict[str, int] = definition["model"]["vocab"]
    added = {token["id"] for token in definition["added_tokens"]}
    taken = set(known.values()) | added
    known.update({f"[{index}]": index for index in range(vocabulary) if index not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False))


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    """Write whole float32 tensors in the format that `_write_weights` writes block by block."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    with path.open("wb") as file:
        file.write(_encoded_header(header))
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())


def _encoded_header(header: dict[str, Any]) -> bytes:
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _write_weights(path: Path, shape: Shape) -> None:
    """Write the safetensors format: header length, JSON header, then the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, dimensions in shape.tensors():
        start, end = end, end + math.prod(dimensions) * BYTES[shape.dtype]
        header[name] = {
            "dtype": _SAFETENSORS_NAME[shape.dtype],
            "shape": dimensions,
            "data_offsets": [start, end],
        }
    with path.open("wb") as file:
        file.write(_encoded_header(header))
        for index, (name, dimensions) in enumerate(shape.tensors()):
            random = np.random.default_rng([shape.seed, index])
            count = math.prod(dimensions)
            for start in range(0, count, _BLOCK):
                size = min(_BLOCK, count - start)
                numbers = random.standard_normal(size, dtype=np.float32) * np.float32(_SPREAD)
                if "norm" in name:
                    numbers += 1
                file.write(_encoded(numbers, shape.dtype))


def _encoded(numbers: np.ndarray[Any, np.dtype[np.float32]], dtype: str) -> bytes:
    if dtype == "float32":
        return numbers.astype("<f4").tobytes()
    bits = numbers.view(np.uint32)
    nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
    return (nearest_even >> 16).astype("<u2").tobytes()


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each size, which other benchmarks share."""
    for name, default in asdict(Shape()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, int):
            parser.add_argument(flag, type=int, default=default)
        else:
            parser.add_argument(flag, choices=list(BYTES), default=default)
    parser.add_argument(
        "--tokenizer", type=Path, default=DEMO, help="model folder to take the tokenizer from"
    )


def shape_of(arguments: argparse.Namespace) -> Shape:
    return Shape(**{name: getattr(arguments, name) for name in asdict(Shape())})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    print(make(shape_of(arguments), output=arguments.output, tokenizer=arguments.tokenizer))


if __name__ == "__main__":
    main()
