"""Interrupted sequences in another engine: the KV that stages keep, tokens drawn again, and the cheapest way back. Pure.

If an instance is patched, the stages behind the last lost one keep KV of each sequence. Its length is the one that all
of them hold for certain. Up to there, the next engine computes the known tokens again on the other stages alone. After
that it continues on all stages. If only a link was lost, every stage keeps its KV.

Every way back has a predicted time, from measured times. `choose_way` alone compares them. The ways are listed in a fixed
order of preference, in which each one is safe. A later way is chosen only if it is faster by more than a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Protocol

from mlx_ring.core.engine_stats import prefill_name
from mlx_ring.core.types import TokenLogprob, Way
from mlx_ring.engine.prefix_cache import LEAST_TOKENS, Tokens, shared_length
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2

FIRST_KEPT = 1 << 49
"""First id of kept sequences, far from those of requests and snapshots."""


@dataclass(frozen=True, slots=True)
class KeptKv:
    """KV that the stages from `first_stage` on keep of one sequence."""

    id: int
    """Id by which the ranks know it until a sequence of the next engine takes it."""
    sequence: int
    """Id by which they knew it before."""
    length: int
    """Number of tokens."""
    first_stage: int
    reached: int
    """Most tokens that it may ever have held."""
    least: int
    """Least length to which it can be cut."""

    def left(self, stages: int) -> LeftKv:
        """Return what another loss leaves of it, if no sequence has taken it before."""
        lengths = tuple(self.length if stage >= self.first_stage else 0 for stage in range(stages))
        return LeftKv(self.id, lengths, self.reached, self.least)


@dataclass(frozen=True, slots=True)
class LeftKv:
    """KV of one sequence at the loss of its instance."""

    sequence: int
    """Id by which the ranks know it."""
    lengths: tuple[int, ...]
    """Number of tokens that each stage holds for certain."""
    reached: int
    least: int

    def keep(self, known: Sequence, first_stage: int, id_: int) -> KeptKv | None:
        """Return what stages keep of it; None if that would be too little.

        Args:
            known: the sequence with its known tokens.
            first_stage: the first stage behind the last lost one.
            id_: id of the kept sequence.
        """
        length = min([_most(known), *self.lengths[first_stage:]])
        if first_stage >= len(self.lengths) or length < max(LEAST_TOKENS, self.least):
            return None
        return KeptKv(id_, self.sequence, length, first_stage, self.reached, self.least)


def _most(known: Sequence) -> int:
    """Return the most tokens to keep: another engine needs results of those after them, on all stages."""
    if known.length > known.prompt_length:
        return known.length - 2
    return 0 if known.request.computes_all else known.prompt_length - 1


def find_left(
    running: Iterable[Sequence],
    unanswered: Iterable[tuple[Sequence, step_pb2.Row]],
    held: Collection[int],
    least_length: Callable[[int], int | None],
    stages: int,
) -> dict[int, LeftKv]:
    """Return the KV that a loss leaves of running sequences.

    Args:
        running: the sequences.
        unanswered: rows that some rank has not answered.
        held: sequences that were opened on the ranks.
        least_length: returns the least length to which a sequence can be cut that held so many tokens; None if it
            cannot be cut.
        stages: number of stages.
    """
    lengths: dict[int, int] = {}
    for sequence, row in unanswered:
        lengths[sequence.id] = min(row.start, lengths.get(sequence.id, row.start))
    left: dict[int, LeftKv] = {}
    for sequence in running:
        length, least = lengths.get(sequence.id, sequence.scheduled), least_length(sequence.reached)
        # Until its first row is answered, some ranks may not even have opened it.
        if least is not None and sequence.id in held and length > sequence.reused:
            behind = max(length, sequence.kept)
            by_stage = tuple(behind if stage >= sequence.kept_from else length for stage in range(stages))
            left[sequence.id] = LeftKv(sequence.id, by_stage, sequence.reached, least)
    return left


def kept_message(kept: Iterable[KeptKv]) -> worker_pb2.KeptKv:
    """Make the message to the ranks; all entries have the same first stage."""
    entries = list(kept)
    return worker_pb2.KeptKv(
        first_stage=entries[0].first_stage if entries else 0,
        sequences=[
            worker_pb2.KeptSequence(sequence=each.sequence, kept_as=each.id, length=each.length)
            for each in entries
        ],
    )


class KvInMemory(Protocol):
    """KV that the ranks have in memory."""

    def shared(self, tokens: Tokens, running: Mapping[int, Sequence]) -> int:
        """Return the number of a text's tokens that the prefix cache could supply now."""
        ...

    def kept_of(self, sequence: int) -> KeptKv | None:
        """Return the KV that was kept for a waiting sequence."""
        ...

    def begin_entry(self, tokens: Tokens, /) -> int | None:
        """Reserve room for KV under an id of its own, and return that; None if there is no room or no need."""
        ...

    def offer_entry(self, entry: int, tokens: Tokens, reached: int, /) -> None:
        """Keep KV that the ranks have under an id of its own, as of an ended sequence."""
        ...

    def free(self, entry: int, /, *, is_opened: bool) -> None:
        """Free the memory of KV that has an id of its own; on the ranks, if they have opened it."""
        ...

    def add_operations(self, operations: Iterable[step_pb2.CacheOperation]) -> None:
        """Add operations that change no sequence."""
        ...


