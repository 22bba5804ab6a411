"""Random interleavings of all operations, compared with plain lists of tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tests.examples import examples
from tests.worker.kv.passes import HEADS, feed, to_list, visible_keys

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv import Batch, KVStore
from mlx_ring.worker.kv.bank_memory import STEP_BYTES

pytestmark = pytest.mark.usefixtures("writing")

WINDOW = 12
SLACK = 8
WINDOWS = (None, WINDOW, None)
COUNTS = st.sampled_from([1, 1, 1, 2, 5, 17, 40, 90, 300])


class Interleavings(RuleBasedStateMachine):
    STEP_BYTES = STEP_BYTES

    def __init__(self) -> None:
        super().__init__()
        caches: list[Any] = [KVCache(), RotatingKVCache(WINDOW), KVCache()]
        self.store = KVStore(caches, mx.float32, slack=SLACK, step_bytes=self.STEP_BYTES)
        self.tokens: dict[int, list[int]] = {}
        self.reached: dict[int, int] = {}
        """Most tokens that each sequence has had, from which sliding layers can be rolled back."""
        self.fresh = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    @precondition(lambda self: len(self.tokens) < 6)
    def open(self) -> None:
        self.store.open(self.fresh, 2000)
        self.tokens[self.fresh] = []
        self.reached[self.fresh] = 0
        self.fresh += 1

    @rule(limit=st.integers(1, 1 << 20) | st.none())
    def limit(self, limit: int | None) -> None:
        self.store.limit(limit)

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def append(self, data: st.DataObject) -> None:
        for sequences, rows, batch in self.draw_batches(data):
            fetched = feed(batch, rows)
            masks = [
                cache.make_mask(max(batch.counts), window_size=window)
                for cache, window in zip(batch.caches, WINDOWS, strict=True)
            ]
            mx.eval(fetched, *batch.arrays)
            for place, index in enumerate(batch.rows):
                have = self.tokens[sequences[index]] + rows[index]
                for layer, window in enumerate(WINDOWS):
                    self.check(fetched[layer], masks[layer], batch, place, have, layer, window)
                self.tokens[sequences[index]] = have
                self.reached[sequences[index]] = max(self.reached[sequences[index]], len(have))
            self.store.commit(batch)

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def append_without_commit(self, data: st.DataObject) -> None:
        for _, rows, batch in self.draw_batches(data):
            feed(batch, rows)

    def draw_batches(self, data: st.DataObject) -> list[tuple[list[int], list[list[int]], Batch]]:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        counts = [data.draw(COUNTS) for _ in sequences]
        if data.draw(st.booleans()):
            counts = [counts[0]] * len(counts)
        fitting = [
            (sequence, count)
            for sequence, count in zip(sequences, counts, strict=True)
            if len(self.tokens[sequence]) + count <= 2000
        ]
        rows = [
            [sequence * 20 + 7 * (len(self.tokens[sequence]) + step) % 97 + 1 for step in range(count)]
            for sequence, count in fitting
        ]
        names = [sequence for sequence, _ in fitting]
        return [(names, rows, batch) for batch in self.store.batches(fitting)]

    def check(
        self,
        fetched: list[mx.array],
        mask: Any,
        batch: Batch,
        place: int,
        have: list[int],
        layer: int,
        window: int | None,
    ) -> None:
        keys, values = fetched
        queries, length = max(batch.counts), keys.shape[2]
        rows = to_list(keys[place, HEADS - 1, :, 0])
        assert mx.array_equal(keys, -values)
        count = batch.counts[place]
        for query in {0, count // 2, count - 1}:
            position = len(have) - count + query
            first = 0 if window is None else max(0, position - window + 1)
            shown = visible_keys(mask, query, queries, length, place)
            got = [key for key, shows in zip(rows, shown, strict=True) if shows]
            assert got == [token + 10_000 * layer for token in have[first : position + 1]]

    @rule(data=st.data(), back=st.integers(0, 3 * SLACK))
    @precondition(lambda self: self.tokens)
    def trim(self, data: st.DataObject, back: int) -> None:
        sequence = self.pick(data)
        length = max(0, len(self.tokens[sequence]) - back)
        if not self.shorten(sequence, length, lambda: self.store.trim(sequence, length)):
            return
        self.tokens[sequence] = self.tokens[sequence][:length]
        if length == 0:
            self.reached[sequence] = 0

    @rule(data=st.data(), back=st.integers(0, 2 * SLACK))
    @precondition(lambda self: self.tokens and len(self.tokens) < 6)
    def fork(self, data: st.DataObject, back: int) -> None:
        source = self.pick(data)
        length = max(0, len(self.tokens[source]) - back)
        self.open()
        branch = self.fresh - 1
        if self.shorten(source, length, lambda: self.store.fork(source, branch, length)):
            self.tokens[branch] = self.tokens[source][:length]
            self.reached[branch] = self.reached[source] if length else 0

    def shorten(self, sequence: int, length: int, operation: Any) -> bool:
        """Shorten a sequence: within the slack and to zero tokens it must succeed, beyond that it may be refused."""
        if length == 0 or length >= self.reached[sequence] - SLACK:
            operation()
            return True
        try:
            operation()
        except StepFailed:
            return False
        return True

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.store.free(sequence)
        del self.tokens[sequence]

    @rule(data=st.data())
    @precondition(lambda self: self.tokens)
    def retain_and_free_several(self, data: st.DataObject) -> None:
        ended = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True))
        for sequence in ended:
            self.store.retain(sequence)
        for sequence in ended:
            tokens = self.tokens.pop(sequence)
            if tokens:
                keys, values = self.store.read(sequence, 2, (0, HEADS), (0, len(tokens)))
                assert to_list(keys[1, :, 0]) == [token + 20_000 for token in tokens]
                assert mx.array_equal(keys, -values)
        self.store.free(*ended)

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.tokens.clear()

    @invariant()
    def lengths_agree(self) -> None:
        for sequence, tokens in self.tokens.items():
            assert self.store.length(sequence) == len(tokens)

    @invariant()
    def without_sequences_no_bytes_are_held(self) -> None:
        if not self.tokens:
            assert self.store.nbytes == 0

    def teardown(self) -> None:
        for sequence in list(self.tokens):
            self.store.free(sequence)
        assert self.store.nbytes == 0


class GradualInterleavings(Interleavings):
    """Interleavings with banks that change one array in a step."""

    STEP_BYTES = 1


SETTINGS = examples(0.4, stateful_step_count=30)
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = SETTINGS
TestGradualInterleavings = GradualInterleavings.TestCase
TestGradualInterleavings.settings = SETTINGS
pytestmark = pytest.mark.timeout(240)
