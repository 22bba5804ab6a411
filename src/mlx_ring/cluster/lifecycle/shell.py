"""Commands on the machines of a cluster: directly on the local one, over the user's `ssh` elsewhere, in parallel."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TypeVar

from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.core.errors import HostFailed, HostUnreached

CONNECT_S = 10
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    # Notice a machine that disappears during a command.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_SSH_FAILED = 255
_STEP_S = 120.0
_BEGINS = "mlx-ring-begins-here"
"""Mark before a command's output, because a machine's shell start-up files may print something too."""

Result = TypeVar("Result")


def command_on(machine: Machine, words: Sequence[str]) -> list[str]:
    """Return the command line that runs a command there.

    ssh passes one line to the user's shell, so each argument is quoted.
    """
    return list(words) if machine.is_here else [*_SSH, "--", machine.device.ssh, shlex.join(words)]


def run_on(
    machine: Machine, words: Sequence[str], *, stdin: str = "", timeout_s: float | None = _STEP_S
) -> str:
    """Run a command on a machine and return its output.

    Args:
        machine: the machine.
        words: the command.
        stdin: the standard input; secrets are passed this way, because other users can see arguments.
        timeout_s: the time limit.

    Raises:
        HostFailed: a machine out of reach, or a failed command, with its last output.
    """
    *start, command = command_on(machine, words)
    try:
        done = subprocess.run(
            [*start, command if machine.is_here else f"echo {_BEGINS}; {command}"],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostUnreached(f"{machine.name} did not answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise HostFailed(
            f"{machine.name}: cannot run {command_on(machine, words)[0]} ({error.strerror})."
        ) from error
    check_exit(machine, done.returncode, done.stderr)
    return own_output(done.stdout)


def own_output(said: str) -> str:
    """Return the command's own output, without the lines that the shell printed before it."""
    before, mark, after = said.partition(f"{_BEGINS}\n")
    return after if mark else before


def send_to(machine: Machine, words: Sequence[str], write: Callable[[IO[bytes]], None]) -> None:
    """Run a command there with the output of `write` as its input.

    Raises:
        HostFailed: the same errors as in `run_on`.
    """
    with subprocess.Popen(
        command_on(machine, words), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        broken = False
        assert process.stdin is not None  # noqa: S101 - `stdin` is a pipe
        assert process.stderr is not None  # noqa: S101 - `stderr` is a pipe
        try:
            write(process.stdin)
            process.stdin.close()
        except OSError:
            broken = True
        said = process.stderr.read().decode(errors="replace")
        code = process.wait()
    check_exit(machine, code or int(broken), said)


def check_exit(machine: Machine, code: int, said: str) -> None:
    """Raise an error with the last line of output if a command has failed."""
    if code == 0:
        return
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = (lines[-1] if lines else f"it ended with code {code}").removeprefix("mlx-ring: ").rstrip(".")
    if code == _SSH_FAILED and not machine.is_here:
        raise HostUnreached(
            f"{machine.name} cannot be reached by `ssh {machine.device.ssh}`: {last}. {_remedy(last)}"
        )
    raise HostFailed(f"{machine.name}: {last}{'' if last.endswith('?') else '.'}")


def _remedy(last: str) -> str:
    if "Connection refused" in last:
        return (
            "Turn on an ssh server there: on a Mac, System Settings > General > Sharing > Remote Login; "
            "on Debian and Ubuntu, `sudo apt install openssh-server`."
        )
    return "Make that command work without a prompt."


def on_all(machines: Sequence[Machine], work: Callable[[Machine], Result]) -> list[Result]:
    """Do the work for all machines in parallel, and wait for all.

    Raises:
        HostFailed: a sentence for each machine that failed, or the original error of a single one.
    """
    if not machines:
        return []
    with ThreadPoolExecutor(max_workers=len(machines)) as pool:
        futures = [pool.submit(work, machine) for machine in machines]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, HostFailed):
            raise error
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise HostFailed("\n".join(map(str, failures)))
    return [future.result() for future in futures]
