"""Packages for a machine of another system, fetched here so that it needs no internet access.

uv fetches them, because it evaluates requirements for a given system; pip does so only for its own. The package index comes
from uv's settings, or from pip's if uv has none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlx_ring.cluster.lifecycle.installation import Python, wheel_platform, wheel_variables
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import HostFailed
from mlx_ring.host.private_files import locked, make_private_folder

_PIP_S = 60.0
_SYSTEM = Path("/etc")
"""Parent of the folder with uv's settings for all users."""
_SECTIONS = ("global", "install", "download", ":env:")
"""Sections of pip's settings that are read; later ones override earlier ones."""
_UV_INDEX_NAMES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
_SEVERAL = {"extra-index-url": " ", "find-links": ",", "trusted-host": " "}
"""Settings with several values, each with uv's separator; pip separates by spaces."""


def index_environments() -> list[dict[str, str]]:
    """Return the environments to start uv with, the second in case the first one fails.

    pip takes each file from any index, but uv takes all files of a version from one. pip's extra indexes therefore come
    second: a wheel there for one system would hide those for all others.
    """
    environment = inherited_environment({})
    if has_uv_settings(environment):
        return [environment]
    named = variables_of(pip_settings(_pip_config()), environment)
    main = {name: value for name, value in named.items() if not name.startswith("UV_INDEX")}
    return [own | environment for own in ([main] if main == named else [main, named])]


def has_uv_settings(environment: Mapping[str, str]) -> bool:
    """Return True if uv has an index in the environment or a settings file."""
    if any(environment.get(name) for name in (*_UV_INDEX_NAMES, "UV_CONFIG_FILE")):
        return True
    own = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return any((folder / "uv" / "uv.toml").is_file() for folder in (own, _SYSTEM))


def pip_settings(text: str) -> dict[str, str]:
    """Parse the output of `pip config list`, with lines such as `global.index-url='https://…'`."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            found.setdefault(section, {})[key] = str(ast.literal_eval(value))
    return {key: value for section in _SECTIONS for key, value in found.get(section, {}).items()}


def variables_of(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings by the names of uv's environment variables."""
    found: dict[str, str] = {}
    for key, name in _NAMES.items():
        text = settings.get(key, "").strip()
        values = text.split() if key in _SEVERAL else [text]
        if there := [value for value in values if value and _is_there(value)]:
            found[name] = _SEVERAL.get(key, "").join(there)
    if "UV_INDEX" in found:
        # By default, pip takes the best match of all indexes, and uv the first index that has the package.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in environment}


def _is_there(value: str) -> bool:
    """Return False for a missing folder, which pip ignores and uv reports as an error."""
    if value.startswith("file:"):
        return Path(unquote(urlsplit(value).path)).exists()
    return Path(value).exists() if value.startswith("/") else True


@functools.cache
def _pip_config() -> str:
    """Return the settings of this environment's pip, or of the one on the PATH; empty without pip."""
    for pip in ((sys.executable, "-m", "pip"), ("pip3",)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [*pip, "config", "list"], capture_output=True, text=True, timeout=_PIP_S, check=False
            )
            if done.returncode == 0:
                return done.stdout
    return ""


_FETCH_S = 1800.0
_MOST_KEPT = 4
_IN_USE_S = 3600.0
"""Time for which a folder of packages may still be in use, that is, being sent."""
_NAME = r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(?:\{[^}]*\})?"
_NO_WHEEL = re.compile(rf"{_NAME}==([\w.+!]+) has no (?:usable )?wheels")
_NO_VERSION = re.compile(rf"(?:there is no version of|you require \S.*? and) {_NAME}==([\w.+!]+)")
_UNKNOWN = re.compile(rf"Because {_NAME} was not found in the (provided package locations|package registry)")
_REFUSED = re.compile(r"(?:credentials \(|returned a )(40[13] \w+)")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_OTHERS = re.compile(r"Wheels are available for [^:]*: ((?:`[^`]+`(?:, )?)+)")
_NETWORK = re.compile(
    r"Failed to (?:fetch|download)|error sending request|timed out|dns error|network was disabled",
    re.IGNORECASE,
)
_DRAWN = re.compile(r"[\s\u00d7\u2500-\u25b6]+")
"""Spaces, and the lines and arrows that some versions of uv draw."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Packages to fetch, with the versions of this machine."""

    requirements: tuple[str, ...]
    """Requirements with markers, which are evaluated for the target machine."""
    exact: tuple[str, ...] = ()
    """Required versions, such as `mlx==0.32.4`."""
    preferred: tuple[str, ...] = ()
    """Preferred versions, used if they exist for the target system."""


@dataclass(frozen=True, slots=True)
class WheelStore:
    """Cache of fetched packages, and a source of packages beside the index."""

    folder: Path
    given: Path | None = None
    """Folder of the user's own wheels; the index is used only if they are not enough."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of packages for uv: its flags and environment."""

    flags: tuple[str, ...]
    environment: Mapping[str, str]


def packages_for(python: Python, wanted: Wanted, store: WheelStore) -> Path:
    """Return a folder with the content of `site-packages` for the target, fetched unless it is in the cache.

    Raises:
        HostFailed: a package without a wheel for that system, or an index out of reach, with the reason and the remedy.
    """
    platform = wheel_platform(python)
    make_private_folder(store.folder)
    folder = store.folder / _key(python, platform, wanted, store.given)
    with locked(store.folder):
        if not folder.is_dir():
            _fetch(python, platform, wanted, store.given, folder)
        os.utime(folder)
        _forget_old(store.folder)
    return folder


