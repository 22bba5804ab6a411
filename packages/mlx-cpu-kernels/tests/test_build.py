"""Building of the kernels: what it needs, what it refuses, and where binaries are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mlx_cpu_kernels import SpeedReport, build, machine, packages, trial
from mlx_cpu_kernels.build import Target, advice, find_binary, why_without
from mlx_cpu_kernels.packages import Unavailable, version_of

# pyright: reportPrivateUsage=false
# Parts are tested alone, or replaced.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def target() -> Target:
    return Target.installed()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Replace the virtual environment and the user's cache; return their folders of binaries."""
    environment, cache = tmp_path / "environment", tmp_path / "cache"
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return environment / "lib/mlx-cpu-kernels", cache / "mlx-cpu-kernels"


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the process that tries a binary by one that runs the binary as a script. Return a file with a line a try."""
    log = tmp_path / "tries"
    log.touch()
    script = (
        f"import sys; open({str(log)!r}, 'a').write(sys.argv[1] + chr(10)); exec(open(sys.argv[1]).read())"
    )
    monkeypatch.setattr(trial, "_CHILD", ("-c", script))
    monkeypatch.setattr(trial, "_host", lambda: "this")
    forget()
    return log


def forget() -> None:
    """Know no more about binaries than another process."""
    trial.verdict_of_process.cache_clear()


WORKS = """print('{"works": true, "detail": "AVX2"}')"""
OF_A_NEWER_LIBC = """print('{"works": false, "detail": "version GLIBC_2.99 not found"}')"""
CRASHES = "import os; os.kill(os.getpid(), 4)"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"


def put(folder: Path, content: str = WORKS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"_kernels{SUFFIX}"
    path.write_text(content)
    return path


@pytest.mark.processes
@pytest.mark.usefixtures("tries")
def test_a_binary_is_found_in_the_environment_before_the_users_cache(
    target: Target, folders: tuple[Path, Path]
) -> None:
    environment, cache = folders
    assert find_binary(target) is None
    of_user = put(cache / target.key)
    assert find_binary(target) == of_user
    assert find_binary(target) == of_user
    of_environment = put(environment / target.key)
    assert find_binary(target) == of_environment


def test_a_binary_of_another_mlx_or_nanobind_is_not_found(target: Target, folders: tuple[Path, Path]) -> None:
    put(folders[0] / target.key)
    assert find_binary(replace(target, mlx=replace(target.mlx, version="0.32.5"))) is None
    assert find_binary(replace(target, nanobind=replace(target.nanobind, version="2.15.0"))) is None


def test_changed_sources_are_compiled_again(
    target: Target, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folders[0] / target.key)
    sources = tmp_path / "native"
    sources.mkdir()
    monkeypatch.setattr(build, "SOURCES", sources)
    assert find_binary(Target.installed()) is None


@pytest.mark.processes
def test_a_host_tries_a_binary_once(
    target: Target, folders: tuple[Path, Path], tries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = put(folders[0] / target.key)
    for _ in range(3):
        forget()
        assert find_binary(target) == binary
    assert tries.read_text() == f"{binary}\n"
    monkeypatch.setattr(trial, "_host", lambda: "another, which shares the folder")
    forget()
    assert find_binary(target) == binary
    assert len(tries.read_text().splitlines()) == 2
    binary.write_text(f"{WORKS}  # replaced")
    assert find_binary(target) == binary
    assert len(tries.read_text().splitlines()) == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "reason"),
    [(OF_A_NEWER_LIBC, "GLIBC_2.99 not found"), (CRASHES, r"they crash .*\(SIGILL\)")],
)
def test_a_binary_that_does_not_work_here_is_passed_over(
    target: Target, folders: tuple[Path, Path], tries: Path, content: str, reason: str
) -> None:
    put(folders[0] / target.key, content)
    for _ in range(2):
        forget()
        assert find_binary(target) is None
        assert re.search(reason, why_without(target))
    assert len(tries.read_text().splitlines()) == 1
    working = put(folders[1] / target.key)
    assert find_binary(target) == working


def test_kernels_that_are_being_built_are_not_to_be_built_again(
    target: Target, folders: tuple[Path, Path]
) -> None:
    not_built = "they are not built; `python -m mlx_cpu_kernels.build` builds them"
    assert why_without(target) == not_built
    work = folders[0] / target.key / "unfinished-x"
    work.mkdir(parents=True)
    assert why_without(target) == "they are being built, and the next start uses them"
    os.utime(work, (0, 0))
    assert why_without(target) == not_built, "that build was killed"


def test_one_reason_is_said_once_with_what_it_costs() -> None:
    report = SpeedReport("OpenBLAS", problem="they are not built", cost="each token takes longer")
    assert str(report) == "OpenBLAS, without native kernels, so each token takes longer: they are not built"
    assert str(SpeedReport("OpenBLAS", problem="they are for Linux")) == (
        "OpenBLAS, without native kernels: they are for Linux"
    )
    assert str(SpeedReport("OpenBLAS", kernels="AVX2")) == "OpenBLAS; native kernels (AVX2)"


@pytest.mark.processes
def test_another_process_makes_a_trial_again_that_was_killed(
    target: Target, folders: tuple[Path, Path], tries: Path
) -> None:
    put(folders[0] / target.key, IS_KILLED)
    for process in (1, 2):
        forget()
        assert find_binary(target) is None
        assert "SIGKILL" in why_without(target)
        assert len(tries.read_text().splitlines()) == process


@pytest.mark.processes
def test_a_verdict_is_kept_elsewhere_where_the_folder_cannot_be_written(
    target: Target, folders: tuple[Path, Path], tries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BINARIES", tmp_path / "binaries")
    binary = put(tmp_path / "binaries" / target.key)
    beside = binary.with_name("tried-this.json")
    beside.mkdir()  # a file cannot take its place, whoever runs the test
    for _ in range(2):
        forget()
        assert find_binary(target) == binary
    assert len(tries.read_text().splitlines()) == 1
    kept = json.loads((folders[1] / target.key / beside.name).read_text())
    assert kept["works"]
    assert kept["libc"] == os.confstr("CS_GNU_LIBC_VERSION")


@pytest.mark.processes
def test_what_was_compiled_here_and_does_not_work_is_compiled_again_on_request_alone(
    target: Target, folders: tuple[Path, Path], tries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_all(_target: Target, _compiler: str, _flags: list[str], work: Path) -> Path:
        compiled.append(1)
        return put(work, OF_A_NEWER_LIBC if len(compiled) == 1 else WORKS)

    compiled: list[int] = []
    monkeypatch.setattr(build, "_compile_all", compile_all)
    monkeypatch.setattr(build, "_check_internals", dict[object, None]().get)
    monkeypatch.setattr(build, "extension_flags", {target: list[str]()}.get)
    monkeypatch.setenv("CXX", "true")
    put(folders[0] / target.key, CRASHES)  # as another host has made it
    with pytest.raises(Unavailable, match=r"compiled, but not usable here: .*GLIBC_2\.99"):
        build._find_or_build(None, force=False)
    with pytest.raises(Unavailable, match=r"compiled before, .*--force"):
        build._find_or_build(None, force=False)
    assert "--force" in advice()
    assert len(compiled) == 1
    assert build._find_or_build(None, force=True) == find_binary(target)
    assert len(tries.read_text().splitlines()) == 3


def test_binaries_that_nothing_uses_are_removed_and_what_killed_builds_left(tmp_path: Path) -> None:
    current, used, old = (tmp_path / name for name in ("current", "used", "old"))
    left = current / "unfinished-1"
    for folder in (current, used, old, left):
        folder.mkdir(parents=True)
    (old / "file").touch()
    for folder in (current, old, left):
        os.utime(folder, (0, 0))
    build._remove_outdated(tmp_path, current)
    assert sorted(tmp_path.rglob("*")) == [current, used]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    """Interrupt it when a compiler has started another program, as g++ does."""
    # A program of a shell that ignores this signal, such as nohup's, would ignore it too.
    request.addfinalizer(
        partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    )
    pids, compiler, into = tmp_path / "pids", tmp_path / "compiler", tmp_path / "binaries"
    compiler.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {pids}\nwait\n")
    compiler.chmod(0o700)
    os.mkfifo(pids)
    with subprocess.Popen(
        [sys.executable, "-m", "mlx_cpu_kernels.build", "--into", str(into)],
        env={**os.environ, "CXX": str(compiler)},
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        request.addfinalizer(child.kill)
        pid = _first_number(pids, child)
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors == "Compiling was interrupted.\n"
    assert not list(into.rglob("*"))
    assert _has_ended(pid)


def _first_number(pipe: Path, child: subprocess.Popen[str]) -> int:
    """Read a line from a named pipe, unless the child ends before one is written."""
    with open(os.open(pipe, os.O_RDWR)) as lines, open(os.pidfd_open(child.pid)) as ends:  # noqa: PTH123 - descriptors
        ready, _, _ = select.select([lines, ends], [], [], 60)
        assert lines in ready, child.communicate(timeout=60)[1] if ready else "no compiler was started"
        return int(lines.readline())


@pytest.mark.processes
def test_a_signal_is_handled_where_no_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Interrupt the build while it takes the pool's semaphore, which must not stay taken."""
    previous = signal.signal(signal.SIGTERM, build._interrupt)
    request.addfinalizer(partial(signal.signal, signal.SIGTERM, previous))
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 600\n")
    compiler.chmod(0o700)
    enter = threading.Condition.__enter__
    taken: list[None] = []

    def interrupted_enter(condition: threading.Condition) -> bool:
        entered = enter(condition)
        if sys._getframe(1).f_code is threading.Semaphore.acquire.__code__:
            taken.append(None)
            if len(taken) == 2:  # the first compiler runs
                signal.raise_signal(signal.SIGTERM)
        return entered

    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(threading.Condition, "__enter__", interrupted_enter)
    with pytest.raises(KeyboardInterrupt):
        build.build(build.Target.installed(), tmp_path / "binaries")
    assert len(taken) > 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert not list((tmp_path / "binaries").rglob("*"))


