"""Which rows lie in which bank: joining, leaving and making room."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_ring.worker.kv.bank import BLOCK, Bank, Row
from mlx_ring.worker.kv.grouping import SHORT_TOKENS
from mlx_ring.worker.kv.layers import Layout


class Banks:
    """Every bank of a store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._banks: list[Bank] = []

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self._banks)

    def clear(self) -> None:
        """Give all memory back."""
        self._banks.clear()

    def place(self, groups: Sequence[Sequence[Row]]) -> list[Bank]:
        """Bring each group side by side into one bank: the rows that lie elsewhere are copied, once.

        First all rows join, for one that leaves a bank changes the order there; then each bank is put in order,
        which parts no group that is together.
        """
        banks = [self._join(group) for group in groups]
        for bank, group in zip(banks, groups, strict=True):
            bank.gather(group)
        return banks

    def stay(self, rows: Sequence[Row], counts: Sequence[int]) -> bool:
        """Whether rows have room for `counts` more tokens side by side where they lie, or lie nowhere yet."""
        bank = rows[0].bank if rows else None
        if any(row.bank is not bank for row in rows):
            return False
        if bank is None:
            return True
        slots = [row.slot for row in rows]
        if max(slots) - min(slots) >= len(slots):
            return False
        return all(
            row.held(window) + count <= bank.capacities.get(window, 0)
            for window in self._layout.kinds
            for row, count in zip(rows, counts, strict=True)
        )

    def _join(self, group: Sequence[Row]) -> Bank:
        bank = self._target(group)
        strangers = [row for row in group if row.bank is not bank]
        if strangers:
            room = len(bank.rows) + len(strangers)
            if room > bank.slots:
                bank.set_slots(max(room, bank.slots * 3 // 2))
            self.reserve(bank, strangers, [0] * len(strangers))
            for row in strangers:
                bank.take(row)
            self._banks = [bank for bank in self._banks if bank.rows]
        return bank

    def place_alone(self, row: Row, room: int) -> Bank:
        """A bank for a row that lies nowhere yet, with room for so many tokens after those it has."""
        bank = self._new_bank(1)
        self.reserve(bank, [row], [room])
        return bank

    def park(self, row: Row) -> None:
        """Move a row into a bank of its own that has no more room than it needs."""
        source = row.bank
        if source is None:
            return
        bank = self._new_bank(1)
        for window in self._layout.kinds:
            held = row.held(window)
            bank.reserve(window, held, held)
        bank.take(row)
        if not source.rows:
            self._banks.remove(source)

    def reserve(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Room for the rows' tokens and `counts` more in every layer."""
        limit = max(row.max_length for row in [*rows, *bank.rows])
        for window in self._layout.kinds:
            if window is None:
                need = max(row.length + count for row, count in zip(rows, counts, strict=True))
                bank.reserve(None, need, limit)
            else:
                need = self._slide(bank, rows, counts, window)
                bank.reserve(window, need, min(limit, self._layout.most(window)))

    def _slide(self, bank: Bank, rows: Sequence[Row], counts: Sequence[int], window: int) -> int:
        """Shift down the rows whose slots are full; the capacity that all of them need."""
        most = self._layout.most(window)
        needs = [0]
        for row, count in zip(rows, counts, strict=True):
            if row.bank is bank and row.held(window) + count > most:
                bank.shift(row, window)
            needs.append(min(most, row.held(window) + count))
        return max(needs)

    def leave(self, row: Row) -> None:
        """Take a row out of its bank; a bank without rows is dropped."""
        bank = row.bank
        if bank is not None:
            bank.remove(row)
            if not bank.rows:
                self._banks.remove(bank)

    def _target(self, group: Sequence[Row]) -> Bank:
        """The bank with most of the group's tokens, unless its slots are far too long for the others."""
        banks = list({id(row.bank): row.bank for row in group if row.bank is not None}.values())
        if len(group) == 1 and banks:
            return banks[0]
        longest = 4 * (max(row.length for row in group) + BLOCK)
        fitting = [bank for bank in banks if bank.capacities.get(None, 0) <= max(SHORT_TOKENS, longest)]
        if not fitting:
            return self._new_bank(len(group))
        return max(fitting, key=lambda bank: sum(row.length + 1 for row in group if row.bank is bank))

    def _new_bank(self, slots: int) -> Bank:
        bank = Bank(self._layout)
        bank.set_slots(slots)
        self._banks.append(bank)
        return bank
