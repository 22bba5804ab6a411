"""Packages for other systems: index settings, and wheels from a folder or the package index by the real uv."""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

import pytest

from mlx_ring.cluster.lifecycle import wheels
from mlx_ring.cluster.lifecycle.installation import Python
from mlx_ring.cluster.lifecycle.programs import archived_files, wanted_here
from mlx_ring.cluster.lifecycle.wheels import (
    Wanted,
    WheelStore,
    has_uv_settings,
    packages_for,
    pip_settings,
    variables_of,
    why_not,
)
from mlx_ring.core.errors import HostFailed

BOARD = Python("/bin/python3", "linux", "aarch64", "3.12", "glibc", (2, 36))
MINI = Python("/bin/python3", "darwin", "arm64", "3.13", "macos", (15, 3))
WANTED = Wanted(
    ("top", "on-linux; sys_platform == 'linux'", "on-mac; sys_platform == 'darwin'", "absent; python_version < '3.12'"),
    exact=("top==1.0",),
    preferred=("low==1.0", "only-new==1.0"),
)  # fmt: skip


def write_wheel(folder: Path, name: str, version: str, tag: str, *requires: str) -> None:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    metadata = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"tag = {tag!r}")
        wheel.writestr(f"{metadata}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(
            f"{metadata}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag.replace('.', ' ')}\n"
        )
        wheel.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelStore:
    """Return a store with a folder of a few wheels; no index can be reached."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    given = tmp_path / "given"
    given.mkdir()
    for version in ("1.0", "2.0"):
        write_wheel(given, "top", version, "py3-none-any", "low")
        write_wheel(given, "low", version, "cp312-cp312-manylinux_2_28_aarch64", "only_new")
        write_wheel(given, "low", version, "cp313-cp313-macosx_15_0_arm64", "only_new")
    write_wheel(given, "only_new", "1.0", "cp311-cp311-manylinux_2_28_aarch64")
    write_wheel(given, "only_new", "1.1", "py3-none-any")
    write_wheel(given, "on_linux", "1.0", "py3-none-any")
    write_wheel(given, "on_mac", "1.0", "py3-none-macosx_14_0_arm64")
    return WheelStore(tmp_path / "kept", given)


def installed(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".dist-info") for path in folder.glob("*.dist-info"))


def test_each_system_gets_its_requirements_in_local_versions_if_available(
    store: WheelStore,
) -> None:
    for_board, for_mini = packages_for(BOARD, WANTED, store), packages_for(MINI, WANTED, store)
    common = ["only_new-1.1", "top-1.0"]
    assert installed(for_board) == ["low-1.0", "on_linux-1.0", *common]
    assert installed(for_mini) == ["low-1.0", "on_mac-1.0", *common]
    assert "aarch64" in (for_board / "low.py").read_text()
    sent = dict(archived_files(for_board))
    assert sent["low.py"] == for_board / "low.py"
    assert "mlx_ring/cli/main.py" in sent
    assert not any(name.startswith(("mlx/", "bin/", ".")) for name in sent)


def test_fetched_packages_are_cached_and_old_ones_deleted(store: WheelStore) -> None:
    assert store.given is not None
    wanted = Wanted(("on-linux",))
    first = packages_for(BOARD, wanted, store)
    (store.given / "on_linux-1.0-py3-none-any.whl").rename(store.folder / "elsewhere")
    for number in range(4):
        other = store.folder / f"older-{number}"
        other.mkdir()
        os.utime(other, (0, time.time() - 10_000 * (number + 1)))
    (store.folder / "elsewhere").rename(store.given / "on_linux-1.0-py3-none-any.whl")
    assert packages_for(BOARD, wanted, store) == first
    remaining = {path.name for path in store.folder.iterdir() if path.is_dir()}
    assert remaining == {first.name, "older-0", "older-1", "older-2"}


def test_a_package_without_a_wheel_is_named_and_nothing_is_cached(store: WheelStore) -> None:
    old = Python("/bin/python3", "darwin", "arm64", "3.13", "macos", (14, 5))
    with pytest.raises(HostFailed) as caught:
        packages_for(old, Wanted(("low==1.0",)), store)
    assert str(caught.value).startswith("low 1.0 has no wheel for macOS 14.5 on arm64, with Python 3.13")
    assert [path for path in store.folder.iterdir() if path.is_dir()] == []


def test_an_index_out_of_reach_is_reported(store: WheelStore) -> None:
    with pytest.raises(HostFailed, match="the package index is out of reach from here"):
        packages_for(BOARD, Wanted(("zeroconf",)), WheelStore(store.folder))
    with pytest.raises(
        HostFailed, match=r"out of reach .*given alone: zeroconf has no wheel in that folder$"
    ):
        packages_for(BOARD, Wanted(("top", "zeroconf")), store)


UV_ERRORS = {
    "mlx 0.32.4 has no wheel for Linux with glibc 2.36 on aarch64, with Python 3.12 (wheels exist for macosx_14_0_arm64):": """
