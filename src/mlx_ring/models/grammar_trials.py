"""Trials of grammars in a separate process, so that a grammar that ends or blocks it is simply refused.

llguidance limits the cost of a grammar, but not in all cases. 18 KB of patterns that must match together
took minutes, and 2 GB in the first 15 s. References 1,000 deep end a process with a stack of the usual size.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

from mlx_ring.core.errors import RequestError, ServingError
from mlx_ring.core.types import Grammar
from mlx_ring.models.grammars import STACK_BYTES, check_grammar, in_one_line

CPU_S = 5.0
"""CPU time for one grammar; the largest schemas take three seconds."""
_MEMORY_BYTES = 1536 << 20
"""Address space, including the stack."""
_BY_LIMITS = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL}


class GrammarTrials:
    """Process for trials, started with the first grammar. It ends with this process."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        """Function that ends the process and frees its resources."""

    def problem(self, grammar: Grammar) -> str:
        """Return why the grammar cannot be enforced; empty if it can.

        Waits for the answer; only one thread at a time may call it.

        Raises:
            ServingError: a trial process that cannot be started or has failed.
        """
        process = self._running()
        if answer := _ask(process, [grammar.kind, grammar.text]):
            return str(json.loads(answer))
        code = process.wait()
        self._end()
        if code in _BY_LIMITS:
            return (
                f"This schema cannot be enforced: checking it takes more than {self._cpu_s:g} s of processor time, "
                "or too much memory; simplify it."
            )
        raise ServingError(
            f"The answer's schema cannot be checked: the process for it ended with code {code}."
        )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            try:
                self._process = _start(self._cpu_s)
            except OSError as error:
                raise ServingError(f"The answer's schema cannot be checked: {error}.") from error
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _start(cpu_s: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(cpu_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(process: subprocess.Popen[bytes], question: list[str]) -> bytes:
    """Return the process's answer, a line; empty if the question ended it."""
    if process.stdin is None or process.stdout is None:
        return b""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    return answer if answer.endswith(b"\n") else b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def main() -> None:
    """Answer until the pipe closes, which happens when the parent ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # On systems without this limit, the limit of CPU time must suffice.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    answering = threading.Thread(target=_answer_all, args=(float(sys.argv[1]),))
    answering.start()
    answering.join()


def _answer_all(cpu_s: float) -> None:
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        problem = _problem(Grammar(kind, text))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(problem) + "\n")
        sys.stdout.flush()


def _problem(grammar: Grammar) -> str:
    try:
        check_grammar(grammar)
    except RequestError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        return f"This schema cannot be enforced: llguidance fails on it: {in_one_line(str(error))}"
    return ""


if __name__ == "__main__":
    main()
