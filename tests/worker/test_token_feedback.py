"""Sampled tokens as stage 0 files them, in whatever order they come."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_ring.core.errors import ProtocolError, RequestError, StepFailed, WorkerStuck
from mlx_ring.rpc.links import SAMPLED, Inbox, LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.sequences import SequenceTable, TokenFeedback


class Stage0:
    """An inbox, a table with two sequences, and the tokens that arrive for them."""

    def __init__(self) -> None:
        self.inbox = Inbox("test", 1)
        self.table = SequenceTable(KVStore([KVCache()], mx.float32), 100)
        opened = [step_pb2.Open(sequence=sequence, max_length=9) for sequence in (1, 2)]
        self.table.apply([step_pb2.CacheOperation(open=each) for each in opened])
        self.handover = TokenFeedback(self.inbox, self.table)

    def arrive(self, step: int, *tokens: int, failure: step_pb2.Failure | None = None) -> None:
        self.inbox.put(key(step), WireTensor("uint32", (0,), b"", tokens, failure))


def key(step: int) -> LinkKey:
    return LinkKey("test", 1, step, SAMPLED)


@pytest.fixture
def stage() -> Stage0:
    return Stage0()


def test_a_token_is_there_once_its_step_has_said_so(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1, 2])
    assert not stage.handover.has(1)
    stage.arrive(1, 7, 8)
    assert stage.handover.has(1)
    assert [stage.handover.token(sequence) for sequence in (1, 2)] == [7, 8]


def test_a_token_of_an_earlier_step_never_stands_for_a_later_one(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1])
    stage.handover.expect(key(2), [1])
    stage.arrive(1, 7)
    assert not stage.handover.has(1)
    with pytest.raises(ProtocolError, match="No sampled token was handed over for sequence 1"):
        stage.handover.token(1)
    stage.arrive(2, 8)
    stage.handover.wait(1, None)
    assert stage.handover.token(1) == 8


def test_a_token_that_was_there_is_old_as_soon_as_another_is_expected(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1])
    stage.arrive(1, 7)
    assert stage.handover.has(1)
    stage.handover.expect(key(2), [1])
    assert not stage.handover.has(1)


def test_a_row_that_failed_downstream_gets_the_reason_and_the_others_get_their_tokens(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1, 2])
    failure = step_pb2.Failure(kind="RequestError", message="no such thing", sequences=[1, 9])
    stage.arrive(1, 8, failure=failure)
    assert stage.handover.has(2)
    assert not stage.handover.has(1)
    with pytest.raises(RequestError, match="no such thing"):
        stage.handover.token(1)


def test_what_befell_a_row_is_forgotten_when_it_is_sampled_for_again(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1])
    stage.arrive(1, failure=step_pb2.Failure(kind="StepFailed", message="gone", sequences=[1]))
    stage.handover.collect()
    stage.handover.expect(key(2), [1])
    stage.arrive(2, 5)
    assert stage.handover.has(1)
    assert stage.handover.token(1) == 5


def test_a_step_that_failed_leaves_no_token_and_nobody_waits_for_it(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1])
    stage.inbox.put(key(1), StepFailed("it broke"))
    stage.handover.wait(1, None)
    with pytest.raises(ProtocolError, match="No sampled token"):
        stage.handover.token(1)


def test_a_wait_ends_at_its_deadline(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1])
    with pytest.raises(WorkerStuck, match="test epoch 1 step 1"):
        stage.handover.wait(1, 0.0)


def test_tokens_that_nobody_expects_are_passed_over(stage: Stage0) -> None:
    stage.arrive(5, 1, 2, 3)
    stage.handover.collect()
    assert not stage.handover.has(1)


def test_a_number_of_tokens_that_does_not_fit_is_refused(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1, 2])
    stage.arrive(1, 7)
    with pytest.raises(ProtocolError, match="1 tokens were handed over for 2 sequences"):
        stage.handover.collect()


def test_sequences_that_were_freed_in_the_meantime_get_nothing(stage: Stage0) -> None:
    stage.handover.expect(key(1), [1, 2])
    stage.table.apply([step_pb2.CacheOperation(free=step_pb2.Free(sequence=1))])
    stage.arrive(1, 7, 8)
    stage.handover.collect()
    assert stage.handover.token(2) == 8
