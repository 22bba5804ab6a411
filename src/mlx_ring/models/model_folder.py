"""Files of a model's folder: configuration and headers of safetensors or GGUF files, no weights, no MLX.

All mistakes in a folder are found here, before any process starts. They are files that are missing, truncated or
contradict each other, and folders that need their own code to be run, which is never done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from mlx_ring.core.errors import ModelCorrupt, ModelNotFound, ModelUnsafe
from mlx_ring.models.architectures import default_entries
from mlx_ring.models.config_limits import (
    CONTEXT_NAMES,
    HIDDEN_NAMES,
    LAYER_NAMES,
    VOCABULARY_NAMES,
    check_config,
    loading_of,
    read_config,
    read_json,
    require_loadable,
)
from mlx_ring.models.gguf import QUANTIZED, SUFFIX, GgufFile, read_gguf
from mlx_ring.models.gguf.model_config import config_of
from mlx_ring.models.gguf.tensors import ROUNDED, named_tensors

_HEADER_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100 << 20
"""Most bytes of a header, as in the safetensors library."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
"""Bits of the types in safetensors files; there may be others."""
_HALF_PRECISION = ("BF16", "F16")
_SCALES = (".scales", ".biases", ".weight_scale", ".qzeros")
"""Ends of the names of tensors that are, or become, scales and biases of quantized weights."""
_FLOAT_BYTES, _HALF_BYTES = 4, 2
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Patterns of a folder's files beside its weights: configuration, tokenizer, templates."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_LFS_POINTER = b"version https://git-lfs"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz")
"""Ends of the names of weights in other formats."""
_CONFIGS_WITH_CODE = ("config.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. `offset` and `nbytes` are bytes; `dtype` is the name that safetensors or GGUF have for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    loaded_dtype: str = ""
    """Type in memory of a tensor that loading makes others of; empty: as stored."""
    loaded_factor: int = 1
    """Bytes of these for each stored byte."""

    def loaded_bytes(self, *, widened: bool, keeps_scales: bool = False) -> int:
        """Return the bytes in memory.

        Args:
            widened: whether half precision becomes float32 when it is loaded.
            keeps_scales: whether scales and biases of quantized weights do not, as native kernels take them. Those of
                K-quants are float32 then, because products of two numbers of float16 are no such number.
        """
        if (kind := QUANTIZED.get(self.dtype)) is not None:
            is_half = not widened or (keeps_scales and kind.has_half_scales)
            return kind.loaded_bytes(math.prod(self.shape), _HALF_BYTES if is_half else _FLOAT_BYTES)
        is_kept = keeps_scales and self.name.endswith(_SCALES)
        is_half = (self.loaded_dtype or self.dtype) in _HALF_PRECISION
        return self.nbytes * self.loaded_factor * (2 if widened and not is_kept and is_half else 1)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """File of weights: its size, and that of the header before the first tensor, in bytes."""

    name: str
    nbytes: int
    header_bytes: int


@dataclass(frozen=True)
class ModelFolder:
    """Model as its folder describes it."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    weight_files: tuple[WeightFile, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in `architectures`."""
        named = self.config.get("architectures")
        return tuple(map(str, cast("list[object]", named) if isinstance(named, list) else [named]))

    @cached_property
    def num_layers(self) -> int:
        return self._integer(*LAYER_NAMES)

    @cached_property
    def hidden_size(self) -> int:
        return self._integer(*HIDDEN_NAMES)

    @cached_property
    def vocab_size(self) -> int:
        return self._integer(*VOCABULARY_NAMES)

    @cached_property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        found = self.entry(*CONTEXT_NAMES)
        return found if isinstance(found, int) and found > 0 else 2048

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from both configuration files."""
        found: list[object] = []
        for source in (self.config, self._text_config, self.generation_config):
            value = source.get("eos_token_id")
            found.extend(cast("list[object]", value) if isinstance(value, list) else [value])
        return frozenset(token for token in found if type(token) is int)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        found = self.entry("quantization", "quantization_config")
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else None

    @cached_property
    def weight_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def is_gguf(self) -> bool:
        """True if the weights are in GGUF files."""
        return any(file.name.endswith(SUFFIX) for file in self.weight_files)

    @cached_property
    def rounding(self) -> str:
        """Explanation of the weights that are not served exactly; empty if all are."""
        weights: Counter[str] = Counter()
        for entry in self.tensors:
            weights[entry.dtype] += math.prod(entry.shape)
        total = weights.total()
        parts = [
            f"{weights[kind] / total:.0%} of the weights are {kind} ({explanation})"
            for kind, explanation in ROUNDED.items()
            if weights[kind]
        ]
        return "; ".join(parts)

    @cached_property
    def digest(self) -> str:
        """Digest over configuration, names, shapes and sizes; equal for equal models in any folder."""
        described = {
            "config": self.config,
            "tensors": sorted((entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in self.tensors),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _text_config(self) -> Mapping[str, Any]:
        """The language model's part of a multimodal configuration."""
        nested = self.config.get("text_config") or self.config.get("llm_config")
        return cast("Mapping[str, Any]", nested) if isinstance(nested, Mapping) else {}

    @cached_property
    def _defaults(self) -> Mapping[str, int]:
        """mlx-lm's values of entries that are missing."""
        return default_entries(self.config)

    def entry(self, *names: str) -> object:
        """Return an entry of the configuration, or of the language model's part of it, by the first of its names there.

        If there is none, it is mlx-lm's default, or None.
        """
        if names not in self._found:
            sources = (self.config, self._text_config)
            given = (each[name] for each in sources for name in names if each.get(name) is not None)
            defaults = (self._defaults[name] for name in names if name in self._defaults)
            self._found[names] = next(chain(given, defaults), None)
        return self._found[names]

    @cached_property
    def _found(self) -> dict[tuple[str, ...], object]:
        """Entries by their names. Each layer asks for the same ones."""
        return {}

    def _integer(self, *names: str) -> int:
        found = self.entry(*names)
        if type(found) is not int or found < 1:
            raise ModelCorrupt(
                f"{self.path / 'config.json'} gives {names[0]} as {found!r}; it must be 1 or more."
            )
        return found


def read_model_folder(path: Path) -> ModelFolder:
    """Read and check a folder.

    Raises:
        ModelNotFound: there is no such folder, or it is no model's.
        ModelUnsafe: it needs Python from the folder to be run.
        ModelCorrupt: a file is missing, truncated, or contradicts another.
        ModelUnsupported: mlx-lm does not load weights that are quantized in this way.
    """
    if not path.is_dir():
        if path.exists():
            raise ModelNotFound(
                f"{path} is no folder: give a model's folder, or a GGUF file, whose name ends in {SUFFIX}."
            )
        raise ModelNotFound(f"There is no folder {path}.")
    _require_access(path)
    _refuse_special_files(path)
    if not (path / "config.json").is_file():
        # macOS writes `._model.gguf` beside files on disks of other systems.
        file = min(path.glob(f"[!.]*{SUFFIX}"), default=None)
        way = (
            "`mlx-ring list` names models here" if file is None else f"To serve a GGUF file, name it: {file}"
        )
        raise ModelNotFound(f"{path} has no config.json: it is not a model's folder. {way}.")
    _refuse_code(path)
    config = read_config(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    read = list(_read_headers(path, config["model_type"]))
    stored = [entry for _, entries in read for entry in entries]
    dtypes = {entry.name: entry.dtype for entry in stored}
    require_loadable(path, config, dtypes.values())
    loading = loading_of(config, dtypes)
    tensors = (
        replace(entry, loaded_dtype=loading[entry.name][0], loaded_factor=loading[entry.name][1])
        if entry.name in loading
        else entry
        for entry in stored
    )
    return ModelFolder(path, config, generation_config, tuple(tensors), tuple(file for file, _ in read))


def read_gguf_model(parts: Sequence[Path]) -> ModelFolder:
    """Describe the model of a GGUF file, or of its parts, from headers, without its tokenizer.

    Raises:
        ModelCorrupt, ModelUnsupported: it cannot be served.
    """
    file, headers = parts[0], list(map(read_gguf, parts))
    config = config_of(headers)
    check_config(file, config)
    read = [_with_names(header, str(config["model_type"])) for header in headers]
    tensors = tuple(entry for _, entries in read for entry in entries)
    return ModelFolder(file.parent, config, {}, tensors, tuple(weights for weights, _ in read))


def read_model_config(file: Path) -> ModelFolder:
    """Read a configuration alone: a model without weights.

    Raises:
        ModelNotFound: there is no such file.
        ModelCorrupt: it is no model's configuration.
    """
    _require_access(file.parent)
    if not file.is_file():
        raise ModelNotFound(f"There is no file {file}.")
    return ModelFolder(file.parent, read_config(file), {}, ())


def has_tokenizer(folder: ModelFolder) -> bool:
    """Return True if the folder has a tokenizer, because without files transformers creates an empty one."""
    return any((folder.path / file).is_file() for file in _TOKENIZERS)


@dataclass(frozen=True, slots=True)
class PullProgress:
    """State of a fetch of a model."""

    status: Literal["downloading", "verifying", "done"]
    done_bytes: int
    total_bytes: int


Report = Callable[[PullProgress], None]


def _require_access(folder: Path) -> None:
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise ModelCorrupt(f"{folder} may not be read by this user: correct its permissions.")


def _refuse_special_files(path: Path) -> None:
    """Refuse pipes and devices, because reading one may never end."""
    for file in sorted(path.iterdir()):
        with contextlib.suppress(OSError):
            mode = file.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
                raise ModelCorrupt(
                    f"{file} is {kind}, not a file: remove it, and fetch the model's own file."
                )


def _refuse_code(path: Path) -> None:
    for name in _CONFIGS_WITH_CODE:
        if not (path / name).is_file():
            continue
        config = read_json(path / name)
        for key in ("model_file", "auto_map"):
            if config.get(key):
                raise ModelUnsafe(
                    f"{path / name} requires its own Python code ({key}: {config[key]!r}), but code from a model's "
                    "folder is never run. Remove the entry if mlx-lm knows the architecture without it."
                )


def _read_headers(path: Path, model_type: str) -> Iterator[tuple[WeightFile, list[TensorEntry]]]:
    files = sorted(path.glob("model*.safetensors"))
    named = _named_by_index(path, {file.name for file in files})
    files = files or sorted(path.glob("model*.gguf"))
    if not files:
        other = min((file.name for file in path.iterdir() if file.suffix in _OTHER_WEIGHTS), default=None)
        what = (
            "no model*.safetensors is there" if other is None else f"{other} is of a format that is not read"
        )
        raise ModelCorrupt(f"{path} has no weights: {what}. `mlx-ring pull` finds models that can be served.")
    tensors: set[str] = set()
    # Those that the index names come first.
    for file in sorted(files, key=lambda file: file.name not in named):
        try:
            read = _with_names(read_gguf(file), model_type) if file.suffix == SUFFIX else _read_header(file)
        except OSError as error:
            mend = "Correct its permissions" if isinstance(error, PermissionError) else "Fetch it again"
            raise ModelCorrupt(f"{file} cannot be read: {error.strerror}. {mend}.") from error
        if file.name in named:
            tensors.update(entry.name for entry in read[1])
        # A file that the index does not name may be another version of the model, such as a quantized one.
        if file.name in named or tensors.isdisjoint(entry.name for entry in read[1]):
            yield read


def _with_names(header: GgufFile, model_type: str) -> tuple[WeightFile, list[TensorEntry]]:
    file = header.path.name
    tensors = [
        TensorEntry(name, tensor.kind.name, tensor.shape, file, tensor.offset, tensor.nbytes)
        for name, tensor in named_tensors(header, model_type)
    ]
    return WeightFile(file, header.nbytes, header.header_bytes), tensors


def _named_by_index(path: Path, present: set[str]) -> set[str]:
    """Return the files that the index names; none if there is no index, or only one of other files.

    Some published models keep the index of the model that they were made of. mlx-lm reads no index.

    Raises:
        ModelCorrupt: a file is missing.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return set()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelCorrupt(f"{index} has no weight_map.")
    named = set(map(str, cast("dict[str, str]", weight_map).values()))
    missing, count = sorted(named - present), len(present)
    whole = {f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
    if missing and not (named.isdisjoint(present) and present in ({"model.safetensors"}, whole)):
        raise ModelCorrupt(
            f"{index} names {missing[0]}, which is not there ({len(missing)} files are missing)."
        )
    return set() if missing else named


def _read_header(file: Path) -> tuple[WeightFile, list[TensorEntry]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_HEADER_LENGTH.size)
        if len(start) < _HEADER_LENGTH.size:
            raise ModelCorrupt(f"{file} has {size} bytes: it is truncated, or no safetensors file.")
        if _LFS_POINTER.startswith(start):
            raise ModelCorrupt(
                f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in {file.parent}, or download "
                "the model with `mlx-ring pull`."
            )
        (length,) = _HEADER_LENGTH.unpack(start)
        begin = _HEADER_LENGTH.size + length
        if length > _LONGEST_HEADER or begin > size:
            raise ModelCorrupt(
                f"{file} announces a header of {length} bytes but has {size}: it is truncated, "
                "or no safetensors file. Fetch it again."
            )
        header = _parse_header(file, stream.read(length))
    tensors = [
        _tensor_entry(file, name, entry, begin) for name, entry in header.items() if name != "__metadata__"
    ]
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=begin)
    if end != size:
        raise ModelCorrupt(f"{file} should have {end} bytes but has {size}: it is truncated. Fetch it again.")
    return WeightFile(file.name, size, begin), tensors


def _parse_header(file: Path, data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"The header of {file} cannot be read: {error}. Fetch it again.") from error
    if not isinstance(header, dict):
        raise ModelCorrupt(f"The header of {file} is not an object. Fetch it again.")
    return cast("dict[str, Any]", header)


def _tensor_entry(file: Path, name: str, entry: Any, begin: int) -> TensorEntry:
    try:
        first, last = map(int, entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        dtype = str(entry["dtype"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelCorrupt(f"{file} describes tensor {name!r} as {entry!r}: this cannot be read.") from error
    nbytes = math.prod(shape) * _BITS.get(dtype, 0) // 8
    if first < 0 or last < first or min(shape, default=0) < 0 or (dtype in _BITS and last - first != nbytes):
        raise ModelCorrupt(
            f"{file} gives tensor {name!r} the bytes [{first}, {last}), which do not hold {dtype} {list(shape)}. "
            "Fetch it again."
        )
    return TensorEntry(name, dtype, shape, file.name, begin + first, last - first)
