"""Loading of a stage's share of a model's weights, and no more.

mlx-lm builds the whole model around lazy arrays. Nothing is read until an array is evaluated, and only the stage's own
are. They are evaluated one by one, those of the largest modules first. So casting needs the old and the new copy of one
array at a time, while little else is held.

Embedding models are saved as checkpoints of the transformer alone. Their tensors are named `layers.0...` where mlx-lm's
models expect `model.layers.0...`, and most have no output head. An embedding model needs none, so its embedding takes
its place.

Tensors of GGUF files are converted, one module at a time (`gguf_weights.py`).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import (  # its trees are any
    tree_flatten,  # pyright: ignore[reportUnknownVariableType]
    tree_unflatten,  # pyright: ignore[reportUnknownVariableType]
)
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class
    load_model,  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
)

from mlx_cpu_kernels.operations import are_installed
from mlx_ring.core.errors import ModelCorrupt, VersionMismatch
from mlx_ring.core.types import ByteProgress, DType, LayerRange
from mlx_ring.models.architectures import find_architecture, language_module
from mlx_ring.models.layer_tensors import names_head, require_layers
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.weights_manifest import may_have_weights_of, with_weights_of
from mlx_ring.rpc.hello import check_hello
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.worker.shard import StageModel, find_heads, model_errors, simplify_rotations
from mlx_ring.worker.tensor import override

if TYPE_CHECKING:
    from mlx_ring.worker.gguf_weights import GgufWeights

_INNER = "model"
_LOADED = "model*.safetensors"
"""Files that mlx-lm loads from a folder."""


def loading_options(folder: ModelFolder) -> dict[str, Any]:
    """Return mlx-lm's options for loading a folder; most need none."""
    change, changed_config = _change_of(folder)
    # mlx-lm loads every file of weights, also of another version that the folder's description leaves out.
    if {file.name for file in folder.weight_files} != {path.name for path in folder.path.glob(_LOADED)}:
        change = partial(_with_described_files, folder, change or _unchanged)
    if change is None:
        return {}
    return {"get_model_classes": partial(_changed_classes, change), "model_config": changed_config}


def _change_of(folder: ModelFolder) -> tuple[_Change | None, dict[str, Any]]:
    """Return the change that a folder's weights need, None if they need none, and that of its configuration."""
    if language_module(folder.config) == "ministral3" and any(e.loaded_dtype for e in folder.tensors):
        return _with_decoded_fp8, {}
    names = [entry.name for entry in folder.tensors]
    if any(name.startswith(f"{_INNER}.") for name in names) or not any(map(_is_bare, names)):
        return None, {}
    architecture = find_architecture(folder.model_type, folder.classes)
    lacks_head = architecture is not None and architecture.tied and not any(map(names_head, names))
    return _with_whole_names, {"tie_word_embeddings": True} if lacks_head else {}


def _is_bare(name: str) -> bool:
    return name.startswith("layers.")


_Weights = Mapping[str, mx.array]
_Change = Callable[[nn.Module, _Weights], _Weights]


def _changed_classes(change: _Change, config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return mlx-lm's classes, with weights changed before the model uses them."""
    model, arguments = cast("tuple[Any, type]", cast("object", _get_classes(config)))

    def sanitize(self: nn.Module, weights: _Weights) -> _Weights:
        own = getattr(cast("object", super(named, self)), "sanitize", dict)
        return cast("_Weights", own(dict(change(self, weights))))

    named = type(model.__name__, (model,), {"sanitize": sanitize, "__module__": model.__module__})
    return cast("type[nn.Module]", named), arguments


def _unchanged(_model: nn.Module, weights: _Weights) -> _Weights:
    return weights


def _with_described_files(
    folder: ModelFolder, change: _Change, model: nn.Module, _weights: _Weights
) -> _Weights:
    """Replace weights by those of the folder's own files, lazily, and change these."""
    files = [cast("_Weights", mx.load(str(folder.path / file.name))) for file in folder.weight_files]
    return change(model, {name: array for weights in files for name, array in weights.items()})


def _with_decoded_fp8(_model: nn.Module, weights: _Weights) -> _Weights:
    """Decode FP8 before a model multiplies it by its scales: mlx-lm's Ministral 3 would multiply the bytes."""
    return {
        name: mx.from_fp8(array, mx.bfloat16)
        if array.dtype == mx.uint8 and f"{name}_scale_inv" in weights
        else array
        for name, array in weights.items()
    }


def _with_whole_names(model: nn.Module, weights: _Weights) -> _Weights:
    return {_whole_name(name) if _INNER in model else name: array for name, array in weights.items()}


def _whole_name(name: str) -> str:
    return name if names_head(name) else f"{_INNER}.{name}"


_DTYPES: dict[DType, mx.Dtype] = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}
_CLEAR_EVERY_BYTES = 64 << 20
_QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)
"""Layers that compute by the operations of native kernels alone."""