error: No solution found when resolving dependencies
  cause: Because mlx[cpu]==0.32.4 has no wheels with a matching platform tag (e.g., `manylinux_2_36_aarch64`)
hint: Wheels are available for `mlx` (v0.32.4) on the following platforms: `macosx_14_0_arm64`, `win_amd64`""",
    "mlx 0.32.5+mine, which is installed here, is not in the package index": """
  \N{MULTIPLICATION SIGN} No solution found when resolving dependencies:
  ╰─▶ Because there is no version of
      mlx==0.32.5+mine and you require mlx==0.32.5+mine""",
    "mlx 0.32.4+mine, which is installed here, is not in the package index": """
error: No solution found when resolving dependencies
  cause: Because you require mlx[cpu]>=0.32.4 and mlx{sys_platform == 'linux'}==0.32.4+mine, we can conclude that""",
    "the package index is out of reach from here (dns error)": """
error: Request failed after 3 retries
  cause: Failed to fetch: https://mine.example/simple/mlx/
  cause: dns error""",
    "the package index answers 401 Unauthorized: correct the credentials": """
error: No solution found when resolving dependencies
  cause: Because mlx was not found in the package registry and you require mlx, we can conclude that
hint: An index URL (https://mine.example/simple) could not be queried due to a lack of valid authentication credentials (401 Unauthorized)""",
    "the package index answers 403 Forbidden: correct the credentials": """
error: No solution found when resolving dependencies
  cause: Because mlx was not found in the package registry and you require mlx, we can conclude that
hint: An index (https://mine.example/simple) returned a 403 Forbidden error. Check that the index URL is correct""",
    "mlx is not in the package index: give a folder with its wheel": """
error: No solution found when resolving dependencies
  cause: Because mlx was not found in the package registry and you require mlx, we can conclude that""",
    "(error sending request for url (https://mine.example/simple/mlx/))": """
error: Failed to fetch: `https://me:secret@mine.example/simple/mlx/`
  cause: error sending request for url (https://me:secret@mine.example/simple/mlx/)""",
    "cannot be fetched: something new": "error: something new.\n\nhint: read",
    "cannot be fetched: uv printed nothing": "",
}


@pytest.mark.parametrize("sentence", UV_ERRORS)
def test_errors_of_uv_become_one_sentence(sentence: str) -> None:
    written = why_not(UV_ERRORS[sentence], BOARD)
    assert sentence in written
    assert "\n" not in written
    assert "secret" not in written


def test_a_rebuilt_wheel_is_fetched_again(store: WheelStore) -> None:
    assert store.given is not None
    wanted = Wanted(("on-linux",))
    first = packages_for(BOARD, wanted, store)
    wheel = store.given / "on_linux-1.0-py3-none-any.whl"
    wheel.unlink()
    write_wheel(store.given, "on_linux", "1.0", "py3-none-any", "top")
    os.utime(wheel, (0, time.time() + 10))
    second = packages_for(BOARD, wanted, store)
    assert [installed(first), installed(second)] == [
        ["on_linux-1.0"],
        ["low-2.0", "on_linux-1.0", "only_new-1.1", "top-2.0"],
    ]


