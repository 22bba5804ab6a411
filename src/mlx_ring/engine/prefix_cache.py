"""Prefix cache: the KV of running and ended sequences that prompts can reuse. Pure.

If a layer forgets positions (sliding windows) or holds only its present state (recurrent layers), forks are possible
only at some lengths, which `is_exact` determines. If a longer prefix is shared than can be reused, the prompt
leaves a snapshot at that length for later prompts.

The index is a radix tree over token lists. Each edge holds a run of tokens, and each node names the sequences that
contain the whole run of its edge. The end of a sequence splits an edge. A lookup walks down once and compares runs,
not single tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mlx_ring.core.types import BLOCK_TOKENS, RankId
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.rpc.protos import step_pb2

Tokens = tuple[int, ...]
Text = tuple[int, Tokens, int]
"""Cached sequence, its tokens, and the most that it ever held."""
_Run = TypeVar("_Run", Tokens, bytes)


@dataclass(slots=True, eq=False)
class _Node:
    edge: Tokens
    children: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    """Children by the first token of their edges."""
    holders: dict[int, None] = field(default_factory=dict[int, None])


class PrefixIndex:
    """Radix tree of token lists by sequence."""

    def __init__(self) -> None:
        self._root = _Node(())
        self._tokens: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._tokens

    def tokens(self, sequence: int) -> Tokens:
        """Return the recorded tokens of a sequence; empty if it is unknown."""
        return self._tokens.get(sequence, ())

    def put(self, sequence: int, tokens: Tokens) -> None:
        """Record a sequence's tokens, replacing earlier ones."""
        present = self._tokens.get(sequence)
        if present is not None and tokens[: len(present)] != present:
            self.remove(sequence)
        self._tokens[sequence] = tokens
        node, place = self._root, 0
        while place < len(tokens):
            node = self._step(node, tokens, place)
            node.holders[sequence] = None
            place += len(node.edge)

    def _step(self, node: _Node, tokens: Tokens, place: int) -> _Node:
        """Return the child on the path of tokens[place:], created or split if needed."""
        child = node.children.get(tokens[place])
        if child is None:
            child = node.children[tokens[place]] = _Node(tokens[place:])
            return child
        shared = shared_length(child.edge, tokens, place)
        if shared < len(child.edge):
            upper = _Node(child.edge[:shared], {child.edge[shared]: child}, dict(child.holders))
            child.edge = child.edge[shared:]
            child = node.children[tokens[place]] = upper
        return child

    def remove(self, sequence: int) -> None:
        """Forget a sequence, if it is known."""
        tokens = self._tokens.pop(sequence, None)
        if tokens is None:
            return
        node, place = self._root, 0
        while place < len(tokens):
            child = node.children[tokens[place]]
            place += len(child.edge)
            child.holders.pop(sequence, None)
            if not child.holders:
                del node.children[child.edge[0]]
                return
            node = child

    def prefixes(self, tokens: Tokens) -> Iterator[tuple[int, Collection[int]]]:
        """Yield the shared lengths of `tokens` with their sequences: the longest first, then each shorter branch point."""
        path: list[tuple[int, Collection[int]]] = []
        node, place = self._root, 0
        while place < len(tokens) and (child := node.children.get(tokens[place])) is not None:
            shared = shared_length(child.edge, tokens, place)
            place += shared
            path.append((place, child.holders))
            if shared < len(child.edge):
                break
            node = child
        yield from reversed(path)


def shared_length(edge: _Run, tokens: _Run, place: int = 0) -> int:
    """Return the length of the common prefix of `edge` and `tokens[place:]`: a run at a time, then by halving."""
    longest = min(len(edge), len(tokens) - place)
    if edge[:longest] == tokens[place : place + longest]:
        return longest
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low


LEAST_TOKENS = 16
"""Shortest prefix that is reused; a shorter one is computed again."""
OFFERED_TOKENS = 256
"""Tokens by which a prompt in prefill is offered to others, because each offer costs its whole length."""
_TAIL_TO_SPARE = 64
"""Most tokens of an ended sequence that may be lost by taking its KV over instead of copying it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Tokens of a sequence's KV now, and the most it ever held."""

    length: int
    reached: int


