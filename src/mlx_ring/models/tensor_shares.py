"""Division of a stage's layers among the ranks of its group: equally, or in any other proportion. Pure.

Each rank gets neighbouring heads and rows. Attention is divided by KV heads, each with the query heads that read it.
The matrices behind attention and behind an expert or MLP are cut along their input, where quantization has its groups.
No group is cut, so heads and rows only come in packs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, cast

from mlx_ring.core.errors import ModelCorrupt, ModelUnsupported, PlanError
from mlx_ring.core.types import MemberRange
from mlx_ring.models.architectures import module_of
from mlx_ring.models.model_folder import ModelFolder

SPLIT_FAMILIES = {
    "llama": "Llama and Mistral",
    "phi3": "Phi-3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}
"""Modules of mlx-lm whose layers can be split, and their models' names."""
_CUT_ALONG_INPUT = frozenset({"o_proj", "down_proj"})
_OWN_HEAD_DIM = frozenset({"llama", "qwen3", "qwen3_moe"})
"""Modules that read the width of a head; the others divide."""
_USUAL_GROUP = 64
_WIDEST_PACK = 64
_LEAST_PACKS = 64


@dataclass(frozen=True, slots=True)
class TensorShare:
    """One rank's part of every layer, and of the output head."""

    kv_heads: MemberRange
    query_heads: MemberRange
    intermediate: MemberRange
    """Rows of MLPs between their two products."""
    experts: MemberRange
    """Rows of every expert; empty without experts."""
    vocabulary: MemberRange


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Sizes of a model's divisible parts."""

    kv_heads: int
    query_heads: int
    head_dim: int
    intermediate: int
    experts: int
    """Rows of each expert between its two products; 0 without experts."""
    vocabulary: int
    group_size: int = 1
    """Columns that are quantized together in any of the matrices, a multiple of each's; 1: none are."""

    @property
    def queries_per_kv_head(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def divisibles(self) -> tuple[Divisible, ...]:
        """Divisible parts: KV heads, rows of MLPs, of experts and of the vocabulary, in this order."""
        return _divisibles(self)

    @property
    def most_ranks(self) -> int:
        """Most ranks that can have a share."""
        return min(kind.packs for kind in self.divisibles if kind.total)


@dataclass(frozen=True, slots=True)
class Divisible:
    """Part that ranks share, in packs of `pack`."""

    name: str
    total: int
    pack: int

    @property
    def packs(self) -> int:
        return self.total // self.pack

    def __str__(self) -> str:
        return f"{self.total} {self.name}" + (f" in packs of {self.pack}" if self.pack > 1 else "")

    def divide(self, proportions: Sequence[float]) -> list[MemberRange]:
        """Divide into neighbouring parts, as near to the proportions as possible."""
        if not self.total:
            return [MemberRange(0, 0) for _ in proportions]
        ends = accumulate(_apportion(self.packs, proportions), initial=0)
        return [MemberRange(start * self.pack, end * self.pack) for start, end in pairwise(ends)]

    def is_near(self, proportions: Sequence[float]) -> bool:
        """Report whether each rank can have its proportion to within a pack, and at least one."""
        counts, weights = _apportion(self.packs, proportions), _weights(proportions)
        total = sum(weights)
        return all(
            abs(count * total - self.packs * weight) < total
            for count, weight in zip(counts, weights, strict=True)
        )


def read_tensor_sizes(folder: ModelFolder) -> TensorSizes:
    """Read the sizes of a folder's model.

    Raises:
        ModelUnsupported: its layers cannot be split.
        ModelCorrupt: the configuration lacks a size, or sizes contradict each other.
    """
    module = module_of(folder.model_type, folder.classes)
    if module not in SPLIT_FAMILIES:
        raise ModelUnsupported(
            f"{folder.path} is a {folder.model_type!r} model, whose layers cannot be split over several ranks; supported "
            f"are {splittable()}. Split it by layers only."
        )
    queries = _positive(folder, "num_attention_heads")
    kv_heads = (
        queries if folder.entry("num_key_value_heads") is None else _positive(folder, "num_key_value_heads")
    )
    if queries % kv_heads:
        raise ModelCorrupt(
            f"{folder.path / 'config.json'} gives {queries} query heads to {kv_heads} KV heads: each must have as many."
        )
    has_own = module in _OWN_HEAD_DIM and folder.entry("head_dim") is not None
    return TensorSizes(
        kv_heads,
        queries,
        _positive(folder, "head_dim") if has_own else folder.hidden_size // queries,
        _positive(folder, "intermediate_size"),
        _positive(folder, "moe_intermediate_size") if module == "qwen3_moe" else 0,
        folder.vocab_size,
        _group_size(folder.quantization),
    )


def splittable() -> str:
    """Return the names of families whose layers can be split, as text."""
    *others, last = SPLIT_FAMILIES.values()
    return f"{', '.join(others)} and {last}"


def share_out(sizes: TensorSizes, proportions: Sequence[float]) -> tuple[TensorShare, ...]:
    """Return each rank's share, one for each of the proportions, which need not add up to anything.

    Heads and rows are divided to within one pack of the proportion.

    Raises:
        PlanError: these shares cannot be made; it names the nearest that can.
    """
    _check_proportions(proportions)
    kinds = [kind for kind in sizes.divisibles if kind.total]
    for kind in sorted(kinds, key=lambda kind: kind.packs):
        if len(proportions) > kind.packs or not kind.is_near(proportions):
            nearest = _words(nearest_proportions(sizes, proportions))
            raise PlanError(
                f"{kind} cannot be divided {_words(proportions)} among {len(proportions)} ranks, each of which needs "
                f"at least {kind.pack}; the nearest possible split is {nearest}."
            )
    heads, rows, experts, vocabulary = (kind.divide(proportions) for kind in sizes.divisibles)
    return tuple(
        TensorShare(own, own.times(sizes.queries_per_kv_head), *others)
        for own, *others in zip(heads, rows, experts, vocabulary, strict=True)
    )


def nearest_proportions(sizes: TensorSizes, proportions: Sequence[float]) -> tuple[int, ...]:
    """Return the nearest proportions that are possible; for fewer ranks if there are too few packs."""
    packs = sizes.most_ranks
    counts = _apportion(packs, proportions[:packs])
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


def part_of_kv(shares: Sequence[TensorShare], rank: int, nbytes: int) -> int:
    """Return a rank's part of the KV bytes of all ranks: every KV head has the same size.

    Ranks must let the same rows share a forward pass. If that depends on bytes, such as the KV that a step moves,
    they all decide alike if each counts its part.
    """
    return nbytes // shares[-1].kv_heads.end * len(shares[rank].kv_heads)


@lru_cache(maxsize=64)
def _divisibles(sizes: TensorSizes) -> tuple[Divisible, ...]:
    """Return the divisible parts. Searches for plans ask for those of one model thousands of times."""
    group_size = sizes.group_size
    return (
        Divisible("KV heads", sizes.kv_heads, _heads_in_pack(sizes)),
        Divisible("rows of the MLP", sizes.intermediate, _rows_in_pack(sizes.intermediate, group_size)),
        Divisible("rows of an expert", sizes.experts, _rows_in_pack(sizes.experts, group_size)),
        Divisible("tokens of the vocabulary", sizes.vocabulary, _rows_in_pack(sizes.vocabulary)),
    )


def _heads_in_pack(sizes: TensorSizes) -> int:
    width = sizes.queries_per_kv_head * sizes.head_dim
    group = _group_within(width * sizes.kv_heads, sizes.group_size)
    return group // math.gcd(group, width)


def _check_proportions(proportions: Sequence[float]) -> None:
    if not proportions:
        raise PlanError("No shares were given: give one number for each rank, such as 3,1.")
    for number in proportions:
        if not math.isfinite(number) or number <= 0:
            raise PlanError(f"Shares {_words(proportions)} were given; each must be a number above 0.")


def _words(proportions: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in proportions)


def _weights(proportions: Sequence[float]) -> list[int]:
    """Return whole numbers in exactly these proportions."""
    exact = [number.as_integer_ratio() for number in proportions]
    scale = math.lcm(*(below for _, below in exact))
    return [above * (scale // below) for above, below in exact]


def _apportion(packs: int, proportions: Sequence[float]) -> list[int]:
    """Return whole numbers that add up to `packs`, at least 1 each, by largest remainders."""
    weights = _weights(proportions)
    total = sum(weights)
    counts = [max(1, packs * weight // total) for weight in weights]

    def lacks(rank: int) -> int:
        return packs * weights[rank] - counts[rank] * total

    while sum(counts) < packs:
        counts[max(range(len(counts)), key=lacks)] += 1
    while sum(counts) > packs and max(counts) > 1:
        counts[min((rank for rank, count in enumerate(counts) if count > 1), key=lacks)] -= 1
    return counts


def _group_within(columns: int, group_size: int) -> int:
    """Return the columns that no cut of a matrix may separate.

    Only groups that divide its columns can be its own; `group_size` may be that of others.
    """
    return math.gcd(columns, group_size)


def _rows_in_pack(total: int, group_size: int = 1) -> int:
    """Return the rows in a pack: whole quantization groups, enough of them that products keep fast sizes."""
    pack = _group_within(total, group_size)
    while 2 * pack <= _WIDEST_PACK and total % (2 * pack) == 0 and total // (2 * pack) >= _LEAST_PACKS:
        pack *= 2
    return pack


def _positive(folder: ModelFolder, name: str) -> int:
    found = folder.entry(name)
    if type(found) is not int or found < 1:
        raise ModelCorrupt(f"{folder.path / 'config.json'} gives {name} as {found!r}; it must be 1 or more.")
    return found


def _group_size(quantization: Mapping[str, Any] | None) -> int:
    """Return the columns that no cut may separate, in all matrices that are cut along their input."""
    if quantization is None:
        return 1
    return math.lcm(*_group_sizes(quantization)) if any(_group_sizes(quantization)) else _USUAL_GROUP


def _group_sizes(quantization: Mapping[str, Any]) -> Iterator[int]:
    size = quantization.get("group_size")
    if type(size) is int and size > 0:
        yield size
    for path, value in quantization.items():
        if isinstance(value, Mapping) and ("." not in path or path.rpartition(".")[2] in _CUT_ALONG_INPUT):
            yield from _group_sizes(cast("Mapping[str, Any]", value))
