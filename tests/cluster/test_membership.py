"""Who is there, folded from events in any order that a network allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import made_up_profile

from mlx_ring.cluster.membership import Came, Event, Member, Membership, Told, Went


def member(node: str, came: int) -> Member:
    return Member(
        node=node,
        machine="mini",
        host="10.0.0.2",
        port=4000,
        head_host="10.0.0.1",
        profile=made_up_profile(),
        memory_utilization=0.9,
        came=came,
    )


def after(*events: Event) -> Membership:
    stands = Membership()
    for event in events:
        stands = stands.apply(event)
    return stands


def test_who_came_is_there_until_it_went_and_then_it_is_known_why() -> None:
    assert set(after(Came(member("a", 1)), Came(member("b", 2))).members) == {"a", "b"}
    stands = after(Came(member("a", 1)), Went("a", 1, "it was cut off"))
    assert not stands.members
    assert {node: was.reason for node, was in stands.gone.items()} == {"a": "it was cut off"}


def test_a_node_that_comes_again_leaves_no_ghost() -> None:
    stands = after(Came(member("a", 1)), Came(member("a", 2)), Went("a", 1, "the old call ended late"))
    assert stands.members["a"].came == 2
    assert not stands.gone
    again = after(Came(member("a", 1)), Went("a", 1, "it was cut off"), Came(member("a", 2)))
    assert not again.gone


def test_what_is_said_of_an_attendance_that_was_replaced_changes_nothing() -> None:
    stands = after(Came(member("a", 1)), Came(member("a", 2)), Told("a", 1, 7))
    assert stands.members["a"].memory_free_bytes == 0
    assert after(Told("a", 1, 7)) == Membership()


EVENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["come", "tell", "go"]), st.integers(1, 9)), max_size=30
)


@given(EVENTS)
def test_each_node_is_there_once_or_gone_and_never_both(happened: list[tuple[str, str, int]]) -> None:
    stands, serial = Membership(), 0
    for node, kind, number in happened:
        if kind == "come":
            serial += 1
            stands = stands.apply(Came(member(node, serial)))
        elif kind == "tell":
            stands = stands.apply(Told(node, number, number))
        else:
            stands = stands.apply(Went(node, number, "gone"))
        assert not set(stands.members) & set(stands.gone)
        assert all(name == there.node for name, there in stands.members.items())
