"""Gain of two cores of this machine over one, by a model's products alone, without a server around them.

The weights are of 4 bits, and of several layers, so that no cache holds them. Each process has its own core.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from random_model import Shape

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

_LAYERS = 8
_STEPS = 7
_GROUP_SIZE = 64
_BITS = 4
_WAIT_S = 300.0
"""Time for the weights of all processes, after which one has failed."""


def limit_of_ranks(shape: Shape, rows: int, cores: Sequence[int]) -> float:
    """Return the gain of two ranks, each with half of every product, in a step of `rows` rows.

    Processes are not pinned where `cores` is empty.
    """
    whole, halves = _products(shape, ranks=1), _products(shape, ranks=2)
    one, two = _places(cores)
    return _seconds([whole] * _LAYERS, rows, one) / _seconds([halves] * _LAYERS, rows, two)


def limit_of_stages(shape: Shape, rows: int, cores: Sequence[int]) -> float:
    """Return the gain of two stages, each with half of the layers: two groups of half the rows, one on each core."""
    layers = [_products(shape, ranks=1)] * _LAYERS
    one, two = _places(cores)
    both = _seconds(layers[: _LAYERS // 2], max(1, rows // 2), two)
    return _seconds(layers, rows, one) / (2 * both)


def _places(cores: Sequence[int]) -> tuple[list[int | None], list[int | None]]:
    two: list[int | None] = [*cores[:2]] if len(cores) > 1 else [None, None]
    return two[:1], two


def _products(shape: Shape, ranks: int) -> list[tuple[int, int]]:
    """Return the outputs and inputs of a layer's products on one of the ranks, which divide heads and hidden units."""
    query, key = shape.heads * shape.head_dim // ranks, shape.kv_heads * shape.head_dim // ranks
    hidden, inner = shape.hidden, shape.intermediate // ranks
    return [
        *((query, hidden), (key, hidden), (key, hidden), (hidden, query)),
        *((inner, hidden), (inner, hidden), (hidden, inner)),
    ]


def _seconds(layers: Sequence[Sequence[tuple[int, int]]], rows: int, cores: Sequence[int | None]) -> float:
    """Return the median seconds of a step on all cores at once, until the last has finished."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results, barrier = manager.Queue(), manager.Barrier(len(cores), timeout=_WAIT_S)
        processes = [
            context.Process(target=_measure, args=(core, layers, rows, barrier, results)) for core in cores
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("A process that measures products ended with an error.")
        times: list[list[float]] = [results.get() for _ in cores]
    return statistics.median(max(each) for each in zip(*times, strict=True))


def _measure(
    core: int | None, layers: Sequence[Sequence[tuple[int, int]]], rows: int, barrier: Barrier, results: Any
) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    import mlx.core as mx

    import mlx_cpu_kernels

    mx.set_default_device(mx.cpu)
    mlx_cpu_kernels.speed_up()
    weights: list[tuple[mx.array, ...]] = []
    for outputs, inputs in (product for layer in layers for product in layer):
        weights.append(mx.quantize(mx.random.normal((outputs, inputs)), _GROUP_SIZE, _BITS))
        mx.eval(weights[-1])
    inputs_of = {
        size: mx.random.normal((rows, size)) for size in {size for layer in layers for _, size in layer}
    }
    mx.eval(inputs_of)
    sizes = [size for layer in layers for _, size in layer]
    seconds: list[float] = []
    for _ in range(_STEPS + 1):
        barrier.wait()
        began = time.perf_counter()
        for (packed, scales, biases), size in zip(weights, sizes, strict=True):
            mx.eval(
                mx.quantized_matmul(
                    inputs_of[size], packed, scales, biases, group_size=_GROUP_SIZE, bits=_BITS
                )
            )
        seconds.append(time.perf_counter() - began)
    results.put(seconds[1:])
