"""Limits of memory and time for chat templates.

A template is a program from the model's folder. Jinja's sandbox keeps it from harm outside, but not from endless loops and
texts of gigabytes. Here an operation is counted before it runs if the length of its operands does not bound its cost.
The clock is read in between. Numbers count only where they are a size: those of the conversation may be any.
"""

from __future__ import annotations

import math
import operator
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from typing import Any, cast

from jinja2 import Environment, TemplateRuntimeError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, generate_lorem_ipsum, pass_environment

_MOST_CHARACTERS = 1 << 26
"""Largest text that a chat template may make; a request has fewer characters."""
_MOST_ENTRIES = 1 << 23
"""Largest list that a chat template may make."""
_MOST_BYTES = 1 << 29
"""Most memory that the texts and lists of one rendering may take in all."""
_REFERENCE_BYTES = 8
"""Memory of a list's entry that was there before ..."""
_OBJECT_BYTES = 64
"""... and of one that is made for the list, or of a dictionary's entry."""
_WIDEST_CHARACTER_BYTES = 4
_MOST_BITS = 1 << 16
MOST_SOURCE = 1 << 17
"""Most characters of a template; published ones have less than a third."""
MOST_NODES = 1 << 15
"""Most nodes of a template, which bounds the time to compile it: about a second."""
_MOST_COMPARED = 1 << 31
"""Largest product of the lengths of two texts that are compared at every position."""
_CPU_S = 5.0
"""Processor time of a chat's renderings, of which there are several if the template rejects its messages.

A prompt of 10,000 messages takes a second.
"""
_LARGE = 1 << 15
"""Size from which reading or making a text or a list counts as work."""
_LOOKS = 256
"""Number of iterations and calls after which the time is checked."""


class _Spending(threading.local):
    """Resources that the renderings of one chat in this thread have used: time in all, and memory of the last one."""

    until_s = math.inf
    made = 0
    iterations = 0

    def __enter__(self) -> None:
        self.until_s = time.thread_time() + _CPU_S

    def __exit__(self, *_: object) -> None:
        self.until_s = math.inf

    def start_rendering(self) -> None:
        """Start a rendering in the time that earlier ones have left."""
        self.made, self.iterations = 0, 0
        self.check_time()

    def make(self, characters: int, *parts: object) -> None:
        """Count a text before it is made of these parts. Only with parts in ASCII are characters known to be small."""
        if characters > _MOST_CHARACTERS:
            raise TemplateRuntimeError(f"it makes texts of more than {_MOST_CHARACTERS} characters.")
        is_narrow = parts and all(
            isinstance(part, bytes) or (isinstance(part, str) and part.isascii()) for part in parts
        )
        self._take(characters, 1 if is_narrow else _WIDEST_CHARACTER_BYTES)

    def make_entries(self, count: int, bytes_each: int = _REFERENCE_BYTES) -> None:
        """Count a list before it is made."""
        if count > _MOST_ENTRIES:
            raise TemplateRuntimeError(f"it makes lists of more than {_MOST_ENTRIES} entries.")
        self._take(count, bytes_each)

    def _take(self, count: int, bytes_each: int) -> None:
        self.made += count * bytes_each
        if self.made > _MOST_BYTES:
            raise TemplateRuntimeError(f"its texts and lists take more than {_MOST_BYTES >> 20} MiB in all.")
        if count > _LARGE:
            self.check_time()

    def make_like(self, value: object) -> None:
        """Count a value that was made from others of about its size."""
        if isinstance(value, (str, bytes)):
            self.make(len(value), value)
        elif isinstance(value, (list, tuple, dict)):
            each = _OBJECT_BYTES if isinstance(value, dict) else _REFERENCE_BYTES
            self.make_entries(len(cast("Sized", value)), each)

    def iterate(self) -> bool:
        """Count an iteration of a loop, or a call. Return True, so that conditions may contain it."""
        self.iterations += 1
        if self.iterations % _LOOKS == 0:
            self.check_time()
        return True

    def read(self, values: Iterable[object]) -> None:
        """Count values that are about to be read as a whole."""
        self.iterate()
        if any(isinstance(value, Sized) and len(value) > _LARGE for value in values):
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self.until_s:
            raise TemplateRuntimeError(f"it takes more than {_CPU_S:g} s of processor time.")


