"""Checks of a machine: limits, folders, links and RDMA. Fake trees stand for what a test cannot have."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_cpu_kernels import build
from mlx_cpu_kernels.trial import Verdict
from mlx_ring.cli.doctor import machine_checks
from mlx_ring.cli.doctor.machine_checks import (
    GIB,
    check_disk,
    check_energy,
    check_fast_links,
    check_firewall,
    check_memory,
    check_mlx,
    check_state_folder,
    firewall_is_on,
    firewall_remedy,
    judge_installed,
    judge_memory,
    judge_products,
    judge_rdma,
    judge_rdma_ports,
    judge_wired_limit,
)
from mlx_ring.host.interfaces import LanAddress
from mlx_ring.host.process import UsableMemory

RDMA_DEVICES = """
    device                 node GUID
    ------              ----------------
    rdma_en2            0000000000000001
    rdma_en3            0000000000000002
"""


def test_energy_is_noted_where_a_counter_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pynvml", "zeus_apple_silicon"):
        monkeypatch.setitem(sys.modules, name, None)
    assert check_energy(tmp_path).value == "not counted: this system has no counters of it"
    domain = tmp_path / "sys/class/powercap/intel-rapl:0"
    domain.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "99"), ("energy_uj", "5")):
        (domain / name).write_text(text)
    assert (check_energy(tmp_path).level, check_energy(tmp_path).value) == ("ok", "counted by cpu")

    broken = SimpleNamespace(nvmlInit=lambda: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", broken)
        found = check_energy(tmp_path)
    assert (found.value, found.fix) == ("counted by cpu; ZeroDivisionError: division by zero", "")

    def refuse(path: Path, *_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    found = check_energy(tmp_path)
    assert (found.level, found.value) == ("note", f"not counted; {domain / 'name'} can be read by root alone")
    assert "as root" in found.fix


def test_a_container_s_memory_limit_is_found_and_its_file_named(tmp_path: Path) -> None:
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


def test_free_disk_space_is_that_of_the_nearest_existing_folder(tmp_path: Path) -> None:
    assert f"free at {tmp_path}" in check_disk(tmp_path / "a" / "b").value


@pytest.mark.parametrize(("text", "level"), [("0", "note"), ("", "note"), ("12288", "ok")])
def test_the_memory_limit_of_a_mac_s_gpu_is_reported(text: str, level: str) -> None:
    finding = judge_wired_limit(text)
    assert finding.level == level
    assert text in ("", "0") or text in finding.value


def test_rdma_and_thunderbolt_links_are_reported(tmp_path: Path) -> None:
    assert check_fast_links((), tmp_path).value == "neither Thunderbolt nor RDMA"
    (tmp_path / "sys/bus/thunderbolt/devices/0-1").mkdir(parents=True)
    assert "cable" in check_fast_links((), tmp_path).fix
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    bridge = LanAddress("bridge0", 5, "169.254.1.2", "thunderbolt")
    assert check_fast_links([bridge], tmp_path).value == "thunderbolt at 169.254.1.2, RDMA over mlx5_0"


def test_mlx_computes_on_this_machine() -> None:
    findings = {finding.what: finding for finding in check_mlx()}
    assert findings["MLX"].level == "ok"
    if sys.platform == "linux" and findings["MLX"].value == "computes on the CPU":
        assert "; native kernels (" in findings["products"].value


def test_a_cpu_without_native_kernels_is_a_warning() -> None:
    finding = judge_products("OpenBLAS 0.3.34, without native kernels: they are not built", kernels="")
    assert finding.level == "warning"
    assert "python -m mlx_cpu_kernels.build" in finding.fix


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
@pytest.mark.parametrize(
    ("program", "fix"),
    [
        (
            "/nonexistent",
            "Install a C++ compiler and Python's headers (`apt install g++ python3-dev`), then run",
        ),
        ("true", "Run `python -m mlx_cpu_kernels.build`"),
    ],
)
def test_the_advice_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, program: str, fix: str) -> None:
    """Advise to compile kernels here where they came from another machine and do not load."""
    sent = [(Path("sent"), Verdict(works=False, detail="GLIBC_2.99"))]
    monkeypatch.setattr(build, "_verdicts", {build.Target.installed(): sent}.get)
    monkeypatch.setenv("CXX", program)
    monkeypatch.setenv("PATH", "/nonexistent" if program == "/nonexistent" else "/usr/bin:/bin")
    finding = judge_products("OpenBLAS 0.3.34, without native kernels: GLIBC_2.99", kernels="")
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("macos", "status", "devices", "value", "fix"),
    [
        ("15.6.1", "", "", "macOS 15.6.1 has none", "Update to macOS 26.2"),
        ("26.1", "enabled", RDMA_DEVICES, "macOS 26.1 has none", "Update"),
        ("26.2", "disabled", "", "it is disabled", "rdma_ctl enable"),
        ("26.2.1", "", "", "it is not there", "rdma_ctl enable"),
        ("27.0", "enabled", "    device   node GUID", "enabled, without a device", "Thunderbolt 5 cable"),
    ],
)
def test_missing_rdma_is_a_note_with_the_fix(
    macos: str, status: str, devices: str, value: str, fix: str
) -> None:
    finding = judge_rdma(macos, status, devices)
    assert (finding.level, finding.value) == ("note", value)
    assert fix in finding.fix


def test_rdma_devices_are_named_with_the_command_that_writes_the_hostfile() -> None:
    finding = judge_rdma("26.2", "enabled", RDMA_DEVICES)
    assert finding.level == "ok"
    assert finding.value.startswith("rdma_en2, rdma_en3. `mlx.distributed_config")


IFCONFIG = (
    "en3: flags=8863<UP,BROADCAST,SMART,RUNNING> mtu 1500\n\t{address}media: autoselect\n\tstatus: {status}\n"
)
BRIDGE = "bridge0: flags=8863<UP> mtu 1500\n\tmember: {member} flags=3<LEARNING,DISCOVER>\n\tstatus: active\n"
INET = "inet 169.254.12.7 netmask 0xffff0000 broadcast 169.254.255.255\n\t"
INET6 = "inet6 fe80::1%en3 prefixlen 64 secured scopeid 0x6\n\t"


@pytest.mark.parametrize(
    ("address", "status", "bridge", "level", "words"),
    [
        (INET, "active", "", "ok", "rdma_en3"),
        (INET, "active", BRIDGE.format(member="en9"), "ok", "rdma_en3"),
        # ml-explore/mlx#3207: an active bridge gives RTR errno 22.
        (INET, "active", BRIDGE.format(member="en3"), "note", "Thunderbolt Bridge off"),
        # ml-explore/mlx#3467: so does a port with a link-local IPv6 address alone.
        (INET6, "active", "", "note", "no IPv4 address at rdma_en3"),
        (INET, "inactive", "", "note", "no cable is active"),
    ],
)
def test_rdma_ports_need_ipv4_and_no_bridge(
    address: str, status: str, bridge: str, level: str, words: str
) -> None:
    """Judge output in the form of macOS's `ifconfig`, not run."""
    finding = judge_rdma_ports({"rdma_en3": IFCONFIG.format(address=address, status=status)}, bridge)
    assert finding.level == level
    assert words in f"{finding.value} {finding.fix}"


