"""Commands are imported one at a time, and impossible options are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.processes import clean_environment, run_in_process
from typer.main import get_command

from mlx_ring.cli.app import COMMANDS, app

RUN = """
import sys
from mlx_ring.cli.app import run
sys.argv = ["mlx-ring", *sys.argv[1:]]
code = run()
print("imported:", *(name for name in sys.modules if name.startswith("mlx_ring.cli.")), file=sys.stderr)
sys.exit(code)
"""


MAIN = "from mlx_ring.cli.main import main; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        env=clean_environment() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def all_commands(group: Any, name: str) -> Iterator[Any]:
    command = group.get_command(typer.Context(group), name)
    yield command
    yield from getattr(command, "commands", {}).values()


def test_a_command_imports_no_other_command() -> None:
    done = run("service", "show")
    assert done.returncode == 0, done.stderr
    imported = done.stderr.partition("imported: ")[2].split()
    assert {name.split(".")[2] for name in imported} == {"app", "os_service"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_no_line_break_within_a_paragraph(name: str) -> None:
    with_ends = [command.help or "" for command in all_commands(get_command(app), name)]
    assert [text for text in with_ends if "\n" in text.replace("\n\n", "")] == []


def test_a_misspelt_command_gets_a_suggestion(tmp_path: Path) -> None:
    done = run_in_process("modles", folder=tmp_path)
    assert done.returncode == 2
    assert "No such command 'modles'. Did you mean 'models'" in done.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("ls", "No such command 'ls'. Did you mean 'list'? `mlx-ring --help`"),
        ("status", "No such command 'status'. Did you mean 'ps' or 'cluster status'?"),
        ("download", "Did you mean 'pull'?"),
        ("node status", "No such command 'node status'. Did you mean 'cluster status'? `mlx-ring --help`"),
        ("cluster ls", "No such command 'cluster ls'. Did you mean 'node list'?"),
    ],
)
def test_the_name_of_a_command_in_other_programs_gets_a_suggestion(
    typed: str, said: str, tmp_path: Path
) -> None:
    done = run_in_process(*typed.split(), "qwen3:8b", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("typed", "usage"),
    [
        (("help",), "mlx-ring [OPTIONS] COMMAND"),
        (("-h",), "mlx-ring [OPTIONS] COMMAND"),
        (("help", "token"), "mlx-ring token [OPTIONS] COMMAND"),
        (("help", "demo"), "mlx-ring serve [OPTIONS] [MODEL]..."),
        (("help", "help"), "mlx-ring [OPTIONS] COMMAND"),
        (("help", "version"), "mlx-ring [OPTIONS] COMMAND"),
        (("models", "help"), "mlx-ring models [OPTIONS] COMMAND"),
        (("help", "models", "load"), "mlx-ring models load [OPTIONS]"),
        (("models", "rm", "--help"), "mlx-ring models rm [OPTIONS] MODEL"),
        (("serve", "-h"), "mlx-ring serve [OPTIONS] [MODEL]..."),
    ],
)
def test_help_is_found_where_people_look_for_it(typed: tuple[str, ...], usage: str, tmp_path: Path) -> None:
    done = run_in_process(*typed, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: {usage}" in done.stdout


def test_help_for_an_unknown_command_suggests_one_and_version_is_a_command(tmp_path: Path) -> None:
    unknown = run_in_process("help", "modles", folder=tmp_path)
    assert unknown.returncode == 2
    assert "Did you mean 'models'" in unknown.stderr
    said = run_in_process("--version", folder=tmp_path).stdout
    for typed in (("version",), ("version", "--help")):
        done = run_in_process(*typed, folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, said)


def test_a_removed_working_directory_ends_a_command_with_one_sentence(tmp_path: Path) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-c", MAIN, "serve", "./model"],
        cwd=removed,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mlx-ring: The working directory does not exist any more: change to another one.\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--tp", "2", "--nodes", "2"), "name it with --trusted-interface, here and on each machine"),
        (
            ("--tp", "2", "--nodes", "3"),
            "2 workers, which cannot be spread evenly over 3 machines: use --nodes 1, 2 or",
        ),
        (("--tp", "2", "--tp-shares", "3,1,1"), "--tp-shares has 3 shares: give as many"),
        (("--tp-shares", "3,0"), "--tp-shares is 3,0; it must be numbers above 0"),
    ],
)
def test_impossible_tensor_parallel_options_are_refused(
    typed: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run_in_process("serve", "demo", "--port", "0", *typed, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.replace("\n", " ")


def test_stages_and_several_nodes_exclude_each_other(tmp_path: Path) -> None:
    done = run_in_process("serve", "demo", "--nodes", "2", "--stages", "3", "--port", "0", folder=tmp_path)
    assert done.returncode == 2
    assert "--stages 3 splits the layers over processes of one machine" in done.stderr
    assert "leave --stages out" in done.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("chat", "--temperature", "hot"), "--temperature is hot; it must be a number of 0.0 or more."),
        (("run", "demo", "--top-p", "2"), "--top-p is 2; it must be a number from 0.0 to 1.0."),
        (("chat", "--max-tokens", "0"), "--max-tokens is 0; it must be a whole number of 1 or more."),
        (("heads", "--timeout", "x"), "--timeout is x; it must be a number."),
        (
            ("serve", "--port"),
            "Option '--port' requires an argument. `mlx-ring serve --help` lists its options.",
        ),
    ],
)
def test_a_wrong_or_missing_value_of_a_flag_is_refused_with_the_values_that_it_takes(
    typed: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = run_in_process(*typed, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mlx-ring: {said}")


@pytest.mark.parametrize("arguments", [(), ("cluster",), ("models",)])
def test_a_command_without_a_verb_prints_its_help(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_in_process(*arguments, folder=tmp_path)
    assert done.returncode == 0
    assert "Usage: mlx-ring" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_a_terminal_of_80_columns_shows_whole_names(flag: str, tmp_path: Path) -> None:
    lines = run_in_process("serve", flag, folder=tmp_path, environment={"COLUMNS": "80"}).stdout.splitlines()
    assert [line for line in lines if "…" in line] == []
    assert max(map(len, lines)) <= 80
    assert flag != "--help" or len(lines) <= 120


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_values_whole_and_without_types_of_python(name: str, tmp_path: Path) -> None:
    for command in all_commands(get_command(app), name):
        typed = (name,) if command.name == name else (name, command.name)
        text = run_in_process(*typed, "--help", folder=tmp_path, environment={"COLUMNS": "80"}).stdout
        assert "Usage: mlx-ring" in text
        assert re.findall(r"<(?!NAME>)\w[^>]*>|\{\w+\}|.*…", text) == []


def test_an_output_that_nobody_reads_ends_a_command_without_a_message(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, "ps", "--json"],
            env=clean_environment() | {"MLX_RING_STATE_DIR": str(tmp_path), "PYTHONUNBUFFERED": ""},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if not line.startswith("imported:")] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("command", [["ps", "--json"], ["list"]])
def test_an_output_that_cannot_be_written_is_reported_in_one_sentence(
    command: list[str], tmp_path: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *command],
            env=clean_environment() | {"MLX_RING_STATE_DIR": str(tmp_path), "HOME": str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("imported:")]
    assert said == [
        "mlx-ring: The output cannot be written: No space left on device. Free some space, or write it elsewhere."
    ]


def test_a_name_that_the_terminal_cannot_show_is_printed_with_escapes(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "machines: [{name: büro, memory_gb: 24, bandwidth_gb_s: 100, tflops: 4}]\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, "plan", "demo", "--cluster", "cluster.yaml"],
        env=clean_environment() | {"COLUMNS": "200", "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "b\\xfcro" in done.stdout
