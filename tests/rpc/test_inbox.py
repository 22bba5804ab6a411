"""Waiting in an inbox, and the ends of waits."""

from __future__ import annotations

import threading

import pytest
from tests.rpc.receivers import TENSOR, key

from mlx_ring.core.errors import LinkLost, NotReady, ProtocolError, StaleMessage, WorkerLost, WorkerStuck
from mlx_ring.rpc import links
from mlx_ring.rpc.links import HIDDEN, SAMPLED, Inbox, LinkKey
from mlx_ring.rpc.protos import worker_pb2


@pytest.mark.parametrize("purpose", [HIDDEN, SAMPLED])
def test_a_message_of_a_later_epoch_is_dropped(inbox: Inbox, purpose: worker_pb2.Activation.Purpose) -> None:
    inbox.put(LinkKey("demo", 2, 5, purpose), TENSOR)
    inbox.advance(2)
    assert not inbox.holds(LinkKey("demo", 2, 5, purpose))
    inbox.put(LinkKey("demo", 2, 5, purpose), TENSOR)
    assert inbox.holds(LinkKey("demo", 2, 5, purpose))


@pytest.mark.parametrize("purpose", [HIDDEN, SAMPLED])
@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1024, 3 * 24)])
def test_a_sender_is_refused_when_too_many_messages_wait(
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    purpose: worker_pb2.Activation.Purpose,
    most: int,
    most_bytes: int,
) -> None:
    monkeypatch.setattr(links, "_MOST_WAITING", most)
    monkeypatch.setattr(links, "_MOST_WAITING_BYTES", most_bytes)
    for step in (1, 2, 3):
        inbox.put(LinkKey("demo", 1, step, purpose), TENSOR)
    with pytest.raises(ProtocolError, match="4 messages of 96 bytes wait on a link"):
        inbox.put(LinkKey("demo", 1, 4, purpose), TENSOR)
    inbox.recv(LinkKey("demo", 1, 1, purpose))
    inbox.put(LinkKey("demo", 1, 4, purpose), TENSOR)


def test_a_wait_past_its_deadline_names_its_step(inbox: Inbox) -> None:
    with pytest.raises(WorkerStuck, match="demo epoch 1 step 9"):
        inbox.recv(key(9), deadline=0.0)


def test_a_new_epoch_ends_waits_for_the_old_one(inbox: Inbox) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            inbox.recv(key(1))
        except StaleMessage as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    inbox.advance(2)
    waiter.join(timeout=10)
    assert [type(error) for error in errors] == [StaleMessage]


def test_messages_before_a_lost_link_can_still_be_received(inbox: Inbox) -> None:
    inbox.put(key(1), TENSOR)
    inbox.break_off(WorkerLost("stage 0 was lost"))
    assert inbox.recv(key(1)) is TENSOR
    with pytest.raises(WorkerLost, match="stage 0 was lost"):
        inbox.recv(key(2))


def test_a_new_sender_ends_the_loss_of_the_one_before_but_no_other_error(inbox: Inbox) -> None:
    first = inbox.admit()
    assert first.break_off(LinkLost("The first sender ended."))
    with pytest.raises(LinkLost, match="The first sender ended"):
        inbox.recv(key(1))
    second = inbox.admit()
    assert not inbox.holds(key(1))
    assert not first.break_off(LinkLost("The first sender ended again."))
    second.put(key(1), TENSOR)
    assert inbox.recv(key(1)) is TENSOR
    # A worker that is prepared for other neighbours drops its steps, whoever links meanwhile.
    inbox.break_off(NotReady("It is being linked."))
    inbox.admit()
    with pytest.raises(NotReady, match="It is being linked"):
        inbox.recv(key(2), deadline=0.0)


def test_holds_waits_for_a_message_until_its_timeout_or_an_error(inbox: Inbox) -> None:
    assert not inbox.holds(key(1))
    assert not inbox.holds(key(1), wait_s=1e-3)
    sender = threading.Thread(target=inbox.put, args=(key(1), TENSOR))
    sender.start()
    assert inbox.holds(key(1), wait_s=60.0)
    sender.join()
    inbox.break_off(WorkerLost("lost"))
    assert inbox.holds(key(2), wait_s=60.0), "an error ends the wait too"
