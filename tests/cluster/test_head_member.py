"""The agent of the head's own machine, started by an earlier head."""

from __future__ import annotations

import re

import pytest

from mlx_ring.cluster.head_member import stale_trust
from mlx_ring.host.trusted_interfaces import trusted_interfaces


@pytest.mark.parametrize(
    ("trusted", "named", "said"),
    [
        (
            (),
            ("127.0.0.1",),
            r"It trusts nothing with collectives, and this head names \w+ \(127\.0\.0\.1\)\.",
        ),
        (
            ("127.0.0.1",),
            (),
            r"It trusts \w+ \(127\.0\.0\.1\) with collectives, and this head names nothing\.",
        ),
    ],
)
def test_an_agent_with_other_trusted_interfaces_is_reported(
    trusted: tuple[str, ...], named: tuple[str, ...], said: str
) -> None:
    assert re.search(said, stale_trust(trusted_interfaces(trusted), named))
    assert stale_trust(trusted_interfaces(trusted), trusted) == ""
