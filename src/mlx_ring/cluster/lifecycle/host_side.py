"""What a machine of the cluster does when it is told over ssh: start something that stays, wait for it, ask it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlx_ring.cluster.lifecycle.about import OWN_PROGRAM, About, own_versions
from mlx_ring.core.cluster_folders import AUTHORITY_FILE, logs_folder, node_folder
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, HostFailed
from mlx_ring.host.private_files import make_private_folder, read_private
from mlx_ring.host.running import running_here
from mlx_ring.models.model_source import builtin_names

if TYPE_CHECKING:
    import httpx

_LOOK_S = 0.1
_ASK_S = 0.5
"""Between questions to a head, each of which is a line in its log."""
_ANSWER_S = 600.0
_LAST_LINES = 3
_BAD_STATUS = 400
_OWN = False
"""Nothing is to be verified: the head is a process of this machine, whose address it has written down itself, and its
certificate is for the name that others know it by."""


def about_here(state: Path, *, identity: bool) -> About:
    """Of this machine; with `identity` it gets an id where it has none."""
    folder = node_folder(state)
    if identity:
        from mlx_ring.rpc.tls.identity import open_identity  # gRPC, for the first time alone

        node = open_identity(folder).node
    else:
        node = (read_private(folder / "node-id") or b"").decode(errors="replace").strip()
    authority = read_private(folder / AUTHORITY_FILE)
    cluster = hashlib.sha256(authority).hexdigest()[:16] if authority else ""
    return About(own_versions(), str(state), node, tuple(running_here(state)), cluster)


def whole_path(name: str, folders: Sequence[Path]) -> str:
    """A model as the head takes it wherever it runs: a folder of this machine by its whole path, anything else as it is."""
    if name in builtin_names():
        return name
    found = next((path for folder in folders if (path := folder / Path(name).expanduser()).is_dir()), None)
    return name if found is None else str(found.resolve())


def run_detached(state: Path, arguments: Sequence[str], timeout_s: float) -> int:
    """Start `mlx-ring` with these arguments for good; its process, once it says itself that it runs.

    It leads a session of its own and holds nothing of this one's, so that it stays when ssh goes.

    Raises:
        ConfigError: it has ended instead; its last words.
    """
    leave_program()
    out = out_file(state, arguments[0])
    make_private_folder(out.parent)
    with out.open("wb") as stream:
        process = subprocess.Popen(
            [*OWN_PROGRAM, *arguments],
            cwd=state,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Nobody rotates that file, and what is logged lies beside it.
            env=inherited_environment({"PYTHONUNBUFFERED": "1", "MLX_RING_LOG_STDERR": "off"}),
        )
    waiting = _Waiting(state, arguments[0], lambda: process.poll() is not None)
    waiting.until(lambda: any(found.pid == process.pid for found in running_here(state)), timeout_s)
    return process.pid


def leave_program() -> None:
    """Where other machines look first for the program that runs here: it may lie in a checkout, where nobody would look."""
    path = Path.home() / ".local" / "share" / "mlx-ring" / "bin" / "mlx-ring"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f'#!/bin/sh\nexec {shlex.join(OWN_PROGRAM)} "$@"\n'
        fresh = path.with_suffix(".new")
        fresh.write_text(text, "utf-8")
        fresh.chmod(0o755)
        fresh.replace(path)


def wait_for_port(state: Path, pid: int, port: int, timeout_s: float) -> None:
    """Until that process listens there. Nobody connects: a head would take that for somebody it must refuse.

    Raises:
        ConfigError: it has ended instead, or the time is over.
    """

    def listens() -> bool:
        connections = psutil.Process(pid).net_connections("tcp")
        return any(
            found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            for found in connections
        )

    _Waiting(state, "serve", lambda: _has_ended(pid)).until(listens, timeout_s)


def wait_until_ready(state: Path, pid: int, timeout_s: float) -> bool:
    """Until that head answers requests; False where it does not yet when the time is over.

    Raises:
        ConfigError: it has ended instead; its last words.
    """
    import httpx  # most of what a machine is told asks nobody

    url = next((found.url for found in running_here(state) if found.pid == pid), "")
    with httpx.Client(timeout=_ANSWER_S, trust_env=False, verify=_OWN) as client:

        def is_ready() -> bool:
            try:
                return client.get(f"{url}/health/ready").status_code < _BAD_STATUS
            except httpx.HTTPError:
                return False

        return _Waiting(state, "serve", lambda: _has_ended(pid)).holds_before(is_ready, timeout_s, _ASK_S)


def ask_head(state: Path, method: str, path: str, body: str, keys: Sequence[str]) -> str:
    """What the head of this machine answers; of several the one that was started last.

    Raises:
        HostFailed: none runs here, or it answers with an error.
    """
    import httpx

    heads = [found for found in running_here(state) if found.kind == "head"]
    if not heads:
        raise HostFailed("No head runs here: start it with `mlx-ring cluster start`.")
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    headers |= {"content-type": "application/json"} if body else {}
    url = f"{max(heads, key=lambda found: found.started_s).url}{path}"
    try:
        answer = httpx.request(
            method,
            url,
            content=body or None,
            headers=headers,
            timeout=_ANSWER_S,
            trust_env=False,
            verify=_OWN,
        )
    except httpx.HTTPError as error:
        raise HostFailed(f"The head at {url} does not answer: {error}.") from error
    if answer.status_code >= _BAD_STATUS:
        raise HostFailed(f"The head answered with {answer.status_code}: {_said(answer)}")
    return answer.text


def log_command(state: Path, lines: int, *, follow: bool) -> list[str]:
    """What prints the ends of this machine's log files, and with `follow` what is added to them."""
    files = sorted(map(str, Path(logs_folder(str(state))).glob("*.log")))
    if not files:
        raise ConfigError(
            f"There are no log files in {logs_folder(str(state))}: nothing was started there yet."
        )
    return ["tail", "-q", "-n", str(lines), *(["-F"] if follow else []), *files]


def out_file(state: Path, verb: str) -> Path:
    """What it prints until it serves, and what it dies of; its log goes to files that rotate."""
    return Path(logs_folder(str(state))) / f"{verb}.out"


def last_words(text: str) -> str:
    """Why a program has ended, by what it printed last."""
    lines = [line for line in text.splitlines() if line.strip()]
    sentences = [line.removeprefix("mlx-ring: ") for line in lines if line.startswith("mlx-ring: ")]
    return sentences[-1] if sentences else " / ".join(lines[-_LAST_LINES:]) or "without a word"


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True, slots=True)
class _Waiting:
    """For something of a process; that it ends is noticed."""

    state: Path
    verb: str
    has_ended: Callable[[], bool]

    def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        if not self.holds_before(holds, timeout_s):
            raise ConfigError(
                f"`mlx-ring {self.verb}` is not as far as it should be after {timeout_s:g} s: "
                f"see {out_file(self.state, self.verb)}."
            )

    def holds_before(self, holds: Callable[[], bool], timeout_s: float, pause_s: float = _LOOK_S) -> bool:
        """Looks again and again; False where the time is over."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                if holds():
                    return True
            if self.has_ended():
                words = last_words(out_file(self.state, self.verb).read_text("utf-8", errors="replace"))
                raise ConfigError(f"`mlx-ring {self.verb}` has ended: {words}")
            if time.monotonic() > end:
                return False
            time.sleep(pause_s)
