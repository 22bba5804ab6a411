"""How often a stranger may be wrong."""

from __future__ import annotations

from mlx_ring.cluster.security.enrolment import TryLimit


def test_a_host_may_try_a_few_times_and_then_as_fast_as_tries_come_back() -> None:
    limit = TryLimit(burst=3, per_second=0.5)
    assert [limit.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.take("a", 2.0) for _ in range(2)] == [True, False]


def test_a_long_silence_gives_no_more_than_the_burst() -> None:
    limit = TryLimit(burst=2, per_second=1.0)
    limit.take("a", 0.0)
    assert [limit.take("a", 1e6) for _ in range(3)] == [True, True, False]


def test_a_right_try_counts_for_nothing() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    for _ in range(10):
        assert limit.take("a", 0.0)
        limit.give_back("a")


def test_one_host_s_tries_are_not_another_s() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert limit.take("192.168.1.7", 0.0)
    assert not limit.take("192.168.1.7", 0.0)
    assert limit.take("192.168.1.8", 0.0)


def test_a_host_cannot_have_more_by_changing_its_ipv6_address() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert limit.take("2001:db8::1", 0.0)
    assert not limit.take("2001:db8::ffff:2", 0.0)
    assert limit.take("2001:db8:0:1::1", 0.0)
    assert limit.take("::ffff:192.168.1.7", 0.0)
    assert not limit.take("192.168.1.7", 0.0)


def test_no_more_hosts_are_remembered_than_told() -> None:
    limit = TryLimit(burst=1, per_second=0.0, addresses=2)
    for host in "abc":
        assert limit.take(host, 0.0)
    assert limit.take("a", 0.0)
    assert not limit.take("c", 0.0)
