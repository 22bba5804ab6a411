"""Which package index the person uses: uv's own settings, or pip's handed to uv where it has none."""

from __future__ import annotations

import ast
import contextlib
import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlx_ring.core.environment import inherited_environment

_PIP_S = 60.0
_SYSTEM = Path("/etc")
"""Where uv's settings for everybody lie."""
_SECTIONS = ("global", "install", "download", ":env:")
"""Of pip's settings, those that count; the later ones more."""
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
"""What there may be several of, and what uv wants between them; pip has spaces."""


def index_environments() -> list[dict[str, str]]:
    """What uv is started with, for the index that is used here; the second where the first does not do.

    pip takes each file from whatever index has it, and uv all files of a version from one: so the further indexes of pip's
    come last, lest a wheel for one system there hides all others.
    """
    environment = inherited_environment({})
    if has_uv_settings(environment):
        return [environment]
    named = variables_of(pip_settings(_pip_config()), environment)
    main = {name: value for name, value in named.items() if not name.startswith("UV_INDEX")}
    return [own | environment for own in ([main] if main == named else [main, named])]


def has_uv_settings(environment: Mapping[str, str]) -> bool:
    """Whether uv was told which index to use, or has a file of settings."""
    if any(environment.get(name) for name in (*_UV_INDEX_NAMES, "UV_CONFIG_FILE")):
        return True
    own = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return any((folder / "uv" / "uv.toml").is_file() for folder in (own, _SYSTEM))


def pip_settings(told: str) -> dict[str, str]:
    """Out of what `pip config list` prints: `global.index-url='https://…'`."""
    found: dict[str, dict[str, str]] = {}
    for line in told.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):
            found.setdefault(section, {})[key] = str(ast.literal_eval(value))
    return {key: value for section in _SECTIONS for key, value in found.get(section, {}).items()}


def variables_of(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What pip is set to, by the names of the variables that uv reads."""
    found: dict[str, str] = {}
    for key, name in _NAMES.items():
        told = settings.get(key, "").strip()
        values = told.split() if key in _SEVERAL else [told]
        if there := [value for value in values if value and _is_there(value)]:
            found[name] = _SEVERAL.get(key, "").join(there)
    if "UV_INDEX" in found:
        # pip takes the best of all indexes, uv the first that has a package.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if name not in environment}


def _is_there(value: str) -> bool:
    """A folder that is none is no error to pip, and one to uv."""
    if value.startswith("file:"):
        return Path(unquote(urlsplit(value).path)).exists()
    return Path(value).exists() if value.startswith("/") else True


@functools.cache
def _pip_config() -> str:
    """Of this environment's pip, else of the one on the PATH; empty where there is none."""
    for pip in ((sys.executable, "-m", "pip"), ("pip3",)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [*pip, "config", "list"], capture_output=True, text=True, timeout=_PIP_S, check=False
            )
            if done.returncode == 0:
                return done.stdout
    return ""