def load_stage(
    folder: ModelFolder,
    layers: LayerRange,
    dtype: DType,
    progress: ByteProgress,
    divide: Callable[[StageModel], None] | None = None,
    *,
    dequantized: bool = False,
) -> StageModel:
    """Load layers `[start, end)` in `dtype`.

    Args:
        dequantized: load quantized weights as float32, except embeddings that are no head.
        divide: keeps one rank's part of the stage's weights, before any of them is read.

    Raises:
        ModelUnsupported: mlx-lm does not know the architecture, or it cannot be cut.
        ModelCorrupt: the weights do not match the configuration, or are of other layers only.
    """
    loading = StageLoading(folder, layers, dtype, progress, divide, dequantized=dequantized)
    for _ in loading.parts():
        pass
    return loading.stage


class StageLoading:
    """Load of a stage in parts, between which other work may be done. Weights that are held already are not read again."""

    def __init__(
        self,
        folder: ModelFolder,
        layers: LayerRange,
        dtype: DType,
        progress: ByteProgress,
        divide: Callable[[StageModel], None] | None = None,
        *,
        dequantized: bool = False,
        held: Mapping[str, mx.array] | None = None,
    ) -> None:
        """Build the model lazily; nothing is read yet.

        Args:
            folder: folder of the model.
            layers: the layers.
            dtype: type in which the stage computes.
            progress: receives the bytes that were read, and those to read.
            divide: keeps one rank's part of the stage's weights, before any of them is read.
            dequantized: load quantized weights as float32, except embeddings that are no head.
            held: weights that another stage of the same model in memory computes with, by path.

        Raises:
            ModelUnsupported: mlx-lm does not know the architecture, or it cannot be cut.
            ModelCorrupt: the weights do not match the configuration, or are of other layers only.
        """
        require_layers(folder.path, layers)
        self._folder, self._layers = folder, layers
        self._dtype: DType = dtype
        self._progress, self._divide, self._dequantized = progress, divide, dequantized
        self._held: Mapping[str, mx.array] = held or {}
        self._gguf: GgufWeights | None = None
        self._build_lazily(widened=False)

    def _build_lazily(self, *, widened: bool) -> None:
        folder, layers = self._folder, self._layers
        if folder.is_gguf:
            from mlx_ring.worker.gguf_weights import GgufWeights  # with NumPy, which is slow to import

            self._gguf = GgufWeights(folder, widened=widened)
        with model_errors(folder.path):
            if self._gguf is None:
                model = load_model(folder.path, lazy=True, strict=True, **loading_options(folder))[0]
            else:
                model = _build_of_gguf(folder, self._gguf.arrays)
        simplify_rotations(model, folder.context_length)
        if self._dequantized:
            dequantize(model, folder, layers)
        with model_errors(folder.path):  # it runs a pass of the model
            stage = StageModel(model, layers, _DTYPES[self._dtype], folder.vocab_size, folder.hidden_size)
        if stage.num_layers != folder.num_layers:
            raise ModelCorrupt(
                f"{folder.path / 'config.json'} declares {folder.num_layers} layers, but its model has {stage.num_layers}."
            )
        if self._divide is not None:
            self._divide(stage)
        parameters = _cast_parameters(stage)
        # It must not hold weights that the stage does not need.
        self._held = {
            path: array for path, array in self._held.items() if _can_keep(stage, parameters, path, array)
        }
        parameters |= self._held
        model.load_weights(list(parameters.items()), strict=False)
        model.eval()
        self.stage = stage
        """Stage, whose weights are in memory once all parts are done."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the weights that were held already."""
        return sum(array.nbytes for array in self._held.values())

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights to read."""
        return sum(array.nbytes for array in self._unread().values())

    def _unread(self) -> dict[str, mx.array]:
        return {path: array for path, array in needed_weights(self.stage).items() if path not in self._held}

    def parts(self) -> Iterator[None]:
        """Read the weights that are not held; yield after each array."""
        if self._gguf is None:
            yield from _read(self._unread(), self._progress, None)
            return
        from mlx_ring.worker.gguf_weights import ScalesOverflow

        # The traceback holds the arrays that were read, so it ends before the next load.
        with suppress(ScalesOverflow):
            yield from _read(self._unread(), self._progress, self._gguf)
            return
        del self.stage, self._gguf
        gc.collect()
        mx.clear_cache()
        self._build_lazily(widened=True)
        yield from _read(self._unread(), self._progress, self._gguf)


def needed_weights(stage: StageModel) -> dict[str, mx.array]:
    """Return the weights that a stage computes with, by path."""
    flat = cast("dict[str, Any]", tree_flatten(stage.model.parameters(), destination={}))
    return {path: array for path, array in flat.items() if isinstance(array, mx.array) and stage.needs(path)}


def _can_keep(stage: StageModel, parameters: _Weights, path: str, array: mx.array) -> bool:
    """Report whether a stage can take a weight of another one: it needs it, in the same form."""
    own = parameters.get(path)
    return own is not None and stage.needs(path) and (own.shape, own.dtype) == (array.shape, array.dtype)


def _build_of_gguf(folder: ModelFolder, arrays: _Weights) -> nn.Module:
    """Build the model with these arrays; mlx-lm finds no files of weights in the folder."""
    used = dict(arrays)

    def give(model: nn.Module, _weights: _Weights) -> _Weights:
        expected = cast("dict[str, mx.array]", tree_flatten(model.parameters(), destination={}))
        for entry in folder.tensors:
            wanted = expected[entry.name].shape if entry.name in expected else entry.shape
            if wanted != entry.shape:
                raise ValueError(f"{entry.name} has the sizes {entry.shape} instead of {wanted}")
        return used

    model = load_model(
        folder.path, lazy=True, strict=False, get_model_classes=partial(_changed_classes, give)
    )[0]
    model.load_weights(list(used.items()), strict=True)
    used.clear()  # or the model's class would hold all arrays, beside those that are made of them
    return model


_PLAIN: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
"""Layers with quantized weights, and those that compute the same with plain ones."""
_WITH_BIAS = (nn.Linear, SwitchLinear)


def quantized_modules(model: nn.Module, folder: ModelFolder, layers: LayerRange) -> dict[str, nn.Module]:
    """Return the modules whose quantized weights a stage multiplies by, with their paths.

    The embedding counts on a last stage whose head it is. Others look up some rows.
    """
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    tied = layers.end == folder.num_layers and not find_heads(model, folder.vocab_size)

    def multiplies(module: nn.Module) -> bool:
        shape = cast("tuple[int, ...]", (module.num_embeddings, module.dims))
        return tied and shape == (folder.vocab_size, folder.hidden_size)

    return {
        path: module
        for path, module in modules
        if type(module) in _PLAIN
        and module.get("global_scale") is None
        and (not isinstance(module, nn.QuantizedEmbedding) or multiplies(module))
    }


def dequantize(model: nn.Module, folder: ModelFolder, layers: LayerRange) -> None:
    """Replace a stage's quantized modules by plain ones with float32 weights, lazily: equal to the quantized ones."""
    replaced: list[tuple[str, nn.Module]] = []
    for path, module in quantized_modules(model, folder, layers).items():
        packed, kind = cast("Any", module), _PLAIN[type(module)]
        scales, biases = cast("mx.array", packed.scales), cast("mx.array | None", packed.get("biases"))
        if biases is not None:  # of affine groups; other scales are integers
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(
            packed.weight, scales, biases, packed.group_size, packed.bits, packed.mode, dtype=mx.float32
        )
        plain = kind(*reversed(weight.shape), **({"bias": "bias" in module} if kind in _WITH_BIAS else {}))
        plain["weight"] = weight
        if "bias" in module:
            plain["bias"] = packed.bias
        replaced.append((path, plain))
    model.update_modules(tree_unflatten(replaced))


