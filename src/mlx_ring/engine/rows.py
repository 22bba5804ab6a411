"""Messages of a sequence's part of a step: operations, also those of restores in parts, rows, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.generation import WayBack
from mlx_ring.core.types import TokenLogprob
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, tensor_pb2
from mlx_ring.rpc.protos.step_pb2 import Want
from mlx_ring.rpc.sampling import encode_sampling

_NEXT_TOKEN = Want(where=Want.LAST, what=Want.TOKEN)
_EVERY_TOKEN = Want(where=Want.ALL, what=Want.TOKEN)
_SEED_MASK = (1 << 64) - 1
_MOST_CANDIDATES = (1 << 32) - 1


def open_operation(sequence: Sequence) -> step_pb2.CacheOperation:
    """Make the operation that opens a sequence; it precedes the first row."""
    return step_pb2.CacheOperation(
        open=step_pb2.Open(
            sequence=sequence.id,
            sampling=_sampling(sequence),
            seed=sequence.request.sampling.seed & _SEED_MASK,
            eos=sorted(sequence.ends),
            prompt_length=sequence.prompt_length,
            max_length=sequence.max_length,
            grammar=sequence.grammar_id,
            traceparent=sequence.traceparent,
            fill_tokens=sequence.fill_to,
        )
    )


def free_operation(sequence_id: int, *, first_stage: int = 0) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(free=step_pb2.Free(sequence=sequence_id), first_stage=first_stage)


def trim_operation(sequence_id: int, length: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(trim=step_pb2.Trim(sequence=sequence_id, length=length))


def retain_operation(sequence_id: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(retain=step_pb2.Retain(sequence=sequence_id))


def fork_operation(
    source: int, destination: int, length: int, *, take: bool, first_stage: int = 0, end_stage: int = 0
) -> step_pb2.CacheOperation:
    """Make the operation that forks a sequence, on the stages from `first_stage` on and before `end_stage`, if any."""
    return step_pb2.CacheOperation(
        fork=step_pb2.Fork(source=source, destination=destination, length=length, take=take),
        first_stage=first_stage,
        end_stage=end_stage,
    )


def continue_operations(
    sequence: Sequence, kept: int, length: int, first_stage: int
) -> list[step_pb2.CacheOperation]:
    """Make the operations that open a sequence with KV that the stages from `first_stage` on have kept."""
    fork = fork_operation(kept, sequence.id, length, take=True, first_stage=first_stage)
    return [open_operation(sequence), fork]


def snapshot_operations(source: int, length: int, snapshot: int) -> list[step_pb2.CacheOperation]:
    """Make the operations that keep a running sequence's KV under an id of its own."""
    opened = step_pb2.Open(sequence=snapshot, prompt_length=length, max_length=length)
    return [
        step_pb2.CacheOperation(open=opened),
        fork_operation(source, snapshot, length, take=False),
        retain_operation(snapshot),
    ]


def restore_operations(
    fetch: int, tokens: tuple[int, ...], entry: int, part: int, parts: int
) -> Iterator[step_pb2.CacheOperation]:
    """Yield the operations of one of the `parts` in which fetched KV is kept under an id of its own."""
    length = len(tokens)
    if part == 0:
        opened = step_pb2.Open(sequence=entry, tokens=tokens, prompt_length=length, max_length=length)
        yield step_pb2.CacheOperation(open=opened)
    adopt = step_pb2.Adopt(sequence=entry, fetch=fetch, length=length, part=part, parts=parts)
    yield step_pb2.CacheOperation(adopt=adopt)
    if part == parts - 1:
        yield retain_operation(entry)


def arrival_operations(
    entry: int, length: int, source: int | None, start: int
) -> Iterator[step_pb2.CacheOperation]:
    """Yield the operations that open an entry for KV from other workers.

    Args:
        entry: its id.
        length: number of its tokens.
        source: sequence that has its first tokens; None if no sequence has.
        start: number of these tokens.
    """
    opened = step_pb2.Open(sequence=entry, prompt_length=length, max_length=length)
    yield step_pb2.CacheOperation(open=opened)
    if start and source is not None:
        yield fork_operation(source, entry, start, take=False)


def adopt_operation(
    entry: int, fetch: int, start: int, tokens: tuple[int, ...], part: int, parts: int
) -> step_pb2.CacheOperation:
    """Make the operation that appends one of the `parts` of KV which was fetched from other workers.

    Args:
        entry: the sequence.
        fetch: the fetch.
        start: number of the sequence's tokens before.
        tokens: tokens that were fetched.
        part: number of the part.
        parts: number of all parts.
    """
    adopt = step_pb2.Adopt(
        sequence=entry,
        fetch=fetch,
        start=start,
        length=start + len(tokens),
        moved=True,
        part=part,
        parts=parts,
    )
    adopt.tokens.extend(tokens if part == parts - 1 else ())
    return step_pb2.CacheOperation(adopt=adopt)