def test_thunderbolt_4_gets_no_advice_to_enable_rdma() -> None:
    """Judge the recorded output of jundot/omlx#3037, not run."""
    finding = judge_rdma("26.5", "enabled", "device          node GUID\n------          ----------------")
    assert "Thunderbolt 4 hardware never has RDMA" in finding.fix
    assert "rdma_ctl enable" not in finding.fix


def test_python_that_rosetta_translates_is_named_with_what_to_install() -> None:
    versions = {"mlx-ring": "0.1", "mlx": "absent", "mlx-lm": "0.32.2"}
    finding = judge_installed(versions, is_translated=True)
    assert (finding.level, "Rosetta" in finding.value) == ("broken", True)
    assert "Apple silicon" in finding.fix
    assert "Install mlx:" in judge_installed(versions, is_translated=False).fix
    assert judge_installed({"mlx": "0.32.4"}, is_translated=False).level == "ok"


def test_a_state_folder_within_a_folder_closed_to_this_user_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    exists = Path.exists

    def look(path: Path) -> bool:
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    def refuse(dir: Path) -> None:  # noqa: A002 - tempfile's interface
        raise PermissionError(13, "Permission denied", str(dir))

    closed.mkdir()
    monkeypatch.setattr(Path, "exists", look)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = check_state_folder(closed / "state")
    assert (found.level, found.value) == (
        "broken",
        f"{closed / 'state'} cannot be written (Permission denied)",
    )
    assert f"Make {closed} writable" in found.fix


