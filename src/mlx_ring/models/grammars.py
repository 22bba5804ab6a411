"""Conversion of grammars for llguidance, and their limits: equal on the head, which tries them, and on workers.

llguidance is imported when the first grammar comes, because few servers ever need it. It follows a schema's
references one by one, so its calls go thousands deep and need a thread with a large stack.

Trials of grammars run in a separate process, so that a grammar that ends or blocks it is simply refused.
llguidance limits the cost of a grammar, but not in all cases. 18 KB of patterns that must match together
took minutes, and 2 GB in the first 15 s. References 1,000 deep end a process with a stack of the usual size.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from mlx_ring.core.errors import RequestError, ServingError
from mlx_ring.core.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 256 << 10
"""Largest grammar: llguidance needs a second for it, and more for a model's tokens.

Real schemas have some kilobytes.
"""
_LEXER_STATES = 50_000
"""Most states of the lexer, of one to two kilobytes each; all answers under one grammar share them."""
_WHERE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_LISTING = re.compile(r"\n *\d+ \| ")
"""Lines of the grammar that was derived from the client's input."""
_OWN_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_OF_TEXT = {"json_schema", "regex"}
"""Kinds of grammars that need none of a model's own tokens, so that bytes alone decide what they allow."""
_NOTHING_GOES_ON = "NoExtensionBias"
"""llguidance's name for a state in which not even the end is allowed."""
_TOO_MANY = re.compile(r"Current row has (\d+) items; max is (\d+)")
"""llguidance's words for too many continuations, among which are all optional properties that may come next."""
JSON_OPTIONS = {
    "whitespace_pattern": r"\x20|\x0A(\x20{0,24}|\x09{0,8})",
    "lenient": False,
    "coerce_one_of": False,
}
"""Options that allow a space, or a new line with its indentation, between JSON's tokens.

With more white space allowed, small models repeat it until their limit. Schemas that cannot be enforced are refused.
"""


def grammar_limits() -> LLParserLimits:
    """Return the limits of one grammar: some milliseconds a token at worst, and some megabytes."""
    from llguidance import LLParserLimits  # imported late, as the module says

    return LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)


def to_llguidance(kind: str, text: str) -> str:
    """Convert a `Grammar` to llguidance's own form.

    Raises:
        RequestError: it is too long, or of an unknown kind.
    """
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"The schema, or the grammar made from it, has {len(text)} characters; "
            f"the limit is {MAX_GRAMMAR_BYTES} bytes."
        )
    match kind:
        case "json_schema":
            return _in_json({"json_schema": _read_schema(text) | {"x-guidance": JSON_OPTIONS}})
        case "json_object":
            return _in_json({"json_schema": {"type": "object", "x-guidance": JSON_OPTIONS}})
        case "lark":
            return _in_json({"lark_grammar": text})
        case "regex":
            from llguidance import LLMatcher  # imported late, as the module says

            return LLMatcher.grammar_from_regex(text)
        case other:
            raise RequestError(
                f"Grammars are json_schema, json_object, regex or lark; this one is {other!r}."
            )


def _in_json(grammar: Mapping[str, object]) -> str:
    return json.dumps({"grammars": [grammar]})


def _read_schema(text: str) -> dict[str, object]:
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The schema cannot be read: {error}.") from error
    if not isinstance(schema, dict):
        raise RequestError("The schema is not an object.")
    return cast("dict[str, object]", schema)


def check_grammar(grammar: Grammar) -> None:
    """Try to compile a grammar, which takes milliseconds and may crash the process: see `GrammarTrials`.

    Raises:
        RequestError: it cannot be enforced, with llguidance's reason; or no answer can begin under it.
    """
    from llguidance import LLMatcher  # imported late, as the module says

    compiled = to_llguidance(grammar.kind, grammar.text)
    problem = LLMatcher.validate_grammar(compiled, limits=grammar_limits())
    if problem and not problem.startswith("WARNING"):
        raise RequestError(f"This schema cannot be enforced: {in_one_line(problem)}")
    if grammar.kind in _OF_TEXT and not _can_begin(compiled):
        raise RequestError("No answer can match this schema: it allows no first character.")


def _can_begin(compiled: str) -> bool:
    """Report whether a grammar allows anything for an answer's first byte, or its end."""
    from llguidance import LLMatcher, LLTokenizer  # imported late, as the module says

    matcher = LLMatcher(LLTokenizer("byte"), compiled, limits=grammar_limits(), log_level=0)
    matcher.compute_bitmask()
    return _NOTHING_GOES_ON not in matcher.get_error()


def in_one_line(problem: str) -> str:
    """Return llguidance's message as the end of a sentence; for a schema within a larger grammar, only the part about the schema."""
    if _NOTHING_GOES_ON in problem:
        return "nothing may follow at this place."
    if found := _TOO_MANY.search(problem):
        return (
            f"it allows {found[1]} continuations at one place, of {found[2]} at most; require more of its properties, "
            "or name fewer."
        )
    said = _WHERE.sub("", _LISTING.split(problem, maxsplit=1)[0]).replace(_OWN_ADVICE, "Write it with anyOf")
    said = " ".join(said.split()).removesuffix("<non-verbose/>").strip()
    return f"{said[:300].rstrip('.')}."


STACK_BYTES = 256 << 20
"""Address space of the stack: memory is only used as deep as calls go.

With the usual 8 MiB a process ends at 1,000 references.
"""
_SIZE = threading.Lock()
"""Lock for the stack size, which applies to every thread that starts meanwhile."""


def deep_thread(name: str) -> ThreadPoolExecutor:
    """Return one thread that takes one call at a time."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    with _SIZE:
        usual = threading.stack_size(STACK_BYTES)
        try:
            pool.submit(int).result()
        finally:
            threading.stack_size(usual)
    return pool


# ---- trials in a separate process

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
        [sys.executable, "-m", "mlx_ring.models.grammars", str(cpu_s)],
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
