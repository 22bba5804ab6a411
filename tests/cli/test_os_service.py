"""`mlx-ring service`, as a person types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes import run_cli, run_in_process

from mlx_ring.core.environment import library_variables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the paths are those of systemd")

UNIT = Path(".config/systemd/user/mlx-ring-join.service")
CALLS = Path("calls")
SYSTEMCTL = f"""#!/bin/sh
echo "$@" >> "$HOME/{CALLS}"
"""


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that calls no `systemctl`, in this process with its own home."""
    return run_in_process("service", *arguments, folder=home, environment=environment_in(home))


def run_with_calls(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that calls `systemctl`, in a process of its own with its own home."""
    return run_cli("service", *arguments, folder=home, environment=environment_in(home))


def environment_in(home: Path) -> dict[str, str]:
    """Return an environment with this home and a `systemctl` that only records its calls: tests start no services."""
    programs = home / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    return {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin"}


def test_install_writes_a_unit_once_and_replaces_a_changed_one(tmp_path: Path) -> None:
    first = run("install", "--", "join", "mini.local", home=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"{tmp_path / UNIT} is written.\n")
    assert "  systemctl --user enable mlx-ring-join.service\n" in first.stdout
    assert "join mini.local\n" in (tmp_path / UNIT).read_text()
    again = run("install", "--", "join", "mini.local", home=tmp_path)
    assert "is already up to date." in again.stdout
    assert "is replaced." in run("install", "--", "join", "mini.local:6000", home=tmp_path).stdout
    assert not (tmp_path / CALLS).exists()


def test_a_head_that_runs_as_a_service_writes_no_token_to_the_journal(tmp_path: Path) -> None:
    for flags in ((), ("--no-join-lines",)):
        written = run("install", "--", "serve", "demo", *flags, "--nodes", "2", home=tmp_path)
        assert "mlx-ring token create" in written.stdout
        unit = tmp_path / ".config/systemd/user/mlx-ring-serve.service"
        (start,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        assert start.count("--no-join-lines") == 1


def test_install_now_starts_a_service_and_uninstall_stops_and_removes_it(tmp_path: Path) -> None:
    assert run_with_calls("install", "--now", "--", "join", "mini", home=tmp_path).returncode == 0
    removed = run_with_calls("uninstall", "join", home=tmp_path)
    assert (removed.returncode, removed.stdout) == (0, f"{tmp_path / UNIT} is removed.\n")
    assert (tmp_path / CALLS).read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable mlx-ring-join.service",
        "--user restart mlx-ring-join.service",
        "--user disable --now mlx-ring-join.service",
    ]
    again = run_with_calls("uninstall", home=tmp_path)
    assert again.returncode == 0
    assert again.stdout.count("is not there.") == 2


def test_install_into_a_folder_that_cannot_be_written_does_not_blame_an_option(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file")
    done = run("install", "--", "serve", "demo", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mlx-ring-serve.service cannot be written (" in done.stderr
    assert "): correct that, or log in as the user of the service." in done.stderr
    assert "--system" not in done.stderr


def test_install_names_the_variables_of_the_shell_that_a_service_lacks(tmp_path: Path) -> None:
    def reported(given: dict[str, str]) -> list[str]:
        environment = environment_in(tmp_path) | dict.fromkeys(library_variables(), "") | given
        words = ("service", "install", "--", "serve", "demo")
        done = run_in_process(*words, folder=tmp_path, environment=environment)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "does not get" in line]

    assert reported({}) == []
    settings, others = reported(
        {"MLX_RING_PORT": "8200", "HF_HOME": "/big/models", "https_proxy": "http://user:secret@10.0.0.1"}
    )
    assert settings == (
        "The service does not get MLX_RING_PORT from this shell: give flags, or write such lines into "
        f"{tmp_path / '.env'}."
    )
    assert others == (
        "The service does not get HF_HOME, https_proxy from this shell: run `systemctl --user edit "
        "mlx-ring-serve.service`, and add lines such as Environment=HF_HOME=… below [Service]."
    )
    (tmp_path / ".env").write_text("MLX_RING_PORT=8100\nMLX_RING_API_KEY=key-2\n")
    assert reported({"MLX_RING_PORT": "8200", "MLX_RING_API_KEY": "key-1"}) == []


def test_install_advises_to_write_no_secret_into_the_unit(tmp_path: Path) -> None:
    given = {"HF_TOKEN": "hf_secret", "MLX_RING_API_KEY": "key-1", "MLX_RING_PORT": "8200", "HF_HOME": "/big"}
    environment = environment_in(tmp_path) | dict.fromkeys(library_variables(), "") | given
    done = run_in_process(
        "service", "install", "--", "serve", "demo", folder=tmp_path, environment=environment
    )
    said = {line.split()[5].rstrip(","): line for line in done.stdout.splitlines() if "does not get" in line}
    assert said.keys() == given.keys()
    assert said["HF_TOKEN"].endswith(
        "from this shell: log in once with `hf auth login`, which keeps the token in your home folder."
    )
    assert "a file that only its owner reads, and give --api-key-file FILE." in said["MLX_RING_API_KEY"]


def test_show_prints_the_unit_before_and_after_install(tmp_path: Path) -> None:
    shown = run("show", "--", "join", "mini", home=tmp_path).stdout
    assert not (tmp_path / UNIT).exists()
    assert run("show", home=tmp_path).stdout.startswith("No service is installed")
    run("install", "--", "join", "mini", home=tmp_path)
    assert (tmp_path / UNIT).read_text() == shown
    assert shown in run("show", home=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("install", "--", "join", "mini", "--token", "mlxring1x"), "--token is a secret"),
        (("install",), "A service runs `mlx-ring join …`"),
        (("install", "--run-as", "root", "--", "join"), "--run-as is root, which needs --system"),
        (
            ("install", "--system", "--run-as", "nobody-here", "--", "join"),
            "--run-as is nobody-here, which is no user",
        ),
        (("uninstall", "chat"), "There is no service 'chat'"),
        (("install", "--", "serve", "demo", "--port", "99999"), "--port is 99999; it must be a whole number"),
        (("show", "--", "serve", "no-such-model"), "There is no model 'no-such-model'"),
        (("install", "--", "join", "mini", "--ports", "1"), "No such option: --ports"),
        (("show", "--", "serve", "--config", "none.yaml"), "The settings file none.yaml does not exist"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence_and_writes_nothing(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run(*arguments, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mlx-ring: {said}")
    assert not (tmp_path / ".config").exists()