def _key(python: Python, platform: str, wanted: Wanted, given: Path | None) -> str:
    wheels = [(path.name, path.stat()) for path in given.glob("*.whl") if path.is_file()] if given else []
    # A rebuilt wheel may have the same name as before.
    names = sorted(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in wheels)
    lines = [platform, repr(wheel_variables(python)), python.version]
    lines += [*wanted.requirements, "", *wanted.exact, "", *wanted.preferred, "", *names]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _fetch(python: Python, platform: str, wanted: Wanted, given: Path | None, folder: Path) -> None:
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _fetch_into(fresh, python, platform, wanted, given)
        (fresh / "packages").rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _fetch_into(fresh: Path, python: Python, platform: str, wanted: Wanted, given: Path | None) -> None:
    """Try the sources in turn until one has everything."""
    failures: list[str] = []
    for source in _sources(given):
        try:
            _fetch_from(source, python, platform, wanted, fresh)
        except HostFailed as error:
            failures.append(str(error))
        else:
            return
    if given is None:
        raise HostFailed(failures[0])
    raise HostFailed(f"{failures[1]}. With {given} alone: {failures[0]}")


def _sources(given: Path | None) -> list[_Source]:
    """Return the user's folder alone, then the index together with it."""
    environments = index_environments()
    links = () if given is None else ("--find-links", str(given.absolute()))
    alone = [] if given is None else [_Source(("--no-index", *links), environments[0])]
    return alone + [_Source(links, environment) for environment in environments]


def _fetch_from(source: _Source, python: Python, platform: str, wanted: Wanted, fresh: Path) -> None:
    target = (
        *("--python", sys.executable, "--no-python-downloads", "--python-platform", platform),
        *("--python-version", python.version, "--only-binary", ":all:", "--quiet", "--color", "never"),
        *source.flags,
    )
    # Leftovers of a source that did not have everything.
    shutil.rmtree(fresh / "packages", ignore_errors=True)
    for name, lines in (
        ("wanted.txt", wanted.requirements),
        ("exact.txt", wanted.exact),
        # uv prefers the versions in an existing output file.
        ("versions.txt", wanted.preferred),
    ):
        (fresh / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    plain = ("--no-annotate", "--no-header")
    out = ("--constraints", "exact.txt", "--output-file", "versions.txt")
    _run_uv(("pip", "compile", "wanted.txt", *out, *plain, *target), python, source, fresh)
    # Copies, because links into uv's cache cannot be sent.
    into = ("--target", "packages", "--no-deps", "--link-mode", "copy")
    _run_uv(("pip", "install", "--requirements", "versions.txt", *into, *target), python, source, fresh)


def _run_uv(words: Sequence[str], python: Python, source: _Source, folder: Path) -> None:
    try:
        done = subprocess.run(
            [_uv(), *words],
            cwd=folder,
            env={**source.environment, **wheel_variables(python)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostFailed(
            f"packages for {python} were not fetched within {_FETCH_S:g} s: check the network and start again"
        ) from error
    if done.returncode:
        raise HostFailed(why_not(done.stderr, python))


def _uv() -> str:
    """Return the path of uv, from the PATH if the program was itself sent here without it."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin  # not always installed

        return find_uv_bin()
    found = shutil.which("uv")
    if found is None:
        raise HostFailed(
            "fetching packages for another system needs uv, which is not installed here: "
            "install it with pip install 'mlx-ring[deploy]'"
        )
    return found


def why_not(said: str, python: Python) -> str:
    """Turn uv's output into one sentence without a full stop and without credentials for an index."""
    said = _CREDENTIALS.sub("", said)
    text = _DRAWN.sub(" ", said).strip()
    if match := _NO_WHEEL.search(text):
        return (
            f"{match[1]} {match[2]} has no wheel for {python}{_others(text)}: use another Python or another system there, "
            "or install mlx-ring there manually"
        )
    if match := _NO_VERSION.search(text):
        return (
            f"{match[1]} {match[2]}, which is installed here, is not in the package index. Install a version that is in the "
            "index, or give a folder with its wheel as `wheels` in the file"
        )
    last = _last_cause(said)
    if problem := _index_problem(text, last):
        return (
            f"packages for {python} cannot be fetched, because the package index {problem}, or give a folder with wheels "
            "for it as `wheels` in the file"
        )
    if match := _UNKNOWN.search(text):
        if match[2] == "package registry":
            return f"{match[1]} is not in the package index: give a folder with its wheel as `wheels` in the file"
        return f"{match[1]} has no wheel in that folder"
    return f"packages for {python} cannot be fetched: {last}"


def _index_problem(text: str, last: str) -> str:
    """Describe the problem of the index and its remedy; return an empty text if the index is not the cause."""
    if match := _REFUSED.search(text):
        return f"answers {match[1]}: correct the credentials in the settings of uv or pip"
    return f"is out of reach from here ({last}): check the network" if _NETWORK.search(text) else ""


def _others(text: str) -> str:
    """Name the other systems for which wheels exist."""
    match = _OTHERS.search(text)
    names = match[1].replace("`", "").split(", ") if match else []
    known = ", ".join(name for name in names if name and not name.startswith("win"))
    return f" (wheels exist for {known})" if known else ""


def _last_cause(said: str) -> str:
    lines = [_DRAWN.sub(" ", line).strip() for line in said.partition("hint:")[0].splitlines()]
    last = next((line for line in reversed(lines) if line), "uv printed nothing")
    return last.removeprefix("error: ").removeprefix("cause: ").rstrip(".")


def _forget_old(folder: Path) -> None:
    """Delete all folders but those used last."""
    kept = sorted(
        (path for path in folder.iterdir() if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in kept[_MOST_KEPT:]:
        if time.time() - path.stat().st_mtime > _IN_USE_S:
            shutil.rmtree(path, ignore_errors=True)
