"""Grammars in llguidance's dialect of Lark. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mlx_ring.core.errors import RequestError
from mlx_ring.models.grammars import JSON_OPTIONS

ANY_TEXT = "/(?s:.*)/"
"""Pattern of any text. Special tokens are not text."""
SPACE = r"/[ \t\r\n]{1,8}/"
PYTHON_STRINGS = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options for JSON strings that are read as Python's, which has fewer escapes."""


@dataclass(slots=True)
class LarkGrammar:
    """Grammar in construction."""

    tokens: Mapping[str, int]
    """Special tokens by their text."""
    rules: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self.rules[name] = body
        return name

    def fresh(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule under a new name. A lazy rule matches as little as possible."""
        name = f"r{len(self.rules)}"
        self.rules[f"{name}[lazy]" if lazy else name] = body
        return name

    def exactly(self, text: str) -> str:
        """Return an expression of a text, with special tokens by their ids."""
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece)
            for piece in self.pieces(text)
        )

    def json(self, schema: Mapping[str, object], **options: object) -> str:
        """Return an expression of JSON under a schema."""
        try:
            return f"%json {json.dumps(dict(schema) | {'x-guidance': JSON_OPTIONS | options})}"
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"The schema cannot be read: {error}.") from error

    def until(self, text: str, *, besides: str = "") -> str:
        """Return an expression of any text up to and including the first `text`; `besides` restricts the whole.

        Parsers recognize a mark without the white space at its ends too.
        """
        first, *others = self.pieces(text)
        free = ANY_TEXT
        if besides or first != first.strip():
            others_than = f" & ~/{besides}/" if besides else ""
            free = self._terminal(f"{ANY_TEXT} & {_without(first.strip() or first)}{others_than}")
        if first in self.tokens:
            return f"{free} {self.exactly(text)}"
        head = self.fresh(f"{free} {json.dumps(first)}", lazy=True)
        return f"{head} {self.exactly(''.join(others))}" if others else head

    def until_mark(self, mark: str, within: Iterable[str] = ()) -> str:
        """Return an expression of any text up to a mark in any spelling. The text must match each of `within`."""
        free = self._terminal(" & ".join([ANY_TEXT, _without(mark), *within]))
        if mark in self.tokens:
            return f"{free} {self.exactly(mark)}"
        return self._terminal(f"{free} {json.dumps(mark)}")

    def in_order(self, values: Mapping[str, str], required: Collection[object], *, between: str) -> str:
        """Return an expression of the values in order, each at most once, and those in `required` exactly once."""
        first = after = '""'
        for name, value in reversed(list(values.items())):
            optional = name not in required
            written = f"{self.fresh(value)} {after}"
            first = self.fresh(f"{written} | {first}" if optional else written)
            after = self.fresh(f"{between} {written} | {after}" if optional else f"{between} {written}")
        return first

    def pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and the texts between them."""
        known = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        return [piece for piece in (re.split(f"({known})", text) if known else [text]) if piece]

    def write(self) -> str:
        return "\n".join(["%llguidance {}", *(f"{name}: {body}" for name, body in self.rules.items())])

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules[name] = body
        return name


def either(options: Iterable[str]) -> str:
    """Return an expression of one of several options."""
    return f"({' | '.join(options)})"


def _without(text: str) -> str:
    """Return an expression of every text that does not contain this one."""
    literally = re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
    return f"~/(?s:.*){literally}(?s:.*)/"