_NOTHING = Extent(0, 0)


@dataclass(frozen=True, slots=True)
class Match:
    """A sequence that shares a prefix with a prompt."""

    source: int
    length: int
    """Number of tokens to reuse."""
    kept: bool
    """True if the sequence has ended and its KV is cached."""
    extent: Extent
    """KV of the sequence."""

    @property
    def nearly_whole(self) -> bool:
        """True if taking its KV over loses few tokens."""
        return self.extent.length - self.length <= max(_TAIL_TO_SPARE, self.extent.length // 20)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a lookup."""

    match: Match | None
    shared: int
    """Length of the longest shared prefix, reusable or not."""


class PrefixCache:
    """Index of the KV of running and ended sequences."""

    def __init__(self, ranks: Mapping[RankId, RankKv] | None) -> None:
        given = list((ranks or {}).values())
        self.recurrent = any(rank.recurrent for rank in given)
        sliding = [rank for rank in given if rank.slack]
        self._slack = min((rank.slack for rank in sliding), default=None)
        self._exact_length = min((rank.exact_length for rank in sliding), default=0)
        self._index = PrefixIndex()
        self._kept: dict[int, int] = {}
        """Ended sequences with the most tokens that each ever held, the least recently used first."""
        self.version = 0
        """Number that grows with every change of the index."""
        self.queries = self.query_tokens = self.hits = self.hit_tokens = self.evictions = 0

    @property
    def entries(self) -> int:
        return len(self._kept)

    @property
    def entry_tokens(self) -> int:
        return sum(len(self._index.tokens(sequence)) for sequence in self._kept)

    def is_exact(self, shared: int, *, length: int, reached: int) -> bool:
        """Return True if `shared` tokens can be forked from a sequence, or kept of it.

        Args:
            shared: the first of its tokens.
            length: tokens that it holds.
            reached: the most that it ever held.
        """
        least = self.least_length(reached)
        return shared == length if least is None else shared >= least

    def least_length(self, reached: int) -> int | None:
        """Return the least length to which a sequence can be cut that held `reached` tokens; None if it cannot be cut."""
        if self.recurrent:
            return None
        return 0 if self._slack is None or reached <= self._exact_length else reached - self._slack

    def may_take(self, match: Match, longest: int) -> bool:
        """Return True if a sequence that grows to `longest` tokens may take a match's KV over instead of copying it.

        Little may be lost by that, and the sequence must have a way back to all of the match's tokens.
        """
        return match.kept and match.nearly_whole and self._has_way_back(match.extent, longest)

    def outgrows(self, length: int, longest: int) -> bool:
        """Return True if a prompt of `length` tokens cannot be answered again from a sequence that grows to `longest`.

        Sent again, the prompt leaves one token to compute.
        """
        return not self._has_way_back(Extent(length - 1, length), longest)

    def _has_way_back(self, extent: Extent, longest: int) -> bool:
        return self.is_exact(extent.length, length=longest, reached=max(extent.reached, longest))

    def kept(self, *, spare: int | None = None) -> Iterable[int]:
        """Return the sequences that could be evicted."""
        return (sequence for sequence in self._kept if sequence != spare)

    def texts(self) -> list[Text]:
        """Return the cached sequences with their tokens and the most that each ever held, the last used first."""
        return [(each, self._index.tokens(each), reached) for each, reached in reversed(self._kept.items())]

    @property
    def forgets(self) -> bool:
        """True if some lengths of a sequence cannot be restored."""
        return self.recurrent or self._slack is not None

    # ---- look-up

    def find(self, tokens: Tokens, running: Mapping[int, Extent]) -> Found:
        """Return the longest prefix of `tokens` that can be reused, and the longest that is shared.

        One token at least is left over to compute.
        """
        shared, best = 0, None
        for point, holders in self._index.prefixes(tokens[:-1]):
            shared = max(shared, point)
            if point < LEAST_TOKENS:
                break
            best = self._best(point, holders, running)
            if best is not None:
                break
        return Found(best, shared)

    def _best(self, point: int, holders: Collection[int], running: Mapping[int, Extent]) -> Match | None:
        matches = (self._match(sequence, point, running) for sequence in holders)
        usable = [match for match in matches if match is not None]
        # Prefer an ended sequence, which can be taken over, and one of which little else would be lost.
        return min(usable, key=lambda match: (not match.kept, match.extent.length), default=None)

    def _match(self, sequence: int, point: int, running: Mapping[int, Extent]) -> Match | None:
        kept = sequence in self._kept
        extent = self._extent(sequence) if kept else running.get(sequence, _NOTHING)
        if extent.length < point or not self.is_exact(point, length=extent.length, reached=extent.reached):
            return None
        return Match(sequence, point, kept, extent)

    def _extent(self, sequence: int) -> Extent:
        return Extent(len(self._index.tokens(sequence)), self._kept[sequence])

    def counts(self) -> dict[str, int]:
        """Return the statistics, by their names in `CacheStats`."""
        names = ("queries", "hits", "query_tokens", "hit_tokens", "entries", "entry_tokens", "evictions")
        return {name: getattr(self, name) for name in names}

    def count(self, prompt_tokens: int, match: Match | None) -> None:
        """Count a lookup whose result was used."""
        self.queries += 1
        self.query_tokens += prompt_tokens
        if match is not None:
            self.hits += 1
            self.hit_tokens += match.length

    # ---- what there is

    def note_running(self, sequence: int, tokens: Tokens) -> None:
        """Record the tokens in a running sequence's KV."""
        self.version += 1
        self._index.put(sequence, tokens)

    def keep(self, sequence: int, tokens: Tokens, reached: int, *, is_oldest: bool = False) -> Iterable[int]:
        """Keep an ended sequence or a snapshot; return the cached ones that it makes redundant.

        It counts as used last; with `is_oldest`, as least recently used, or like the last used one that it replaces.
        """
        self.version += 1
        self._index.put(sequence, tokens)
        needless = self._kept_within(sequence, Extent(len(tokens), reached), tokens)
        if is_oldest:
            entries = list(self._kept.items())
            entries.insert(max(map([*self._kept].index, needless), default=0), (sequence, reached))
            self._kept = dict(entries)
        else:
            self._kept[sequence] = reached
        for other in needless:
            self.forget(other)
        return needless

    def covers(self, tokens: Tokens) -> bool:
        """Return True if a cached sequence begins with all of `tokens` and can be forked there."""
        for point, holders in self._index.prefixes(tokens):
            if point < len(tokens):
                break
            for holder in filter(self._kept.__contains__, holders):
                extent = self._extent(holder)
                if self.is_exact(point, length=extent.length, reached=extent.reached):
                    return True
        return False

    def is_worth_keeping(self, tokens: Tokens, extent: Extent) -> bool:
        """Return True if prompts can reuse these first tokens of a sequence of some extent, and not those of another one."""
        is_exact = self.is_exact(len(tokens), length=extent.length, reached=extent.reached)
        return is_exact and len(tokens) >= LEAST_TOKENS and not self.covers(tokens)

    def _kept_within(self, sequence: int, extent: Extent, tokens: Tokens) -> list[int]:
        """Return the cached sequences that are a prefix of `tokens`, and to which a sequence of that extent can be cut.

        A prompt of all their tokens leaves one to compute, so one token fewer must do.
        """
        return [
            holder
            for point, holders in self._index.prefixes(tokens)
            for holder in holders
            if holder != sequence and holder in self._kept and len(self._index.tokens(holder)) == point
            if self.is_exact(point - 1, length=extent.length, reached=extent.reached)
        ]

    def touch(self, sequence: int) -> None:
        """Record the use of a cached sequence."""
        if sequence in self._kept:
            self._kept[sequence] = self._kept.pop(sequence)

    def forget(self, sequence: int) -> None:
        """Forget a sequence whose KV is freed or about to change."""
        self.version += 1
        self._kept.pop(sequence, None)
        self._index.remove(sequence)

    def evict(self, spare: int | None = None) -> int | None:
        """Remove and return the least recently used entry, except `spare`; None if there is none."""
        oldest = next(iter(self.kept(spare=spare)), None)
        if oldest is not None:
            self.evictions += 1
            self.forget(oldest)
        return oldest

    def clear(self) -> None:
        self.version += 1
        self._kept.clear()
        self._index = PrefixIndex()


# ---- blocks on the disks

TOKEN_BYTES = 4
_DIGEST_BYTES = 16


def last_end(tokens: int) -> int:
    """Return the last end of a block that leaves a token to compute."""
    return max(0, tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Return tokens as bytes, `TOKEN_BYTES` for each."""
    return np.fromiter(tokens, "<u4").tobytes()


def block_digests(tokens: Iterable[int] | bytes, owner: str = "") -> list[bytes]:
    """Return the digests of all full blocks of a text's tokens, 16 bytes each, followed by the owner's.

    Args:
        tokens: the tokens, or the bytes that `token_bytes` returns for them.
        owner: the digest of the API key for which they are saved; empty: none.
    """
    content = tokens if isinstance(tokens, bytes) else token_bytes(tokens)
    size, digest, digests = BLOCK_TOKENS * TOKEN_BYTES, b"", list[bytes]()
    for end in range(size, len(content) + 1, size):
        digest = _digest(digest, content[end - size : end], owner)
        digests.append(digest)
    return digests


def _digest(before: bytes, content: bytes, owner: str, person: bytes = b"") -> bytes:
    content = before[:_DIGEST_BYTES] + content
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=person).digest() + bytes.fromhex(owner)


def list_block(before: bytes, tokens: Tokens, owner: str, digest: bytes = b"") -> step_pb2.ListedBlock | None:
    """Return a block as texts find it that share at least its first tokens; None if it is too short for that.

    Args:
        before: the digest of the block before it.
        tokens: its tokens.
        owner: the digest of the API key for which it is saved; empty: none.
        digest: its own digest; empty in a request.
    """
    if len(tokens) < LEAST_TOKENS:
        return None
    place = _digest(before, token_bytes(tokens[:LEAST_TOKENS]), owner, b"place")
    return step_pb2.ListedBlock(place=place, digest=digest, tokens=tokens)


@dataclass(frozen=True, slots=True)
class SavedText:
    """Blocks of a text that is saved."""

    digests: list[bytes]
    last_tokens: int = 0
    """Tokens of the last block, if it is shorter than the others; 0 if it is not."""
    listed: tuple[step_pb2.ListedBlock, ...] = ()
    """Blocks that texts may share in part: those with the end of the prompt and the begin of the answer, and the last one."""

    def tokens_in(self, first: int, end: int) -> int:
        """Return the number of tokens in the blocks [first, end)."""
        is_short = self.last_tokens and first < end == len(self.digests)
        return (end - first) * BLOCK_TOKENS - (BLOCK_TOKENS - self.last_tokens if is_short else 0)


def split_text(tokens: Tokens, prompt_length: int, owner: str) -> SavedText:
    """Split the tokens of an ended sequence into blocks to save. The rest after a full block is one too."""
    digests = block_digests(tokens, owner)
    full = len(digests)
    rest = tokens[full * BLOCK_TOKENS :] if full else ()
    if len(rest) < LEAST_TOKENS:
        rest = ()
    else:
        digests.append(_digest(digests[-1], token_bytes(rest), owner))
    listed = (
        list_block(
            digests[number - 1], tokens[number * BLOCK_TOKENS :][:BLOCK_TOKENS], owner, digests[number]
        )
        for number in sorted({last_end(prompt_length) // BLOCK_TOKENS, prompt_length // BLOCK_TOKENS, full})
        if 0 < number < len(digests)
    )
    return SavedText(digests, len(rest), tuple(block for block in listed if block is not None))
