"""Stage of any mlx-lm model, without our own forward code for any architecture.

The model's own forward runs. Its list of layers keeps its length. Layers of other stages become pass-throughs, the
first owned layer receives the activations, and the last one returns them. MLX is lazy, so embedding, norm and head are
computed only if their results are needed.
"""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported, RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.worker.cache_slots import (
    ArgumentKey,
    CacheSlots,
    LayerCalls,
    find_cache_slots,
    take,
    watch_layers,
)
from mlx_ring.worker.tensor import SplitHead, override

Output = Literal["logits", "own logits", "hidden"]
_ACTIVATION_AXES = 3


class _PassThrough:
    """Placeholder for a layer of another stage. It passes its input on and answers for the layer's attributes.

    It is no module, so the original's weights are in no module's parameters.
    """

    def __init__(self, original: nn.Module, place: ArgumentKey, extras: int) -> None:
        self._original = original
        self._place = place
        self._extras = (None,) * extras

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        hidden = take(self._place, arguments, named)
        return (hidden, *self._extras) if self._extras else hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Passage:
    """Activations that enter and leave the stage's layers in one forward pass."""

    def __init__(self, place: ArgumentKey) -> None:
        self.place = place
        self.hidden: mx.array | None = None
        self.entered = False
        self.taken: mx.array | None = None

    def clear(self) -> None:
        self.hidden = self.taken = None
        self.entered = False

    def enter(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the activations in a layer's arguments."""
        if self.hidden is None:
            return arguments, named
        self.entered = True
        if not arguments or isinstance(self.place, str):
            name = self.place if isinstance(self.place, str) else next(iter(named))
            return arguments, {**named, name: self.hidden}
        return (*arguments[: self.place], self.hidden, *arguments[self.place + 1 :]), named

    def leave(self, output: Any) -> None:
        """Record a layer's activations."""
        self.taken = cast("mx.array", output[0] if isinstance(output, tuple) else output)


def _make_end(layer: nn.Module, passage: _Passage, *, is_entry: bool, is_exit: bool) -> None:
    """Make a layer the first or last of a stage, or both: it replaces its input or records its output."""

    def make(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
            if is_entry:
                arguments, named = passage.enter(arguments, named)
            output = run(self, *arguments, **named)
            if is_exit:
                passage.leave(output)
            return output

        return call

    override(layer, "__call__", make)


class StageModel:
    """Layers `[start, end)` of a model, with the embedding on the first stage and the head on the last."""

    def __init__(
        self, model: nn.Module, layers: LayerRange, dtype: mx.Dtype, vocab_size: int, hidden_size: int
    ) -> None:
        self.model = model
        self._layers_path, originals = _layer_list(model)
        self.layers = layers
        self.num_layers = len(originals)
        if not 0 <= layers.start < layers.end <= self.num_layers:
            raise ModelUnsupported(f"Layers {layers} were requested; the model has {self.num_layers}.")
        self.is_first = layers.start == 0
        self.is_last = layers.end == self.num_layers
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        calls = watch_layers(model, originals, self._make_caches)
        self._embeds_again = calls.embeds_again
        self._passage = _Passage(calls.place)
        self._heads = tuple(
            path for path in find_heads(model, vocab_size) if not path.startswith(self._layers_path)
        )
        self._embeddings = tuple(
            f"{name}."
            for name, module in cast("list[tuple[str, nn.Module]]", model.named_modules())
            if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        )
        _check_cut(calls, layers)
        self._slots: CacheSlots = find_cache_slots(calls, layers, self._make_caches)
        self._cut(originals, calls)
        self._tap = HeadTap(model, self._heads) if self.is_last else None
        self.head: SplitHead | None = None
        """Head that combines the ranks' logits, if other ranks compute parts of them."""

    def needs(self, path: str) -> bool:
        """Report whether the stage computes with the parameter at `path`, as `model.parameters()` names it."""
        if path.startswith(self._layers_path):
            return True
        if self._is_head(path):
            return self.is_last
        if self._embeds_again and path.startswith(self._embeddings):
            return True
        if self.is_last and not self.is_first:
            return not self._heads or not path.startswith(self._embeddings)
        return self.is_first

    @property
    def takes_row_offsets(self) -> bool:
        """True if rows at different positions may share a pass, as far as rotations are concerned."""
        modules = cast("list[nn.Module]", self.model.modules())
        return not any(isinstance(module, DynamicNTKScalingRoPE) for module in modules)

    def _is_head(self, path: str) -> bool:
        return path.startswith(self._heads) if self._heads else False

    def _make_caches(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def _cut(self, layer_list: list[Any], calls: LayerCalls) -> None:
        for index in range(len(layer_list)):
            layer = layer_list[index]
            if not self.layers.start <= index < self.layers.end:
                layer_list[index] = _PassThrough(layer, calls.place, calls.extras[index])
                continue
            is_entry, is_exit = index == self.layers.start, index == self.layers.end - 1
            if is_entry or is_exit:
                _make_end(layer, self._passage, is_entry=is_entry, is_exit=is_exit)

    def make_layer_caches(self) -> list[Any]:
        """Make mlx-lm caches for the owned layers. Their kinds and windows define what each layer needs."""
        return self._slots.make_owned()

    @property
    def cache_numbers(self) -> tuple[int, ...]:
        """Numbers of these caches in the model's list, which may have several for a layer, or none."""
        return self._slots.owned

    def forward(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        caches: Sequence[Any],
        positions: mx.array | None,
        *,
        offset: int | mx.array = 0,
        output: Output = "logits",
    ) -> mx.array:
        """Build one lazy pass.

        Args:
            tokens: (batch, n) int32, on every stage, because some models also read them in later layers.
            hidden: (batch, n, hidden) for the first owned layer; None embeds the tokens.
            caches: one for each of `make_layer_caches`, with mlx-lm's cache interface.
            positions: (p,) or (batch, p) offsets into n whose results are wanted; None: all. Last stage only.
            offset: position of the first token, one for all rows or (batch,).
            output: on the last stage: logits, those of this rank's tokens only, or the input of the model's head.

        Returns:
            (batch, n, hidden) activations. The last stage returns (batch, p, vocabulary) logits,
            (batch, p, own tokens of the vocabulary) of them, or (batch, p, hidden).
        """
        passage = self._passage
        passage.hidden = None if hidden is None else hidden.astype(self.dtype)
        try:
            full = self._slots.complete(caches, offset)
            run = cast("Callable[..., Any]", self.model)
            result = (
                self._tap.run(lambda: run(tokens, cache=full), positions, hidden_only=output == "hidden")
                if self._tap is not None
                else run(tokens, cache=full)
            )
            if passage.taken is None or passage.entered != (hidden is not None):
                raise ModelUnsupported(f"{type(self.model).__module__} does not call its layers one by one.")
            if self.is_last:
                return self.head.logits(result) if self.head is not None and output == "logits" else result
            if passage.taken.ndim != _ACTIVATION_AXES:
                raise ModelUnsupported(
                    f"{type(self.model).__module__} hands on arrays of shape {passage.taken.shape} between its layers, "
                    "where a link takes (batch, n, hidden): it cannot be cut."
                )
            return passage.taken
        finally:
            passage.clear()

    @property
    def has_own_head(self) -> bool:
        """True if `logits_of` can compute logits: a pass has come through the head, of which no other rank has a part."""
        return self._tap is not None and self._tap.is_reached and self.head is None

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Return lazy (n, vocabulary) logits of (n, hidden) inputs of the head, as `forward` returns them.

        The model's own forward runs for that, because it may scale or cap what its head returns. Its layers are not
        evaluated.
        """
        if self._tap is None:
            raise ModelUnsupported("Only the last stage has the model's head.")
        caches, passage = self._slots.complete(self.make_layer_caches(), 0), self._passage
        passage.hidden = None if self.is_first else mx.zeros((1, 1, self.hidden_size), self.dtype)
        run, tokens = cast("Callable[..., Any]", self.model), mx.zeros((1, 1), mx.int32)
        try:
            return self._tap.run(lambda: run(tokens, cache=caches), None, given=hidden[None])[0]
        finally:
            passage.clear()


def simplify_rotations(model: nn.Module, context_length: int) -> None:
    """Replace rotations whose base depends on the length only beyond the context by plain ones, which give the same bits.

    Plain ones take a position for each row, and native kernels compute them.
    """
    for module in cast("list[nn.Module]", model.modules()):
        for name, part in [*cast("dict[str, object]", module).items()]:
            if isinstance(part, DynamicNTKScalingRoPE) and part.max_position_embeddings >= context_length:
                setattr(module, name, nn.RoPE(part.dims, part.traditional, part.base))


def _same(held: Sequence[object], layers: Sequence[object]) -> bool:
    return len(held) == len(layers) and all(map(operator.is_, held, layers))


def _check_cut(calls: LayerCalls, layers: LayerRange) -> None:
    for earlier, later in sorted(calls.reads):
        for cut in (layers.start, layers.end):
            if earlier < cut <= later:
                raise ModelUnsupported(
                    f"Layer {later} reads more of layer {earlier} than activations, "
                    f"so the model cannot be cut before layer {cut}."
                )


def _layer_list(model: nn.Module) -> tuple[str, list[Any]]:
    """Return the path of the model's list of layers, and the list itself, so that its items can be replaced."""
    layers = list(cast("Sequence[nn.Module]", getattr(model, "layers", ())))
    for path, module in cast("list[tuple[str, nn.Module]]", model.named_modules()):
        for name, value in cast("dict[str, object]", module).items():
            held = cast("list[Any]", value) if isinstance(value, list) else []
            if held and _same(held, layers):
                return f"{path}.{name}.".lstrip("."), held
    raise ModelUnsupported(f"{type(model).__module__} keeps its layers in a way that cannot be cut.")


@contextmanager
def model_errors(path: Path) -> Generator[None]:
    """Raise any error of mlx-lm's code for the model in a folder as one of the folder, in one line.

    Files that cannot be read and memory that is short stay what they are: they say nothing about the model.

    Raises:
        ModelUnsupported: mlx-lm does not know the architecture.
        ModelCorrupt: weights and configuration do not fit, or the model's code fails with its configuration.
    """
    try:
        yield
    except (RingError, OSError, MemoryError):
        raise
    except Exception as error:
        is_sentence = isinstance(error, ValueError | RuntimeError) and bool(str(error))
        if is_sentence and "allocate" in str(error):  # MLX has no error of its own for it
            raise
        kind = "" if is_sentence else f"mlx-lm fails with its configuration, {type(error).__name__}: "
        message = textwrap.shorten(f"{kind}{error}".removesuffix(": "), 200, placeholder=" ...")
        if is_sentence and "not supported" in message:
            raise ModelUnsupported(f"{path}: {message}") from error
        raise ModelCorrupt(f"{path} cannot be loaded: {message}") from error


class HeadTap:
    """Filter of the head's input, the hidden states after the final norm, whether it is a layer or the transposed embedding.

    The head is the most expensive layer, so it runs only at the wanted positions. They are selected here because everything
    that a model does after its last layer has seen all positions by then.
    """

    def __init__(self, model: nn.Module, heads: Sequence[str]) -> None:
        self._model = model
        self._positions: mx.array | None = None
        self._entered: mx.array | None = None
        self._given: mx.array | None = None
        self.is_reached = False
        """True once a pass has come through the head."""
        modules = dict(cast("list[tuple[str, nn.Module]]", model.named_modules()))
        for path in heads:
            override(modules[path], "__call__", self._tapped)
        for module in modules.values():
            if hasattr(module, "as_linear"):
                override(module, "as_linear", self._tapped)

    def run(
        self,
        forward: Callable[[], mx.array],
        positions: mx.array | None,
        *,
        hidden_only: bool = False,
        given: mx.array | None = None,
    ) -> mx.array:
        """Build a lazy pass.

        Args:
            forward: returns (batch, n, vocabulary) logits.
            positions: (p,) or (batch, p) offsets into n whose results are wanted; None: all.
            hidden_only: return the head's input, and never evaluate its product.
            given: (batch, p, hidden) input of the head instead of what comes from the layers, which is not evaluated.
        """
        self._positions, self._entered, self._given = positions, None, given
        try:
            logits = forward()
        finally:
            self._given = None
        entered, self._entered = self._entered, None
        if hidden_only:
            if entered is None:
                raise ModelUnsupported(
                    f"{type(self._model).__module__} gives no access to its hidden states: its head was not found."
                )
            return entered
        return logits if entered is not None or positions is None else _at_positions(logits, positions)

    def _tapped(self, head: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def tapped(module: nn.Module, hidden: mx.array) -> mx.array:
            self.is_reached = True
            if self._given is not None:
                hidden = self._given
            elif self._positions is not None:
                hidden = _at_positions(hidden, self._positions)
            self._entered = hidden
            return head(module, hidden)

        return tapped


def _at_positions(output: mx.array, positions: mx.array) -> mx.array:
    """Return (batch, n, width) at (p,) or (batch, p) offsets."""
    if positions.ndim == 1:
        return output[:, positions]
    return mx.take_along_axis(output, positions[:, :, None], axis=1)


def find_heads(model: nn.Module, vocab_size: int) -> tuple[str, ...]:
    """Return the paths of linear layers that produce a vocabulary; none if the embedding is the head."""
    return tuple(
        path
        for path, module in cast("list[tuple[str, nn.Module]]", model.named_modules())
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] == vocab_size
    )
