"""Membership as a fold over events in any order that a network allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import made_up_profile

from mlx_ring.cluster.membership import Event, Joined, Left, Member, Membership, Reported


def member(node: str, session: int) -> Member:
    return Member(
        node=node,
        machine="mini",
        host="10.0.0.2",
        port=4000,
        head_host="10.0.0.1",
        profile=made_up_profile(),
        memory_utilization=0.9,
        session=session,
    )


def after(*events: Event) -> Membership:
    stands = Membership()
    for event in events:
        stands = stands.apply(event)
    return stands


def test_a_node_is_a_member_until_it_leaves_with_a_reason() -> None:
    assert set(after(Joined(member("a", 1)), Joined(member("b", 2))).members) == {"a", "b"}
    stands = after(Joined(member("a", 1)), Left("a", 1, "it was cut off"))
    assert not stands.members
    assert {node: was.reason for node, was in stands.former.items()} == {"a": "it was cut off"}


def test_a_reconnected_node_replaces_its_session() -> None:
    stands = after(Joined(member("a", 1)), Joined(member("a", 2)), Left("a", 1, "the old call ended late"))
    assert stands.members["a"].session == 2
    assert not stands.former
    again = after(Joined(member("a", 1)), Left("a", 1, "it was cut off"), Joined(member("a", 2)))
    assert not again.former


def test_events_of_a_replaced_session_change_nothing() -> None:
    stands = after(Joined(member("a", 1)), Joined(member("a", 2)), Reported("a", 1, 7))
    assert stands.members["a"].memory_free_bytes == 0
    assert after(Reported("a", 1, 7)) == Membership()


EVENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["come", "tell", "go"]), st.integers(1, 9)), max_size=30
)


@given(EVENTS)
def test_each_node_is_either_a_member_or_a_former_one(happened: list[tuple[str, str, int]]) -> None:
    stands, serial = Membership(), 0
    for node, kind, number in happened:
        if kind == "come":
            serial += 1
            stands = stands.apply(Joined(member(node, serial)))
        elif kind == "tell":
            stands = stands.apply(Reported(node, number, number))
        else:
            stands = stands.apply(Left(node, number, "gone"))
        assert not set(stands.members) & set(stands.former)
        assert all(name == there.node for name, there in stands.members.items())
