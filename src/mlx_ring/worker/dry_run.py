"""How a model calls its layers, seen in a run that computes nothing.

Which cache each layer is given, which argument carries the activations, and what layers hand to later
ones besides: all that decides where a model can be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx import nn

Place = int | str
"""An argument's index, or its name."""


@dataclass(slots=True)
class LayerCalls:
    """What a dry run has seen."""

    slots: list[set[int]]
    """For each layer, the slots whose caches it is called with."""
    extras: list[int]
    """For each layer, how many values it returns behind the activations."""
    place: Place = 0
    """Which argument of a layer carries the activations."""
    reads: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(earlier, later): the later layer is given a value that the earlier one returned behind the activations."""
    embeds_again: bool = False
    """Whether layers are given, beside the activations, what looks like them: the embedded tokens once more."""


def watch_layers(model: nn.Module, layer_list: list[Any], make_caches: Callable[[], list[Any]]) -> LayerCalls:
    """Run the model once, lazily, with every layer watched.

    Layers pass their input through. A model whose layers return more than activations has no use for
    that: its own layers run then, on caches of their own, and nothing of it is evaluated.
    """
    try:
        return _watch(model, layer_list, make_caches(), run_layers=False)
    except (TypeError, ValueError):
        return _watch(model, layer_list, make_caches(), run_layers=True)


def _watch(model: nn.Module, layer_list: list[Any], caches: list[Any], *, run_layers: bool) -> LayerCalls:
    count = len(layer_list)
    calls = LayerCalls([set() for _ in range(count)], [0] * count)
    watcher = _Watcher(calls, {id(cache): slot for slot, cache in enumerate(caches)}, run_layers=run_layers)
    originals = list(layer_list)
    layer_list[:] = [_Watched(layer, index, watcher) for index, layer in enumerate(originals)]
    try:
        cast("Callable[..., Any]", model)(mx.zeros((1, 1), mx.int32), cache=list(caches))
    finally:
        layer_list[:] = originals
    return calls


class _Watcher:
    """Gathers what the watched layers are called with."""

    def __init__(self, calls: LayerCalls, slots: dict[int, int], *, run_layers: bool) -> None:
        self._calls = calls
        self._slots = slots
        self._run_layers = run_layers
        self._handed_on: Any = None
        self._makers: dict[int, int] = {}
        self._kept: list[Any] = []
        """Keeps what layers returned alive, so that no other object takes its identity."""

    def call(
        self, index: int, layer: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        calls = self._calls
        calls.place = _find_place(self._handed_on, arguments, named, calls.place)
        if index > 0:
            activations = take(calls.place, arguments, named)
            calls.embeds_again |= any(
                _is_like(value, activations)
                for value in (*arguments, *named.values())
                if value is not activations
            )
        for value in _flatten((*arguments, *named.values())):
            if id(value) in self._slots:
                calls.slots[index].add(self._slots[id(value)])
            if value is not self._handed_on and id(value) in self._makers:
                calls.reads.add((self._makers[id(value)], index))
        if not self._run_layers:
            self._handed_on = mx.stop_gradient(take(calls.place, arguments, named))
            return self._handed_on
        output: Any = layer(*arguments, **named)
        activations, *extras = cast("tuple[Any, ...]", output if isinstance(output, tuple) else (output,))
        self._handed_on = activations
        calls.extras[index] = len(extras)
        self._kept.append(output)
        for value in _flatten(extras):
            self._makers[id(value)] = index
        return cast("Any", output)


class _Watched:
    """A layer in the dry run."""

    def __init__(self, original: Any, index: int, watcher: _Watcher) -> None:
        self._original = original
        self._index = index
        self._watcher = watcher

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._watcher.call(self._index, self._original, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def take(place: Place, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The argument that carries the activations; the first one where that is not told apart by name."""
    if isinstance(place, str):
        return named[place]
    return arguments[place] if arguments else next(iter(named.values()))


def _find_place(handed_on: Any, arguments: tuple[Any, ...], named: dict[str, Any], otherwise: Place) -> Place:
    """Where the activations of the layer before come in."""
    if handed_on is not None:
        for place, value in (*enumerate(arguments), *named.items()):
            if value is handed_on:
                return place
    return otherwise


def _is_like(value: Any, activations: Any) -> bool:
    return (
        isinstance(value, mx.array)
        and isinstance(activations, mx.array)
        and (value.shape, value.dtype) == (activations.shape, activations.dtype)
    )


def _flatten(values: Sequence[Any]) -> Iterator[Any]:
    """Values, and what lists and tuples among them hold."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from _flatten(cast("Sequence[Any]", value))
