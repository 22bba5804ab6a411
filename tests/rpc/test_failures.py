from __future__ import annotations

import grpc
import pytest

from mlx_ring.core import errors
from mlx_ring.rpc.failures import channel_error, error_to_failure, failure_to_error
from mlx_ring.rpc.protos import step_pb2


@pytest.mark.parametrize(
    "error",
    [
        errors.StepFailed("a"),
        errors.WorkerLost("b"),
        errors.ModelCorrupt("c"),
        errors.PlanError("d"),
        errors.ProtocolError("e"),
        errors.RequestError("f", param="x"),
    ],
)
def test_an_error_keeps_its_class_and_message(error: errors.RingError) -> None:
    back = failure_to_error(error_to_failure(error))
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_a_lost_link_keeps_its_ends_and_blames_nobody() -> None:
    error = errors.LinkLost("The link broke.").between("mini-1", "mini-2").blamed_on("mini-2")
    back = failure_to_error(error_to_failure(error))
    assert isinstance(back, errors.LinkLost)
    assert (str(back), back.ends, back.blamed_on("mini-1").node) == (
        "The link broke.",
        ("mini-1", "mini-2"),
        "",
    )


def test_another_exception_becomes_a_failed_step_that_names_it() -> None:
    back = failure_to_error(error_to_failure(ZeroDivisionError("division by zero"), sequences=[3]))
    assert type(back) is errors.StepFailed
    assert str(back) == "ZeroDivisionError: division by zero"


def test_an_error_with_more_than_a_message_becomes_a_request_error() -> None:
    error = errors.ContextExceeded("too long", prompt_tokens=9, context_tokens=8)
    assert type(failure_to_error(error_to_failure(error))) is errors.RequestError


def test_an_unknown_kind_of_failure_is_a_serving_error() -> None:
    back = failure_to_error(step_pb2.Failure(kind="FromTheFuture", message="hm"))
    assert type(back) is errors.ServingError


@pytest.mark.parametrize(
    ("details", "meaning"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:50051: Connection refused (111)",
            "no process listens there",
        ),
        ("recvmsg:Connection reset by peer", "it closed the connection"),
        ("keepalive watchdog timeout", "it does not answer"),
        ("ipv4:10.0.0.7:50051: connect: No route to host (113)", "no network leads there"),
        # From recorded output, not run: errno 65 as in TraceMachina/nativelink#1694 and dharmab/skyeye#566, on the LAN ...
        (
            "ipv4:10.0.0.7:50051: connect: No route to host (65)",
            "macOS has no route there, or its Local Network",
        ),
        (
            "ipv6:%5Bfe80::7%5D:50051: connect: No route to host (65)",
            "macOS has no route there, or its Local",
        ),
        # ... and at an address beyond it, which Local Network privacy does not concern.
        ("ipv4:8.8.8.8:50051: connect: No route to host (65)", "no network leads there"),
    ],
)
def test_a_lost_peer_is_described_without_the_words_of_grpc(details: str, meaning: str) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)
    text = str(channel_error(error, "mini-2"))
    assert text.startswith(f"The connection to mini-2 broke: {meaning}")
    assert "ipv4" not in text


def test_a_cause_that_the_peer_itself_gave_is_kept() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "no timeout is set")
    assert str(channel_error(error, "mini-2")) == "The connection to mini-2 broke: no timeout is set."
    assert str(channel_error(error, "The Beast")) == "The connection to The Beast broke: no timeout is set."
    assert str(channel_error(error, "The head")) == "The connection to the head broke: no timeout is set."
