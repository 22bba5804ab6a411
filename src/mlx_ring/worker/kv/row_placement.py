"""Placement of rows in banks: joining, leaving and making room."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_ring.worker.kv.bank import Bank, Row
from mlx_ring.worker.kv.grouping import BLOCK, SHORT_TOKENS, Growth
from mlx_ring.worker.kv.layers import Layout


class Banks:
    """Banks of a store."""

    def __init__(self, layout: Layout, growth: Growth) -> None:
        self._layout = layout
        self._growth = growth
        self._banks: list[Bank] = []

    @property
    def nbytes(self) -> int:
        return sum(bank.memory.nbytes for bank in self._banks)

    @property
    def target_bytes(self) -> int:
        """Bytes of all banks at their target sizes."""
        return sum(bank.memory.target_bytes for bank in self._banks)

    def clear(self) -> None:
        """Free all memory."""
        self._banks.clear()

    def place(self, groups: Sequence[Sequence[Row]]) -> list[tuple[Bank, list[Row]]]:
        """Bring each group side by side into one bank. Rows that lie elsewhere are copied once.

        If a bank has no room yet for those that join, they stay separate until it has grown.

        First all rows join, because a row that leaves a bank changes the order there. Then each bank is put in order,
        which separates no group.
        """
        placed = [place for group in groups for place in self._join(group)]
        self._banks = [bank for bank in self._banks if bank.rows]
        for bank, group in placed:
            bank.gather(group)
        return placed

    def stay(self, rows: Sequence[Row], counts: Sequence[int]) -> bool:
        """Report whether rows have room for `counts` more tokens side by side in their bank, or have no bank yet."""
        bank = rows[0].bank if rows else None
        if any(row.bank is not bank for row in rows):
            return False
        if bank is None:
            return True
        slots = [row.slot for row in rows]
        if max(slots) - min(slots) >= len(slots) or bank.memory.is_changing:
            return False
        return not any(
            bank.memory.grows(window, row.held(window) + count, self._limit(bank, window))
            for window in self._layout.kinds
            for row, count in zip(rows, counts, strict=True)
        )

    def _join(self, group: Sequence[Row]) -> list[tuple[Bank, list[Row]]]:
        bank = self._target(group)
        if bank.memory.is_changing:
            bank.memory.continue_resizing()
        residents = [row for row in group if row.bank is bank]
        strangers = [row for row in group if row.bank is not bank]
        limits = {window: self._limit(bank, window, strangers) for window in self._layout.kinds}
        if strangers and not bank.make_room(strangers, limits):
            return [(bank, residents), *self._apart(strangers)]
        for row in strangers:
            bank.take(row)
        return [(bank, list(group))]

    def _apart(self, rows: Sequence[Row]) -> list[tuple[Bank, list[Row]]]:
        """Group rows by their banks; those without a bank get one."""
        banks = {id(row.bank): row.bank for row in rows if row.bank is not None}.values()
        placed = [(bank, [row for row in rows if row.bank is bank]) for bank in banks]
        homeless = [row for row in rows if row.bank is None]
        return [*placed, *self._join(homeless)] if homeless else placed

    def place_alone(self, row: Row, room: int) -> Bank:
        """Place a row in a new bank, with room for a number of further tokens."""
        bank = self._new_bank(1)
        self.reserve(bank, [row], [room])
        return bank

    def retain(self, row: Row) -> None:
        """Move a row into a bank of its own that has no more room than it needs."""
        source = row.bank
        if source is None or self._is_exact(source, row):
            return
        bank = self._new_bank(1)
        for window in self._layout.kinds:
            held = row.held(window)
            bank.memory.reserve(window, held, held)
        bank.take(row)
        if not source.rows:
            self._banks.remove(source)

    def _is_exact(self, bank: Bank, row: Row) -> bool:
        """Return True if a bank has one row, and no more room than that needs."""
        memory = bank.memory
        return (
            bank.rows == [row]
            and memory.slots == memory.target_slots == 1
            and all(
                row.held(window) == memory.capacity(window) == memory.target_capacity(window)
                for window in self._layout.kinds
            )
        )

    def reserve(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Make room for the rows' tokens and `counts` more in every layer, for a row alone also for its next ones."""
        alone = rows[0] if len(rows) == 1 and all(row is rows[0] for row in bank.rows) else None
        for window in self._layout.kinds:
            if window is None:
                need = max(row.length + count for row, count in zip(rows, counts, strict=True))
            else:
                need = self._slide(bank, rows, counts, window)
            limit = self._limit(bank, window, rows)
            soon = 0 if alone is None else min(limit, alone.fill_length)
            bank.memory.reserve(window, need, limit, max(counts), soon)

    def _limit(self, bank: Bank, window: int | None, rows: Sequence[Row] = ()) -> int:
        """Return the most tokens that a slot will ever hold, for present and joining rows."""
        longest = max(row.max_length for row in [*rows, *bank.rows])
        return longest if window is None else min(longest, self._layout.most(window))

    def _slide(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int], window: int) -> int:
        """Shift the rows whose slots are full. Return the capacity that all of them need."""
        most = self._layout.most(window)
        needs = [0]
        for row, count in zip(rows, counts, strict=True):
            if row.bank is bank and row.held(window) + count > most:
                bank.shift(row, window)
            needs.append(min(most, row.held(window) + count))
        return max(needs)

    def leave(self, row: Row) -> None:
        """Remove a row from its bank; drop a bank without rows."""
        bank = row.bank
        if bank is not None:
            bank.remove(row)
            if not bank.rows:
                self._banks.remove(bank)

    def _target(self, group: Sequence[Row]) -> Bank:
        """Return the bank with most of the group's tokens, unless its slots are far too long for the others."""
        banks = list({id(row.bank): row.bank for row in group if row.bank is not None}.values())
        if len(group) == 1 and banks:
            return banks[0]
        longest = 4 * (max(row.length for row in group) + BLOCK)
        fitting = [bank for bank in banks if bank.memory.capacity(None) <= max(SHORT_TOKENS, longest)]
        if not fitting:
            return self._new_bank(len(group))
        return max(fitting, key=lambda bank: sum(row.length + 1 for row in group if row.bank is bank))

    def _new_bank(self, slots: int) -> Bank:
        bank = Bank(self._layout, slots, self._growth)
        self._banks.append(bank)
        return bank
