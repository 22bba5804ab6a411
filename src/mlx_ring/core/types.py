"""Values that several processes share. All are frozen; units are in the names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Literal, NamedTuple, get_args

ByteProgress = Callable[[int, int], None]
"""Function that receives (bytes done, bytes in all)."""
FinishReason = Literal["stop", "length", "abort", "error"]
DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = get_args(DType)
CpuWeights = Literal["auto", "quantized", "float32"]
"""Form in which CPUs hold quantized weights."""
PoolingKind = Literal["last", "mean", "cls"]
"""Hidden states that make a text's vector: the last token's, all tokens' mean, or the first token's."""
CHUNK_TOKENS, LONG_CHUNK_TOKENS = 512, 2048
"""Most tokens of a prompt in a step if no number is given: usually, and of one alone where GPUs compute that fast."""
LONG_CHUNK_CONTEXT = 8192
"""Tokens up to which steps of that many tokens may reach. Behind more of them, steps have fewer."""
LONG_CHUNK_US = 1e6
"""Time of chunks that may be longer than usual. A prompt that arrives meanwhile waits for them."""
LONG_CHUNK_PAIRS = LONG_CHUNK_TOKENS * LONG_CHUNK_CONTEXT
"""Most pairs of tokens in a long chunk: attention may hold a score for each, and each head."""
BLOCK_TOKENS = 256
"""Tokens of a block of KV on a disk."""
_FETCH_BITS = 32
_FIRST_MOVED = 1 << 31
"""First number in an epoch of fetches from other workers, far from those of disks."""


def fetch_ids(epoch: int, *, moved: bool = False) -> Iterator[int]:
    """Return the ids of an epoch's fetches of KV, from disks or `moved` from other workers.

    Ranks may still know the fetches of the epoch before, which had another head.
    """
    return count((epoch << _FETCH_BITS) + (_FIRST_MOVED if moved else 1))


def fetches_of(epoch: int | None, ids: Iterable[int]) -> list[int]:
    """Return those of some ids that are of fetches of an epoch, or all for None."""
    return [id_ for id_ in ids if epoch in (None, id_ >> _FETCH_BITS)]


def is_moved(id_: int) -> bool:
    """Report whether a fetch is from other workers."""
    return bool(id_ & _FIRST_MOVED)


def longest_chunk(usual: int, most: int, before: int, chunk_us: Callable[[int], float | None]) -> int:
    """Return the most tokens of the next chunk of a prompt alone: doubled as often as its time and its context allow.

    Args:
        usual: most tokens of a usual chunk.
        most: most tokens of any chunk; no chunk is longer than usual if it is less.
        before: tokens before the chunk.
        chunk_us: returns the microseconds of a chunk of so many tokens on the slowest stage; None if it is not known.
    """
    longest = usual
    while 2 * longest <= most and 2 * longest * (before + 2 * longest) <= LONG_CHUNK_PAIRS:
        us = chunk_us(2 * longest)
        if us is None or us > LONG_CHUNK_US:
            break
        longest *= 2
    return longest


_EVEN_CHUNKS = (2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16)
"""Sizes of even chunks that are tried beside the longest: kernels compute rows in tiles of 16 or more."""
_HANDLING_US, _SOONER = 500.0, 0.98
"""Time of an even chunk beside its computing, and the part of the time of larger ones that it may take."""
_LEAST_PART = 0.25
"""Smallest chunk that is left at the end of a prompt, over the even size; else the others are a little larger."""


def even_chunk(total: int, stages: int, longest: int, chunk_us: Callable[[int], float | None]) -> int | None:
    """Return the tokens of equal chunks in which prompts pass several stages about as soon as possible.

    While a stage computes a chunk, the others compute those before and after it. More chunks fill the pipeline sooner,
    fewer read the weights less often. None if the time of the longest chunk is not known.

    Args:
        total: tokens of the prompts.
        stages: number of stages, all of which are as slow as the slowest.
        longest: most tokens of a chunk.
        chunk_us: returns the microseconds of a chunk of so many tokens on the slowest stage; None if it is not known.
    """
    best, best_us = None, math.inf
    for size in (longest, *(size for size in _EVEN_CHUNKS if size < longest)):
        part = even_part(total, size, longest)
        us = chunk_us(part)
        if us is None:
            break
        passed_us = (-(-total // part) + stages - 1) * (us + _HANDLING_US)
        if passed_us < _SOONER * best_us:
            best, best_us = size, passed_us
    return best


def even_part(left: int, size: int, longest: int) -> int:
    """Return the tokens of the next chunk of a prompt of which `left` are left, about as large as an even size.

    Chunks of one prompt are alike. They are rounded up to tiles of kernels where that does not add much.
    """
    chunks = -(-left // size)
    fewer = chunks - 1
    if fewer and left <= min(fewer * longest, (fewer + _LEAST_PART) * size):
        chunks = fewer
    part = -(-left // chunks)
    tile = 32 if part >= 128 else 16 if part >= 64 else 1  # noqa: PLR2004 - a quarter more at most
    return min(longest, left, -(-part // tile) * tile)


@dataclass(frozen=True, slots=True)
class HalfOpenRange:
    """A half-open range, `[start, end)`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


