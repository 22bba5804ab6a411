"""How often a stranger may be wrong: a bucket of tries for each address, which fills up again with time."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_IPV6_SUBNET = 64
"""Bits; below that a single machine chooses its address at will."""


@dataclass(slots=True)
class _Bucket:
    tries: float
    at_s: float


class TryLimit:
    """`take` before each try, `give_back` after one that was right. Times are the caller's."""

    def __init__(self, *, burst: int = 5, per_second: float = 0.5, addresses: int = 4096) -> None:
        """Take the limits.

        Args:
            burst: tries at once.
            per_second: how fast they come back.
            addresses: how many are remembered; beyond that, the one that has been silent longest is forgotten.
        """
        self._burst, self._per_second, self._addresses = burst, per_second, addresses
        self._buckets: dict[str, _Bucket] = {}

    def take(self, host: str, now_s: float) -> bool:
        """Whether this host may try now; that uses up one try."""
        key = _key(host)
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, now_s)
        self._buckets[key] = bucket
        if len(self._buckets) > self._addresses:
            del self._buckets[next(iter(self._buckets))]
        bucket.tries = min(self._burst, bucket.tries + (now_s - bucket.at_s) * self._per_second)
        bucket.at_s = now_s
        if bucket.tries < 1:
            return False
        bucket.tries -= 1
        return True

    def give_back(self, host: str) -> None:
        """The try was right and counts for nothing."""
        if (bucket := self._buckets.get(_key(host))) is not None:
            bucket.tries = min(self._burst, bucket.tries + 1)


def _key(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_SUBNET), strict=False))