spending = _Spending()


# ---- sizes of values

_EMPTY: dict[str, Any] = {}
_EMPTY_VIEWS: tuple[object, ...] = (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())
_HOLDERS: tuple[type[Any], ...] = (list, tuple, dict, *map(type, _EMPTY_VIEWS), Namespace)
"""Types of values whose text contains that of other values."""


def _size(value: Any) -> int:
    """Return the characters and entries of a value's text. Lists that contain one list many times grow fast."""
    if isinstance(value, (str, bytes)):
        return len(value)
    found, pending = 1, [value]
    while pending and found <= _MOST_CHARACTERS and spending.iterate():
        for part in _parts(pending.pop()):
            if isinstance(part, str):
                found += len(part) + 1
            else:
                found += 1
                if isinstance(part, _HOLDERS):
                    pending.append(part)
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace):
        value = vars(value).get("_Namespace__attrs", {})
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return chain(entries, entries.values())
    return cast("Iterable[Any]", value) if isinstance(value, _HOLDERS) else ()


def checked(value: Any) -> Any:
    """Return a value whose text, order or hash is about to be computed, after counting all that it contains."""
    if isinstance(value, _HOLDERS):
        spending.make(_size(value))
    return value


def _check_product(text: Any, part: Any) -> None:
    """Check a search that may compare a part with a text at each position."""
    if isinstance(text, Sized) and isinstance(part, Sized) and len(text) * len(part) > _MOST_COMPARED:
        raise TemplateRuntimeError("it searches for a long text in a long text.")


def check_bits(*values: Any) -> None:
    if any(isinstance(value, int) and value.bit_length() > _MOST_BITS for value in values):
        raise TemplateRuntimeError(f"it makes a number of more than {_MOST_BITS} bits.")


def _largest(given: Iterable[Any]) -> int:
    """Return the largest size among arguments: of a number itself, and of anything else as a text."""
    return max((abs(each) if isinstance(each, int) else _size(each) for each in given), default=0)


def counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        spending.iterate()
        yield value


def listed(values: Iterator[Any]) -> list[Any]:
    entries: list[Any] = []
    for value in values:
        spending.iterate()
        entries.append(value)
        if len(entries) > _MOST_ENTRIES or len(entries) % _LOOKS == 0:
            spending.make_entries(len(entries), 0)
            spending.make_entries(_LOOKS, _OBJECT_BYTES)
    return entries


# ---- operators


def check_operands(operation: str, left: Any, right: Any) -> None:
    if operation == "%" and isinstance(left, str):
        _check_percent(left, right)
        return
    if operation == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        _make_sum(len(left) + len(right), left, right)
    elif operation == "*":
        count, unit = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int) and isinstance(unit, Sized):
            _make_sum(max(0, count) * len(unit), unit)
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left, right)
        if operation == "**" and left.bit_length() * right > _MOST_BITS:
            raise TemplateRuntimeError(f"it makes a number of more than {_MOST_BITS} bits.")


def _make_sum(size: int, *parts: object) -> None:
    if isinstance(parts[0], (str, bytes)):
        spending.make(size, *parts)
    else:
        spending.make_entries(size)