@dataclass(frozen=True, slots=True)
class LayerRange(HalfOpenRange):
    """Range of layers."""


@dataclass(frozen=True, slots=True)
class MemberRange(HalfOpenRange):
    """Range of heads or rows."""

    def times(self, factor: int) -> MemberRange:
        """Return the range of these members' parts, `factor` in each."""
        return MemberRange(self.start * factor, self.end * factor)

    def shifted(self, by: int) -> MemberRange:
        """Return the same members in a sequence that begins further on."""
        return MemberRange(self.start + by, self.end + by)


class RankId(NamedTuple):
    """Place of a worker in the plan."""

    stage: int
    rank: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an answer's text must match. Tokens that would leave it are never drawn."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str
    """The schema as JSON, the expression, or the grammar; empty for any JSON object."""
    param: str = field(default="", compare=False)
    """Path of the request's field that it comes from, for errors."""


_ADVISED = {"advised": True}
"""Mark of a parameter that a model's makers may advise in their `generation_config.json`."""
_PENALTY = {"penalty": True}
"""Mark of a parameter by which earlier tokens change the logits, unless it has its default."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that workers draw a sequence's tokens by. The message `Sampling` has the same fields.

    A request field of the same name sets each of them; see `api/openai/sampling.py`.
    """

    temperature: float = field(default=0.0, metadata=_ADVISED)
    top_p: float = field(default=1.0, metadata=_ADVISED)
    top_k: int = field(default=0, metadata=_ADVISED)
    """0: off."""
    min_p: float = field(default=0.0, metadata=_ADVISED)
    repetition_penalty: float = field(default=1.0, metadata=_ADVISED | _PENALTY)
    presence_penalty: float = field(default=0.0, metadata=_PENALTY)
    frequency_penalty: float = field(default=0.0, metadata=_PENALTY)
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit."""
    logprobs: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0


ADVISED_SAMPLING = tuple(each.name for each in fields(Sampling) if "advised" in each.metadata)
"""Names of the parameters that a model's makers may advise."""
PENALTIES = tuple(each for each in fields(Sampling) if "penalty" in each.metadata)
"""Fields by which earlier tokens change the logits."""
DEFAULT_SAMPLING = Sampling(temperature=1.0)
"""Defaults of requests to a model whose makers advise nothing; OpenAI's."""


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """All that says how one sequence's tokens are drawn and where they end.

    Tokens are a pure function of these and of their position.
    """

    seed: int = 0
    max_tokens: int | None = None
    """None: to the end of the context."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    """None: any text."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position's log-probability, with the most likely alternatives first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Way = Literal["recompute", "kept", "disk", "peers", "replica", "wait", "move"]
"""Way of a sequence back to its next token.

`recompute`: all tokens are computed again. `kept`: workers that stay have kept KV. `disk`: KV is read from disks.
`peers`: so is KV that only disks of other machines have. `replica`: another replica computes the tokens. `wait`: a suspect answers in time, and everything stays in place.
`move`: workers of another instance, which still serve, send their KV.
"""
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True, slots=True)
class KvPlace:
    """KV of one rank, and the ways to its worker."""

    rank: RankId
    layers: LayerRange
    shares: tuple[float, ...]
    """Shares of all ranks of its stage."""
    node: str
    address_from: Callable[[str], tuple[str, str]]
    """Function that returns the worker's address for workers of a node, and the owner of the certificate there."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Measured throughput to other nodes."""

    def common(self, other: KvPlace) -> range:
        """Return the layers that both ranks have."""
        return range(max(self.layers.start, other.layers.start), min(self.layers.end, other.layers.end))
