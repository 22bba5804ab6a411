"""A model to serve: its folder, its tokenizer and its limits."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.environment import has_cuda_build, quieten_transformers
from mlx_ring.core.errors import ConfigError, ModelCorrupt, ModelUnsupported
from mlx_ring.core.folders import absolute_path, typed_path
from mlx_ring.core.lean_imports import import_bare, import_tokenizers, importing
from mlx_ring.core.traces import owner_of
from mlx_ring.core.types import (
    ADVISED_SAMPLING,
    CHUNK_TOKENS,
    DEFAULT_SAMPLING,
    Sampling,
)
from mlx_ring.engine.sequence import Limits
from mlx_ring.models.architectures import require_cuttable, require_quantizable
from mlx_ring.models.config_limits import check_memory
from mlx_ring.models.layer_tensors import dequantized_bytes
from mlx_ring.models.model_folder import ModelFolder, TensorEntry, has_tokenizer
from mlx_ring.models.model_source import LocalModel, find_model, hold_folder
from mlx_ring.models.short_names import short_names_of
from mlx_ring.models.weights_manifest import WeightsSample, join_digests
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.profiles import ModelProfile
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import api_keys

log = logging.getLogger(__name__)

_PACKED_BITS = 4
"""Bits of packed weights of which a configuration does not say them: compressed-tensors' and AWQ's."""
_BESIDE = ("scales", "biases", "weight_scale", "weight_shape", "qzeros", "g_idx")
"""Names of tensors beside a module's packed weights."""
_SCALES = ("_scale_inv", "activation_scale", "input_scale", "_proj_scales")
"""Ends of the names of scales of FP8, and of gpt-oss's experts."""
_NIBBLES = "_proj_blocks"
"""End of the names of gpt-oss's experts: two weights in a byte."""

_MOST = 1e9
"""Largest value of a parameter, far above any that has a meaning."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that was checked and can be placed."""

    local: LocalModel
    tokenizer: Any
    """mlx-lm's wrapper of a Hugging Face tokenizer.

    The API and the engine each declare the methods that they use.
    """
    limits: Limits
    names: tuple[str, ...]
    """Names for clients; responses show the first."""

    @property
    def folder(self) -> ModelFolder:
        return self.local.folder

    @cached_property
    def _weights(self) -> WeightsSample:
        return WeightsSample(self.folder)

    def read_digest(self) -> str:
        """Return the digest of structure and weights, as a sample has them now; equal for equal models in any folder.

        It looks at every file of the weights, and may read them: call it in a thread.

        Raises:
            ModelCorrupt: the weights cannot be read.
        """
        return join_digests(self.folder.digest, self._weights.digest())

    @property
    def digest(self) -> str:
        """Digest of structure and weights, as it was read last."""
        return join_digests(self.folder.digest, self._weights.last_digest)

    @cached_property
    def sizes(self) -> ModelProfile | None:
        """Sizes of its layers, computed once, because that takes long where there are many tensors; None if unknown."""
        try:
            return profile_folder(self.folder, self.names[0])
        except ModelUnsupported:
            return None


async def sizes_for_chunks(served: ServedModel, settings: Settings, *, on_gpus: bool) -> ModelProfile | None:
    """Return a model's sizes, without holding up other tasks; None if no long chunks of prompts are possible, or if they are unknown."""
    return (
        await asyncio.to_thread(lambda: served.sizes) if on_gpus and settings.prefill_chunk is None else None
    )


