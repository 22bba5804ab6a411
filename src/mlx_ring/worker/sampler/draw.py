"""Parameters of a draw, and three ways to draw a token, each over rows (rows, vocabulary) in float32 -> (rows,) int32.

A row has the same bits in any batch. Sums are trees of elementwise additions whose order only depends on the row.
A library's reduction may choose its order by the shape of the batch. On a Linux CPU `mx.exp` and `mx.sort` of 152k
logits take 1.3 and 11 ms. `exponential` takes a quarter, and `largest` only sorts what can be among the largest.

All noise is Gumbel noise, of which the largest `logit / temperature + noise` is a draw from the
softmax (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). It is a function of (seed, position, index), with no
state.

The key of a position is BLAKE2b over (seed, position). The bits of an index are that key mixed with
the index by a 32-bit integer hash: two keyed rounds of Wellons' `lowbias32` [1]. Both are our own integer arithmetic,
so the bits are the same on every device and with every release of MLX.

[1] https://github.com/skeeto/hash-prospector
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import PENALTIES, Sampling
from mlx_ring.rpc.sampling import decode_sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mlx_ring.rpc.protos import step_pb2

_GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: dividing by less changes nothing."""


@dataclass(frozen=True, slots=True)
class Parameters(Sampling):
    """Sampling parameters of one sequence, and what follows from them."""

    @classmethod
    def from_message(cls, message: step_pb2.Sampling) -> Parameters:
        return decode_sampling(message, cls)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """True if the history changes the logits."""
        return any(getattr(self, each.name) != each.default for each in PENALTIES)

    def check(self, vocabulary: int) -> None:
        """Check that the values can be applied to `vocabulary` logits. Raises RequestError, which names the field."""
        for token, bias in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"logit_bias names token {token}, but this model's tokens are 0 to {vocabulary - 1}.",
                    param="logit_bias",
                )
            if math.isnan(bias):
                raise RequestError(f"logit_bias of token {token} is not a number.", param="logit_bias")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; give a number above 0.",
                param="repetition_penalty",
            )
        for each in fields(self):
            value: object = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{each.name} is {value}; give a finite number.", param=each.name)


CountedEffects = tuple[mx.array, mx.array, mx.array]
"""Tokens whose logits change, (changed,) int64, and the factor and the penalty of each, float32."""

_UNCOUNTED = 128
"""Tokens at a sequence's end that are not counted: more than a step's draft, which may be rolled back."""


class History:
    """Effect of a sequence's tokens on its logits, kept so that a token costs no time for all those before it.

    All but the last tokens are counted. Those are counted anew for each row, which may be a draft's.
    """

    def __init__(self) -> None:
        self._counted = 0
        """Number of tokens that `_answer` and `_repeated` count."""
        self._answer: Counter[int] = Counter()
        self._repeated: set[int] = set()
        self._ids = range(0)
        self._effects: CountedEffects | None = None
        """Effects of the counted tokens, as far as they are in `_ids`."""

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on, because others may follow."""
        if length < self._counted:
            # This is rare, because the last tokens are not counted.
            self._counted, self._answer, self._repeated, self._effects = 0, Counter(), set(), None

    def read(self, row: SamplerRow, ids: range) -> tuple[Counter[int], set[int]]:
        """Count the tokens before a row, if enough have come, and return the others.

        Returns:
            The tokens of the answer, and those that are repeated.
        """
        self.cut(row.position)
        penalizes, end = row.sampling.repetition_penalty != 1.0, row.position - _UNCOUNTED
        if end - self._counted >= _UNCOUNTED:
            self._answer.update(row.tokens[max(self._counted, row.prompt_length) : end])
            self._repeated.update(row.tokens[self._counted : end] if penalizes else ())
            self._counted, self._effects = end, None
        if self._effects is None or self._ids != ids:
            self._ids, self._effects = ids, self._read_effects(row, ids)
        answer = Counter(row.tokens[max(self._counted, row.prompt_length) : row.position])
        return answer, set(row.tokens[self._counted : row.position] if penalizes else ())

    def _read_effects(self, row: SamplerRow, ids: range) -> CountedEffects:
        tokens = [token for token in self._repeated | self._answer.keys() if token in ids]
        factor, penalty = self.effects(row, tokens, Counter(), set())
        changed = mx.array(tokens, dtype=mx.int64)
        return changed, mx.array(factor, dtype=mx.float32), mx.array(penalty, dtype=mx.float32)

    @property
    def counted(self) -> CountedEffects | None:
        """Effects of the counted tokens; None if there are none."""
        return self._effects if self._effects is not None and self._effects[0].size else None

    def effects(
        self, row: SamplerRow, tokens: list[int], answer: Counter[int], repeated: set[int]
    ) -> tuple[list[float], list[float]]:
        """Return the factor and the penalty of each of some tokens; `answer` and `repeated` are what `read` returns."""
        sampling = row.sampling
        factor = sampling.repetition_penalty
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        counts = [self._answer[token] + answer[token] for token in tokens]
        return (
            [factor if token in repeated or token in self._repeated else 1.0 for token in tokens],
            [frequency * count + presence if count else 0.0 for count in counts],
        )


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """One token to draw: row i of the logits is the distribution of the token at `position`."""

    sampling: Parameters
    seed: int
    """Seed of any 64 bits."""
    position: int
    """Index in the sequence (prompt and answer) of the token that is drawn."""
    tokens: Sequence[int]
    """Prompt and answer. Only tokens before `position` count, so rows of one sequence may share it."""
    prompt_length: int
    """Number of tokens in the prompt; the answer follows."""
    eos: frozenset[int] = frozenset()
    """Tokens that are barred until `min_tokens` were drawn."""
    allowed: NDArray[np.bool_] | None = None
    """(vocabulary,) true for tokens that a grammar allows here; None allows all. Tokens beyond its end are barred."""
    history: History | None = field(default=None, compare=False, repr=False)
    """Counts of the sequence's tokens, which all its rows share; None: they are counted for this row alone."""