def _cast_parameters(stage: StageModel) -> dict[str, mx.array]:
    """Return every parameter of the tree, lazily in the stage's dtype. Arrays that are not evaluated stay on disk.

    Scales and biases of quantized weights are cast too, because half-precision ones slow products tenfold on a CPU.
    The native kernels take them as they are stored, with the same results, and read less.
    Parameters that a model keeps in float32 are not narrowed: expert selection, for example, would choose others.
    """
    flat = cast("dict[str, Any]", tree_flatten(stage.model.parameters(), destination={}))
    may_narrow = cast("Callable[[str], bool]", getattr(stage.model, "cast_predicate", _anything))
    kept = _keep_scales(stage) if stage.dtype == mx.float32 and are_installed() else frozenset[str]()
    return {
        path: array.astype(stage.dtype)
        if mx.issubdtype(array.dtype, mx.floating)
        and path not in kept
        and (stage.dtype == mx.float32 or may_narrow(path))
        else array
        for path, array in flat.items()
        if isinstance(array, mx.array)
    }


def _keep_scales(stage: StageModel) -> frozenset[str]:
    """Return the paths of scales and biases that can stay as stored. Embeddings of these become those of the dtype."""
    kept: set[str] = set()
    for path, module in cast("list[tuple[str, nn.Module]]", stage.model.named_modules()):
        if not isinstance(module, _QUANTIZED) or getattr(module, "mode", "") != "affine":
            continue
        kept |= {f"{path}.{name}" for name in ("scales", "biases")}
        if isinstance(module, nn.QuantizedEmbedding):
            override(module, "__call__", partial(_embed_in, stage.dtype))
    return frozenset(kept)


