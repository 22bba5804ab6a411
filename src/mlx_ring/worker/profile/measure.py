"""Measurement of this worker's device, within bounds of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import mlx.core as mx

from mlx_cpu_kernels import SpeedReport
from mlx_cpu_kernels.operations import are_installed
from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.machine_profile import PROFILE_VERSION, MachineProfile, StepCosts, WeightRate
from mlx_ring.host.process import cpu_quota, own_memory, usable_cores
from mlx_ring.worker.platform.device import device_description, device_memory, device_name, free_memory
from mlx_ring.worker.profile.steps import (
    FEW_LAYERS,
    FEW_WORDS,
    MANY_LAYERS,
    MANY_WORDS,
    Measured,
    Measurement,
    SmallStage,
    Stopwatch,
    attending,
    drawing,
    in_turns,
    stopwatch,
)

GROUP = 64
"""Group size of quantized weights, as nearly every model has it."""
WIDE_RATIO = 4
"""Ratio of two widths that are read, because short rows are slower than long ones."""
_CPU_WIDTH, _GPU_WIDTH = 512, 1024
_READ_S = 8e-3
"""Duration of a repetition that reads, and of one that computes: long for a clock, short for a second."""
_COMPUTE_S = 15e-3
_MOST_ROWS = 512
_FEWEST_ROWS = 16
_MOST_PRODUCTS = 4096

Multiply = Callable[[mx.array, int], mx.array]
"""Product of (rows, width) with the weights of a number -> (rows, width)."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Storage of weights, and the type that they are multiplied with."""

    name: str
    dtype: mx.Dtype
    """Type of activations."""
    bits: int = 0
    """Bits of a quantized weight; 0: weights are of the dtype."""


def narrow_width() -> int:
    """Return the width of the smaller weights; a GPU reads only those that are `WIDE_RATIO` times as wide."""
    return _CPU_WIDTH if mx.default_device() == mx.Device(mx.cpu) else _GPU_WIDTH


class Products:
    """Weights of one kind and width, ready to be measured."""

    def __init__(self, kind: WeightKind, width: int, set_bytes: int, stopwatch: Stopwatch) -> None:
        """Make weights of about `set_bytes`, two matrices at least."""
        self.width = width
        self._stopwatch = stopwatch
        self._dtype = kind.dtype
        self._multiply, self.nbytes, count = _make_weights(kind, width, set_bytes)
        self._turns = cycle(range(count))
        self._row = mx.ones((1, width), kind.dtype)
        self._reads = self._products_in(_READ_S, self._row)
        self._rows: mx.array | None = None
        self._blocks = 1

    def read(self) -> float:
        """Return the seconds for reading one matrix, in products of a single row."""
        return self._seconds(self._row, self._reads) / self._reads

    def compute(self) -> float:
        """Return the operations a second in products of many rows."""
        if self._rows is None:
            self._rows, self._blocks = self._block_of_rows()
        taken = self._seconds(self._rows, self._blocks)
        return 2 * self._blocks * self._rows.shape[0] * self.width**2 / taken

    def _seconds(self, rows: mx.array, products: int) -> float:
        return self._stopwatch(lambda: mx.eval(self._chain(rows, islice(self._turns, products))))

    def _chain(self, rows: mx.array, turns: Iterator[int]) -> mx.array:
        for number in turns:
            rows = self._multiply(rows, number)
        return rows

    def _products_in(self, seconds: float, rows: mx.array) -> int:
        """Return how many products take so long. The first call is slower and does not count."""
        self._seconds(rows, 1)
        products = 1
        while products < _MOST_PRODUCTS and (taken := self._seconds(rows, products)) < seconds / 2:
            products = min(_MOST_PRODUCTS, products * max(2, int(seconds / taken / 2)))
        return products

    def _block_of_rows(self) -> tuple[mx.array, int]:
        """Return as many rows as a chunk of a prompt has, or fewer if they take too long."""
        if mx.default_device() != mx.Device(mx.cpu):
            # A GPU is fast with as many rows as a chunk has, and CUDA would compile other kernels for few rows.
            rows = mx.ones((_MOST_ROWS, self.width), self._dtype)
            return rows, self._products_in(_COMPUTE_S, rows)
        few = mx.ones((_FEWEST_ROWS, self.width), self._dtype)
        self._seconds(few, 1)
        each = self._seconds(few, 1) / _FEWEST_ROWS
        count = min(_MOST_ROWS, max(_FEWEST_ROWS, int(_COMPUTE_S / each)))
        # Many rows are faster than few, so there may be time for more of them.
        rows = mx.ones(
            (min(_MOST_ROWS, 2 * count) if count > _FEWEST_ROWS else count, self.width), self._dtype
        )
        return rows, 1 if count < _MOST_ROWS else self._products_in(_COMPUTE_S, rows)