def _has_ended(pid: int) -> bool:
    """Wait for the system to end a process that was killed."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(process) as ends:  # noqa: PTH123 - a descriptor, which becomes readable at the process's end
        return bool(select.select([ends], [], [], 60)[0])


@pytest.mark.parametrize(
    ("files", "cores", "free"),
    [
        ({}, 64, 8 << 30),
        ({"cpu.max": "200000 100000", "memory.max": "3000", "memory.current": "1000"}, 2, 2000),
        ({"unit/cpu.max": "150000 100000", "unit/memory.max": "max", "memory.max": "7000"}, 1, 7000),
        ({"cpu.max": "max 100000", "memory.max": "max"}, 64, 8 << 30),
        (
            {
                "memory.max": "9000",
                "memory.current": "8000",
                "memory.stat": "inactive_file 5000\nactive_file 1000",
            },
            64,
            7000,
        ),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4, 8 << 30),
        ({"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "5000"}, 64, 5000),
    ],
)
def test_cores_and_memory_are_those_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int, free: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: range(64)}.get)
    has_v1 = any(name.startswith(("cpu/", "memory/")) for name in files)
    groups = "4:memory:/x\n3:cpu,cpuacct:/" if has_v1 else "0::/unit"
    contents = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n", "proc/self/cgroup": groups}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.usable_cores(tmp_path) == cores
    assert machine.free_memory(tmp_path) == free


def test_compilers_run_side_by_side_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 8)
    for free, expected in ((64 << 30, 8), (3 << 30, 3), (100 << 20, 1), (0, 1)):
        monkeypatch.setattr(build, "free_memory", lambda free=free: free)
        assert build._parallel_compilers() == expected


def test_without_a_compiler_the_reason_is_one_sentence(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match=r"^no C\+\+ compiler was found \(g\+\+, c\+\+, clang\+\+\)$"):
        build.build(target)


def test_without_pythons_headers_the_missing_file_is_named(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(Unavailable, match=rf"^Python's headers are missing: {tmp_path}/Python\.h$"):
        build.build(target, tmp_path)


def test_an_mlx_without_headers_is_refused(target: Target, tmp_path: Path) -> None:
    bare = replace(target, mlx=replace(target.mlx, folder=tmp_path))
    with pytest.raises(Unavailable, match=r"^this MLX carries no headers"):
        build.build(bare, tmp_path)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", dict[str, None]().get)
    with pytest.raises(Unavailable, match=r"^the package mlx is not installed$"):
        Target.installed()


@pytest.mark.processes
def test_the_compilers_first_error_is_the_reason(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\necho 'note: here' >&2\necho 'a.cpp:1: error: no such thing' >&2\nexit 1\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Unavailable, match=r"compiler failed: a\.cpp:1: error: no such thing$"):
        build.build(target, tmp_path / "binaries")
    assert not list((tmp_path / "binaries").rglob("*.so"))


def test_another_nanobinds_binary_is_refused(target: Target, tmp_path: Path) -> None:
    binary = tmp_path / "binary.so"
    binary.write_bytes(b"\0nanobind_system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_1_a1_v99\0")
    with pytest.raises(
        Unavailable, match=r"^nanobind 3\.1\.0 shares no types with this MLX, which needs nanobind_\w+_v22$"
    ):
        build._check_internals(target, binary)


@pytest.mark.processes
def test_the_command_prints_the_binary_or_one_sentence(tmp_path: Path) -> None:
    environment = {"PATH": "/nonexistent", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "mlx_cpu_kernels.build"]
    missing = subprocess.run(
        [*command, "--into", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 1
    assert missing.stderr == (
        "The native kernels cannot be built: no C++ compiler was found (g++, c++, clang++).\n"
    )
    found = find_binary(Target.installed())
    if found is not None:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{found}\n"


@pytest.mark.parametrize("distribution", ["mlx", "mlx-lm", "nanobind", "PyYAML", "pyyaml"])
def test_the_version_of_a_distribution_is_that_of_its_metadata(distribution: str) -> None:
    assert version_of(distribution) == importlib.metadata.version(distribution)


def test_of_two_folders_of_metadata_the_one_is_read_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for version in ("1.2", "1.3"):
        folder = tmp_path / f"one_or_two-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: one-or-two\nVersion: {version}\n")
    found = importlib.metadata.version("one-or-two")
    assert version_of("one-or-two") == found
    for folder in tmp_path.glob(f"*-{found}.dist-info"):
        folder.rename(tmp_path / "one_or_two-1.4.dist-info")
        next(each for each in tmp_path.iterdir() if each.name != "one_or_two-1.4.dist-info").rename(
            tmp_path / "gone"
        )
    assert version_of("one-or-two") == "1.4"
    assert version_of("none-of-these") == ""
