"""Measure the cost of a row that joins, leaves, is trimmed, forked or retained, compared with mlx-lm's batch cache.

    python bench/kv_rows.py [--rows 8] [--tokens 2048] [--layers 8]

Uses keys and values of artificial layers. Prints milliseconds and the rise of peak memory over the memory in use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_ring.worker.kv import KVStore

_HEADS, _WIDTH = 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    rows, tokens, layers = arguments.rows, arguments.tokens, arguments.layers
    store = KVStore([KVCache() for _ in range(layers)], mx.float32)
    for sequence in range(rows + 1):
        store.open(sequence, 4 * tokens)
        _append(store, {sequence: tokens})
    _append(store, dict.fromkeys(range(rows), 1))
    own = tokens * layers * _HEADS * _WIDTH * 2 * 4
    print(
        f"{rows} rows of {tokens} tokens in {layers} layers: {store.nbytes / 1e6:.0f} MB held, a row is {own / 1e6:.0f} MB"
    )
    print(f"{'':44}{'ms':>9}{'rise of peak, MB':>23}")
    _measure("one more token for every row", lambda: _append(store, dict.fromkeys(range(rows), 1)))
    _measure_join(store, rows + 1)
    _measure("one more token for every row", lambda: _append(store, dict.fromkeys(range(rows + 1), 1)))
    _measure("a row is trimmed by 4 tokens", lambda: store.trim(2, tokens - 2))
    store.open(100, 4 * tokens)
    _measure("a row is forked", lambda: store.fork(3, 100, tokens))
    _measure("a row is retained", lambda: store.retain(1))
    store.open(101, 4 * tokens)
    _measure("a retained row is reused", lambda: store.fork(1, 101, tokens, take=True))
    _measure("a row leaves", lambda: store.free(4))
    rest = [sequence for sequence in range(rows + 1) if sequence not in (1, 4)]
    _measure("the step after it", lambda: _append(store, dict.fromkeys(rest, 1)))
    batch, joining = _batch(rows, tokens, layers), _batch(1, 64, layers)
    _measure(
        "mlx-lm: a row leaves (filter)",
        lambda: _each(batch, lambda cache: cache.filter(mx.array(list(range(1, rows))))),
    )
    _measure(
        "mlx-lm: a row of 64 tokens joins (extend)",
        lambda: _each(batch, lambda cache: cache.extend(joining[0])),
    )


def _append(store: KVStore, work: dict[int, int]) -> int:
    """Feed the given number of tokens to each sequence, and return the number of passes."""
    batches = store.batches(list(work.items()))
    for batch in batches:
        shape = (len(batch.rows), _HEADS, max(batch.counts), _WIDTH)
        for cache in batch.caches:
            cache.update_and_fetch(mx.ones(shape), mx.ones(shape))
        mx.eval(batch.arrays)
        store.commit(batch)
    return len(batches)


def _batch(rows: int, tokens: int, layers: int) -> list[BatchKVCache]:
    caches = [BatchKVCache([0] * rows) for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(
            mx.ones((rows, _HEADS, tokens, _WIDTH)), mx.ones((rows, _HEADS, tokens, _WIDTH))
        )
        mx.eval(cache.state)
    return caches


def _each(caches: list[BatchKVCache], change: Callable[[BatchKVCache], None]) -> None:
    for cache in caches:
        change(cache)
    mx.eval([cache.state for cache in caches])


def _measure_join(store: KVStore, rows: int) -> None:
    """Measure the steps with one more row until all rows share a pass; slots grow meanwhile."""
    steps: list[tuple[float, float]] = []
    passes = 2
    while passes > 1:
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        passes = _append(store, dict.fromkeys(range(rows), 1))
        steps.append((time.perf_counter() - started, mx.get_peak_memory() - held))
    _print(f"a row joins: the slowest of {len(steps)} steps", *max(steps))
    _print(
        "a row joins: all of these steps",
        sum(seconds for seconds, _ in steps),
        max(rise for _, rise in steps),
    )


def _measure(what: str, change: Callable[[], object]) -> None:
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    started = time.perf_counter()
    change()
    _print(what, time.perf_counter() - started, mx.get_peak_memory() - held)


def _print(what: str, seconds: float, rise: float) -> None:
    print(f"{what:44}{1000 * seconds:9.1f}{rise / 1e6:23.0f}")


if __name__ == "__main__":
    main()