def check_comparison(operation: str, left: Any, right: Any) -> None:
    """Check a comparison. Only two texts, or two lists, are compared at length."""
    if operation in {"in", "notin"}:
        if isinstance(right, (str, dict)):
            checked(left)
        elif isinstance(right, Sized):
            width = len(left) if isinstance(left, (str, bytes)) else 1
            if isinstance(left, _HOLDERS) or len(right) * width > _MOST_CHARACTERS:
                checked(left)
                checked(right)
    elif isinstance(left, _HOLDERS) and isinstance(right, _HOLDERS) and left and right:
        checked(left)
        checked(right)
    spending.read(cast("tuple[object, object]", (left, right)))


def compare(operation: str, left: Any, right: Any) -> bool:
    """Compare two values; the operation has jinja's name."""
    check_comparison(operation, left, right)
    if operation in {"in", "notin"}:
        return (left in right) is (operation == "in")
    compared: Any = getattr(operator, _OPERATORS[operation])(left, right)
    return compared


_OPERATORS = {"eq": "eq", "ne": "ne", "gt": "gt", "gteq": "ge", "lt": "lt", "lteq": "le"}


def join(*values: object) -> str:
    """Join the operands of `~`."""
    texts = [str(checked(value)) for value in values]
    spending.make(sum(map(len, texts)), *texts)
    return "".join(texts)


def cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return a slice of a value."""
    spending.read((value,))
    part = value[start:stop:step]
    spending.make_like(part)
    return part


# ---- formats

_NUMBER = re.compile(r"\d+")
"""Number in a format of `str.format`, whose digits may be of any script."""
_FIELD = re.compile(
    r"%(?:\([^)]*\))?[-#0 +]*(?P<width>\*|[0-9]+)?(?:\.(?P<precision>\*|[0-9]+)?)?[hlL]?(?P<kind>.)",
    re.DOTALL,
)
_NAMED_SIZES = re.compile(r"\)[-#0 +]*([0-9]*)(?:\.([0-9]*))?")


def _check_percent(text: str, given: Any) -> None:
    """Check a format with `%`: widths, precisions, and the values that it contains."""
    if isinstance(given, Mapping):
        values = cast("Mapping[Any, Any]", given)
        sizes = [int(size) for found in _NAMED_SIZES.findall(text) for size in found if size]
        longest = max(map(_size, values.values()), default=0)
        spending.make(len(text) + sum(sizes) + text.count("%") * longest)
        return
    rest = iter(cast("tuple[Any, ...]", given) if isinstance(given, tuple) else (given,))
    made = len(text)
    for field in _FIELD.finditer(text):
        spending.iterate()
        for size in field.group("width", "precision"):
            number = next(rest, 0) if size == "*" else int(size or 0)
            made += abs(number) if isinstance(number, int) else 0
        if field["kind"] != "%":
            made += _size(next(rest, None))
    spending.make(made)


class _LimitedFields:
    """Checks of the fields of `str.format`, before the sandbox's own methods format them."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        spending.iterate()
        spending.make(sum(map(int, _NUMBER.findall(format_spec))))
        text: Any = super().format_field(checked(value), format_spec)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType] - of the class mixed in
        made = cast("str", text)
        spending.make(len(made), made)
        return made

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(checked(value), conversion)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue, reportUnknownVariableType] - as above


class LimitedFormatter(_LimitedFields, SandboxedFormatter):
    pass


class LimitedEscapeFormatter(_LimitedFields, SandboxedEscapeFormatter):
    pass


# ---- methods and functions

_WIDTHS = frozenset({"ljust", "rjust", "center", "zfill", "to_bytes", "hex"})
_AT_EACH_POSITION = frozenset(
    {"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition", "trim"}
)
"""Methods and filters whose time is the product of the lengths of a text and of their argument."""
_SMALL = {
    "striptags": 1 << 13,
    "urlize": 1 << 13,
    "pprint": 1 << 13,
    "wordwrap": 1 << 15,
    "xmlattr": 1 << 20,
    "title": 1 << 22,
    "wordcount": 1 << 22,
}
"""Longest values for methods and filters that take more than linear time, or much memory for each character."""
GIVES_BACK = frozenset({"get", "default", "d", "first", "last", "attr", "random", "min", "max"})
"""Methods and filters that return a value that was there before."""


