"""Request for a plan: the promised load, the strategy, and the objective; and loads of many requests. Pure."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from mlx_ring.core.engine_stats import BLOCK
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import CHUNK_TOKENS, LONG_CHUNK_PAIRS, longest_chunk
from mlx_ring.planner.profiles import LayerProfile, ModelProfile
from mlx_ring.settings.strategies import Strategy

Objective = Literal["latency", "throughput", "first-token", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

USUAL_CONTEXT = 8192
"""Tokens of context of each sequence, if no number is given and the model's longest is not less."""
FULL_PRECISION_BITS, _SCALE_AND_BIAS_NUMBERS = 16, 2
_QUANTIZED_GROUP = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """Load that a plan must be able to serve."""

    context_tokens: int
    sequences: int
    kv_bits: int = 16
    typical_tokens: int | None = None
    """Mean context of decoded tokens; None for half of `context_tokens`."""
    kv_memory_bytes: int | None = None
    """Memory of each worker's KV cache, whatever it holds; None for as much as the promised load needs."""
    chunk_tokens: int | None = None
    """Most tokens of a prompt in a step; None for what each machine's engine takes."""
    even_tokens: int | None = None
    """Most tokens of a prompt in a step over several stages; None for as many as in any step."""

    @property
    def step_tokens(self) -> int:
        """Most tokens of a prompt in a usual step."""
        return self.chunk_tokens or CHUNK_TOKENS

    @property
    def stage_tokens(self) -> int:
        """Most tokens of a prompt in a step over several stages."""
        return min(self.step_tokens, self.even_tokens or self.step_tokens)

    @property
    def mean_context_tokens(self) -> int:
        """Context of a decoded token on average, for which steps are predicted."""
        return self.context_tokens // 2 if self.typical_tokens is None else self.typical_tokens

    def kv_factor(self, number_bytes: int = 2) -> float:
        """Return the size of the KV cache relative to an unquantized one.

        Quantized groups of 64 numbers have a scale and a bias of `number_bytes` each.
        """
        if self.kv_bits >= FULL_PRECISION_BITS:
            return 1.0
        overhead_bits = 8 * _SCALE_AND_BIAS_NUMBERS * number_bytes / _QUANTIZED_GROUP
        return (self.kv_bits + overhead_bits) / (8 * number_bytes)


def chunk_within(prefill_chunk: int | None, context_tokens: int) -> int | None:
    """Return the most tokens of a prompt in a step for `--prefill-chunk`, where no prompt is longer than the context."""
    return prefill_chunk and min(prefill_chunk, max(CHUNK_TOKENS, context_tokens))


def held_kv_bytes(layer: LayerProfile, model: ModelProfile, demand: Demand) -> float:
    """Return the KV bytes of a layer, for all promised sequences."""
    each = layer.kv_bytes_per_token * demand.context_tokens * demand.kv_factor(model.number_bytes)
    return demand.sequences * (each + layer.kv_bytes_per_sequence)