class Resumptions:
    """Counts of resumed sequences."""

    def __init__(self) -> None:
        self.redrawn = 0
        """Known tokens that were drawn again ..."""
        self.disagreements = 0
        """... and those that differed."""
        self.kept_tokens = 0
        """Known tokens that the stages from `kept_from` on did not compute again ..."""
        self.replayed_tokens = 0
        """... and all others."""

    def totals(self) -> dict[str, int]:
        """Return the counts by their names in `StepTotals`."""
        return {
            "resume_redrawn": self.redrawn,
            "resume_disagreements": self.disagreements,
            "resume_kept": self.kept_tokens,
            "resume_replayed": self.replayed_tokens,
        }

    def record_prefilled(self, sequence: Sequence) -> None:
        """Count the known tokens of a sequence, once they are computed, and let it be one like others from now on."""
        sequence.is_resumed = False
        self.kept_tokens += sequence.kept
        self.replayed_tokens += sequence.length - sequence.kept

    def compare(self, sequence: Sequence, redrawn: Iterable[TokenLogprob]) -> None:
        """Compare a token that was delivered before a loss with what is drawn now; the delivered one stays."""
        for token in redrawn:
            sequence.redraws = False
            self.redrawn += 1
            self.disagreements += token.token != sequence.tokens[-1]


# ---- the cheapest way back

MARGIN, LEAST_MARGIN_S = 0.1, 0.05
"""Share and time by which a way must be faster than those that are preferred to it: predictions are no more exact."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way back, and its predicted seconds until the next token; None: unknown."""

    way: Way
    seconds: float | None


def choose_way(candidates: Ordered[Candidate]) -> Candidate:
    """Choose the first candidate whose predicted time is within the margin of the shortest one.

    Args:
        candidates: the possible ways, the preferred ones first. If the time of the first one is unknown, it is chosen, and
            others of unknown time never are.
    """
    first = candidates[0]
    if first.seconds is None:
        return first
    known = [(each, each.seconds) for each in candidates if each.seconds is not None]
    least = min(seconds for _, seconds in known)
    most = least + max(LEAST_MARGIN_S, MARGIN * least)
    return next(each for each, seconds in known if seconds <= most)


_PREDICTED_CHUNK, _MEDIUM_TEXT = 256, 1024
PredictChunk = Callable[[int, int, int], float]
"""Function that predicts a stage's seconds for a chunk of some tokens after a context of some tokens."""
_LEAST_SPREAD = 64.0
"""Standard deviation of the context's length from which its influence on the time is measured."""


class PrefillSpeed:
    """Predicted times of prefill, by a line through the measured times of a token over the length of its context."""

    def __init__(
        self, stages: int, measured: dict[str, list[float]], predict: PredictChunk | None = None
    ) -> None:
        """Start with what was measured before.

        Args:
            stages: number of stages.
            measured: sums of chunks by stage, as `Meter.record_chunk` makes them.
            predict: predicts the seconds of a chunk, until one was measured.
        """
        self._names = [prefill_name(stage, stages) for stage in range(stages)]
        self._measured, self._predict = measured, predict

    def seconds(self, start: int, end: int, stages: int | None = None) -> float | None:
        """Return the time to compute the tokens [start, end) on the first `stages`, or all; None if it is unknown."""
        if end <= start:
            return 0.0
        times: list[float] = []
        for stage in range(len(self._names) if stages is None else stages):
            seconds = self._stage_s(stage, start, end)
            if seconds is None:
                return None
            times.append(seconds)
        # The stages work at the same time, except on the first and the last chunk.
        slowest = max(times, default=0.0)
        return slowest + (sum(times) - slowest) * min(1.0, _PREDICTED_CHUNK / (end - start))

    @property
    def token_s(self) -> float | None:
        """Seconds of a token of a text of medium length; None if it is unknown."""
        seconds = self.seconds(0, _MEDIUM_TEXT)
        return None if seconds is None else seconds / _MEDIUM_TEXT

    def _stage_s(self, stage: int, start: int, end: int) -> float | None:
        tokens, context = end - start, (start + end) / 2
        sums = self._measured.get(self._names[stage])
        if sums is not None:
            least, slope = _line(*sums)
            return tokens * (least + slope * context)
        if self._predict is None:
            return None
        chunk = min(tokens, _PREDICTED_CHUNK)
        return self._predict(stage, chunk, round(context)) * tokens / chunk


