"""KV store of one rank: sequences, the banks that hold them, and the batches that step them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, RingError, StepFailed
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.kv.bank import Row
from mlx_ring.worker.kv.bank_memory import STEP_BYTES, Growth
from mlx_ring.worker.kv.content import (
    Banks,
    Range,
    as_stored,
    check_written,
    object_parts,
    parts_with,
    read_row,
    row_parts,
    row_planes,
    write_row,
)
from mlx_ring.worker.kv.layers import JoinedStates, Layout, RowStates, read_layout
from mlx_ring.worker.kv.passes import Assembly, Batch, PassLedger
from mlx_ring.worker.tensors import dtype_name

log = logging.getLogger(__name__)


class KVStore:
    """KV cache of one stage's layers. One thread calls it; lengths and token ranges are in tokens."""

    def __init__(
        self,
        prototypes: Sequence[Any],
        dtype: mx.Dtype,
        *,
        kv_bits: int | None = None,
        slack: int = 64,
        ragged: bool = True,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        """Prepare a store for the layers of `prototypes`, fresh mlx-lm caches of the owned layers.

        Args:
            prototypes: caches that define what each layer keeps.
            dtype: type of keys and values.
            kv_bits: number of bits of quantized keys and values.
            ragged: whether the model's forward takes an array of offsets, one for each row. Without it only
                rows of one length share a pass.
            slack: how many tokens sliding layers can be rolled back.
            step_bytes: how much of others' KV a step copies at most, about, to make room for more rows and tokens.
        """
        self.dtype = dtype
        self._layout: Layout = read_layout(prototypes, kv_bits, slack)
        self._rows: dict[int, Row] = {}
        self._growth = Growth(lambda: self._banks.target_bytes, step_bytes)
        self._banks = Banks(self._layout, self._growth)
        self._assembly = Assembly(self._layout, self._banks, ragged=ragged)
        self._state_bytes = 0
        """Bytes of one sequence's recurrent states, the most seen so far."""
        self._ledger = PassLedger(self._layout)

    @property
    def nbytes(self) -> int:
        """Bytes held now, including room for growth."""
        states = sum(row.states.nbytes for row in self._rows.values() if row.states is not None)
        return self._banks.nbytes + states

    @property
    def can_undo(self) -> bool:
        """True if building a pass leaves everything before it unchanged."""
        return self._ledger.can_undo

    def limit(self, limit_bytes: int | None) -> None:
        """Limit the memory of this rank. The head enforces the limit; room ahead of need stays within it."""
        self._growth.limit_bytes = limit_bytes
        self._banks.fit()

    @property
    def sequences(self) -> Collection[int]:
        """Ids of all sequences."""
        return self._rows.keys()

    def length(self, sequence: int) -> int:
        """Return the number of committed tokens."""
        return self._row(sequence).length

    def open(self, sequence: int, max_length: int, fill_length: int = 0) -> None:
        """Open a sequence. Nothing is allocated before its first token.

        Args:
            sequence: its id.
            max_length: most tokens that it can hold.
            fill_length: tokens that it is about to hold, for which there is room from the first one on if it is alone
                in its bank.
        """
        if sequence in self._rows:
            raise ProtocolError(f"Sequence {sequence} is open already.")
        if max_length <= 0:
            raise ProtocolError(
                f"Sequence {sequence} wants room for {max_length} tokens; at least 1 is needed."
            )
        self._rows[sequence] = Row(sequence, max_length, min(fill_length, max_length))

    def free(self, *sequences: int) -> None:
        """Forget sequences and free their memory, all at once."""
        self._ledger.settle()
        rows = [self._row(sequence) for sequence in sequences]
        try:
            self._empty(*rows)
        finally:
            for sequence in sequences:
                del self._rows[sequence]

    def reset(self) -> None:
        """Forget every sequence."""
        self._ledger.clear()
        self._rows.clear()
        self._banks.clear()

    def keep(self, kept: Iterable[worker_pb2.KeptSequence], *, moves: bool) -> frozenset[int]:
        """Cut sequences and give them other ids; free all others, and those that cannot be cut.

        Args:
            kept: the sequences, their lengths, and their new ids.
            moves: whether each of them gets memory of its own, in this order.

        Returns:
            The new ids of those that were kept.
        """
        self._ledger.settle()
        wanted = {each.sequence: each for each in kept}
        self.free(
            *(
                sequence
                for sequence in [*self._rows]
                if sequence not in wanted or not self._can_keep(sequence, wanted[sequence].length)
            )
        )
        rows, self._rows = self._rows, {}
        for sequence, each in wanted.items():
            row = rows.get(sequence)
            if row is not None:
                row.sequence = each.kept_as
                self._rows[each.kept_as] = row
        if moves:
            self._banks.retain([*self._rows.values()])
        return frozenset(self._rows)

    def _can_keep(self, sequence: int, length: int) -> bool:
        """Cut a sequence; return False if that is impossible or leaves nothing of use."""
        try:
            row = self._sound(sequence)
            self.trim(sequence, length)
        except RingError as error:
            log.warning("The KV of sequence %d is not kept: %s", sequence, error)
            return False
        return length > 0 and not row.retained

    def trim(self, sequence: int, length: int) -> None:
        """Drop all but the first `length` tokens."""
        self._ledger.settle()
        row = self._row(sequence)
        if not 0 <= length <= row.length:
            raise ProtocolError(f"Sequence {sequence} has {row.length} tokens; it cannot be cut to {length}.")
        if length == row.length:
            return
        if length == 0:
            self._empty(row)
            return
        self._check_reach(row, length, "cut")
        if self._layout.object_parts:
            kind = type(self._layout.object_parts[0].prototype).__name__
            raise StepFailed(
                f"Sequence {sequence} cannot be cut from {row.length} to {length} tokens: a {kind} cannot go back. "
                "Free it and prefill again."
            )
        row.length = length
        if row.bank is not None:
            row.bank.tighten()

    def retain(self, sequence: int) -> None:
        """Keep an ended sequence for forks. It cannot step any more, and takes no more memory than it needs."""
        self._ledger.settle()
        row = self._sound(sequence)
        row.retained = True
        self._banks.retain([row])
        if row.states is not None:
            row.states = row.states.owned(self._layout.object_parts)

    def fork(self, source: int, destination: int, length: int, *, take: bool = False) -> None:
        """Give `destination`, which is open and empty, the first `length` tokens of `source`.

        With `take` the source is closed: its memory changes owner, and nothing is copied.
        """
        self._ledger.settle()
        origin, row = self._row(source), self._row(destination)
        if row.length:
            raise ProtocolError(
                f"Sequence {destination} has {row.length} tokens; only an empty one takes a fork."
            )
        if not 0 <= length <= min(origin.length, row.max_length):
            raise ProtocolError(
                f"Sequence {source} has {origin.length} tokens and {destination} takes {row.max_length}; "
                f"{length} cannot be forked."
            )
        if length == 0:
            return
        self._empty(row)
        self._check_reach(origin, length, "forked")
        if self._layout.object_parts and length != origin.length:
            raise StepFailed(
                f"Sequence {source} is recurrent and stands at {origin.length} tokens; "
                f"it can only be forked there, not at {length}."
            )
        if take:
            self._take(origin, row, length)
            return
        row.length, row.bases = length, dict(origin.bases)
        try:
            self._copy(origin, row)
        except BaseException:
            self._empty(row)
            raise

    def _copy(self, origin: Row, row: Row) -> None:
        if origin.states is not None:
            row.states = RowStates(JoinedStates(origin.states.alone(self._layout.object_parts), 1), 0)
        bank = self._banks.place_alone(row, 1)
        if origin.bank is not None:
            bank.take_copy(row, origin.bank, origin.slot)

    def _take(self, origin: Row, row: Row, length: int) -> None:
        row.length, row.bases, row.states = length, origin.bases, origin.states
        if origin.bank is not None:
            origin.bank.replace(origin, row)
        del self._rows[origin.sequence]

    def traits(self) -> worker_pb2.KvTraits:
        """Return a sequence's KV size here, and its possible cuts; known once a sequence was stepped and freed."""
        windows = self._layout.windows
        return worker_pb2.KvTraits(
            bytes_per_token=self._layout.token_bytes(None),
            bytes_per_sequence=self._state_bytes
            + sum(self._layout.most(window) * self._layout.token_bytes(window) for window in windows),
            recurrent=bool(self._layout.object_parts),
            slack=self._layout.slack if windows else 0,
            exact_length=min((self._layout.keep(window) for window in windows), default=0),
        )

    def read(self, sequence: int, layer: int, heads: Range, tokens: Range) -> tuple[mx.array, ...]:
        """Return copies of a layer's content, `(heads, tokens, width)` each, in temporal order."""
        self._ledger.settle()
        row = self._sound(sequence)
        return read_row(row, row_parts(self._layout.layers[layer]), heads, tokens)

    @property
    def unsaved_layers(self) -> str:
        """Description of the layers whose content cannot be saved; empty if that of all can."""
        kinds = sorted(
            {type(part.prototype).__name__ for part in self._layout.object_parts if not part.copies}
        )
        return f"states of type {' and '.join(kinds)}" if kinds else ""

    def layer_content(self, sequence: int, layer: int, tokens: Range) -> tuple[mx.array, ...]:
        """Return copies of all heads' keys and values of a layer; none if it has no cache of its own."""
        parts = row_parts(self._layout.layers[layer])
        self._ledger.settle()
        return read_row(self._sound(sequence), parts, None, tokens) if parts else ()

    def kinds(self, layer: int) -> list[tuple[str, int, int]]:
        """Return type, heads and width of each array of a layer's content, after a first pass; any thread may call it."""
        planes = row_planes(row_parts(self._layout.layers[layer]))
        return [(dtype_name(plane.dtype), plane.heads, plane.width) for plane in planes]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of the layers with keys and values; None for those that keep every token."""
        return self._layout.kinds

    def layers_with(self, window: int | None) -> list[int]:
        """Return the layers that have keys and values of a window, or of every token."""
        return [n for n, layer in enumerate(self._layout.layers) if parts_with(layer, window)]

    @property
    def layers_with_states(self) -> list[int]:
        return [n for n, layer in enumerate(self._layout.layers) if object_parts(layer.parts)]

    def holds(self, sequence: int, window: int | None, tokens: Range) -> bool:
        """Report whether the layers of a window hold these tokens of a sequence."""
        row = self._sound(sequence)
        return row.base(window) <= tokens[0] and tokens[1] <= row.length

    def content(self, sequence: int, tokens: Range, window: int | None = None) -> list[tuple[mx.array, ...]]:
        """Return copies of all heads' content of every layer, as far as it is of that window."""
        self._ledger.settle()
        row = self._sound(sequence)
        return [read_row(row, parts_with(layer, window), None, tokens) for layer in self._layout.layers]

    def fill(
        self, sequence: int, layer: int, tokens: Range, arrays: Sequence[Any], window: int | None = None
    ) -> None:
        """Write tokens of all heads of a layer, as host arrays of what `content` returns."""
        parts = parts_with(self._layout.layers[layer], window)
        given = [as_stored(array, plane) for array, plane in zip(arrays, row_planes(parts), strict=True)]
        self._ledger.settle()
        write_row(self._sound(sequence), self._banks, self._layout, parts, None, tokens, given)

    def states(self, sequence: int) -> list[tuple[mx.array | None, ...]]:
        """Return copies of every layer's states after the last token of a sequence, `(1, ...)` each."""
        self._ledger.settle()
        row = self._sound(sequence)
        if row.states is None:
            raise StepFailed(f"Sequence {sequence} has no states yet.")
        owned = row.states.owned(self._layout.object_parts).joined.states
        return [
            tuple(array for part in object_parts(layer.parts) for array in owned[part.index].cache)
            for layer in self._layout.layers
        ]

    def fill_states(self, sequence: int, layers: Mapping[int, Sequence[mx.array | None]]) -> None:
        """Set the states of a sequence that is being filled, by layer, as `states` returns them."""
        made = [part.fresh() for part in self._layout.object_parts]
        for layer in self.layers_with_states:
            rest = list(layers[layer])
            for part in object_parts(self._layout.layers[layer].parts):
                count = len(made[part.index].cache)
                made[part.index].cache, rest = rest[:count], rest[count:]
                if len(made[part.index].cache) != count:
                    raise StepFailed(f"The states of layer {layer} are not those that it keeps.")
        self._sound(sequence).states = RowStates(JoinedStates(made, 1), 0)

    def write(
        self, sequence: int, layer: int, heads: Range, tokens: Range, arrays: Sequence[mx.array]
    ) -> None:
        """Write content, as `read` returns it, into a sequence that is being filled.

        Nothing counts before `adopt`. A sliding layer is filled from the first position that it holds.
        """
        self._ledger.settle()
        parts = row_parts(self._layout.layers[layer])
        write_row(self._sound(sequence), self._banks, self._layout, parts, heads, tokens, arrays)

    def adopt(self, sequence: int, length: int) -> None:
        """Count the first `length` tokens as committed: every layer's content has been written."""
        row = self._sound(sequence)
        if self._layout.object_parts and row.states is None:
            raise StepFailed(f"Sequence {sequence} has recurrent layers, whose states were not written.")
        if not row.length <= length <= row.max_length:
            raise StepFailed(f"Sequence {sequence} has {row.length} tokens; {length} cannot be adopted.")
        check_written(row, self._layout.row_parts, length)
        self._check_reach(row, length, "taken over")
        row.length = length
        row.written.clear()

    def batches(self, rows: Sequence[tuple[int, int]]) -> list[Batch]:
        """Group rows, given as (sequence, tokens to append), into forward passes, and make room for them."""
        self._ledger.settle()
        asked = [self._row(sequence) for sequence, _ in rows]
        if len({sequence for sequence, _ in rows}) != len(rows):
            raise ProtocolError(f"A step names a sequence twice: {[sequence for sequence, _ in rows]}.")
        for sequence, count in rows:
            self.check(sequence, count)
        batches = self._assembly.batches(asked, [count for _, count in rows])
        self._ledger.ask(batches)
        return batches

    def stay(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Report whether rows can step together where they are, without copies to make room or to bring them together."""
        asked = [(self._rows[sequence], count) for sequence, count in rows if sequence in self._rows]
        return self._banks.stay([row for row, _ in asked], [count for _, count in asked])

    def begin(self, batch: Batch) -> None:
        """Count a pass's tokens once it is built, so that another pass can be built on top of it."""
        self._ledger.begin(batch)

    def commit(self, batch: Batch) -> None:
        """Commit the tokens of a forward pass to their sequences.

        A batch that has begun was evaluated, and there may be others on top of it.
        """
        self._ledger.commit(batch)

    def undo(self, batches: Sequence[Batch]) -> None:
        """Undo the passes that were built last, whether begun or not, without leaving anything of them."""
        self._ledger.undo(batches)

    def fail(self, batches: Sequence[Batch]) -> None:
        """Handle passes that failed while they were evaluated: restore their sequences, or mark them lost."""
        self._ledger.fail(batches)

    def _row(self, sequence: int) -> Row:
        try:
            row = self._rows[sequence]
        except KeyError:
            raise ProtocolError(f"Sequence {sequence} is not open here.") from None
        return row

    def _sound(self, sequence: int) -> Row:
        row = self._row(sequence)
        if row.lost:
            raise StepFailed(row.lost)
        return row

    def check(self, sequence: int, count: int) -> None:
        """Check that a number of tokens can be appended.

        Raises:
            ProtocolError: the sequence is not open, is retained, has no room for them, or they are none.
            StepFailed: its content is lost, or is being filled from outside.
        """
        row = self._sound(sequence)
        if row.retained:
            raise ProtocolError(f"Sequence {sequence} has ended and is kept for forks; it steps no more.")
        if row.written:
            raise StepFailed(f"Sequence {sequence} is being filled; it steps after it was adopted.")
        if count < 1:
            raise ProtocolError(f"The row of sequence {sequence} has {count} tokens.")
        if row.length + count > row.max_length:
            raise ProtocolError(
                f"Sequence {sequence} has {row.length} tokens and was opened for {row.max_length}; "
                f"{count} more do not fit."
            )

    def _check_reach(self, row: Row, length: int, what: str) -> None:
        """Check that sliding layers, which hold a window and some slack, reach back to `length`."""
        if row.lost:
            raise StepFailed(row.lost)
        for window in self._layout.windows:
            if row.base(window) > max(0, length - window + 1):
                raise StepFailed(
                    f"Sequence {row.sequence} cannot be {what} at {length} tokens: a layer with a window of "
                    f"{window} holds tokens from {row.base(window)} to {row.length} only. "
                    "Free it and prefill again."
                )

    def _empty(self, *rows: Row) -> None:
        """Reset to empty sequences that hold nothing."""
        for row in rows:
            if row.states is not None:
                self._state_bytes = max(self._state_bytes, row.states.nbytes)
        self._banks.leave(rows)
        for row in rows:
            row.length, row.bases, row.written, row.states, row.lost = 0, {}, {}, None, ""
