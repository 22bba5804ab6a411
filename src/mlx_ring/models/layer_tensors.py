"""Tensors of a checkpoint that a stage computes with, and copies of a model's folder with these only.

They are derived from their names and shapes alone. A missing tensor would be read as zeros, so every stage gets the
tensors whose names are ambiguous. The files of a copy have the same names and sizes, with holes. A mark in its folder
names its layers, so that no others are read from it as zeros.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlx_ring.core.errors import ModelCorrupt, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.architectures import find_architecture
from mlx_ring.models.gguf import QUANTIZED
from mlx_ring.models.model_folder import SMALL_FILES, ModelFolder, TensorEntry, WeightFile

_IN_LAYER = re.compile(
    r"^(?P<path>(?:.+?\.)?(?:layers|h|blocks|block|layer))\.(?P<number>\d+)\.(?P<rest>.+)$"
)
"""Names such as `model.layers.3.mlp.up_proj.weight`, and those of GPT-2, OLMo and similar models."""
_HEADS = frozenset({"lm_head", "output", "output_layer", "embed_out", "head", "ff_out"})
NEVER_COMPUTED = re.compile(
    r"(?:^|\.)(?:vision|visual|audio|mtp|multi_modal_projector|mm_projector|embed_vision|embed_audio)(?:[._]|$)"
)
"""Encoders of images and sound, and layers that predict further tokens: mlx-lm leaves them out of every model."""
_NEEDS_ALL_TENSORS = frozenset({"talkie"})
"""Families whose every stage gets all tensors outside the layers.

talkie's layers get the embedded tokens beside the activations, and its head is no module of its own.
"""
_SMALL_BYTES = 1 << 16
_USUAL_GROUP, _FLOAT_BYTES = 64, 4

Inside = Mapping[str, Sequence[tuple[int, str, TensorEntry]]]
"""Tensors by the path before a layer's number: the number, the path after it, and the tensor."""


def tensors_of_stage(folder: ModelFolder, layers: LayerRange) -> tuple[TensorEntry, ...]:
    """Return the tensors that a stage must have on disk, in the folder's order.

    These are its own layers, and on every stage the tensors outside the layers, with two exceptions. The embedding is on
    the first stage. The output head is on the last, or the embedding if that may be the head.

    Raises:
        PlanError: layers that the model does not have.
    """
    if not 0 <= layers.start < layers.end <= folder.num_layers:
        raise PlanError(
            f"Layers {layers} were requested, but {folder.path.name} has {folder.num_layers} layers."
        )
    inside, outside = group_by_layers(folder.tensors)
    path = path_of_layers(inside, folder.num_layers)
    if path is None:
        return folder.tensors
    unwanted = {entry for number, _, entry in inside[path] if not layers.start <= number < layers.end}
    others = [entry for other, found in inside.items() if other != path for _, _, entry in found]
    unwanted |= _unwanted_outside(folder, [*outside, *others], layers)
    return tuple(entry for entry in folder.tensors if entry not in unwanted)


def group_by_layers(entries: Iterable[TensorEntry]) -> tuple[Inside, list[TensorEntry]]:
    """Group tensors in numbered layers by the path before the number; return the others too."""
    inside: defaultdict[str, list[tuple[int, str, TensorEntry]]] = defaultdict(list)
    outside: list[TensorEntry] = []
    for entry in entries:
        found = _IN_LAYER.match(entry.name)
        if found is None:
            outside.append(entry)
        else:
            inside[found["path"]].append((int(found["number"]), found["rest"], entry))
    return inside, outside


def path_of_layers(inside: Inside, num_layers: int) -> str | None:
    """Return the path that numbers every layer. An encoder of images may have as many, and is the smaller one."""
    every = set(range(num_layers))
    sizes = {
        path: sum(entry.nbytes for _, _, entry in found)
        for path, found in inside.items()
        if every <= {number for number, _, _ in found}
    }
    return max(sizes, key=lambda path: sizes[path], default=None)


