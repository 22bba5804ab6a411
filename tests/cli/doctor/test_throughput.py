"""What the channel to a head carries."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.machines import free_pair_of_ports

from mlx_ring.agent.enrolment import join
from mlx_ring.cli.doctor import Finding
from mlx_ring.cli.doctor.network import check_throughput, judge_link
from mlx_ring.cluster.control import open_control
from mlx_ring.cluster.security.members import Members
from mlx_ring.core.cluster_folders import authority_folder
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.link_probe import LinkMeasure


def test_it_is_measured_with_a_head_that_runs_and_refused_to_a_machine_that_was_removed(
    tmp_path: Path,
) -> None:
    async def act() -> tuple[Finding, Finding]:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            folder = tmp_path / "node"
            await asyncio.to_thread(join, str(head), control.make_token(life_s=60.0), folder)
            measured = await asyncio.to_thread(check_throughput, head, folder)
            members = Members(authority_folder(tmp_path / "head"))
            (node,) = set(members.list()) - {control.node}
            members.remove(node)
            return measured, await asyncio.to_thread(check_throughput, head, folder)

    measured, refused = asyncio.run(act())
    assert measured.level in ("ok", "warning")
    assert " MB/s (" in measured.value
    assert (refused.level, "removed" in refused.value) == ("broken", True)
    assert "mlx-ring token create" in refused.fix


def test_a_machine_that_has_not_joined_is_told_how_to(tmp_path: Path) -> None:
    found = check_throughput(HeadAddress("127.0.0.1", 1), tmp_path)
    assert (found.level, bool(found.fix)) == ("note", True)


@pytest.mark.parametrize(
    ("bandwidth", "round_trip_s", "level"),
    [(110e6, 0.3e-3, "ok"), (11e6, 0.3e-3, "warning"), (110e6, 20e-3, "warning")],
)
def test_a_slow_link_is_a_warning(bandwidth: float, round_trip_s: float, level: str) -> None:
    measure = LinkMeasure(round_trip_s, round_trip_s, bandwidth, frames=100, nbytes=1 << 20)
    finding = judge_link("throughput", measure)
    assert finding.level == level
    assert bool(finding.fix) == (level == "warning")