@pytest.mark.parametrize(
    ("name", "output", "active"),
    [
        ("ufw", "Status: active\n\nTo   Action\n", True),
        ("ufw", "Status: inactive\n", False),
        ("firewalld", "running\n", True),
        ("firewalld", "not running\n", False),
        ("iptables", "-P INPUT ACCEPT\n-A INPUT -p icmp -j DROP\n", True),
        ("iptables", "-P INPUT ACCEPT\n", False),
        ("nftables", "chain input {\n type filter hook input priority filter; policy drop;\n}", True),
        ("nftables", "chain input {\n type filter hook input priority filter; policy accept;\n}", False),
        ("macOS's firewall", "Firewall is enabled. (State = 1)", True),
        ("macOS's firewall", "Firewall is disabled. (State = 0)", False),
    ],
)
def test_a_firewall_s_state_is_read_from_its_output(name: str, output: str, active: bool) -> None:  # noqa: FBT001 - a parameter
    assert firewall_is_on(name, output) is active


def test_remedy_for_macos_s_firewall_names_the_program_and_for_others_the_ports() -> None:
    allowed = firewall_remedy(["macOS's firewall"], "TCP port 50051")
    assert f"--unblockapp {Path(sys.executable).resolve()}`" in allowed
    assert firewall_remedy(["ufw"], "TCP port 50051") == "Let other machines reach TCP port 50051."


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


linux = pytest.mark.skipif(sys.platform != "linux", reason="the programs are Linux's")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the only programs that are found."""
    folder = tmp_path / "bin"

    def find(name: str) -> str | None:
        return shutil.which(name, path=str(folder))

    monkeypatch.setattr(machine_checks, "_program", find)
    return folder


@linux
def test_firewalls_that_only_root_may_ask_are_a_note_with_the_commands(
    programs: Path, tmp_path: Path
) -> None:
    assert check_firewall((8100,), tmp_path).level == "ok"
    install(programs, "nft", 'echo "Operation not permitted (you must be root)" >&2; exit 1')
    install(programs, "iptables", "exit 4")
    found = check_firewall((8100,), tmp_path)
    assert (found.level, found.value) == ("note", "unknown, because nft, iptables gave no answer")
    assert "`sudo nft list chains`, `sudo iptables -S INPUT`" in found.fix
    assert "TCP ports 8100" in found.fix


@linux
@pytest.mark.parametrize(("user", "advice"), [(1000, "Ask as root: "), (0, "Root gets no answer here")])
def test_root_reads_that_a_container_gives_no_answer(
    user: int, advice: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "iptables", "exit 4")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert check_firewall((8100,), tmp_path).fix.startswith(advice)


@linux
def test_the_file_of_a_ufw_that_was_removed_says_nothing(programs: Path, tmp_path: Path) -> None:
    assert not programs.exists()
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text("ENABLED=yes")
    assert check_firewall((8100,), tmp_path).level == "ok"


@linux
def test_a_firewall_that_is_off_is_none_also_if_its_program_says_so_by_its_exit_code(
    programs: Path, tmp_path: Path
) -> None:
    install(programs, "firewall-cmd", "echo 'not running' >&2; exit 252")
    install(programs, "nft", "exit 0")
    assert check_firewall((8100,), tmp_path).level == "ok"
    install(programs, "firewall-cmd", "echo running")
    assert check_firewall((8100,), tmp_path).value == "firewalld is on"


@linux
@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("ENABLED=yes", "ufw is on"),
        ("  ENABLED='yes'", "ufw is on"),
        ("ENABLED=no", "unknown, because ufw gave no answer"),
        ("#ENABLED=yes", "unknown, because ufw gave no answer"),
    ],
)
def test_ufw_s_own_file_is_read_where_ufw_does_not_answer(
    line: str, value: str, programs: Path, tmp_path: Path
) -> None:
    install(programs, "ufw", 'echo "ERROR: You need to be root to run this script" >&2; exit 1')
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text(f"# ufw\n{line}\nLOGLEVEL=low\n")
    assert check_firewall((8100,), tmp_path).value == value
    install(programs, "ufw", "echo 'Status: inactive'")
    assert check_firewall((8100,), tmp_path).level == "ok"
