"""Contract of every kind of link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.rpc.receivers import TENSOR, key, serve
from tests.worker.collective.pairs import KINDS, ForwardingInbox, joined_pair
from tests.worker.in_process_link import InProcessLink

from mlx_ring.core.errors import StaleMessage, StepFailed, WorkerStuck
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import SAMPLED, GrpcLink, Inbox, LinkKey, LinkSender, WireTensor


@pytest.fixture(scope="module")
def collectives() -> Iterator[Callable[[str, Inbox], LinkSender]]:
    """Return a function that lets a pair of a kind deliver to an inbox; each pair is started once."""
    started: dict[str, tuple[LinkSender, ForwardingInbox]] = {}
    with ExitStack() as stack:

        def into(kind: str, inbox: Inbox) -> LinkSender:
            if kind not in started:
                forwarding = ForwardingInbox()
                started[kind] = stack.enter_context(joined_pair(kind, forwarding)), forwarding
            pair, forwarding = started[kind]
            forwarding.target = inbox
            return pair

        yield into


@pytest.fixture(params=["in process", "grpc over a Unix socket", "grpc over TCP", *KINDS])
def link(
    request: pytest.FixtureRequest,
    inbox: Inbox,
    tmp_path: Path,
    collectives: Callable[[str, Inbox], LinkSender],
) -> Iterator[LinkSender]:
    if request.param in KINDS:
        yield collectives(request.param, inbox)
        return
    if request.param == "in process":
        yield InProcessLink(inbox)
        return
    unix = f"unix:{tmp_path}/s"
    server, port = serve(inbox, unix if "Unix" in request.param else "127.0.0.1:0")
    sender = GrpcLink(unix if "Unix" in request.param else f"127.0.0.1:{port}", make_hello())
    yield sender
    sender.close()
    server.stop(None).wait()


def test_a_tensor_arrives_with_its_bytes_shape_and_tokens(link: LinkSender, inbox: Inbox) -> None:
    link.send(key(1), TENSOR)
    got = inbox.recv(key(1))
    assert (got.dtype, got.shape, bytes(got.data), got.tokens) == ("float32", (2, 3), TENSOR.data, (7, 8))


def test_a_tensor_arrives_bit_for_bit(link: LinkSender, inbox: Inbox) -> None:
    """Send negative zero, a signalling NaN, a denormal number and infinity, which a sum of floats would change."""
    odd = b"".join(
        number.to_bytes(4, "little") for number in (0x80000000, 0x7FA00001, 1, 0x7F800000, 0xFFFFFFFF, 0)
    )
    link.send(key(8), WireTensor("float32", (2, 3), odd))
    assert bytes(inbox.recv(key(8)).data) == odd


def test_messages_are_taken_by_key_and_those_of_passed_steps_are_dropped(
    link: LinkSender, inbox: Inbox
) -> None:
    for step in (1, 2, 3):
        link.send(key(step), WireTensor("float32", (1, 3), bytes([step] * 12)))
    assert [bytes(inbox.recv(key(step)).data)[0] for step in (1, 3)] == [1, 3]
    with pytest.raises(WorkerStuck):
        inbox.recv(key(2), deadline=0.0)


def test_a_tombstone_ends_the_wait_with_the_steps_error(link: LinkSender, inbox: Inbox) -> None:
    link.send_failure(key(4), error_to_failure(StepFailed("matmul went wrong")))
    with pytest.raises(StepFailed, match="matmul went wrong"):
        inbox.recv(key(4))


def test_an_older_epochs_message_is_dropped(link: LinkSender, inbox: Inbox) -> None:
    inbox.advance(2)
    link.send(key(5, epoch=1), TENSOR)
    link.send(key(5, epoch=2), TENSOR)
    assert inbox.recv(key(5, epoch=2)).shape == (2, 3)
    with pytest.raises(StaleMessage, match="epoch 2 is in force"):
        inbox.recv(key(5, epoch=1))


def test_a_large_tensor_arrives_whole(link: LinkSender, inbox: Inbox) -> None:
    data = bytes(range(256)) * (3 << 14)
    link.send(key(6), WireTensor("float32", (len(data) // 12, 3), data))
    assert bytes(inbox.recv(key(6)).data) == data


def test_sampled_tokens_do_not_mix_with_activations(link: LinkSender, inbox: Inbox) -> None:
    link.send(LinkKey("demo", 1, 7, SAMPLED), WireTensor("uint32", (0,), b"", (42,)))
    link.send(key(7), TENSOR)
    assert inbox.recv(key(7)).shape == (2, 3)
    assert inbox.holds(LinkKey("demo", 1, 7, SAMPLED), wait_s=60.0)
    assert [
        message.tokens for _, message in inbox.take_arrived(SAMPLED) if isinstance(message, WireTensor)
    ] == [(42,)]
    assert inbox.take_arrived(SAMPLED) == []


def test_tokens_of_a_later_step_can_be_received_first(link: LinkSender, inbox: Inbox) -> None:
    earlier, later = (LinkKey("demo", 1, step, SAMPLED) for step in (1, 2))
    for sampled in (earlier, later):
        link.send(sampled, WireTensor("uint32", (0,), b"", (sampled.step,)))
    assert inbox.recv(later).tokens == (2,)
    assert inbox.recv(earlier, deadline=0.0).tokens == (1,)
