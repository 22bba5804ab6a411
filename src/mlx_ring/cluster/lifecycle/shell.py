"""Commands on the machines of a cluster: here as they are, elsewhere by the user's own `ssh`, side by side."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TypeVar

from mlx_ring.cluster.lifecycle.arguments import Place
from mlx_ring.core.errors import HostFailed, HostUnreached

CONNECT_S = 10
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
    # A machine that goes away in the middle is noticed.
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_SSH_FAILED = 255
_STEP_S = 120.0
_BEGINS = "mlx-ring-begins-here"
"""Before what a command prints: a machine's start files may print something of their own."""

Result = TypeVar("Result")


def words_on(place: Place, words: Sequence[str]) -> list[str]:
    """What runs a command there. ssh hands one line to the user's shell, so that each word is quoted for it."""
    return list(words) if place.is_here else [*_SSH, "--", place.device.ssh, shlex.join(words)]


def run_on(place: Place, words: Sequence[str], *, told: str = "", timeout_s: float | None = _STEP_S) -> str:
    """What it prints.

    Args:
        place: where.
        words: the command.
        told: what it reads; secrets go this way, for arguments can be seen by others.
        timeout_s: how long it may take.

    Raises:
        HostFailed: the machine cannot be reached, or the command fails; its own last words.
    """
    *start, command = words_on(place, words)
    try:
        done = subprocess.run(
            [*start, command if place.is_here else f"echo {_BEGINS}; {command}"],
            input=told,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HostUnreached(f"{place.name} did not answer within {timeout_s:g} s.") from error
    except OSError as error:
        raise HostFailed(
            f"{place.name}: {words_on(place, words)[0]} cannot be run ({error.strerror})."
        ) from error
    check_exit(place, done.returncode, done.stderr)
    return own_words(done.stdout)


def own_words(said: str) -> str:
    """What a command itself has printed, without what came before it."""
    before, mark, after = said.partition(f"{_BEGINS}\n")
    return after if mark else before


def send_to(place: Place, words: Sequence[str], write: Callable[[IO[bytes]], None]) -> None:
    """Run a command there that reads what `write` writes.

    Raises:
        HostFailed: as `run_on`.
    """
    with subprocess.Popen(
        words_on(place, words), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        broken = False
        assert process.stdin is not None  # noqa: S101 - it was asked for above
        assert process.stderr is not None  # noqa: S101 - as above
        try:
            write(process.stdin)
            process.stdin.close()
        except OSError:
            broken = True
        said = process.stderr.read().decode(errors="replace")
        code = process.wait()
    check_exit(place, code or int(broken), said)


def check_exit(place: Place, code: int, said: str) -> None:
    """Raises where a command has failed, with its last words as one sentence."""
    if code == 0:
        return
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = (lines[-1] if lines else f"it ended with code {code}").removeprefix("mlx-ring: ").rstrip(".")
    if code == _SSH_FAILED and not place.is_here:
        raise HostUnreached(
            f"{place.name} cannot be reached by `ssh {place.device.ssh}`: {last}. Mend that until it asks nothing."
        )
    raise HostFailed(f"{place.name}: {last}.")


def on_all(places: Sequence[Place], work: Callable[[Place], Result]) -> list[Result]:
    """Do it for all machines side by side, and wait for all.

    Raises:
        HostFailed: with a sentence for each machine that failed; the very error where one did.
    """
    if not places:
        return []
    with ThreadPoolExecutor(max_workers=len(places)) as pool:
        futures = [pool.submit(work, place) for place in places]
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in failures:
        if not isinstance(error, HostFailed):
            raise error
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise HostFailed("\n".join(map(str, failures)))
    return [future.result() for future in futures]
