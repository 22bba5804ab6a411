"""The limit on wrong join requests."""

from __future__ import annotations

from mlx_ring.cluster.security.enrolment import TryLimit


def test_a_host_has_a_burst_of_tries_and_then_the_refill_rate() -> None:
    limit = TryLimit(burst=3, per_second=0.5)
    assert [limit.take("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.take("a", 2.0) for _ in range(2)] == [True, False]


def test_a_long_pause_refills_no_more_than_the_burst() -> None:
    limit = TryLimit(burst=2, per_second=1.0)
    limit.take("a", 0.0)
    assert [limit.take("a", 1e6) for _ in range(3)] == [True, True, False]


def test_a_successful_try_does_not_count() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    for _ in range(10):
        assert limit.take("a", 0.0)
        limit.give_back("a")


def test_tries_are_counted_per_host() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert limit.take("192.168.1.7", 0.0)
    assert not limit.take("192.168.1.7", 0.0)
    assert limit.take("192.168.1.8", 0.0)


def test_a_host_gains_no_tries_by_changing_its_ipv6_address() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert limit.take("2001:db8::1", 0.0)
    assert not limit.take("2001:db8::ffff:2", 0.0)
    assert limit.take("2001:db8:0:1::1", 0.0)
    assert limit.take("::ffff:192.168.1.7", 0.0)
    assert not limit.take("192.168.1.7", 0.0)


def test_the_number_of_remembered_hosts_is_limited() -> None:
    limit = TryLimit(burst=1, per_second=0.0, addresses=2)
    for host in "abc":
        assert limit.take(host, 0.0)
    assert limit.take("a", 0.0)
    assert not limit.take("c", 0.0)