def _line(n: float, x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Return a token's seconds without context, and those for each token of its context, from sums; neither is negative."""
    spread = n * xx - x * x
    if spread <= (n * _LEAST_SPREAD) ** 2:
        return y / n, 0.0
    slope = max(0.0, (n * xy - x * y) / spread)
    least = (y - slope * x) / n
    return (least, slope) if least >= 0.0 else (0.0, xy / xx)


_DISK_BYTES_PER_S = 1e9
"""Speed at which a rank reads its disk, until it was measured. It is high, so that a disk is tried."""
_WEIGHT, _FORGET_S = 0.5, 600.0
"""Weight of the newest measurement, and seconds after which a low speed is forgotten: a disk may have been busy."""
_PEERS, _LARGE_BYTES = (1.0, 0.02), 4 << 20
"""Assumed factor and seconds, as `ReadSpeeds` measures them, and the size from which a reading tells the factor."""


class ReadSpeeds:
    """Predicted times of reading saved KV, by the slowest rank of the last readings.

    A token takes some seconds from the ranks' own disks. Bytes of other machines take longer than their links promise, by
    a factor, and each reading by some seconds, which are mostly those of requests.
    """

    def __init__(self, measured: dict[str, list[float]], token_bytes: int) -> None:
        """Start with what was measured before, which later measurements change; `token_bytes` is for the rank with most."""
        self._measured, self._token_bytes = measured, token_bytes

    def disk_s(self, tokens: int, now: float) -> float:
        """Return the predicted seconds until all ranks have read some tokens from their own disks."""
        assumed_s = self._token_bytes / _DISK_BYTES_PER_S
        token_s, measured_at = self._measured.get("disk", (assumed_s, -math.inf))
        return tokens * (min(token_s, assumed_s) if now - measured_at > _FORGET_S else token_s)

    def peers_s(self, tokens: int, link_s: float, now: float) -> float:
        """Return the predicted seconds to read some tokens, with bytes of other machines for which links need `link_s`."""
        factor, setup_s = self._peers(now)
        return self.disk_s(tokens, now) + setup_s + factor * link_s

    def _peers(self, now: float) -> tuple[float, float]:
        factor, setup_s, measured_at = self._measured.get("peers", (*_PEERS, -math.inf))
        if now - measured_at > _FORGET_S:
            return min(factor, _PEERS[0]), min(setup_s, _PEERS[1])
        return factor, setup_s

    def record_disk(self, tokens: int, taken_s: float, now: float) -> None:
        """Learn from a reading of the ranks' own disks."""
        token_s = taken_s / tokens
        before = self._measured.get("disk", [token_s])[0]
        self._measured["disk"] = [before + _WEIGHT * (token_s - before), now]

    def record_peers(self, tokens: int, link_s: float, nbytes: float, taken_s: float, now: float) -> None:
        """Learn from a reading with bytes of other machines."""
        factor, setup_s = self._peers(now)
        over_s = max(0.0, taken_s - self.disk_s(tokens, now))
        if nbytes < _LARGE_BYTES or not link_s:
            setup_s += _WEIGHT * (max(0.0, over_s - factor * link_s) - setup_s)
        else:
            factor += _WEIGHT * (max(0.0, over_s - setup_s) / link_s - factor)
        self._measured["peers"] = [factor, setup_s, now]


def shared_beginning(tokens: Tokens, others: Iterable[Ordered[int]]) -> int:
    """Return the tokens of the longest beginning that is shared with another text, if it can be reused."""
    first = tokens[:LEAST_TOKENS]
    alike = (tuple(other) for other in others if tuple(other[:LEAST_TOKENS]) == first)
    most = max((shared_length(other, tokens) for other in alike), default=0)
    return most if most >= LEAST_TOKENS else 0


@dataclass(slots=True)
class Destination:
    """An engine that may continue interrupted sequences."""

    way: Way
    ready_s: float | None
    """Predicted time until it serves; None: unknown."""
    token_s: float | None
    """Predicted seconds to compute a token; None: unknown."""
    ahead_tokens: int
    """Tokens to compute there before, running sequences included."""
    shared: Callable[[Tokens], int] = lambda _tokens: 0
    """Function that returns the cached tokens of a text there."""
    given: list[Tokens] = field(default_factory=list[Tokens])
    """Texts that it was given."""

    def own_tokens(self, tokens: Tokens) -> int:
        """Return the tokens of a text that it would have to compute: a beginning that is shared with another one counts once."""
        return len(tokens) - max(self.shared(tokens), shared_beginning(tokens, self.given))

    def seconds(self, tokens: Tokens) -> float | None:
        """Return the predicted time until the text's next token; None if it is unknown."""
        if self.ready_s is None or self.token_s is None:
            return None
        return self.ready_s + self.token_s * (self.ahead_tokens + self.own_tokens(tokens))

    def give(self, tokens: Tokens) -> None:
        """Record that it gets the text."""
        self.ahead_tokens += self.own_tokens(tokens)
        self.given.append(tokens)


def choose_destination(tokens: Tokens, others: Ordered[Destination], own: Destination) -> Destination:
    """Choose where a sequence continues: on an engine that serves, or on its own instance, once it is back.

    Args:
        tokens: its known tokens.
        others: engines that serve; one of them is preferred. Without predictions, it is the one with least to compute.
        own: the instance that was lost.
    """

    def cost(other: Destination) -> tuple[float, int]:
        seconds = other.seconds(tokens)
        return math.inf if seconds is None else seconds, other.ahead_tokens + other.own_tokens(tokens)

    best = min(others, key=cost)
    chosen = choose_way([Candidate(best.way, best.seconds(tokens)), Candidate(own.way, own.seconds(tokens))])
    return own if chosen.way == own.way else best


_PRIOR_RETURNS_S, _PRIOR_WEIGHT, _PRIOR_LOSSES = (2.2, 2.4, 2.7, 3.0, 3.4), 0.8, 1.0
"""Silences that are assumed before any was measured: those that ended, the weight of each, and those that did not."""
_KEPT_SILENCES = 16
WAIT_BONUS_S = 1.0
"""Time by which waiting may take longer than a recovery: it leaves everything in place."""


class Silences:
    """Lengths of the last silences of suspects, which predict how long the next one lasts. All times are in seconds."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def record(self, silent_s: float | None) -> None:
        """Record a silence that has ended, or with None one that ended in a loss."""
        self._seen = [*self._seen, math.inf if silent_s is None else silent_s][-_KEPT_SILENCES:]

    def _weights(self, silent_s: float) -> tuple[list[tuple[float, float]], float]:
        """Return the rests of silences that lasted longer, with their weights, and the weight of those that never ended."""
        prior = [(length, _PRIOR_WEIGHT) for length in _PRIOR_RETURNS_S]
        seen = [*prior, *((length, 1.0) for length in self._seen if length < math.inf)]
        lost = _PRIOR_LOSSES + sum(length == math.inf for length in self._seen)
        return sorted((length - silent_s, weight) for length, weight in seen if length > silent_s), lost

    def wait_s(self, silent_s: float, limit_s: float) -> float:
        """Return the mean rest of a silence that ends before the limit; the time to the limit if none does."""
        rests = [each for each in self._weights(silent_s)[0] if each[0] <= limit_s - silent_s]
        weight = sum(one for _, one in rests)
        return sum(rest * one for rest, one in rests) / weight if weight else max(0.0, limit_s - silent_s)

    def is_worth_waiting(self, silent_s: float, limit_s: float, recovery_s: float | None) -> bool:
        """Return True if some further wait, up to the limit, is expected to cost less than the recovery at once.

        Args:
            silent_s: length of the silence so far.
            limit_s: length from which it counts as a loss in any case.
            recovery_s: predicted time to the next tokens without the suspect; None: unknown, so that the limit decides.
        """
        if silent_s >= limit_s:
            return False
        if recovery_s is None:
            return True
        recovery_s += WAIT_BONUS_S
        rests, lost = self._weights(silent_s)
        weight = lost + sum(one for _, one in rests)

        def cost(wait_s: float) -> float:
            returned = [(rest, one) for rest, one in rests if rest <= wait_s]
            left = weight - sum(one for _, one in returned)
            return (sum(rest * one for rest, one in returned) + left * (wait_s + recovery_s)) / weight

        most_s = limit_s - silent_s
        waits = [most_s, *(rest for rest, _ in rests if rest <= most_s)]
        return min(map(cost, waits)) < recovery_s