def prepare_model(settings: Settings, *, insists: bool = True) -> ServedModel:
    """Find and check the model, and load its tokenizer.

    It may download the model, which can take minutes.

    Args:
        settings: settings that name it.
        insists: True to refuse a context longer than the model's; False to use the model's.

    Raises:
        ModelError, PlanError, ConfigError: it cannot be served as asked.
    """
    local = find_model(settings.model, must_fit=settings.nodes == 1)
    folder = local.folder
    if folder.rounding:
        log.info("%s is not served exactly as its file has it: %s", local.name, folder.rounding)
    require_cuttable(folder, settings.stages)
    if settings.kv_bits != "off":
        require_quantizable(folder)
    if settings.nodes == 1:
        check_memory(local.name, memory_for_weights(folder, settings))
    context = _context_length(folder, settings.max_model_len, insists=insists)
    tokenizer = _load_tokenizer(folder)
    eos = folder.eos_token_ids | frozenset(int(token) for token in tokenizer.eos_token_ids)
    limits = Limits(context, folder.vocab_size, eos)
    names = settings.served_model_name or (local.name, *short_names_of(local.name))
    served = ServedModel(local, tokenizer, limits, names)
    digest = served.read_digest()  # now, because later loads look for changes only
    log.debug("%s has the digest %s", local.name, digest)
    # Last, because a model that cannot be served must not count as served.
    hold_folder(folder.path)
    return served


def prepare_models(settings: Settings) -> list[tuple[Settings, ServedModel]]:
    """Prepare each model that is named, with its settings.

    Raises:
        ModelError, PlanError, ConfigError: one of them cannot be served as asked.
    """
    prepared = [(settings, prepare_model(settings))]
    for name in settings.more_models:
        own = settings.model_copy(update={"model": name, "served_model_name": ()})
        served = prepare_model(own, insists=False)
        if any(served.names[0] in other.names for _, other in prepared):
            raise ConfigError(
                f"The model {served.names[0]} was named twice; use --replicas to load it several times."
            )
        prepared.append((own, served))
    return prepared


def start_name(given: str, local: LocalModel) -> str:
    """Return the name or the absolute path with which another start, in any folder, finds the model that was given."""
    return str(absolute_path(typed_path(given))) if local.kind in ("folder", "file") else given


def describe_model(folder: ModelFolder) -> Mapping[str, object]:
    """Describe architecture, size and quantization as plain JSON, without a digest of the weights."""
    quantization = folder.quantization or {}
    return {
        "model_type": folder.model_type,
        "architectures": folder.config.get("architectures") or [],
        "layers": folder.num_layers,
        "hidden_size": folder.hidden_size,
        "parameters": _count_parameters(folder),
        "quantization": {
            key: quantization[key] for key in ("bits", "group_size", "mode") if key in quantization
        }
        or None,
        "weight_bytes_on_disk": folder.weight_bytes,
        "format": "gguf" if folder.is_gguf else "safetensors",
    }


_MADE = {"steps_ahead", "prefill_chunk", "long_chunk", "prefix_cache", "kv_owners"}
"""Fields of a scheduler's configuration that are no values of settings."""


def policy_of(settings: Settings, long_chunk: int = 0) -> Policy:
    """Return the scheduler's configuration: values of settings by name, and what follows from others. `long_chunk` is what workers may take."""
    given = {each.name: getattr(settings, each.name) for each in fields(Policy) if each.name not in _MADE}
    return Policy(
        **given,
        prefill_chunk=settings.prefill_chunk or CHUNK_TOKENS,
        long_chunk=long_chunk if settings.prefill_chunk is None else 0,
        prefix_cache=settings.prefix_cache == "on",
        kv_owners=_kv_owners(settings),
    )


def _kv_owners(settings: Settings) -> frozenset[str]:
    """Return the owners of KV on disks, also the empty one; none if it is not saved, or if the keys cannot be read now."""
    if settings.kv_disk is None:
        return frozenset()
    try:
        return frozenset(["", *(owner_of(f"key {key}") for key in api_keys(settings))])
    except ConfigError:
        return frozenset()


def memory_for_weights(folder: ModelFolder, settings: Settings) -> int:
    """Return the bytes of the loaded weights, at least.

    On a CPU, half precision becomes float32 unless set otherwise, and quantized weights do if asked for. Scales of
    quantized weights stay as they are stored where native kernels may run.
    """
    widens = widens_half_precision(settings.dtype)
    dequantizes = widens and settings.cpu_weights == "float32" and not _has_gpu()
    sizes = dequantized_bytes(folder) if dequantizes else dict[str, int]()
    keeps_scales = settings.blas == "auto"
    return sum(
        sizes.get(entry.name, entry.loaded_bytes(widened=widens, keeps_scales=keeps_scales))
        for entry in folder.tensors
    )


