"""Cost of a step beside reading its weights, found with the step loop that serves, on a tiny model.

Measurements are repeated in turns, so that changes of the machine's speed affect all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3

from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.links import Inbox
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.replies import StageLinks
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.sampler import LazySample, Parameters, SamplerRow
from mlx_ring.worker.shard import StageModel

# ---- measurements in turns

LEAST_ROUNDS = 3

Measurement = Callable[[], float]
"""Function that does something once and returns a figure, of which the median counts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one measurement."""

    median: float
    spread: float
    """Distance from the first quarter to the third, over the median."""

    @classmethod
    def of(cls, values: list[float]) -> Measured:
        """Summarize at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, abs(high - low) / abs(median) if median else 0.0)


def in_turns(
    measurements: Mapping[str, Measurement], until: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, Measured]:
    """Run every measurement once a round until the time is up, but a few rounds at least.

    Args:
        until: on the clock, seconds.
    """
    values = {name: list[float]() for name in measurements}
    rounds = 0
    while rounds < LEAST_ROUNDS or clock() < until:
        for name, measure in measurements.items():
            values[name].append(measure())
        rounds += 1
    return {name: Measured.of(found) for name, found in values.items()}


Stopwatch = Callable[[Callable[[], None]], float]
"""Function that measures how long something takes, once, in seconds."""


def stopwatch(threads: int, cores: float | None) -> Stopwatch:
    """Return a stopwatch: by the clock, or by the granted time if a control group grants the computing thread less than a core.

    How much of a second that is depends on when the measurement falls into the group's period; planning counts with it.
    With several threads some wait while others compute, so the time of all is no measure.
    """
    is_part = cores is not None and cores < 1 and threads == 1 and mx.default_device() == mx.Device(mx.cpu)
    return partial(_seconds_of, time.process_time if is_part else time.perf_counter)


def _seconds_of(clock: Callable[[], float], work: Callable[[], None]) -> float:
    started = clock()
    work()
    return max(clock() - started, 1e-9)


# ---- a step

FEW_LAYERS, MANY_LAYERS = 2, 10
FEW_WORDS, MANY_WORDS = 1024, 1 << 17
_HEADS, _KV_HEADS, _HEAD_WIDTH, _CONTEXT = 16, 8, 128, 2048
_ATTENTIONS = 4
_DRAWS = 4
_STEPS = 6
_INSTANCE = "profile"
_WANT = step_pb2.Want(what=step_pb2.Want.TOKEN, where=step_pb2.Want.LAST)
_SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_GROUP = 32
_LONGEST = 4096


class SmallStage:
    """Whole model of some layers, driven as the head drives a stage: each step comes before the last is answered."""

    def __init__(
        self, layers: int, dtype: mx.Dtype, stopwatch: Stopwatch, *, quantized: bool = False
    ) -> None:
        self._stopwatch = stopwatch
        arguments = cast("Any", qwen3.ModelArgs).from_dict(_SMALL | {"num_hidden_layers": layers})
        model = cast("Any", qwen3.Model)(arguments)
        model.set_dtype(dtype)
        if quantized:
            nn.quantize(model, group_size=_GROUP, bits=4)
        model.eval()
        mx.eval(model.parameters())
        stage = StageModel(model, LayerRange(0, layers), dtype, _SMALL["vocab_size"], _SMALL["hidden_size"])
        self._kv = KVStore(stage.make_layer_caches(), dtype)
        assignment = worker_pb2.StageAssignment(instance=_INSTANCE, epoch=1)
        self._runner = StageRunner(assignment, stage, self._kv, StageLinks(Inbox(_INSTANCE, 1)))
        self._step = self._length = 0
        self._begin()

    def seconds(self) -> float:
        """Return the seconds of one step, the mean over several in a row."""
        if self._length + _STEPS > _LONGEST:
            self._begin()
        return self._stopwatch(self._decode) / _STEPS

    def _begin(self) -> None:
        """Start a new sequence, and run its first steps, which are slower."""
        self._runner.reset()
        # The runner counts from zero again, and later steps need higher numbers.
        opened = step_pb2.Open(sequence=1, prompt_length=1, max_length=_LONGEST)
        self._length = 1
        self._run(
            step_pb2.Row(sequence=1, start=0, token=1, wants=[_WANT]),
            [step_pb2.CacheOperation(open=opened)],
        )
        self._decode()

    def _decode(self) -> None:
        for _ in range(_STEPS):
            self._run(step_pb2.Row(sequence=1, start=self._length, previous=True, wants=[_WANT]))
            self._length += 1
        for done in self._runner.finish():
            _check(done)

    def _run(self, row: step_pb2.Row, operations: list[step_pb2.CacheOperation] | None = None) -> None:
        self._step += 1
        step = step_pb2.Step(
            instance=_INSTANCE, epoch=1, step=self._step, operations=operations or [], rows=[row]
        )
        for done in self._runner.take(step, 0):
            _check(done)


def _check(done: step_pb2.StepDone) -> None:
    if done.HasField("failure"):
        raise RuntimeError(done.failure.message)


def drawing(words: int, stopwatch: Stopwatch) -> Callable[[], float]:
    """Return a function that draws one token of a vocabulary at a usual temperature, and returns the seconds.

    Several are drawn at once, because a GPU draws while the next step is built.
    """
    logits = mx.random.normal((1, words))
    row = SamplerRow(Parameters(temperature=1.0), seed=7, position=1, tokens=(0,), prompt_length=1)
    mx.eval(logits)

    def draw() -> float:
        taken = stopwatch(lambda: mx.eval([LazySample(logits, [row]).tokens for _ in range(_DRAWS)]))
        return taken / _DRAWS

    draw()
    return draw


def attending(dtype: mx.Dtype, stopwatch: Stopwatch) -> Callable[[], float]:
    """Return a function that attends from one token to long contexts, and gives seconds for each token and query."""
    queries = mx.ones((1, _HEADS, 1, _HEAD_WIDTH), dtype)
    held = [
        tuple(mx.full((1, _KV_HEADS, _CONTEXT, _HEAD_WIDTH), 0.1, dtype) for _ in range(2))
        for _ in range(_ATTENTIONS)
    ]
    mx.eval(queries, held)

    def attend() -> float:
        taken = stopwatch(
            lambda: mx.eval(
                [
                    mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1)
                    for keys, values in held
                ]
            )
        )
        return taken / (_ATTENTIONS * _CONTEXT * _HEADS * _HEAD_WIDTH)

    attend()
    return attend
