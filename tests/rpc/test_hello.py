from __future__ import annotations

import pytest

from mlx_ring.core.errors import StaleMessage, VersionMismatch
from mlx_ring.rpc.hello import check_hello, make_hello


def test_equal_greetings_are_accepted() -> None:
    check_hello(make_hello(instance="a", epoch=2), make_hello(instance="a", epoch=1), "the head")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("protocol", 99, "speaks protocol 99.*install the same mlx-ring"),
        ("mlx_ring", "0.0.1", "mlx-ring 0.0.1.*install mlx-ring"),
        ("mlx", "0.1", "mlx 0.1.*install mlx"),
        ("mlx_lm", "0.2", "mlx-lm 0.2.*install mlx-lm"),
        ("model_digest", "bbb", "model digest bbb, this side aaa"),
        ("plan_digest", "bbb", "plan digest bbb, this side aaa"),
    ],
)
def test_what_differs_is_named_with_the_mend(field: str, value: int | str, message: str) -> None:
    ours = make_hello(model_digest="aaa", plan_digest="aaa")
    theirs = make_hello(model_digest="aaa", plan_digest="aaa")
    setattr(theirs, field, value)
    with pytest.raises(VersionMismatch, match=message):
        check_hello(theirs, ours, "node b")


def test_an_absent_digest_is_not_compared() -> None:
    check_hello(make_hello(), make_hello(model_digest="aaa"), "the head")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"instance": "a"}, {"instance": "b"}, "instance a, this side serves b"),
        ({"epoch": 1}, {"epoch": 2}, "epoch 1, epoch 2 is in force"),
        ({"fencing_id": 3}, {"fencing_id": 4}, "head 3; head 4 has taken over"),
    ],
)
def test_a_peer_of_the_past_is_refused(
    theirs: dict[str, str | int], ours: dict[str, str | int], message: str
) -> None:
    with pytest.raises(StaleMessage, match=message):
        check_hello(make_hello(**theirs), make_hello(**ours), "node b")  # pyright: ignore[reportArgumentType] - keyword sets vary
