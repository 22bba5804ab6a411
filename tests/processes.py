"""Real processes of this project: `mlx-ring` as a person starts it, with its children."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import httpx
import psutil
from tests.eventually import eventually
from tests.once import folder_of_run, once

from mlx_ring.agent.profiling import MOST_MEASUREMENTS, PROFILE_FILE
from mlx_ring.core.environment import inherited_environment, quieten_grpc

MLX_RING = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")
READY_WAIT_S = 120.0
_REQUEST_WAIT_S = 120.0
_END_WAIT_S = 30.0
_SETTINGS = {"MLX_RING_SPARE_WORKER": "off", "MLX_RING_LOG_DIR": "logs"}
"""Settings of processes that tests start."""


def run_cli(
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in `folder`. `within` is a command that runs it."""
    return subprocess.run(
        [*within, *MLX_RING, *arguments],
        cwd=folder,
        env=clean_environment() | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=READY_WAIT_S,
        check=False,
    )


def run_in_process(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, with the folder, environment and result of `run_cli`.

    It saves the start of a process. Use it for commands that refuse their input or only compute: not for those that
    start processes, serve, handle signals or use gRPC: of `serve`, until it has prepared its models. An error that is
    not handled reaches the test.
    """
    out, err = io.StringIO(), io.StringIO()
    # No worker is started, and `cluster start` names settings that reach no other machine.
    inherited = {name: value for name, value in clean_environment().items() if name not in _SETTINGS}
    settings = inherited | dict(environment or {})
    with (
        # A head reads its own stderr for what gRPC writes there: this process keeps its own.
        patch("mlx_ring.rpc.tls.handshakes.log_refused_handshakes"),
        patch.object(sys, "argv", ["mlx-ring", *arguments]),
        patch.dict("os.environ", settings, clear=True),
        contextlib.chdir(folder),
        _fresh_logging(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = _exit_code()
    return subprocess.CompletedProcess(["mlx-ring", *arguments], code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    """Call the console script in this process, and return the exit code that a shell sees."""
    from mlx_ring.cli.main import main  # most tests with processes need no command in this one

    quieten_grpc()  # a command may be the first to import it
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextlib.contextmanager
def _fresh_logging() -> Generator[None]:
    """Give a command the logging of a new process, and restore the present one afterwards."""
    root, kind, show_warning = logging.getLogger(), logging.getLoggerClass(), warnings.showwarning
    saved = [(each, type(each), _logger_state(each)) for each in (root, *_loggers())]
    handlers = list(root.handlers)
    root.handlers = []
    root.setLevel(logging.WARNING)
    try:
        with (
            patch.object(sys, "excepthook", sys.excepthook),
            patch.object(threading, "excepthook", threading.excepthook),
        ):
            yield
    finally:
        for handler in root.handlers:
            handler.close()
        if warnings.showwarning is not show_warning:
            logging.captureWarnings(capture=False)
        logging.setLoggerClass(kind)
        for each in _loggers():
            each.__class__ = kind
        for each, its_kind, state in saved:
            each.__class__ = its_kind
            vars(each).update(state)
        root.handlers = handlers
        root.setLevel(root.level)  # forgets what each logger has cached


def _loggers() -> list[logging.Logger]:
    """Return the named loggers."""
    return [each for each in logging.Logger.manager.loggerDict.values() if isinstance(each, logging.Logger)]


def _logger_state(logger: logging.Logger) -> dict[str, Any]:
    """Return a logger's attributes, with its own lists of handlers and filters."""
    return vars(logger) | {"handlers": list(logger.handlers), "filters": list(logger.filters)}


def clean_environment() -> dict[str, str]:
    """Return the environment without any setting of mlx-ring, and without `GRPC_VERBOSITY`, which the tests set.

    Machines keep no spare worker, because it would start another process for each server. Logs are in the working
    directory.
    """
    inherited = inherited_environment({})
    others = {name: value for name, value in inherited.items() if not name.startswith(("MLX_RING_", "GRPC_"))}
    return others | _SETTINGS


def _measure(within: tuple[str, ...]) -> str:
    """Measure this machine with `mlx-ring profile`, and return the text of the file that it writes.

    No agent measures again, even if the machine was busy.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_cli("profile", "--state-dir", folder, folder=Path(folder), within=within)
        assert done.returncode == 0, done.stderr
        kept = json.loads((Path(folder) / PROFILE_FILE).read_text())
        return json.dumps({**kept, "measurements": MOST_MEASUREMENTS})


def give_profile(state: Path, *, within: tuple[str, ...] = (), speed: float = 1.0) -> None:
    """Write this machine's profile into a state folder. It is measured once in a run, by the command `within`.

    With a `speed`, it says that the machine computes so many times as fast.
    """
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = json.loads(once(folder_of_run() / "-".join(["profile", *within]), lambda: _measure(within)))
    profile = kept["profile"]
    for rate in profile["rates"]:
        rate |= {name: rate[name] * speed for name in ("bandwidth", "flops")}
        rate["row_s"] /= speed
    costs = {name: value for name, value in profile["costs"].items() if isinstance(value, float)}
    profile["costs"] |= {name: seconds / speed for name, seconds in costs.items()}
    (state / PROFILE_FILE).write_text(json.dumps(kept))


@dataclass(slots=True)
class Server:
    """A running `mlx-ring serve`."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    children: Sequence[psutil.Process]
    """Agent and workers at the time when it was ready."""
    http: httpx.Client
    """Client of the server. Making one reads the system's certificates, which takes longer than a request."""

    def status(self) -> dict[str, Any]:
        """Return the answer of `/cluster/status`."""
        return self.http.get("/cluster/status").raise_for_status().json()

    def wait_for_health(self, code: int, text: str = "") -> httpx.Response:
        """Wait until `/health/ready` answers with this HTTP status and text, and return the answer.

        Every answer until then must have the status 200 or 503.
        """

        def health() -> httpx.Response:
            answer = self.http.get("/health/ready")
            assert answer.status_code in (200, 503), answer.text
            return answer

        return eventually(health, lambda answer: answer.status_code == code and text in answer.text)

    def child(self, module: str, *arguments: str) -> psutil.Process:
        """Return the child that now runs a module with these arguments."""
        return next(child for child in self.present_children() if _is(child, module, arguments))

    def present_children(self) -> list[psutil.Process]:
        """Return agent and workers as they are now, also those that have replaced lost ones."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """Send Ctrl-C, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(READY_WAIT_S)

    def all_ended(self) -> bool:
        """Wait for the ends of agent and workers; return True if none is left."""
        _, alive = psutil.wait_procs(self.children, timeout=30)
        return not alive


@contextlib.contextmanager
def serving(
    model: Path | str,
    *arguments: str,
    folder: Path,
    on_line: Callable[[str], None] | None = None,
    within: Sequence[str] = (),
) -> Generator[Server]:
    """Run `mlx-ring serve` in `folder` on a free port until it is ready, and kill all of it afterwards.

    Args:
        model: folder or name of the model.
        arguments: further arguments of the command.
        folder: working directory, which gets its standard error as `stderr.txt`.
        on_line: called with each line that it prints until it is ready.
        within: command that runs it, such as `env` or `ip netns exec`.
    """
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [*within, *MLX_RING, "serve", str(model), "--port", "0", *arguments],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    children: list[psutil.Process] = []
    try:
        url = _wait_until_ready(process, folder, on_line or (lambda _line: None))
        children = psutil.Process(process.pid).children(recursive=True)
        with client_of(url) as client:
            yield Server(process, url, folder, children, client)
    finally:
        process.kill()
        process.wait()
        _close(process.stdout)
        for left in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def client_of(url: str) -> httpx.Client:
    """Return a client that keeps no connection, so that none is closed under a request."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=_REQUEST_WAIT_S, limits=limits, verify=False)  # noqa: S501 - loopback, in the clear


@contextlib.contextmanager
def joining(*arguments: str, folder: Path, within: Sequence[str] = ()) -> Generator[subprocess.Popen[str]]:
    """Run `mlx-ring join` as a machine whose state and logs lie in `folder`, and end all of it afterwards."""
    folder.mkdir(exist_ok=True)
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            [*within, *MLX_RING, "join", *arguments, "--state-dir", str(folder / "state")],
            cwd=folder,
            env=clean_environment(),
            stdout=errors,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        processes: list[psutil.Process] = []
        # A test may have ended it.
        with contextlib.suppress(psutil.NoSuchProcess):
            itself = psutil.Process(process.pid)
            processes += [itself, *itself.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(processes, timeout=30)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def listening_addresses(process: psutil.Process) -> list[tuple[str, int]]:
    """Return where a process listens, in the order in which it opened the ports; empty if it has ended."""
    try:
        found = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    opened = sorted((each for each in found if each.status == psutil.CONN_LISTEN), key=lambda each: each.fd)
    return [(each.laddr.ip, each.laddr.port) for each in opened]


@contextlib.contextmanager
def run_at_end(script: str, *arguments: str) -> Generator[None]:
    """Run a shell script when the context ends, or when this process ends, also if it is killed.

    The script runs from the beginning. It first reads a line from its input, which is closed then.
    """
    watcher = subprocess.Popen(
        ["sh", "-c", script, "watcher", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(timeout=_END_WAIT_S)


def _wait_until_ready(process: subprocess.Popen[str], folder: Path, on_line: Callable[[str], None]) -> str:
    """Read the lines that it prints until it is ready, and return its address."""
    url = ""
    for line in process.stdout or ():
        on_line(line)
        found = re.search(r"at (https?://\S+)", line)
        url = found.group(1) if found else url
        if line.startswith("Press Ctrl-C"):
            return url
    message = f"The server ended before it was ready:\n{(folder / 'stderr.txt').read_text()}"
    raise AssertionError(message)


def _is(process: psutil.Process, module: str, arguments: Sequence[str]) -> bool:
    line = command_of(process)
    return module in line and " ".join(arguments) in " ".join(line)


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        stream.close()