_LOG2_E = 1.4426950408889634
_ROUND = 12582912.0
"""1.5 * 2**23: a float32 plus this holds its nearest integer in the low bits."""
_EXP2 = (
    0.0013276471524387066,
    0.009675541330674553,
    0.05550713274945486,
    0.24022119723933952,
    0.6931469670638745,
    1.0,
)
"""Polynomial for 2**x on [-1/2, 1/2], highest power first: least maximal relative error, 8e-8."""
_SUM_BLOCKS = 128
_SELECT_WIDTH = 32


def exponential(x: mx.array) -> mx.array:
    """Return exp(x) in float32 for x <= 0, to 2e-7 of its value; below exp(-86) a positive number under 1e-37."""
    power = mx.maximum(x * _LOG2_E, -125.0)
    shifted = power + _ROUND
    fraction = power - (shifted - _ROUND)
    result = fraction * _EXP2[0]
    for coefficient in _EXP2[1:-1]:
        result = (result + coefficient) * fraction
    result = result + _EXP2[-1]
    return (result.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)


def maximum(logits: mx.array) -> mx.array:
    """Return (rows, 1): each row's largest logit, or 0 if all are -inf, so that it can be subtracted."""
    top = mx.max(logits, axis=-1, keepdims=True)
    return mx.where(top == -mx.inf, 0.0, top)


