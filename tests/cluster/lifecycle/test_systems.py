"""Interpreters of machines, and the binaries that each can load."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from mlx_ring.cluster.lifecycle.installation import (
    PYTHON_INFO,
    Python,
    best_python,
    lowest_release,
    read_python,
    read_pythons,
    wheel_platform,
    wheel_variables,
)
from mlx_ring.core.errors import HostFailed


def python_of(description: str) -> Python:
    python = read_python(f"/bin/{description.split()[2]}", description)
    assert python is not None
    return python


DEBIAN = python_of("linux x86_64 3.11 glibc 2.36")
MINI = python_of("darwin arm64 3.13 macos 15.3.1")


def test_an_interpreter_describes_itself_and_other_output_is_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", PYTHON_INFO], capture_output=True, text=True, check=True)
    here = read_python(sys.executable, done.stdout)
    assert here is not None
    assert (here.system, here.version) == (sys.platform, f"{sys.version_info.major}.{sys.version_info.minor}")
    assert read_python("python3", "Welcome to mini") is None
    assert str(MINI) == "macOS 15.3 on arm64, with Python 3.13"
    assert str(python_of("linux aarch64 3.12 musl 0.0")) == "Linux with musl on aarch64, with Python 3.12"


def test_interpreters_are_parsed_from_a_machine_s_output() -> None:
    lines = [
        "Welcome to mini",
        "python\t/opt/my python3.13\tdarwin arm64 3.13 macos 15.3.1",
        "python\t/bin/python3\t?",
    ]
    assert read_pythons(lines) == [replace(MINI, path="/opt/my python3.13")]


@pytest.mark.parametrize(
    ("description", "platform"),
    [
        ("linux x86_64 3.11 glibc 2.36", "x86_64-manylinux_2_36"),
        ("linux aarch64 3.14 glibc 2.35", "aarch64-manylinux_2_35"),
        ("linux x86_64 3.12 glibc 2.44", "x86_64-manylinux_2_40"),
        ("linux x86_64 3.12 glibc 2.29", "x86_64-manylinux_2_28"),
        ("linux aarch64 3.12 musl 0.0", "aarch64-unknown-linux-musl"),
        ("darwin arm64 3.13 macos 15.3", "aarch64-apple-darwin"),
        ("darwin x86_64 3.13 macos 13.6", "x86_64-apple-darwin"),
    ],
)
def test_a_platform_has_the_name_that_uv_uses(description: str, platform: str) -> None:
    assert wheel_platform(python_of(description)) == platform


def test_a_system_without_any_wheels_is_refused_by_name() -> None:
    with pytest.raises(HostFailed, match=r"no wheels for freebsd15 with libc 0\.0 on amd64"):
        wheel_platform(python_of("freebsd15 amd64 3.12 libc 0.0"))
    with pytest.raises(HostFailed, match=r"no wheels for Linux with glibc 2\.41 on riscv64"):
        wheel_platform(python_of("linux riscv64 3.12 glibc 2.41"))


def test_wheels_for_a_mac_fit_its_macos_release() -> None:
    assert wheel_variables(MINI) == {"MACOSX_DEPLOYMENT_TARGET": "15.3"}
    assert wheel_variables(DEBIAN) == {}


def test_a_copy_loads_on_the_same_system_unless_its_library_is_too_old() -> None:
    assert replace(DEBIAN, release=(2, 35)).can_load(DEBIAN, (2, 35))
    assert not replace(DEBIAN, release=(2, 31)).can_load(DEBIAN, (2, 35))
    for changed in ({"machine": "aarch64"}, {"version": "3.12"}, {"library": "musl"}, {"system": "darwin"}):
        assert not replace(DEBIAN, **changed).can_load(DEBIAN, (2, 35))


def test_a_wheel_needs_the_lowest_release_of_its_tags() -> None:
    assert lowest_release(["cp311-cp311-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_27_x86_64"]) == (
        2,
        27,
    )
    assert lowest_release(["cp312-cp312-macosx_15_0_arm64"]) == (15, 0)
    assert lowest_release(["cp312-cp312-manylinux2014_x86_64"]) == (0, 0)
    assert lowest_release(["py3-none-any"]) == (0, 0)
    assert lowest_release(["cp311-cp311-linux_x86_64"]) is None
    assert lowest_release([]) is None


def test_the_best_python_loads_a_copy_or_has_the_same_version_or_is_newest() -> None:
    newer = python_of("linux x86_64 3.14 glibc 2.36")
    newest_known, unknown = (
        python_of("linux x86_64 3.13 glibc 2.36"),
        python_of("linux x86_64 3.19 glibc 2.36"),
    )
    assert best_python([newer, DEBIAN], DEBIAN, (2, 35)) == DEBIAN
    assert best_python([unknown, newest_known, newer], DEBIAN, (2, 35)) == newer
    assert best_python([newer, DEBIAN], MINI, (15, 0)) == newer
    assert best_python([newer, newest_known], MINI, (15, 0)) == newest_known
    assert best_python([newest_known, newer], None, (0, 0)) == newer
    assert best_python([replace(MINI, machine="x86_64", version="3.11"), MINI], DEBIAN, (2, 35)) == MINI
    assert best_python([], DEBIAN, (2, 35)) is None