def dequantized_bytes(folder: ModelFolder) -> Mapping[str, int]:
    """Return the bytes that quantized tensors have as float32, by name; those of scales count, of their weights none.

    An embedding that is no head stays quantized.
    """
    sizes: dict[str, int] = {}
    names = {entry.name for entry in folder.tensors}
    looked_up = _looked_up(folder)
    for entry in folder.tensors:
        module, _, kind = entry.name.rpartition(".")
        if module in looked_up:
            continue
        if entry.dtype in QUANTIZED:
            sizes[entry.name] = _FLOAT_BYTES * math.prod(entry.shape)
        elif kind == "scales" and f"{module}.weight" in names:
            sizes[entry.name] = _FLOAT_BYTES * _group_size(folder, module) * math.prod(entry.shape)
            sizes[f"{module}.weight"] = sizes[f"{module}.biases"] = 0
    return sizes


def _looked_up(folder: ModelFolder) -> set[str]:
    """Return the paths of embeddings of which a step reads some rows."""
    _, outside = group_by_layers(folder.tensors)
    by_token = [entry for entry in outside if entry.shape[:1] == (folder.vocab_size,)]
    heads = {entry for entry in by_token if names_head(entry.name)}
    if _may_be_tied(folder, heads):
        return set()
    return {entry.name.rpartition(".")[0] for entry in by_token if entry not in heads}


def _group_size(folder: ModelFolder, module: str) -> int:
    """Return the number of weights with a common scale: the module's own, or the model's."""
    quantization = folder.quantization or {}
    own: object = quantization.get(module)
    for source in (own, quantization):
        if isinstance(source, Mapping):
            size = cast("Mapping[str, object]", source).get("group_size")
            if type(size) is int and size > 0:
                return size
    return _USUAL_GROUP


def names_head(name: str) -> bool:
    """Report whether a tensor's name is one of an output head."""
    return not _HEADS.isdisjoint(name.split("."))


def _unwanted_outside(
    folder: ModelFolder, outside: Iterable[TensorEntry], layers: LayerRange
) -> set[TensorEntry]:
    never = {entry for entry in outside if NEVER_COMPUTED.search(entry.name)}
    if folder.model_type in _NEEDS_ALL_TENSORS:
        return never
    large = [entry for entry in outside if entry not in never and _may_be_large(folder, entry)]
    by_token = [entry for entry in large if entry.shape[:1] == (folder.vocab_size,)]
    heads = {entry for entry in by_token if names_head(entry.name)}
    embedding = {entry for entry in by_token if entry not in heads}
    modules = {entry.name.rpartition(".")[0] for entry in embedding}
    if len(modules) != 1 or len(by_token) < len(large):
        # Any other tensor may be computed from the embedding, on every stage.
        embedding = set[TensorEntry]()
    is_last = layers.end == folder.num_layers
    keeps_embedding = layers.start == 0 or (is_last and _may_be_tied(folder, heads))
    return never | (set[TensorEntry]() if is_last else heads) | (set() if keeps_embedding else embedding)


def _may_be_large(folder: ModelFolder, entry: TensorEntry) -> bool:
    return len(entry.shape) > 1 and (entry.nbytes > _SMALL_BYTES or folder.vocab_size in entry.shape)


def _may_be_tied(folder: ModelFolder, heads: Iterable[TensorEntry]) -> bool:
    """Report whether the embedding may be the output head, even if the checkpoint has one."""
    if not any(heads):
        return True
    architecture = find_architecture(folder.model_type, folder.classes)
    if architecture is not None and not architecture.tied:
        return False
    sources = (folder.config, folder.config.get("text_config"), folder.config.get("llm_config"))
    stated = [
        cast("Mapping[str, object]", source)["tie_word_embeddings"]
        for source in sources
        if isinstance(source, Mapping) and "tie_word_embeddings" in source
    ]
    return not stated or any(value is not False for value in stated)


# ---- folders with the tensors of some layers