def _embed_in(dtype: mx.Dtype, _run: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a quantized embedding's look-up that computes its rows in `dtype`, whatever the type of its scales."""

    def embed(module: Any, tokens: mx.array) -> mx.array:
        parts = (module[name][tokens] for name in ("weight", "scales", "biases"))
        return mx.dequantize(*parts, group_size=module.group_size, bits=module.bits, dtype=dtype)

    return embed


def _anything(_path: str) -> bool:
    return True


def _read(arrays: Mapping[str, mx.array], progress: ByteProgress, gguf: GgufWeights | None) -> Iterator[None]:
    """Evaluate the stage's own arrays; yield after each."""
    total = sum(array.nbytes for array in arrays.values())
    held = since_clear = 0
    progress(held, total)
    modules: defaultdict[str, list[mx.array]] = defaultdict(list)
    for path in sorted(arrays, key=lambda path: -arrays[path].nbytes):
        modules[path.rpartition(".")[0]].append(arrays[path])
    for module, own in modules.items():
        with nullcontext() if gguf is None else gguf.readable(module):
            for array in own:
                mx.eval(array)
                held += array.nbytes
                since_clear += array.nbytes
                if since_clear > _CLEAR_EVERY_BYTES:
                    mx.clear_cache()
                    since_clear = 0
                progress(held, total)
                yield
    mx.clear_cache()


def read_folder(request: worker_pb2.LoadRequest, hello: hello_pb2.Hello) -> ModelFolder:
    """Read the model. Raises `VersionMismatch` if it is not the one that the head serves, by a sample of whole weights."""
    folder, wanted = read_model_folder(Path(request.model_path)), request.hello.model_digest
    check_hello(
        hello_pb2.Hello(
            protocol=hello.protocol,
            mlx_ring=hello.mlx_ring,
            mlx=hello.mlx,
            mlx_lm=hello.mlx_lm,
            model_digest=with_weights_of(wanted, folder.digest),
        ),
        request.hello,
        f"the model folder {folder.path}",
    )
    if not (request.fetched or may_have_weights_of(folder, wanted)):
        raise VersionMismatch(
            f"{folder.path} has other weights than the model that the head serves: copy the head's files there, or, if they "
            "have just changed, load the model again."
        )
    return folder
