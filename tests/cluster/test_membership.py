"""Membership as a fold over events in any order that a network allows."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import made_up_profile

from mlx_ring.cluster.membership import Event, Joined, Member, Membership, Reported, SessionEnded


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
    membership = Membership()
    for event in events:
        membership = membership.apply(event)
    return membership


def test_a_node_reaches_a_link_local_address_through_its_own_interface_to_the_head() -> None:
    seen = replace(member("a", 1), host="fe80::a%12", head_host="fe80::1%en3")
    over_ipv4, over_cable = member("b", 2), replace(member("b", 2), head_host="fe80::1%en5")
    assert over_cable.host_of(seen) == "fe80::a%en5"
    assert over_ipv4.host_of(seen) == "fe80::a%12", "the link is then reported as broken"
    assert over_cable.host_of(over_ipv4) == "10.0.0.2"


def test_a_node_is_a_member_until_it_leaves_with_a_reason() -> None:
    assert set(after(Joined(member("a", 1)), Joined(member("b", 2))).members) == {"a", "b"}
    membership = after(Joined(member("a", 1)), SessionEnded("a", 1, "it was cut off"))
    assert not membership.members
    assert {node: former.reason for node, former in membership.former.items()} == {"a": "it was cut off"}


def test_a_reconnected_node_replaces_its_session() -> None:
    membership = after(
        Joined(member("a", 1)), Joined(member("a", 2)), SessionEnded("a", 1, "the old call ended late")
    )
    assert membership.members["a"].session == 2
    assert not membership.former
    again = after(Joined(member("a", 1)), SessionEnded("a", 1, "it was cut off"), Joined(member("a", 2)))
    assert not again.former


def test_events_of_a_replaced_session_change_nothing() -> None:
    membership = after(Joined(member("a", 1)), Joined(member("a", 2)), Reported("a", 1, 7))
    assert membership.members["a"].memory_free_bytes == 0
    assert after(Reported("a", 1, 7)) == Membership()


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["join", "report", "leave"]), st.integers(1, 9)),
    max_size=30,
)


@given(STEPS)
def test_each_node_is_either_a_member_or_a_former_one(events: list[tuple[str, str, int]]) -> None:
    membership, serial = Membership(), 0
    for node, kind, number in events:
        if kind == "join":
            serial += 1
            membership = membership.apply(Joined(member(node, serial)))
        elif kind == "report":
            membership = membership.apply(Reported(node, number, number))
        else:
            membership = membership.apply(SessionEnded(node, number, "it left"))
        assert not set(membership.members) & set(membership.former)
        assert all(name == current.node for name, current in membership.members.items())
