"""Models of GGUF files as mlx-lm has them: configuration, and the other small files of a folder."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import c_float
from pathlib import Path
from typing import Any

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported
from mlx_ring.core.types import ADVISED_SAMPLING, PoolingKind
from mlx_ring.models.gguf import GROUP, QUANTIZED, GgufFile, GgufTensor, read_range, shown
from mlx_ring.models.gguf.tensors import ARCHITECTURES, MIXTRAL, named_tensors, unknown_architecture
from mlx_ring.models.pooling import pooling_files

_LAYERS_OF_GEMMA_27B = 62
"""Number of layers of the Gemma 3 model whose attention is scaled by another width than the head's."""
_LAYERS_OF_GEMMA_1B = 26
"""Number of layers of the Gemma 3 model of which ollama's files cap logits, although the model does not. Ollama ignores it."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of all published Llama 3 models. GGUF has only the factors that follow from them."""
_NEUTRAL = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "expert_gating_func"), (0, 1)),
    **dict.fromkeys(("attn_factor", "yarn_attn_factor", "alpha"), (0, 1)),
    **dict.fromkeys(("attention.causal", "expert_weights_norm", "norm_top_k_prob"), (True,)),
    "yarn_ext_factor": (1, -1),
}
"""Values that change nothing, by name, without `rope.scaling.`; of all other unknown numbers 0."""
_HARMLESS = frozenset(
    {
        # not read by llama.cpp for models of these architectures
        *("vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "decoder_start_token_id"),
        *("rope.dimension_sections", "rope.scaling.finetuned", "attention.temperature_length"),
        "use_parallel_residual",
        # of use with others that are checked
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scale_linear"),
        *("expert_used_count", "expert_feed_forward_length"),
        # of tensors, which are refused by name
        *("expert_shared_count", "expert_shared_feed_forward_length"),
    }
)
_OF_PICTURES = ("vision.", "mm.")
"""Beginnings of names that ollama's files have; tensors of pictures are refused."""
_SAME = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Values of layers with a window, and those of the other layers, which they must equal."""
_POOLINGS: Mapping[int, PoolingKind | None] = {-1: None, 0: None, 1: "mean", 2: "cls", 3: "last"}
_SAMPLING_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""GGUF's names of sampling parameters that it names otherwise."""
_TOLERANCE = 1e-3
_MOST_LAYERS = 100_000
"""Most values of a number that is given for each layer."""


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

    metadata = _Metadata(headers)
    config = metadata.config()
    for header in headers:
        _ = list(named_tensors(header, str(config["model_type"])))
    tokenizer = make_tokenizer(headers[0])
    if tokenizer.count > config["vocab_size"]:
        raise ModelCorrupt(
            f"{headers[0].path} has {tokenizer.count} tokens, but rows for {config['vocab_size']} in token_embd.weight. "
            "Fetch the file again."
        )
    config["eos_token_id"] = tokenizer.ends
    config["bos_token_id"] = tokenizer.begin
    pooling, advised = metadata.pooling(), metadata.sampling()
    return {
        "config.json": config,
        "tokenizer.json": tokenizer.content,
        "tokenizer_config.json": {**tokenizer.config, "model_max_length": config["max_position_embeddings"]},
        **({} if pooling is None else pooling_files(pooling)),
        **({"generation_config.json": advised} if advised else {}),
    }


class _Metadata:
    """Reader of the values that become a configuration."""

    def __init__(self, headers: Sequence[GgufFile]) -> None:
        self._file = file = headers[0]
        self._used: set[str] = set()
        """Names of the values that were read."""
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
        found = MIXTRAL if has_experts else ARCHITECTURES.get(self._prefix)
        if found is None:
            raise ModelUnsupported(unknown_architecture(file.path, self._prefix))
        self._architecture = found
        if (count := file.value("split.count", int)) and count != len(headers):
            raise ModelCorrupt(
                f"{file.path} is one of {count} parts, but {len(headers)} found by its name: give the parts the names that "
                "they were published with."
            )

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
        config |= self._experts() | self._special(config) | self._rope(config)
        self._check_attention(config)
        self._check_others()
        if (bits := self._bits()) is not None:
            config["quantization"] = {"group_size": GROUP, "bits": bits}
        return config

    def pooling(self) -> PoolingKind | None:
        """Return the pooling of an embedding model; None of a generative one."""
        kind = self._integer("pooling_type") or 0
        if kind not in _POOLINGS:
            raise self._unsupported(f"{self._prefix}.pooling_type {kind}")
        return _POOLINGS[kind]

    def sampling(self) -> dict[str, float]:
        """Return the sampling parameters that the model's makers advise."""
        keys = {name: f"general.sampling.{_SAMPLING_NAMES.get(name, name)}" for name in ADVISED_SAMPLING}
        values = {name: self._file.value(key, float) for name, key in keys.items()}
        return {name: _shortest(value) for name, value in values.items() if value is not None}

    def _check_others(self) -> None:
        """Refuse values that would change results and are none of mlx-lm's."""
        self.pooling()
        for key in self._file.keys:
            name = key.removeprefix(f"{self._prefix}.")
            if name == key or name in self._used | _HARMLESS or name.startswith(_OF_PICTURES):
                continue
            value = "with several values" if self._file.is_array(key) else self._file.single(key)
            same = f"{self._prefix}.{_SAME.get(name)}"
            if value in _NEUTRAL.get(name.removeprefix("rope.scaling."), (0,)):
                continue
            if same not in self._file.keys or self._file.single(same) != value:
                raise self._unsupported(f"{key} {f'{value:g}' if isinstance(value, float) else value}")

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
        name = "num_local_experts" if self._architecture is MIXTRAL else "num_experts"
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
        if config["num_hidden_layers"] == _LAYERS_OF_GEMMA_1B:
            self._used.add("final_logit_softcapping")
        return {
            "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
            if is_largest
            else config["head_dim"],
            "sliding_window": self._require("attention.sliding_window"),
            "sliding_window_pattern": self._window_pattern(),
            "rope_local_base_freq": self._float("rope.freq_base_swa")
            or self._float("rope.local.freq_base")
            or 10000.0,
            "rope_theta": self._float("rope.freq_base")
            or self._float("rope.global.freq_base")
            or 1_000_000.0,
        }

    def _window_pattern(self) -> int:
        """Return the number of layers of which the last has no window."""
        name = "attention.sliding_window_pattern"
        if not self._file.is_array(key := f"{self._prefix}.{name}"):
            return self._require(name) if key in self._file.keys else 6
        self._used.add(name)
        windows = [bool(each) for each in self._file.values(key, _MOST_LAYERS) or ()]
        for count in range(1, len(windows) + 1):
            if windows == [(index + 1) % count != 0 for index in range(len(windows))]:
                return count
        raise self._unsupported(f"{key}, which does not repeat")

    def _rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scaling of rotations."""
        self._used.add("rope.scaling.type")
        given = self._file.value(f"{self._prefix}.rope.scaling.type", str)
        kind = given or "linear"
        factor = self._float("rope.scaling.factor")
        factor = self._float("rope.scale_linear") if factor is None else factor
        factor = 1.0 if factor == 0 else factor
        original = self._integer("rope.scaling.original_context_length")
        if (long := self._floats("rope_factors_long.weight")) is not None:
            short = self._floats("rope_factors_short.weight") or long
            scaling: dict[str, Any] = {"type": "longrope", "long_factor": long, "short_factor": short}
            original = original or config["max_position_embeddings"]
            scaling["original_max_position_embeddings"] = original
            self._check_magnitude(config["max_position_embeddings"] / original, original)
            return {"rope_scaling": scaling, "original_max_position_embeddings": original}
        if (factors := self._floats("rope_freqs.weight")) is not None and set(factors) != {1.0}:
            return {"rope_scaling": self._llama3(factors, config)}
        if kind == "none" or (factor is None and given is None) or (kind == "linear" and factor == 1):
            return {}
        if kind == "linear" and factor is not None:
            return {"rope_scaling": {"type": "linear", "factor": factor}}
        if kind == "yarn" and factor is not None and self._prefix != "phi3":
            scaling = {"type": "yarn", "factor": factor}
            numbers = {
                "original_max_position_embeddings": original or config["max_position_embeddings"],
                "beta_fast": self._float("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._float("rope.scaling.yarn_beta_slow"),
                **self._yarn_magnitude(factor),
            }
            return {
                "rope_scaling": scaling
                | {name: value for name, value in numbers.items() if value is not None}
            }
        raise self._unsupported(f"a scaling of rotations of type {shown(kind)} with factor {factor}")

    def _yarn_magnitude(self, factor: float) -> dict[str, float]:
        """Return mlx-lm's numbers for another magnitude of rotations than YaRN's own, of which a file has the ratio."""
        if factor <= 1 or self._prefix == "gemma3":
            # mlx-lm scales no rotations, or those of some layers only: another ratio is refused.
            return {}
        ratio = self._float("rope.scaling.attn_factor") or 1.0
        if ratio == 1:
            return {}
        usual = 1 + 0.1 * math.log(factor)
        return {"mscale": (ratio * usual - 1) / (usual - 1), "mscale_all_dim": 0}

    def _check_magnitude(self, factor: float, original: int) -> None:
        """Refuse another factor of long rotations' magnitude than mlx-lm's."""
        expected = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        found = self._float("rope.scaling.attn_factor") or expected
        if abs(found - expected) > _TOLERANCE * expected:
            raise self._unsupported(f"{self._prefix}.rope.scaling.attn_factor {found:g}")

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
        self._used.add(name)
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
        self._used.add(name)
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
