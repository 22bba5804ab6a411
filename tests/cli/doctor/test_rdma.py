"""What is missing for RDMA over Thunderbolt is told one after the other."""

from __future__ import annotations

import pytest

from mlx_ring.cli.doctor.machine import judge_rdma

DEVICES = """
    device                 node GUID
    ------              ----------------
    rdma_en2            0000000000000001
    rdma_en3            0000000000000002
"""


@pytest.mark.parametrize(
    ("macos", "status", "devices", "value", "fix"),
    [
        ("15.6.1", "", "", "macOS 15.6.1 has none", "Update to macOS 26.2"),
        ("26.1", "enabled", DEVICES, "macOS 26.1 has none", "Update"),
        ("26.2", "disabled", "", "it is disabled", "rdma_ctl enable"),
        ("26.2.1", "", "", "it is not there", "rdma_ctl enable"),
        ("27.0", "enabled", "    device   node GUID", "enabled, without a device", "Thunderbolt 5 cable"),
    ],
)
def test_what_is_missing_is_a_note_with_the_mend(
    macos: str, status: str, devices: str, value: str, fix: str
) -> None:
    finding = judge_rdma(macos, status, devices)
    assert (finding.level, finding.value) == ("note", value)
    assert fix in finding.fix


def test_devices_are_named_with_what_writes_the_hostfile() -> None:
    finding = judge_rdma("26.2", "enabled", DEVICES)
    assert finding.level == "ok"
    assert finding.value.startswith("rdma_en2, rdma_en3. `mlx.distributed_config")
