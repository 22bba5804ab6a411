"""Conversion of grammars for llguidance, and their limits: equal on the head, which tries them, and on workers.

llguidance is imported when the first grammar comes, because few servers ever need it. It follows a schema's
references one by one, so its calls go thousands deep and need a thread with a large stack.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from mlx_ring.core.errors import RequestError
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
    """Try to compile a grammar, which takes milliseconds and may crash the process: see `grammar_trials.py`.

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