def check_call(function: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    everything = (*given, *named.values())
    for value in everything:
        checked(value)
    spending.read((owner, *everything))
    if isinstance(owner, (str, bytes)):
        _check_text(name, owner, given, named)
    elif isinstance(owner, (list, tuple)) and name in {"index", "count"}:
        checked(owner)
    if name in _WIDTHS:
        spending.make(_largest(everything))
    if function is generate_lorem_ipsum:
        spending.make_entries(_largest(everything) ** 2)


def _given(names: tuple[str, ...], given: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """Return arguments by their names, wherever they were given; an empty text for each that is missing."""
    return [given[at] if at < len(given) else named.get(name, "") for at, name in enumerate(names)]


def _check_text(name: str, text: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Check a method of a text, or the filter of the same name."""
    first: Any = next(iter((*given, *named.values())), None)
    if len(text) > _SMALL.get(name, len(text)):
        raise TemplateRuntimeError(f"{name} is for texts of up to {_SMALL[name]} characters.")
    if name in _AT_EACH_POSITION:
        _check_product(text, first)
    if name == "replace":
        old, new = (
            each if isinstance(each, bytes) else str(each) for each in _given(("old", "new"), given, named)
        )
        made = len(text) + (text.count(old) if old else len(text) + 1) * len(new)
        spending.make(made, text, new)
    elif name == "join" and isinstance(first, Sized):
        spending.make(_size(first) + len(text) * len(first))
    elif name == "expandtabs" and isinstance(first, int):
        spending.make(len(text) + text.count("\t") * abs(first), text)
    elif name == "translate":
        # A list is a table too.
        spending.make(len(text) * max(map(_size, _parts(first)), default=1))
    elif name in {"split", "rsplit"}:
        (separator,) = _given(("sep",), given, named)
        spending.make_entries(text.count(separator) if separator else len(text) // 2, _OBJECT_BYTES)
    elif name == "splitlines":
        spending.make_entries(
            sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) if isinstance(text, str) else 0,
            _OBJECT_BYTES,
        )


# ---- filters


def check_filter(name: str, value: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    everything = (*given, *named.values())
    if isinstance(value, str):
        _check_text(name, value, given, named)
    elif name in _SMALL and _size(value) > _SMALL[name]:
        raise TemplateRuntimeError(f"{name} is for values of up to {_SMALL[name]} entries.")
    if name == "format":
        _check_percent(str(value), named or given)
    elif name == "join" and isinstance(value, Sized):
        (separator,) = _given(("d",), given, named)
        spending.make(_size(value) + len(value) * _size(separator))
    elif name in {"center", "indent"}:
        spending.make(_largest(everything) * (1 + str(value).count("\n") * (name == "indent")))
    elif name in {"batch", "slice"}:
        spending.make_entries(_largest(everything))
    elif name == "round" and _largest(everything) > _LOOKS:
        raise TemplateRuntimeError(f"it rounds to more than {_LOOKS} digits.")
    elif name in {"list", "reverse", "unique", "sort"} and isinstance(value, Sized):
        is_there = isinstance(value, (list, tuple))
        spending.make_entries(len(value), _REFERENCE_BYTES if is_there else _OBJECT_BYTES)
    elif name == "tojson" and everything:
        spending.make(_size(value) * (1 + _depth(value)) * _largest(everything))


@pass_environment
def limited_sum(
    environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    """Add up values as the filter does, but count each sum."""
    total = start
    for each in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
        spending.iterate()
        check_operands("+", total, each)
        total = total + each
    return total


def _depth(value: Any) -> int:
    """Return how deep a value's lists are nested."""
    depth, level = 0, [value]
    while level := [part for each in level for part in _parts(each) if isinstance(part, _HOLDERS)]:
        spending.iterate()
        depth += 1
    return depth + 1