def sum_strided(weights: mx.array) -> mx.array:
    """Sum over each block of `in_blocks`: (rows, n) -> (rows, blocks)."""
    summed = in_blocks(weights, 0.0)
    while (width := summed.shape[1]) > 1:
        summed = summed[:, : width // 2] + summed[:, width // 2 :]
    return summed[:, 0]


def in_blocks(values: mx.array, fill: float) -> mx.array:
    """Arrange (rows, n) as (rows, 128, blocks), padded with `fill`: block j holds the columns j, j + blocks, ..."""
    rows, columns = values.shape
    padding = -columns % _SUM_BLOCKS
    if padding:
        values = mx.pad(values, [(0, 0), (0, padding)], constant_values=fill)
    return mx.reshape(values, (rows, _SUM_BLOCKS, -1))


def total(weights: mx.array) -> mx.array:
    """Sum each row: (rows, n) -> (rows, 1)."""
    while weights.shape[1] > 1:
        weights = sum_strided(weights)
    return weights


def log_total(logits: mx.array) -> mx.array:
    """Return (rows, 1): log of the sum of exp of each row."""
    top = maximum(logits)
    return top + mx.log(total(exponential(logits - top)))


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` largest of each row, (rows, count) values and int32 ids: by value, then by lowest id.

    Exact: an entry among the `count` largest lies in one of the `count` blocks with the largest maxima,
    where equal maxima go to the lower block.
    """
    rows, columns = logits.shape
    if count * _SELECT_WIDTH * 2 > columns or columns % _SELECT_WIDTH:
        ids = mx.broadcast_to(mx.arange(columns, dtype=mx.int32), (rows, columns))
        return _first(logits, ids, count)
    blocks = mx.reshape(logits, (rows, -1, _SELECT_WIDTH))
    maxima = mx.max(blocks, axis=-1)
    index = mx.broadcast_to(mx.arange(maxima.shape[1], dtype=mx.int32), maxima.shape)
    chosen = mx.partition(_order_keys(maxima, index), count - 1, axis=-1)[:, :count].astype(mx.int32)
    ids = mx.flatten(chosen[:, :, None] * _SELECT_WIDTH + mx.arange(_SELECT_WIDTH), start_axis=1)
    return _first(mx.take_along_axis(logits, ids, axis=-1), ids, count, source=logits)


def _first(
    values: mx.array, ids: mx.array, count: int, source: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    keys = _order_keys(values, ids)
    if count < keys.shape[1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    ids = mx.sort(keys, axis=-1).astype(mx.int32)
    return mx.take_along_axis(values if source is None else source, ids, axis=-1), ids


def _order_keys(values: mx.array, ids: mx.array) -> mx.array:
    """Return int64 that grows as the value falls, then as the id grows; the low 32 bits are the id."""
    bits = (values + 0.0).view(mx.int32)  # -0.0 becomes 0.0
    falling = mx.where(bits < 0, bits & 0x7FFFFFFF, ~bits).astype(mx.int64)
    return (falling << 32) | ids.astype(mx.int64)


_MASK = (1 << 64) - 1


def keys(draws: Iterable[tuple[int, int]]) -> mx.array:
    """Return (rows, 4) uint32 for (seed, position) pairs: words 0 and 1 key the tokens, 2 and 3 the blocks."""
    words = [struct.unpack("<4I", _digest(seed, position)) for seed, position in draws]
    return mx.array(words, dtype=mx.uint32)


def _digest(seed: int, position: int) -> bytes:
    return blake2b(
        struct.pack("<QQ", seed & _MASK, position & _MASK), digest_size=16, person=b"mlx-ring noise"
    ).digest()


def bits(key: mx.array, index: mx.array) -> mx.array:
    """Return uniform uint32 of `index`'s shape (rows, n) or (1, n), from (rows, 2) key words."""
    mixed = _mix(index.astype(mx.uint32) * 0x9E3779B9 + key[:, :1])
    return _mix(mixed ^ key[:, 1:])


def _mix(value: mx.array) -> mx.array:
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


def gumbel(key: mx.array, index: mx.array) -> mx.array:
    """Return standard Gumbel noise in float32, between -2.9 and 22.9.

    It uses log1p so that the winning (large) end keeps all 32 bits.
    """
    uniform = (bits(key, index).astype(mx.float32) + 0.5) * 2.0**-32
    return -mx.log(-mx.log1p(-mx.minimum(uniform, 1 - 2.0**-24)))


_CANDIDATES = (256, 8192)
"""Numbers of the largest logits to try before the whole vocabulary is sorted."""


def greedy(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Return the largest logit's token, the lowest of equals."""
    del rows
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def in_two_levels(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Draw from all tokens, or all that min-p leaves, with noise for a few hundred of them.

    A block of tokens is drawn by its total weight, then a token in it. The blocks only depend on the
    vocabulary's size. That is the exact distribution. The maximum of a block's Gumbel scores is itself
    a Gumbel score, of the log of the block's sum. It is independent of which token attains it.
    """
    key = _noise_keys(rows)
    scaled = (logits - maximum(logits)) / _column([row.sampling.temperature for row in rows])
    min_p = _column([row.sampling.min_p for row in rows])
    weights = exponential(scaled)
    if any(row.sampling.min_p > 0 for row in rows):
        weights = mx.where(weights >= min_p, weights, 0.0)
    mass = sum_strided(weights)
    blocks = mass.shape[1]
    score = mx.log(mass) + gumbel(key[:, 2:], mx.arange(blocks)[None])
    block = mx.argmax(score, axis=-1, keepdims=True)
    inside = mx.take_along_axis(in_blocks(scaled, -mx.inf), block[:, None], axis=2)[:, :, 0]
    ids = block.astype(mx.int32) + blocks * mx.arange(inside.shape[1], dtype=mx.int32)
    kept = exponential(inside) >= min_p
    score = mx.where(kept, inside + gumbel(key[:, :2], ids), -mx.inf)
    picked = mx.take_along_axis(ids, mx.argmax(score, axis=-1, keepdims=True), axis=-1)[:, 0]
    return mx.minimum(picked, logits.shape[1] - 1)


def among_largest(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Draw from what min-p, top-k and top-p leave, with as few candidates as suffice.

    Their number changes no token, because the noise belongs to each token id.
    """
    return _among(logits, rows, _CANDIDATES)


def among_more(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Draw like `among_largest`, for rows that `among_few` left open."""
    return _among(logits, rows, _CANDIDATES[1:])


def _among(logits: mx.array, rows: Sequence[SamplerRow], sizes: Sequence[int]) -> mx.array:
    vocabulary = logits.shape[1]
    parts: list[tuple[list[int], mx.array]] = []
    pending = list(range(len(rows)))
    for size in (*(size for size in sizes if size < vocabulary), vocabulary):
        tokens, settled = _draw_among(take(logits, pending), [rows[index] for index in pending], size)
        if all(_bounded(rows[index], size, vocabulary) for index in pending):
            parts.append((pending, tokens))
            break
        flags = cast("list[bool]", settled.tolist())
        done = [place for place, flag in enumerate(flags) if flag]
        if done:
            parts.append(([pending[place] for place in done], take(tokens, done)))
        pending = [index for index, flag in zip(pending, flags, strict=True) if not flag]
        if not pending:
            break
    return reassemble(parts)


def among_few(logits: mx.array, rows: Sequence[SamplerRow]) -> tuple[mx.array, mx.array | None]:
    """Draw like `among_largest`, with the fewest candidates only, all lazy.

    Returns the tokens, and for each row whether the candidates sufficed; None if that is certain.
    """
    vocabulary = logits.shape[1]
    size = min(_CANDIDATES[0], vocabulary)
    tokens, settled = _draw_among(logits, rows, size)
    certain = all(_bounded(row, size, vocabulary) for row in rows)
    return tokens, None if certain else settled


def take(rows: mx.array, chosen: list[int]) -> mx.array:
    """Return the chosen rows, which are in ascending order; without a copy if that is all of them."""
    return rows if len(chosen) == rows.shape[0] else rows[mx.array(chosen)]


def reassemble(parts: list[tuple[list[int], mx.array]]) -> mx.array:
    """Return tokens in row order from (row numbers, tokens) parts that cover every row once."""
    if len(parts) == 1:
        return parts[0][1]
    order = [index for chosen, _ in parts for index in chosen]
    place = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate([tokens for _, tokens in parts])[mx.array(place)]


def _draw_among(logits: mx.array, rows: Sequence[SamplerRow], size: int) -> tuple[mx.array, mx.array]:
    """Draw (rows,) tokens among the `size` largest. Also return whether those sufficed, (rows,)."""
    limits = [_top_k(row, size, logits.shape[1]) for row in rows]
    temperature = _column([row.sampling.temperature for row in rows])
    min_p = _column([row.sampling.min_p for row in rows])
    top_p = _column([row.sampling.top_p if row.sampling.top_p < 1.0 else math.inf for row in rows])
    values, ids = largest(logits, size)
    top = maximum(values)
    scaled = (values - top) / temperature
    weights = exponential(scaled)
    kept = (weights >= min_p) & (mx.arange(size) < mx.array([limit or size for limit in limits])[:, None])
    weights = mx.where(kept, weights, 0.0)
    mass = total(weights)
    if not all(limits):
        everything = exponential((logits - top) / temperature)
        everything = total(mx.where(everything >= min_p, everything, 0.0))
        mass = mx.where(mx.array([limit > 0 for limit in limits])[:, None], mass, everything)
    before = mx.cumsum(weights, axis=-1, inclusive=False)
    kept = kept & (before < top_p * mass)
    score = mx.where(kept, scaled + gumbel(_noise_keys(rows)[:, :2], ids), -mx.inf)
    tokens = mx.take_along_axis(ids, mx.argmax(score, axis=-1, keepdims=True), axis=-1)[:, 0]
    bounded = mx.array([_bounded(row, size, logits.shape[1]) for row in rows])
    suffice = mx.array([_knows_mass(row, size, logits.shape[1]) for row in rows])
    return tokens, bounded | (suffice & ~kept[:, -1])


def _top_k(row: SamplerRow, size: int, vocabulary: int) -> int:
    """Return the row's top-k if `size` candidates hold them all, else 0."""
    top_k = row.sampling.top_k
    return top_k if 0 < top_k <= size and top_k < vocabulary else 0


def _knows_mass(row: SamplerRow, size: int, vocabulary: int) -> bool:
    """Report whether the mass of which top-p takes a part is known from `size` candidates: not if top-k leaves more."""
    return row.sampling.top_p >= 1.0 or not size < row.sampling.top_k < vocabulary


def _bounded(row: SamplerRow, size: int, vocabulary: int) -> bool:
    """Report whether `size` candidates certainly suffice."""
    return size == vocabulary or _top_k(row, size, vocabulary) > 0


def _noise_keys(rows: Sequence[SamplerRow]) -> mx.array:
    return keys((row.seed, row.position) for row in rows)


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
