"""Assignment of caches to a stage's layers, found by a dry run of the model.

The dry run computes nothing. It shows which cache each layer gets, which argument carries the activations, and what
layers pass to later ones besides. All this decides where a model can be cut.

mlx-lm gives a model one list of caches, which models index as they like: one for each layer, two for each layer, none
for layers without state. A model also makes its masks from some layer's cache, which may belong to another stage.
Such a slot is filled with an owned cache of the same kind. If the stage owns none, a phantom takes its
place, which only knows the position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import LayerRange

ArgumentKey = int | str
"""Index or name of an argument."""


@dataclass(slots=True)
class LayerCalls:
    """Result of a dry run."""

    slots: list[set[int]]
    """Slots of the caches with which each layer is called."""
    extras: list[int]
    """Number of values that each layer returns after the activations."""
    place: ArgumentKey = 0
    """Argument of a layer that carries the activations."""
    reads: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Pairs (earlier, later): the later layer gets a value that the earlier one returned after the activations."""
    embeds_again: bool = False
    """True if layers get another value shaped like the activations: the embedded tokens once more."""


def watch_layers(model: nn.Module, layer_list: list[Any], make_caches: Callable[[], list[Any]]) -> LayerCalls:
    """Run the model once, lazily, with every layer watched.

    Layers pass their input through. If a model's layers return more than activations, that does not suffice:
    then its own layers run on separate caches, and nothing is evaluated.
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
    """Recorder of the watched layers' arguments."""

    def __init__(self, calls: LayerCalls, slots: dict[int, int], *, run_layers: bool) -> None:
        self._calls = calls
        self._slots = slots
        self._run_layers = run_layers
        self._handed_on: Any = None
        self._makers: dict[int, int] = {}
        self._kept: list[Any] = []
        """Values that layers returned, kept alive so that no other object gets their identity."""

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
    """Layer in the dry run."""

    def __init__(self, original: Any, index: int, watcher: _Watcher) -> None:
        self._original = original
        self._index = index
        self._watcher = watcher

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._watcher.call(self._index, self._original, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def take(place: ArgumentKey, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the argument that carries the activations. By index, it is the first one if there are only named ones."""
    if isinstance(place, str):
        return named[place]
    return arguments[place] if arguments else next(iter(named.values()))


def _find_place(
    handed_on: Any, arguments: tuple[Any, ...], named: dict[str, Any], otherwise: ArgumentKey
) -> ArgumentKey:
    """Find the argument that carries the activations of the layer before."""
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
    """Yield the values, and those inside lists and tuples among them."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from _flatten(cast("Sequence[Any]", value))


CacheKind = tuple[Any, ...]


class _Phantom:
    """Cache of another stage's kind: a position, and masks made from it."""

    def __init__(self, prototype: Any, offset: int | mx.array) -> None:
        self._prototype = prototype
        self.offset = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prototype, name)

    def __getitem__(self, index: int) -> Any:
        return self._prototype[index]

    def __setitem__(self, index: int, value: Any) -> None:
        """Ignore the value: another stage keeps the state."""

    def make_mask(self, size: int, *_arguments: Any, window_size: int | None = None, **_named: Any) -> Any:
        """Return a causal mask. Only layers of this kind would read it, and this stage has none."""
        if not hasattr(self._prototype, "offset"):
            return self._prototype.make_mask(size)
        return None if size == 1 else create_causal_mask(size, window_size=window_size)


class CacheSlots:
    """Model's list of caches, of which this stage owns some."""

    def __init__(
        self,
        prototypes: Sequence[Any],
        owned: Sequence[int],
        make: Callable[[], list[Any]],
        apart: Collection[int] = (),
    ) -> None:
        """Map the slots. `apart` are slots that no layer gets: unless owned, no other cache fills them."""
        self._prototypes = prototypes
        self.owned = tuple(owned)
        """Numbers of the owned caches in the model's list."""
        self._make = make
        first_of_kind: dict[CacheKind, int] = {}
        for place, slot in enumerate(self.owned):
            first_of_kind.setdefault(_kind(prototypes[slot]), place)
        places = {slot: place for place, slot in enumerate(self.owned)}
        self._sources = [
            places.get(slot, None if slot in apart else first_of_kind.get(_kind(prototype)))
            for slot, prototype in enumerate(prototypes)
        ]
        """Owned cache that fills each slot; None if a phantom must."""

    def make_owned(self) -> list[Any]:
        caches = self._make()
        return [caches[slot] for slot in self.owned]

    def complete(self, caches: Sequence[Any], offset: int | mx.array) -> list[Any]:
        """Return the whole list, from the owned caches in their order."""
        return [
            _phantom(prototype, offset) if source is None else caches[source]
            for source, prototype in zip(self._sources, self._prototypes, strict=True)
        ]


def find_cache_slots(calls: LayerCalls, layers: LayerRange, make: Callable[[], list[Any]]) -> CacheSlots:
    """Find the slots that the layers `[start, end)` get.

    A slot that no layer gets is read before the layers, so the first stage owns it.

    Raises:
        ModelUnsupported: a layer of another stage shares one of them.
    """
    users: dict[int, list[int]] = {}
    for layer, slots in enumerate(calls.slots):
        for slot in slots:
            users.setdefault(slot, []).append(layer)
    prototypes = make()
    owned: list[int] = []
    for slot in range(len(prototypes)):
        inside = [layers.start <= layer < layers.end for layer in users.get(slot, [])]
        if any(inside) and not all(inside):
            raise ModelUnsupported(
                f"Layers {users[slot]} share one cache, so the model cannot be cut to layers {layers}."
            )
        if any(inside) or (not inside and layers.start == 0):
            owned.append(slot)
    return CacheSlots(prototypes, owned, make, set(range(len(prototypes))) - set(users))


def _kind(cache: Any) -> CacheKind:
    """Return the cache's kind. Caches of one kind make the same masks."""
    if isinstance(cache, CacheList):
        return (CacheList, *(_kind(part) for part in cast("Sequence[Any]", cache.caches)))
    return (type(cast("object", cache)), getattr(cache, "max_size", None), getattr(cache, "chunk_size", None))


def _phantom(prototype: Any, offset: int | mx.array) -> Any:
    if isinstance(prototype, CacheList):
        phantom = copy.copy(prototype)
        parts = cast("Sequence[Any]", prototype.caches)
        cast("Any", phantom).caches = tuple(_phantom(part, offset) for part in parts)
        return phantom
    return _Phantom(prototype, offset)