def _make_weights(kind: WeightKind, width: int, set_bytes: int) -> tuple[Multiply, int, int]:
    """Make weights that keep a row of equal numbers unchanged.

    Also return the bytes of a matrix and the number of matrices.
    """
    matrix = mx.full((width, width), 1 / width, kind.dtype)
    parts = [matrix] if not kind.bits else list(mx.quantize(matrix, GROUP, kind.bits))
    if kind.bits and are_installed():  # which take scales as models store them
        parts[1:] = [part.astype(mx.bfloat16) for part in parts[1:]]
    nbytes = sum(part.nbytes for part in parts)
    weights = [_copies(parts) for _ in range(max(2, set_bytes // nbytes))]
    mx.eval(weights)

    def multiply(rows: mx.array, number: int) -> mx.array:
        if not kind.bits:
            return rows @ weights[number][0].T
        packed, scales, biases = weights[number]
        return mx.quantized_matmul(
            rows, packed, scales, biases, transpose=True, group_size=GROUP, bits=kind.bits
        )

    return multiply, nbytes, len(weights)


def _copies(parts: Sequence[mx.array]) -> list[mx.array]:
    """Return arrays with their own memory: adding zero is computed, while `mx.array` might share."""
    return [part + mx.zeros((1,), part.dtype) for part in parts]


_SET_BYTES = 192 << 20
"""Size of a set of weights: far more than caches hold ..."""
_SLOW_SET_BYTES = 32 << 20
"""... and of kinds with which a CPU is slow, where computing takes the time."""
_LEAST_BYTES = 128 << 20
_SETS = 6
_PLAIN, _QUANTIZED = "plain", "quantized"
"""Kinds of layers that a step may have."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a measurement."""

    seconds: float = 2.5
    memory_share: float = 0.25
    """Share of the free memory."""


def measure(bounds: Bounds, *, products: SpeedReport, blas_threads: int) -> MachineProfile:
    """Return the profile of this device.

    Args:
        products: description of what computes products, with `blas_threads` threads.

    Raises:
        ConfigError: too little memory is left to measure with.
    """
    started, quota = time.monotonic(), cpu_quota()
    watch = stopwatch(blas_threads, quota.cores if quota else None)
    memory, left = device_memory()[0], free_memory()
    allowed = _allowed_bytes(left, bounds.memory_share)
    name, limited_by = device_description()
    plain, width = _plain_dtype(), narrow_width()
    kinds = _kinds(plain)
    wide = {
        kind.name: Products(kind, width * WIDE_RATIO, _set_bytes(kind, allowed), watch)
        for kind in kinds
        if _is_fast(kind)
    }
    narrow = {
        kind.name: Products(kind, width, _set_bytes(kind, allowed), watch)
        for kind in kinds
        if mx.default_device() == mx.Device(mx.cpu)
    }
    found = in_turns(_product_turns(wide, narrow) | _step_turns(plain, watch), started + bounds.seconds)
    mx.clear_cache()
    # With the memory that products and steps leave behind, as in a worker that has served.
    worker_bytes = max(0, own_memory() - mx.get_active_memory())
    return MachineProfile(
        version=PROFILE_VERSION,
        device=device_name(),
        device_name=name,
        computes_in="float32" if plain == mx.float32 else "",
        memory_bytes=memory,
        memory_available_bytes=left,
        memory_limited_by=limited_by,
        cores=usable_cores(),
        cpu_share=quota.cores if quota else None,
        cpu_period_s=quota.period_s if quota else None,
        worker_bytes=worker_bytes,
        agent_bytes=0,
        blas=str(products),
        kernels=products.kernels,
        blas_threads=blas_threads,
        mlx=package_version("mlx"),
        rates=tuple(_rate(kind.name, {"narrow": narrow, "wide": wide}, found) for kind in kinds),
        costs=_costs(found),
        seconds=time.monotonic() - started,
    )


def _plain_dtype() -> mx.Dtype:
    """Return the default type for a model of half precision: see `resolve_dtype`."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def _kinds(plain: mx.Dtype) -> tuple[WeightKind, ...]:
    return (
        WeightKind("float32", mx.float32),
        WeightKind("bfloat16", mx.bfloat16),
        WeightKind("float16", mx.float16),
        WeightKind("8-bit", plain, 8),
        WeightKind("4-bit", plain, 4),
    )


def _allowed_bytes(left: int, share: float) -> int:
    allowed = int(left * share)
    if allowed < _LEAST_BYTES:
        raise ConfigError(
            f"{left / 1e6:.0f} MB of memory are left, of which measuring may take {share:.0%}; it needs "
            f"{_LEAST_BYTES / 1e6:.0f} MB: close other programs, or raise the container's limit."
        )
    return allowed


def _is_fast(kind: WeightKind) -> bool:
    """Report whether memory may bound this kind. On a CPU, computing bounds the others."""
    return mx.default_device() != mx.Device(mx.cpu) or (not kind.bits and kind.dtype == mx.float32)


def _set_bytes(kind: WeightKind, allowed: int) -> int:
    """Return the bytes of a set of weights.

    They are half of the allowed memory at most, because making them takes some too.
    """
    return min(_SET_BYTES if _is_fast(kind) else _SLOW_SET_BYTES, allowed // 2 // _SETS)


def _product_turns(wide: Mapping[str, Products], narrow: Mapping[str, Products]) -> dict[str, Measurement]:
    turns: dict[str, Measurement] = {f"{name} wide": products.read for name, products in wide.items()}
    turns |= {f"{name} narrow": products.read for name, products in narrow.items()}
    return turns | {f"{name} compute": products.compute for name, products in {**narrow, **wide}.items()}


def _step_turns(dtype: mx.Dtype, watch: Stopwatch) -> dict[str, Measurement]:
    turns: dict[str, Measurement] = {}
    # Layers of quantized weights have fewer operations with native kernels, and as many as others without.
    for kind in (_PLAIN, _QUANTIZED) if are_installed() else (_PLAIN,):
        for layers in (FEW_LAYERS, MANY_LAYERS):
            stage = SmallStage(layers, dtype, watch, quantized=kind == _QUANTIZED)
            turns[f"{layers} {kind} layers"] = stage.seconds
    return turns | {
        "few words": drawing(FEW_WORDS, watch),
        "many words": drawing(MANY_WORDS, watch),
        "attention": attending(dtype, watch),
    }


def _rate(name: str, made: Mapping[str, Mapping[str, Products]], found: Mapping[str, Measured]) -> WeightRate:
    """Derive a rate. A matrix takes its bytes over the bandwidth, and a constant for each row: two widths give both.

    On a GPU, narrow matrices would measure the starts of operations, which are part of a layer's other costs.
    """
    flops = found[f"{name} compute"].median
    widths = {width: of_kinds[name] for width, of_kinds in made.items() if name in of_kinds}
    if len(widths) == 1:
        ((width, only),) = widths.items()
        read = found[f"{name} {width}"]
        return WeightRate(
            weights=name, bandwidth=only.nbytes / read.median, row_s=0.0, spread=read.spread, flops=flops
        )
    narrow, wide = widths["narrow"], widths["wide"]
    few, many = found[f"{name} narrow"], found[f"{name} wide"]
    # With as many rows as the wide matrix has: WIDE_RATIO narrow ones.
    same_rows_s = WIDE_RATIO * few.median
    bandwidth = (wide.nbytes - WIDE_RATIO * narrow.nbytes) / max(many.median - same_rows_s, 1e-12)
    row_s = (many.median - wide.nbytes / bandwidth) / wide.width
    if row_s < 0 or many.median <= same_rows_s:
        bandwidth, row_s = wide.nbytes / many.median, 0.0
    return WeightRate(weights=name, bandwidth=bandwidth, row_s=row_s, spread=many.spread, flops=flops)


def _layer_seconds(kind: str, found: Mapping[str, Measured]) -> float:
    few, many = (found[f"{layers} {kind} layers"].median for layers in (FEW_LAYERS, MANY_LAYERS))
    return max(0.0, (many - few) / (MANY_LAYERS - FEW_LAYERS))


def _costs(found: Mapping[str, Measured]) -> StepCosts:
    """Derive step costs.

    Differences give the cost of one layer and of one token of the vocabulary; the rest is a step's own.
    """
    layer = _layer_seconds(_PLAIN, found)
    some, all_ = found["few words"].median, found["many words"].median
    logit = max(0.0, (all_ - some) / (MANY_WORDS - FEW_WORDS))
    return StepCosts(
        step_s=max(0.0, found[f"{FEW_LAYERS} {_PLAIN} layers"].median - FEW_LAYERS * layer),
        layer_s=layer,
        quantized_layer_s=_layer_seconds(_QUANTIZED, found) if are_installed() else layer,
        draw_s=max(0.0, some - FEW_WORDS * logit),
        logit_s=logit,
        attention_s=found["attention"].median,
        starts_ahead=mx.default_device() != mx.Device(mx.cpu),
    )
