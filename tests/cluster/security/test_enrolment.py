"""The limit on wrong join requests."""

from __future__ import annotations

from itertools import repeat

from mlx_ring.cluster.security.enrolment import TryLimit


def take(limit: TryLimit, host: str, now_s: float) -> bool:
    """Make a wrong try; return False if it is not allowed."""
    if not limit.has_try(host, now_s):
        return False
    limit.charge(host, now_s)
    return True


def test_a_host_has_a_burst_of_tries_and_then_the_refill_rate() -> None:
    limit = TryLimit(burst=3, per_second=0.5)
    assert [take(limit, "a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [take(limit, "a", 2.0) for _ in range(2)] == [True, False]


def test_a_long_pause_refills_no_more_than_the_burst() -> None:
    limit = TryLimit(burst=2, per_second=1.0)
    take(limit, "a", 0.0)
    assert [take(limit, "a", 1e6) for _ in range(3)] == [True, True, False]


def test_a_successful_try_does_not_count() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert all(limit.has_try(host, 0.0) for host in repeat("a", 10))


def test_tries_are_counted_per_host() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert take(limit, "192.168.1.7", 0.0)
    assert not take(limit, "192.168.1.7", 0.0)
    assert take(limit, "192.168.1.8", 0.0)


def test_a_host_gains_no_tries_by_changing_its_ipv6_address() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert take(limit, "2001:db8::1", 0.0)
    assert not take(limit, "2001:db8::ffff:2", 0.0)
    assert take(limit, "2001:db8:0:1::1", 0.0)
    assert take(limit, "::ffff:192.168.1.7", 0.0)
    assert not take(limit, "192.168.1.7", 0.0)


def test_the_number_of_remembered_hosts_is_limited() -> None:
    limit = TryLimit(burst=1, per_second=0.0, addresses=2)
    for host in "abc":
        assert take(limit, host, 0.0)
    assert take(limit, "a", 0.0)
    assert not take(limit, "c", 0.0)
