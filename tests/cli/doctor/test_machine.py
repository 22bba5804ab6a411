"""Checks of a machine: limits, folders, links; on made-up trees where a test cannot have the real thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.cli.doctor.machine import (
    GIB,
    check_disk,
    check_fast_links,
    check_memory,
    check_mlx,
    check_state_folder,
    judge_memory,
    judge_wired_limit,
)
from mlx_ring.host.interfaces import LanAddress
from mlx_ring.host.process import UsableMemory


def test_a_container_s_limit_is_found_and_its_file_named(tmp_path: Path) -> None:
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("memory")
    (group / "memory.max").write_text(str(GIB // 2))
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    finding = check_memory(tmp_path)
    assert finding.level == "warning"
    assert finding.value.startswith("0.5 GiB")
    assert "/sys/fs/cgroup/memory.max" in finding.value
    assert "container" in finding.fix


@pytest.mark.parametrize(
    ("total", "left", "limit", "level"),
    [
        (16 * GIB, 8 * GIB, "the machine", "ok"),
        (16 * GIB, 8 * GIB, "the control group (/a)", "note"),
        (16 * GIB, GIB // 2, "the machine", "warning"),
        (2 * GIB, 2 * GIB, "the machine", "warning"),
    ],
)
def test_little_memory_is_a_warning(total: int, left: int, limit: str, level: str) -> None:
    assert judge_memory(UsableMemory(total, left, limit)).level == level


def test_a_state_folder_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    assert check_state_folder(tmp_path / "none" / "yet").level == "ok"
    assert not (tmp_path / "none").exists()
    tmp_path.chmod(0o755)
    finding = check_state_folder(tmp_path)
    assert (finding.level, finding.fix) == ("warning", f"Close it: chmod -R go= '{tmp_path}'.")
    tmp_path.chmod(0o700)
    assert check_state_folder(tmp_path).level == "ok"


def test_the_disk_is_that_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert f"free at {tmp_path}" in check_disk(tmp_path / "a" / "b").value


@pytest.mark.parametrize(("text", "level"), [("0", "note"), ("", "note"), ("12288", "ok")])
def test_the_limit_of_a_mac_s_gpu_is_told(text: str, level: str) -> None:
    finding = judge_wired_limit(text)
    assert finding.level == level
    assert text in ("", "0") or text in finding.value


def test_rdma_and_thunderbolt_are_told(tmp_path: Path) -> None:
    assert check_fast_links((), tmp_path).value == "neither Thunderbolt nor RDMA"
    (tmp_path / "sys/bus/thunderbolt/devices/0-1").mkdir(parents=True)
    assert "cable" in check_fast_links((), tmp_path).fix
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    bridge = LanAddress("bridge0", 5, "169.254.1.2", "thunderbolt")
    assert check_fast_links([bridge], tmp_path).value == "thunderbolt at 169.254.1.2, RDMA over mlx5_0"


def test_mlx_computes_here() -> None:
    assert check_mlx().level == "ok"