def drop_operation(fetch: int, *, moved: bool = False) -> step_pb2.CacheOperation:
    """Make the operation that forgets fetched KV, of a disk or from other workers."""
    return step_pb2.CacheOperation(adopt=step_pb2.Adopt(fetch=fetch, moved=moved))


def prefill_row(sequence: Sequence, end: int) -> step_pb2.Row:
    """Make a row of the known tokens from the end of the KV up to `end`."""
    start = sequence.scheduled
    return step_pb2.Row(
        sequence=sequence.id,
        start=start,
        tokens=step_pb2.Tokens(ids=sequence.tokens[start:end]),
        wants=_prefill_wants(sequence, start, end),
    )


def decode_row(sequence: Sequence, draft: tuple[int, ...] = ()) -> step_pb2.Row:
    """Make a row of the next token, known or sampled by the previous row, and of a draft to verify."""
    row = step_pb2.Row(
        sequence=sequence.id,
        start=sequence.scheduled,
        draft=draft,
        wants=[_EVERY_TOKEN if draft else _NEXT_TOKEN],
    )
    if sequence.scheduled < sequence.length:
        row.token = sequence.tokens[sequence.scheduled]
    else:
        row.previous = True
    return row


def end_stage(sequence: Sequence, row: step_pb2.Row) -> int:
    """Return the stage before which a row ends, because the stages from there on have kept its KV; 0 if they have not."""
    return sequence.kept_from if row.start < sequence.kept else 0


def samples_token(row: step_pb2.Row) -> bool:
    return any(want.what == Want.TOKEN for want in row.wants)


def tokens_fed(row: step_pb2.Row) -> int:
    """Return the number of tokens that the row adds to the KV."""
    return (len(row.tokens.ids) or 1) + len(row.draft)


class RowReading(NamedTuple):
    """Results of the last stage for a row."""

    sampled: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    hidden_sum: NDArray[np.float32] | None
    """Sum of the pooled hidden states, (hidden,); None if nothing is pooled."""


def read_result(row: step_pb2.Row, result: step_pb2.RowResult | None) -> RowReading:
    """Read the results of the last stage for a row.

    Raises:
        ProtocolError: something that the row wants is not there.
    """
    result = step_pb2.RowResult() if result is None else result
    for want in row.wants:
        if want.what == Want.TOKEN and not result.tokens:
            raise ProtocolError(f"The last stage sampled no token for sequence {row.sequence}.")
        if want.what == Want.LOGPROBS and len(result.logprobs) != len(want.targets):
            raise ProtocolError(
                f"The last stage gave {len(result.logprobs)} of {len(want.targets)} log-probabilities "
                f"for sequence {row.sequence}."
            )
    return RowReading(
        tuple(map(_token_logprob, result.tokens)),
        tuple(map(_token_logprob, result.logprobs)),
        _read_sum(row, result.hidden) if _pools(row) else None,
    )


def _pools(row: step_pb2.Row) -> bool:
    return any(want.what == Want.HIDDEN_SUM for want in row.wants)


