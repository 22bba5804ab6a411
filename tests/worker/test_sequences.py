"""Feedback of sampled tokens to stage 0, in any order of arrival."""

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
    """Inbox, table with two sequences, and feedback of the tokens that arrive for them."""

    def __init__(self) -> None:
        self.inbox = Inbox("test", 1)
        self.table = SequenceTable(KVStore([KVCache()], mx.float32), 100)
        opened = [step_pb2.Open(sequence=sequence, max_length=9) for sequence in (1, 2)]
        self.table.apply([step_pb2.CacheOperation(open=each) for each in opened])
        self.feedback = TokenFeedback(self.inbox, self.table)

    def arrive(self, step: int, *tokens: int, failure: step_pb2.Failure | None = None) -> None:
        self.inbox.put(key(step), WireTensor("uint32", (0,), b"", tokens, failure))


def key(step: int) -> LinkKey:
    return LinkKey("test", 1, step, SAMPLED)


@pytest.fixture
def stage() -> Stage0:
    return Stage0()


def test_token_is_available_once_its_step_has_reported_it(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1, 2])
    assert not stage.feedback.has(1)
    stage.arrive(1, 7, 8)
    assert stage.feedback.has(1)
    assert [stage.feedback.token(sequence) for sequence in (1, 2)] == [7, 8]


def test_token_of_an_earlier_step_is_never_used_for_a_later_one(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1])
    stage.feedback.expect(key(2), [1])
    stage.arrive(1, 7)
    assert not stage.feedback.has(1)
    with pytest.raises(ProtocolError, match="No sampled token was fed back for sequence 1"):
        stage.feedback.token(1)
    stage.arrive(2, 8)
    stage.feedback.wait(1, None)
    assert stage.feedback.token(1) == 8


def test_available_token_is_outdated_once_another_is_expected(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1])
    stage.arrive(1, 7)
    assert stage.feedback.has(1)
    stage.feedback.expect(key(2), [1])
    assert not stage.feedback.has(1)


def test_row_that_failed_downstream_gets_the_error_and_others_get_their_tokens(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1, 2])
    failure = step_pb2.Failure(kind="RequestError", message="no such thing", sequences=[1, 9])
    stage.arrive(1, 8, failure=failure)
    assert stage.feedback.has(2)
    assert not stage.feedback.has(1)
    with pytest.raises(RequestError, match="no such thing"):
        stage.feedback.token(1)


def test_error_of_a_row_is_forgotten_when_it_is_sampled_again(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1])
    stage.arrive(1, failure=step_pb2.Failure(kind="StepFailed", message="lost", sequences=[1]))
    stage.feedback.collect()
    stage.feedback.expect(key(2), [1])
    stage.arrive(2, 5)
    assert stage.feedback.has(1)
    assert stage.feedback.token(1) == 5


def test_failed_step_leaves_no_token_and_ends_the_wait(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1])
    stage.inbox.put(key(1), StepFailed("it broke"))
    stage.feedback.wait(1, None)
    with pytest.raises(ProtocolError, match="No sampled token"):
        stage.feedback.token(1)


@pytest.mark.parametrize("is_collected", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_failure_that_arrives_before_its_step_is_built_ends_the_wait(
    stage: Stage0, times: int, *, is_collected: bool
) -> None:
    stage.inbox.put(key(2), StepFailed("it broke"))
    if is_collected:
        stage.feedback.collect()
    stage.feedback.expect(key(1), [2])
    for _ in range(times):
        # A step that was rolled back is built again.
        stage.feedback.expect(key(2), [1])
        stage.feedback.wait(1, 0.0)
    with pytest.raises(ProtocolError, match="No sampled token"):
        stage.feedback.token(1)
    stage.feedback.expect(key(3), [1])
    stage.arrive(3, 7)
    assert stage.feedback.has(1)


def test_wait_ends_at_its_deadline(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1])
    with pytest.raises(WorkerStuck, match="test epoch 1 step 1"):
        stage.feedback.wait(1, 0.0)


def test_unexpected_tokens_are_ignored(stage: Stage0) -> None:
    stage.arrive(5, 1, 2, 3)
    stage.feedback.collect()
    assert not stage.feedback.has(1)


def test_wrong_number_of_tokens_is_refused(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1, 2])
    stage.arrive(1, 7)
    with pytest.raises(ProtocolError, match="1 tokens were fed back for 2 sequences"):
        stage.feedback.collect()


def test_sequences_freed_meanwhile_get_no_token(stage: Stage0) -> None:
    stage.feedback.expect(key(1), [1, 2])
    stage.table.apply([step_pb2.CacheOperation(free=step_pb2.Free(sequence=1))])
    stage.arrive(1, 7, 8)
    stage.feedback.collect()
    assert stage.feedback.token(2) == 8


def test_sequences_that_are_freed_one_after_the_other_leave_the_kv_together(
    stage: Stage0, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, free = list[tuple[int, ...]](), KVStore.free

    def record(store: KVStore, *sequences: int) -> None:
        freed.append(sequences)
        free(store, *sequences)

    monkeypatch.setattr(KVStore, "free", record)
    operations = [step_pb2.CacheOperation(free=step_pb2.Free(sequence=sequence)) for sequence in (1, 9, 2)]
    failed = stage.table.apply(operations)
    assert freed == [(1, 2)]
    assert {sequence: str(error) for sequence, error in failed.items()} == {9: "Sequence 9 is not open here."}
    assert len(stage.table) == 0