def widens_half_precision(dtype: str) -> bool:
    """Return True if loading converts half precision to float32."""
    return dtype == "float32" or (dtype == "auto" and not _has_gpu())


def _has_gpu() -> bool:
    return sys.platform == "darwin" or has_cuda_build()


def _count_parameters(folder: ModelFolder) -> int:
    """Count parameters.

    Packed integers count as the weights that they hold, by the bits of their module. Scales and biases do not count.
    """
    given = folder.quantization or {}
    packed = {module: entry for entry in folder.tensors for module in [_packed_module(entry)] if module}
    total = 0
    for entry in folder.tensors:
        module, _, kind = entry.name.rpartition(".")
        if entry.name.endswith(_SCALES) or (kind in _BESIDE and module in packed):
            continue
        size = math.prod(entry.shape)
        own = cast("object", given.get(module))
        bits = cast("Mapping[str, Any]", own if isinstance(own, Mapping) else given).get("bits", _PACKED_BITS)
        total += size * 32 // int(bits) if packed.get(module) is entry else size
        total += size if entry.name.endswith(_NIBBLES) else 0
    return total


def _packed_module(entry: TensorEntry) -> str:
    """Return the module whose weights a tensor has in integers of 32 bits; empty for other tensors."""
    module, _, kind = entry.name.rpartition(".")
    is_packed = (entry.dtype, kind) in (("U32", "weight"), ("I32", "weight_packed"), ("I32", "qweight"))
    return module if is_packed else ""


def _context_length(folder: ModelFolder, asked: int | None, *, insists: bool) -> int:
    if asked is not None and asked > folder.context_length:
        if not insists:
            return folder.context_length
        raise ConfigError(
            f"--max-model-len is {asked}; {folder.path.name} supports {folder.context_length} tokens at most."
        )
    return asked or folder.context_length


def _load_tokenizer(folder: ModelFolder) -> Any:
    if not has_tokenizer(folder):
        raise ModelCorrupt(
            f"{folder.path} has no tokenizer: tokenizer.json, tokenizer.model or vocab.json is missing."
        )
    quieten_transformers()
    import_bare("mlx_lm")
    # Its libraries take seconds to load, so errors of the model are reported first.
    with importing():
        import_tokenizers()
        from mlx_lm.tokenizer_utils import load  # pyright: ignore[reportUnknownVariableType] - bare dicts

    try:
        with importing():  # imports the tokenizer's own class
            tokenizer = load(
                folder.path,
                {"trust_remote_code": False, "local_files_only": True},
                eos_token_ids=sorted(folder.eos_token_ids) or None,
            )
        # The first use resets truncation and padding of the tokenizer's file. After it, threads can share it.
        tokenizer.encode("", add_special_tokens=False)
    except Exception as error:  # the libraries raise any kind
        reason = " ".join(str(error).split())[:300]
        raise ModelCorrupt(
            _file_problem(folder.path / "tokenizer.json")
            or f"The tokenizer in {folder.path} cannot be loaded: {reason}"
        ) from error
    return tokenizer


def _file_problem(file: Path) -> str:
    """Return why a tokenizer's file cannot be one, as a sentence; empty if it is missing or may be one."""
    try:
        content: object = json.loads(text) if (text := file.read_bytes()) else None
    except FileNotFoundError:
        return ""
    except ValueError:
        text, content = b"?", None
    if isinstance(content, dict) and "model" in content:
        return ""
    problem = "is no valid tokenizer" if text else "is empty"
    return f"{file} {problem}: copy or fetch the model's files again."


def sampling_defaults(config: Mapping[str, Any]) -> Sampling:
    """Return the parameters that the model's authors advise.

    The defaults apply where their file gives no number.
    """
    advised: dict[str, Any] = {}
    for name in ADVISED_SAMPLING:
        value: object = config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST:
            is_whole = isinstance(getattr(DEFAULT_SAMPLING, name), int)
            advised[name] = int(value) if is_whole else float(value)
    if config.get("do_sample") is False:
        advised["temperature"] = 0.0
    return replace(DEFAULT_SAMPLING, **advised)