def _read_sum(row: step_pb2.Row, hidden: tensor_pb2.Tensor) -> NDArray[np.float32]:
    if hidden.dtype != "float32" or list(hidden.shape) != [len(hidden.data) // 4] or not hidden.data:
        raise ProtocolError(
            f"The last stage gave {hidden.dtype or 'no'} hidden states of shape {list(hidden.shape)} for sequence "
            f"{row.sequence}, where their sum was wanted."
        )
    return np.frombuffer(hidden.data, "<f4")


def _prefill_wants(sequence: Sequence, start: int, end: int) -> Iterator[Want]:
    """Yield what a prefill row wants. Position p scores token p + 1, which may begin the next chunk; the last one samples."""
    top = sequence.request.prompt_logprobs
    if start >= sequence.prompt_length or len(sequence.prompt_logprobs) >= sequence.prompt_length:
        top = None
    targets = sequence.request.prompt_tokens[start + 1 : end + 1]
    if top is not None and targets:
        yield Want(
            where=Want.LISTED,
            what=Want.LOGPROBS,
            listed=range(len(targets)),
            targets=targets,
            top_logprobs=top,
        )
    yield from _pooled_wants(sequence, start, end)
    if end == sequence.fill_to and sequence.wants_tokens:
        yield _NEXT_TOKEN


def _pooled_wants(sequence: Sequence, start: int, end: int) -> Iterator[Want]:
    """Yield what pooling wants: sums, so that each chunk returns one vector."""
    match sequence.request.pooling:
        case "mean":
            yield Want(where=Want.ALL, what=Want.HIDDEN_SUM)
        case "cls" if start == 0:
            yield Want(where=Want.LISTED, listed=[0], what=Want.HIDDEN_SUM)
        case "last" if end == sequence.fill_to:
            yield Want(where=Want.LAST, what=Want.HIDDEN_SUM)
        case _:
            return


def _sampling(sequence: Sequence) -> step_pb2.Sampling:
    sampling = sequence.request.sampling
    top_k = min(sampling.top_k, _MOST_CANDIDATES)
    return encode_sampling(replace(sampling, top_k=top_k, min_tokens=sequence.least_answer))


def _token_logprob(given: step_pb2.TokenLogprobs) -> TokenLogprob:
    if len(given.top_tokens) != len(given.top_logprobs):
        raise ProtocolError(
            f"The last stage gave {len(given.top_tokens)} likely tokens and {len(given.top_logprobs)} "
            "log-probabilities of them."
        )
    return TokenLogprob(
        given.token, given.logprob, tuple(zip(given.top_tokens, given.top_logprobs, strict=True))
    )


# ---- restores in parts

_PART_BYTES, _MOST_PARTS = 32 << 20, 64
"""Bytes of KV on a rank that are copied with a step, about, and the most steps of one restore."""
_PARTS_BESIDE_PREFILL = 8
"""Parts that are copied with a chunk of a prompt, which takes longer than a decode step."""


def parts_of(nbytes: int) -> int:
    """Return the number of steps with which KV of `nbytes` on the rank with most is copied."""
    return min(_MOST_PARTS, max(1, -(-nbytes // _PART_BYTES)))


@dataclass(slots=True)
class Restore:
    """KV that all ranks have read, and copy into the memory of an entry of the prefix cache."""

    fetch: int
    tokens: tuple[int, ...]
    waiting: list[Sequence]
    parts: int
    nbytes: int
    """Size on the rank with most."""
    offer: Callable[[float], None]
    """Function that lets sequences use the entry, once the last part is sent; it receives the time."""
    back: WayBack | None = None
    """Way back that ends then, if it is none of a sequence."""
    sent: int = 0
    """Number of parts that were sent."""


class Restores:
    """Restores under way. Rows of other sequences go out between their parts."""

    def __init__(self) -> None:
        self._by_entry: dict[int, Restore] = {}

    @property
    def has_parts(self) -> bool:
        return bool(self._by_entry)

    @property
    def newest(self) -> tuple[int, Restore] | None:
        """Restore that was begun last, with its entry; None if none is under way."""
        return next(reversed(self._by_entry.items()), None)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the rank with most has read, and has not copied as a whole."""
        return sum(restore.nbytes for restore in self._by_entry.values())

    def begin(
        self,
        entry: int,
        fetch: int,
        tokens: tuple[int, ...],
        waiting: list[Sequence],
        nbytes: int,
        offer: Callable[[float], None],
        back: WayBack | None,
    ) -> None:
        """Copy KV of `nbytes` on the rank with most, with the next steps."""
        self._by_entry[entry] = Restore(fetch, tokens, waiting, parts_of(nbytes), nbytes, offer, back)

    def join(self, sequence: Sequence, tokens: tuple[int, ...], *, is_whole: bool) -> bool:
        """Let a sequence wait for a restore that has these tokens of it; return False if there is none.

        Args:
            sequence: the sequence.
            tokens: its first tokens.
            is_whole: True if what is restored cannot be cut, so that it must have no others.
        """
        for restore in self._by_entry.values():
            if restore.tokens[: None if is_whole else len(tokens)] == tokens:
                restore.waiting.append(sequence)
                sequence.awaits_kv = restore.fetch
                return True
        return False

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that waits no longer. Others may use what was read."""
        for restore in self._by_entry.values():
            if sequence in restore.waiting:
                restore.waiting.remove(sequence)

    def take(self, now: float, *, is_prefill: bool) -> list[step_pb2.CacheOperation]:
        """Return the operations of the next parts, which go out with a step; `is_prefill` if it has chunks of prompts."""
        operations: list[step_pb2.CacheOperation] = []
        for _ in range(_PARTS_BESIDE_PREFILL if is_prefill else 1):
            entry = next(iter(self._by_entry), None)
            if entry is None:
                break
            restore = self._by_entry[entry]
            operations += restore_operations(
                restore.fetch, restore.tokens, entry, restore.sent, restore.parts
            )
            restore.sent += 1
            if restore.sent == restore.parts:
                self._end(entry)
                restore.offer(now)
        return operations

    def _end(self, entry: int) -> Restore | None:
        restore = self._by_entry.pop(entry, None)
        release(() if restore is None else restore.waiting)
        return restore

    def forget(self, entry: int) -> list[step_pb2.CacheOperation]:
        """Give up the restore of an entry that is freed; return the operations that forget what was read."""
        restore = self._end(entry)
        return [] if restore is None else [drop_operation(restore.fetch)]

    def clear(self) -> None:
        """Give up all restores."""
        for entry in list(self._by_entry):
            self._end(entry)


def release(sequences: Iterable[Sequence]) -> None:
    """Let sequences wait for no KV any more."""
    for sequence in sequences:
        sequence.awaits_kv = 0
