"""Which cache belongs to which layer, and what stands in for the caches of other stages.

mlx-lm hands a model one list of caches. Models index it as they like: one for each layer, two
for each layer, none for layers without state. A dry run shows which cache each layer is given.

A model also makes its masks from some layer's cache, and that layer may be another stage's.
Such a slot is filled with an owned cache of the same kind, or, where the stage owns none, with a
phantom that knows the position alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import LayerRange
from mlx_ring.worker.dry_run import LayerCalls

Kind = tuple[Any, ...]


class _Phantom:
    """A cache of another stage where this one owns none of its kind: a position, and masks made from it."""

    def __init__(self, prototype: Any, offset: int | mx.array) -> None:
        self._prototype = prototype
        self.offset = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prototype, name)

    def __getitem__(self, index: int) -> Any:
        return self._prototype[index]

    def __setitem__(self, index: int, value: Any) -> None:
        """The state is another stage's to keep."""

    def make_mask(self, size: int, *_arguments: Any, window_size: int | None = None, **_named: Any) -> Any:
        """Only layers of its own kind would read it, and this stage has none: any causal mask does."""
        if not hasattr(self._prototype, "offset"):
            return self._prototype.make_mask(size)
        return None if size == 1 else create_causal_mask(size, window_size=window_size)


class CacheSlots:
    """A model's list of caches, of which this stage owns some."""

    def __init__(
        self,
        prototypes: Sequence[Any],
        owned: Sequence[int],
        make: Callable[[], list[Any]],
        apart: Collection[int] = (),
    ) -> None:
        """`apart` are slots that no layer is given: where they are not owned, no other cache fills them."""
        self._prototypes = prototypes
        self._owned = tuple(owned)
        self._make = make
        first_of_kind: dict[Kind, int] = {}
        for place, slot in enumerate(self._owned):
            first_of_kind.setdefault(_kind(prototypes[slot]), place)
        places = {slot: place for place, slot in enumerate(self._owned)}
        self._sources = [
            places.get(slot, None if slot in apart else first_of_kind.get(_kind(prototype)))
            for slot, prototype in enumerate(prototypes)
        ]
        """For each slot, the owned cache that fills it; None where a phantom must."""

    def make_owned(self) -> list[Any]:
        caches = self._make()
        return [caches[slot] for slot in self._owned]

    def complete(self, caches: Sequence[Any], offset: int | mx.array) -> list[Any]:
        """The whole list, from the owned caches in their order."""
        return [
            _phantom(prototype, offset) if source is None else caches[source]
            for source, prototype in zip(self._sources, self._prototypes, strict=True)
        ]


def find_cache_slots(calls: LayerCalls, layers: LayerRange, make: Callable[[], list[Any]]) -> CacheSlots:
    """The slots that the layers `[start, end)` are given.

    A slot that no layer is given is read before the layers: the first stage has it.

    Raises:
        ModelUnsupported: a layer of another stage is given one of them too.
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
                f"Layers {users[slot]} share one cache, so that the model cannot be cut to layers {layers}."
            )
        if any(inside) or (not inside and layers.start == 0):
            owned.append(slot)
    return CacheSlots(prototypes, owned, make, set(range(len(prototypes))) - set(users))


def _kind(cache: Any) -> Kind:
    """Caches of one kind make the same masks."""
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