STAGE_FILE = "mlx-ring-stage.json"
_COPY_BYTES = 4 << 20


def small_files(path: Path) -> list[str]:
    """Return the names of a model folder's files beside its weights, in order."""
    found = {file.name for pattern in SMALL_FILES for file in path.glob(pattern) if file.is_file()}
    return sorted({name for name in found if not name.startswith(".")} - {STAGE_FILE})


def stage_bytes(folder: ModelFolder, layers: LayerRange) -> int:
    """Return the bytes of a stage's tensors."""
    return sum(entry.nbytes for entry in tensors_of_stage(folder, layers))


def write_stage_folder(
    folder: ModelFolder, layers: LayerRange, target: Path, progress: Callable[[int], None]
) -> None:
    """Make `target`, from which a worker can load these layers; it appears whole or not at all.

    Args:
        progress: receives the bytes of tensors copied since its last call.

    Raises:
        PlanError: `target` exists, or cannot be written.
    """
    require_absent(target)
    aside = target.with_name(f".{target.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for name in small_files(folder.path):
            shutil.copyfile(folder.path / name, aside / name)
        for file in folder.weight_files:
            _copy_tensors(folder, file, layers, aside / file.name, progress)
        mark_stage_folder(aside, layers)
        aside.rename(target)
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_absent(target: Path) -> None:
    """Refuse to make a stage's folder over something else. Raises `PlanError`."""
    if target.exists():
        raise PlanError(f"{target} already exists: remove it, or choose another folder with --out.")


def mark_stage_folder(path: Path, layers: LayerRange) -> None:
    """Write the mark that names the folder's layers."""
    (path / STAGE_FILE).write_text(
        json.dumps({"layers": [layers.start, layers.end]}) + "\n", encoding="utf-8"
    )


def _copy_tensors(
    folder: ModelFolder, file: WeightFile, layers: LayerRange, target: Path, progress: Callable[[int], None]
) -> None:
    wanted = [entry for entry in tensors_of_stage(folder, layers) if entry.file == file.name]
    with (folder.path / file.name).open("rb") as source, target.open("wb") as copy:
        copy.truncate(file.nbytes)
        _copy_ranges(source, copy, [(0, file.header_bytes)], lambda _count: None)
        _copy_ranges(source, copy, sorted((entry.offset, entry.nbytes) for entry in wanted), progress)


def _copy_ranges(
    source: BinaryIO, copy: BinaryIO, ranges: Iterable[tuple[int, int]], progress: Callable[[int], None]
) -> None:
    for offset, nbytes in ranges:
        source.seek(offset)
        copy.seek(offset)
        left = nbytes
        while left and (data := source.read(min(left, _COPY_BYTES))):
            left -= copy.write(data)
            progress(len(data))


def require_layers(path: Path, layers: LayerRange) -> None:
    """Raise `ModelCorrupt` if the folder is marked for other layers.

    Fewer do not suffice either: the last ones come with the output head, and the first with the embedding.
    """
    held = _held(path / STAGE_FILE)
    if held is not None and held != layers:
        raise ModelCorrupt(
            f"{path} was made for layers {held}, but layers {layers} are needed: use the folder of that "
            "stage, or the whole model."
        )


def is_whole(path: Path) -> bool:
    """Report whether the folder is not marked, so that it has the weights of all layers."""
    return _held(path / STAGE_FILE) is None


def require_whole(path: Path) -> None:
    """Raise `ModelCorrupt` if the folder is marked, because other nodes can only fetch from a whole model."""
    held = _held(path / STAGE_FILE)
    if held is not None:
        raise ModelCorrupt(
            f"{path} holds layers {held} only: other nodes need a folder with the whole model."
        )


def _held(mark: Path) -> LayerRange | None:
    if not mark.is_file():
        return None
    try:
        start, end = cast("dict[str, Any]", json.loads(mark.read_text(encoding="utf-8")))["layers"]
        return LayerRange(int(start), int(end))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelCorrupt(f"{mark} cannot be parsed: create the folder again.") from error