def limited_kv_bytes(layer: LayerProfile, model: ModelProfile, demand: Demand) -> float:
    """Return the KV bytes of a layer in whole blocks, as a worker with a given KV memory counts them."""
    tokens = -(-demand.context_tokens // BLOCK) * BLOCK
    return held_kv_bytes(layer, model, replace(demand, context_tokens=tokens))


def planned_kv_bytes(layer: LayerProfile, model: ModelProfile, demand: Demand) -> float:
    """Return the KV bytes that a layer adds to its stage; 0 if the memory of the stage's KV cache is given."""
    return 0.0 if demand.kv_memory_bytes is not None else held_kv_bytes(layer, model, demand)


Chunks = tuple[tuple[int, int], ...]
"""Steps in which a prompt is read: their tokens, and how many steps have so many."""


def usual_chunks(tokens: int, most: int) -> Chunks:
    """Return the steps of a prompt that has at most so many tokens in each."""
    whole, rest = divmod(tokens, most)
    return tuple((size, count) for size, count in ((most, whole), (rest, 1)) if size and count)


def chunks_alone(tokens: int, usual: int, most: int, chunk_s: Callable[[int, int], float]) -> Chunks | None:
    """Return the steps of a prompt alone on a machine or group with all layers, as the engine chooses them; None for usual ones.

    A size counts with the middle time of its last three chunks, as the engine measures them: those of the prompt's end.

    Args:
        tokens: length of the prompt.
        usual: most tokens of a usual step.
        most: most tokens of any step.
        chunk_s: returns the seconds of a step by its tokens, and the number of those before it.
    """

    def measured_us(size: int) -> float:
        count = min(tokens, LONG_CHUNK_PAIRS // size) // size
        return 1e6 * chunk_s(size, size * max(0, count - 2 if count > 2 else count - 1))  # noqa: PLR2004 - the middle of three

    fast = longest_chunk(usual, most, 0, measured_us)
    if fast == usual:
        return None
    found, left = list[tuple[int, int]](), tokens
    while left and (size := longest_chunk(usual, fast, tokens - left, lambda _: 0.0)) > usual:
        found.append((min(left, size), 1))
        left -= found[-1][0]
    return (*found, *usual_chunks(left, usual))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Requirements of a plan."""

    demand: Demand
    strategy: Strategy = "auto"
    objective: Objective = "latency"
    proportions: tuple[float, ...] = ()
    """Relative numbers of layers by machine, for the strategy `custom`."""
    counts: tuple[int, ...] = ()
    """Numbers of layers by machine, for the strategy `custom`; used instead of proportions."""
    allows_tensor: bool = True
    """True if machines may compute layers together where the link between them is trusted."""
    prompt_tokens: int = 1024
    """Length of a request's prompt."""
    answer_tokens: int = 256
    """Length of a request's answer."""
    users: int = 1
    """Number of such requests at once."""

    @property
    def chunks(self) -> int:
        """Number of steps in which a prompt is read over several stages."""
        return -(-self.prompt_tokens // self.demand.stage_tokens)

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt in one of these steps."""
        return min(self.prompt_tokens, self.demand.stage_tokens)

    @property
    def streams(self) -> int:
        """Number of streams at once for which times are minimized."""
        return self.demand.sequences if self.objective == "throughput" else self.users

    def share(self, replicas: int) -> int:
        """Return the number of sequences for each of several replicas."""
        return -(-self.demand.sequences // replicas)

    @property
    def minimized_tokens(self) -> int:
        """Number of answer tokens whose time `auto` minimizes after the first."""
        return 0 if self.objective == "first-token" else self.answer_tokens


def request_within(request: PlanRequest, most_tokens: int, context_tokens: int | None) -> PlanRequest:
    """Return the request with its context, in which prompt and answer have room, and a sequence for each user.

    Without a context, it is 8,192 tokens, at most the model's, but at least what given lengths need. Lengths that are
    not given are shortened to the context.

    Args:
        request: the request; its lengths are given if its demand has `typical_tokens`.
        most_tokens: longest context of the model.
        context_tokens: context that is asked for, if any.

    Raises:
        ConfigError: given lengths need a longer context than is asked for, or it is not positive.
    """
    are_given = request.demand.typical_tokens is not None
    prompt, answer = request.prompt_tokens, request.answer_tokens
    context = min(USUAL_CONTEXT, most_tokens) if context_tokens is None else context_tokens
    if context_tokens is None and are_given:
        context = max(context, prompt + answer)
    if context < 1:
        raise ConfigError(f"The context is {context} tokens; it must be 1 or more.")
    if prompt + answer > context:
        if are_given:
            raise ConfigError(
                f"A prompt of {prompt} tokens and an answer of {answer} need a context of {prompt + answer}, "
                f"which is longer than {context}; give a longer context, or a shorter request."
            )
        answer = min(answer, max(1, context // 5))
        prompt = max(1, context - answer)
    chunk = chunk_within(request.demand.chunk_tokens, context)
    demand = replace(request.demand, context_tokens=context, sequences=request.users, chunk_tokens=chunk)
    return replace(request, demand=demand, prompt_tokens=prompt, answer_tokens=answer)


# ---- load of many requests


class SimulatedRequest(NamedTuple):
    """A request that arrives at a time."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplies; fewer than all."""


Arrivals = Literal["poisson", "even", "burst"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)


class Lengths(NamedTuple):
    """Numbers of tokens from `low` to `high`, all equally likely."""

    low: int
    high: int

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, random: np.random.Generator) -> int:
        """Return one of them."""
        return int(random.integers(self.low, self.high + 1))


class Recorded(NamedTuple):
    """A recorded request."""

    prompt: int
    answer: int
    at_s: float | None = None


def read_recorded(text: str, where: str) -> tuple[Recorded, ...]:
    """Return the requests of a file of CSV or JSON lines.

    Raises:
        ConfigError: a line is no request, or they are not in order of arrival.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    entries = map(_json_line, lines) if is_json else csv.DictReader(lines)
    found = [_one_recorded(entry, f"{where}, request {number}") for number, entry in enumerate(entries, 1)]
    if not found:
        raise ConfigError(f"{where} has no requests: give the columns prompt and answer.")
    times = [each.at_s for each in found if each.at_s is not None]
    if len(times) not in (0, len(found)) or any(later < sooner for sooner, later in pairwise(times)):
        raise ConfigError(
            f"{where}: `at` must be the seconds of every request, in order of arrival, or of none."
        )
    return tuple(found)


def _json_line(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _one_recorded(entry: object, where: str) -> Recorded:
    try:
        fields = cast("Mapping[str, Any]", entry)
        at, prompt, answer = fields.get("at"), _tokens(fields["prompt"]), _tokens(fields["answer"])
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        raise ConfigError(
            f"{where}: it must have a prompt and an answer, as whole numbers of tokens."
        ) from None
    if min(prompt, answer) < 1:
        raise ConfigError(f"{where}: prompt {prompt} and answer {answer} must be 1 token or more.")
    return Recorded(prompt, answer, None if at in (None, "") else _seconds(at, where))


def _tokens(value: Any) -> int:
    """Return a number of tokens; JSON has other numbers too, which would be rounded.

    Raises:
        TypeError, ValueError, OverflowError: it is no whole number.
    """
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError
    return int(value)


def _seconds(at: object, where: str) -> float:
    try:
        seconds = math.nan if isinstance(at, bool) else float(cast("str", at))
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ConfigError(f"{where}: at is {at}; it must be a number of seconds, or be left out.")
    return seconds


Drawings = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""A number for each request of each of several drawings, a row for each drawing."""
_DRAWINGS, _DRAWN_REQUESTS = (40, 400), 120_000
"""Fewest and most drawings of which the most typical one is chosen, and about the number of their requests."""
_WINDOWS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Spans, in mean times between requests, in which those that come close together are counted."""
_FEWEST_BURSTS = 4
_LOADS = (0.35, 0.6, 0.8)
"""Loads of queues whose waits are compared."""


def _crowding(gaps: Drawings) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Yield the variance of the number of requests shortly before each one, for each drawing and several spans."""
    drawings, count = gaps.shape
    at = (gaps.cumsum(axis=1) + 4.0 * count * np.arange(drawings)[:, None]).ravel()
    for window in _WINDOWS:
        before = np.arange(at.size) - np.searchsorted(at, at - window)
        yield before.reshape(gaps.shape).astype(np.float64).var(axis=1)


def _waits(gaps: Drawings, work: Drawings) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Yield the mean and two percentiles of waits in queues of several loads, for each drawing."""
    for load in _LOADS:
        left = (load * work - gaps).cumsum(axis=1)
        waits = left - np.minimum.accumulate(np.minimum(left, 0.0), axis=1)
        yield waits.mean(axis=1)
        yield from np.quantile(waits, (0.9, 0.95), axis=1)


@dataclass(frozen=True)
class Load:
    """Requests and how they arrive."""

    prompt: Lengths
    answer: Lengths
    arrivals: Arrivals = "poisson"
    burst: int = 8
    """Number of requests that arrive at once, with bursts."""
    prefix_hits: float = 0.0
    """Share of each prompt that the prefix cache supplies."""
    recorded: tuple[Recorded, ...] = ()
    """Requests that are repeated in their order, in place of the lengths; with times, they arrive as recorded."""
    seed: int = 0

    @property
    def at_once(self) -> int:
        """Number of requests that arrive at once."""
        return self.burst if self.arrivals == "burst" and not self.recorded else 1

    def in_bursts(self, count: int) -> int:
        """Return so many requests, or as many more as several whole bursts need."""
        return self.at_once * max(_FEWEST_BURSTS, -(-count // self.at_once))

    @property
    def mean_prompt(self) -> float:
        return self._mean([each.prompt for each in self.recorded], self.prompt)

    @property
    def mean_answer(self) -> float:
        return self._mean([each.answer for each in self.recorded], self.answer)

    @staticmethod
    def _mean(recorded: Sequence[int], lengths: Lengths) -> float:
        return sum(recorded) / len(recorded) if recorded else lengths.mean

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together."""
        if not self.recorded:
            return self.prompt.high + self.answer.high
        return max(each.prompt + each.answer for each in self.recorded)

    def requests(self, count: int, rate: float) -> list[SimulatedRequest]:
        """Return requests in order of arrival.

        Args:
            count: number of requests.
            rate: requests per second on average.
        """
        return [each._replace(at_s=each.at_s / rate) for each in islice(self.at_one_per_second(), count)]

    def typical(self, count: int) -> list[SimulatedRequest]:
        """Return requests that stand for all of the load: of many drawings, the one nearest to their mean.

        They come within `count` seconds. Drawings are compared by how many requests come close together, and by the waits
        in queues that are served at constant speeds. Lengths are spread evenly. Recorded requests are as they are.
        """
        if self.recorded:
            return list(islice(self.at_one_per_second(), count))
        random = np.random.default_rng((self.seed, count))
        shape = max(_DRAWINGS[0], min(_DRAWINGS[1], _DRAWN_REQUESTS // count)), count
        gaps = np.ones(shape) if self.arrivals == "even" else np.zeros(shape)
        if self.arrivals != "even":
            gaps[:, :: self.at_once] = random.exponential(size=gaps[:, :: self.at_once].shape)
        gaps *= count / gaps.sum(axis=1, keepdims=True)
        prompts, answers = (self._spread(lengths, shape, random) for lengths in (self.prompt, self.answer))
        work = prompts / (2 * self.mean_prompt) + answers / (2 * self.mean_answer)
        figures = np.stack([*_crowding(gaps), *_waits(gaps, work)])
        deviations = figures - figures.mean(axis=1, keepdims=True)
        deviations /= figures.std(axis=1, keepdims=True) + 1e-12
        best = int((deviations**2).sum(axis=0).argmin())
        return [
            SimulatedRequest(float(at_s), int(prompt), int(answer), self._cached(int(prompt)))
            for at_s, prompt, answer in zip(gaps[best].cumsum(), prompts[best], answers[best], strict=True)
        ]

    @staticmethod
    def _spread(lengths: Lengths, shape: tuple[int, int], random: np.random.Generator) -> Drawings:
        """Return lengths of drawings, of which each part of the range has as many in any drawing."""
        places = (random.random(shape).argsort(axis=1) + random.random(shape)) / shape[1]
        return np.floor(lengths.low + places * (lengths.high + 1 - lengths.low))

    def _cached(self, prompt: int) -> int:
        return min(prompt - 1, int(self.prefix_hits * prompt))

    def at_one_per_second(self) -> Iterator[SimulatedRequest]:
        """Yield the requests without end, one per second on average."""
        random, moments = np.random.default_rng(self.seed), self._moments()
        for number, at_s in enumerate(moments):
            if self.recorded:
                prompt, answer, _ = self.recorded[number % len(self.recorded)]
            else:
                prompt, answer = self.prompt.draw(random), self.answer.draw(random)
            yield SimulatedRequest(at_s, prompt, answer, self._cached(prompt))

    def _moments(self) -> Iterator[float]:
        """Yield the times of arrival for one request per second."""
        random, at = np.random.default_rng(self.seed + 1), 0.0
        recorded = [each.at_s for each in self.recorded if each.at_s is not None]
        if recorded:
            # The pause between two rounds is a mean one; if all of a round come at once, it is the whole time of a round.
            mean = (recorded[-1] - recorded[0]) / max(1, len(recorded) - 1)
            each = [(later - sooner) / (mean or 1.0) for sooner, later in pairwise(recorded)]
            while True:
                for gap in (1.0 if mean else float(len(recorded)), *each):
                    at += gap
                    yield at
        while True:
            at += self.at_once * (1.0 if self.arrivals == "even" else float(random.exponential()))
            yield from (at for _ in range(self.at_once))