def test_cached_packages_hold_no_links(store: WheelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_LINK_MODE", "symlink")
    folder = packages_for(BOARD, Wanted(("on-linux",)), store)
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.timeout(300)
def test_mlx_for_another_processor_and_python_is_fetched_from_the_index(tmp_path: Path) -> None:
    wanted = wanted_here()
    board = Python("/bin/python3", "linux", "aarch64", "3.13", "glibc", (2, 39))
    mlx = tuple(text for text in wanted.requirements if text.startswith("mlx") and "mlx-lm" not in text)
    folder = packages_for(board, Wanted(mlx, wanted.exact[:1]), WheelStore(tmp_path))
    assert [name.partition("-")[0] for name in installed(folder)] == ["mlx", "mlx_cpu"]
    libraries = [path for path in folder.rglob("*.so*") if path.is_file()]
    assert {elf_machine(path) for path in libraries} == {183}, "EM_AARCH64"
    assert any("cpython-313-aarch64" in path.name for path in libraries)


def elf_machine(path: Path) -> int:
    """Return the field e_machine of the ELF header; see elf(5)."""
    header = path.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    return int.from_bytes(header[18:20], "little")


PIP_OUTPUT = """
:env:.find-links='/nowhere /etc'
global.index-url='https://mine.example/simple'
global.extra-index-url='https://more.example/simple\\nfile:///nowhere/simple'
global.find-links='/usr'
install.index-url='https://install.example/simple'
list.format='columns'
WARNING: something else
"""


def test_settings_of_pip_reach_uv_without_missing_folders() -> None:
    assert variables_of(pip_settings(PIP_OUTPUT), {}) == {
        "UV_DEFAULT_INDEX": "https://install.example/simple",
        "UV_INDEX": "https://more.example/simple",
        "UV_FIND_LINKS": "/etc",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert variables_of(pip_settings(""), {}) == {}


def test_a_file_may_have_spaces_in_its_name(tmp_path: Path) -> None:
    cert = tmp_path / "ours and theirs.pem"
    cert.touch()
    assert variables_of({"cert": str(cert), "trusted-host": "a.example b.example"}, {}) == {
        "SSL_CERT_FILE": str(cert),
        "UV_INSECURE_HOST": "a.example b.example",
    }


def test_variables_of_the_environment_are_kept() -> None:
    settings = {"cert": "/etc", "index-url": "https://mine.example/simple"}
    assert variables_of(settings, {"SSL_CERT_FILE": "/own"}) == {
        "UV_DEFAULT_INDEX": "https://mine.example/simple"
    }


@pytest.fixture
def clear_uv_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove uv's variables and its system-wide file."""
    monkeypatch.setattr(wheels, "_SYSTEM", tmp_path / "etc")
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_INDEX",
        "UV_INDEX_URL",
        "UV_EXTRA_INDEX_URL",
        "UV_FIND_LINKS",
        "UV_CONFIG_FILE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clear_uv_settings")
def test_settings_of_uv_are_its_variables_or_its_file(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert not has_uv_settings(environment)
    assert has_uv_settings({**environment, "UV_DEFAULT_INDEX": "https://mine.example/simple"})
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").touch()
    assert has_uv_settings(environment)


@pytest.mark.usefixtures("clear_uv_settings")
def test_extra_indexes_of_pip_are_used_only_if_the_main_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "_pip_config", lambda: PIP_OUTPUT)
    first, second = wheels.index_environments()
    assert first["UV_DEFAULT_INDEX"] == second["UV_DEFAULT_INDEX"] == "https://install.example/simple"
    assert "UV_INDEX" not in first
    assert second["UV_INDEX"] == "https://more.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert [one["UV_DEFAULT_INDEX"] for one in wheels.index_environments()] == ["https://own.example/simple"]
