"""JSON schemas of requests, written in keywords that grammars enforce. Pure.

Libraries write other keywords for plain things: maps by an enum's values, objects without further properties, decimals.
The result has about the size of the request's own schema, however that is nested or refers to itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast
from urllib.parse import unquote

Schema = Mapping[str, object]

MOST_NODES = 20_000
"""Objects and lists of a schema that is rewritten as a whole."""
NAMED_PLACES = frozenset(
    {"$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"}
)
"""Keywords with which a reference need not be a path from the schema's root."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_MOST_REFERENCES = 16
"""Longest chain of references to a rule for names."""
_LONGEST_REFERENCE = 1000
"""Characters of a reference that is followed."""
_MOST_NAMES = 32 << 10
"""Bytes of all names in a schema's maps. llguidance needs a state for each, and an answer may need 50,000."""
_ANY_NAME = ""
"""Pattern that every name matches."""
_NO_NAME = r"[^\s\S]"
"""Pattern that no name matches."""
_INDEX = re.compile("0|[1-9][0-9]{0,6}")

_LOOK_AROUND = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*|(?P<found>\(\?<?[=!])", re.DOTALL)
"""Look-around in a pattern, or something that may only look like it: an escaped character, or a class."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
"""Keywords whose values are schemas by names, which may be keywords."""
_APPLICATORS = frozenset({*_REFERENCES, "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"})
"""Keywords by which other schemas apply to the same value."""
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "id", "$id"})
"""Keywords that restrict no value."""
_OF_ANY_TEXT = frozenset({"binary", "password", "path"})
"""Formats that every text has."""
_ENFORCED = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""Formats that llguidance enforces. Libraries write a pattern beside most others, such as Zod's `e164`."""
_SAME_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
"""Patterns with look-around that libraries write, for Pydantic's decimals and Zod's email addresses, and equal ones."""


# ---- references


def schema_at(root: Schema, ref: str) -> object:
    """Return what a reference within a schema names; None if nothing is there."""
    start, *steps = _steps_of(ref)
    found: object = root if start == "#" else None
    for step in steps:
        found = _child(found, step)
    return found


def _steps_of(ref: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in unquote(ref).split("/")]


def _child(value: object, step: str) -> object:
    if isinstance(value, Mapping):
        return cast("Schema", value).get(step)
    if not isinstance(value, list) or not _INDEX.fullmatch(step):
        return None
    listed, index = cast("list[object]", value), int(step)
    return listed[index] if index < len(listed) else None


@dataclass(frozen=True, slots=True)
class _Places:
    """Places of a schema that references name, as a tree of steps. These must stay where they are."""

    inner: dict[str, _Places] = field(default_factory=dict[str, "_Places"])
    are_unknown: bool = False
    """True if references may name any place."""

    def __contains__(self, step: str) -> bool:
        return self.are_unknown or step in self.inner

    def at(self, step: str) -> _Places:
        return self if self.are_unknown else self.inner.get(step, _NOWHERE)


_NOWHERE = _Places()
_ANYWHERE = _Places(are_unknown=True)


class _TooLargeError(Exception):
    """A schema is too large to be rewritten."""


def _places_of(root: Schema) -> _Places:
    """Return the places that a schema's references name. They are unknown if not all are paths from its root.

    Raises:
        _TooLargeError: the schema has too many parts.
    """
    refs: list[str] = []
    has_names = False
    open_: list[object] = [root]
    for _ in range(MOST_NODES):
        if not open_:
            return _tree_of(refs, has_names=has_names)
        node = open_.pop()
        inside = cast("list[object]", node)
        if isinstance(node, Mapping):
            schema = cast("Schema", node)
            inside = list(schema.values())
            refs += [ref for key in _REFERENCES if isinstance(ref := schema.get(key), str)]
            named = schema.keys() & NAMED_PLACES
            has_names |= bool(named - {"$id"} if schema is root else named)
        open_ += [each for each in inside if isinstance(each, Mapping | list)]
    raise _TooLargeError


def _tree_of(refs: Sequence[str], *, has_names: bool) -> _Places:
    places = _Places()
    for ref in refs:
        if has_names or len(ref) > _LONGEST_REFERENCE or not (ref == "#" or ref.startswith("#/")):
            return _ANYWHERE
        _, *steps = _steps_of(ref)
        place = places
        for step in steps:
            place = place.inner.setdefault(step, _Places())
    return places


# ---- other keywords of the same meaning


def in_known_keywords(schema: Schema) -> dict[str, object]:
    """Return an equal schema without keywords that llguidance lacks, where others mean the same.

    Others stay, and are refused later: `names_as_patterns` replaces `propertyNames`. Places that a reference names stay
    too. A schema of unusual size or depth is returned as it is.
    """
    try:
        return _in_known_keywords(schema, _places_of(schema))
    except (RecursionError, _TooLargeError):
        return dict(schema)


def _in_known_keywords(schema: Schema, places: _Places) -> dict[str, object]:
    known = _each_inside(schema, _in_known_keywords, places)
    pattern, form = known.get("pattern"), known.get("format")
    _replace_patterns(known, places)
    if isinstance(form, str) and (form in _OF_ANY_TEXT or (pattern and form not in _ENFORCED)):
        del known["format"]
    if known.get("uniqueItems") is False:
        del known["uniqueItems"]
    for name in ("minContains", "maxContains") if "contains" not in known else ():
        known.pop(name, None)
    if not known.keys() & _APPLICATORS:
        _rename(known, "unevaluatedProperties", "additionalProperties", places)
        if "contains" not in known and not isinstance(known.get("items"), list):
            _rename(known, "unevaluatedItems", "items", places)
    return known


def _replace_patterns(known: dict[str, object], places: _Places) -> None:
    """Replace patterns that libraries write with look-around by equal ones without it."""
    pattern, named = known.get("pattern"), known.get("patternProperties")
    if isinstance(pattern, str):
        known["pattern"] = _SAME_PATTERNS.get(pattern, pattern)
    if isinstance(named, dict):
        by_pattern, referenced = cast("dict[str, object]", named), places.at("patternProperties")
        for given in [each for each in by_pattern if each in _SAME_PATTERNS and each not in referenced]:
            if _SAME_PATTERNS[given] not in by_pattern:
                by_pattern[_SAME_PATTERNS[given]] = by_pattern.pop(given)


def _rename(known: dict[str, object], name: str, other: str, places: _Places) -> None:
    """Replace the keyword for what no other keyword describes, if only this object describes it."""
    if known.get(name) is not None and name not in places:
        known.setdefault(other, known.pop(name))


# ---- names of properties


def names_as_patterns(schema: Schema) -> dict[str, object]:
    """Return an equal schema without `propertyNames` that allow any name, list the names or give their pattern.

    Another schema that has to match too allows only properties whose names match a pattern, so that all else stays where
    it is. It would change the meaning of `unevaluatedProperties`, which no grammar enforces. Other rules for names stay,
    and are refused later. So do long lists of names, and rules that a reference names. A schema of unusual size or depth
    is returned as it is.
    """
    try:
        return _NamesAsPatterns(schema).result()
    except (RecursionError, _TooLargeError):
        return dict(schema)


class _NamesAsPatterns:
    """Schema whose rules for names are being replaced."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[tuple[str, ...], str | None] = {}
        """Patterns of names by the path to their rule, so that each rule is read once."""
        self._left = _MOST_NAMES
        """Bytes that the patterns may still have."""

    def result(self) -> dict[str, object]:
        return self._within(self._root, _places_of(self._root))

    def _within(self, schema: Schema, places: _Places) -> dict[str, object]:
        known = _each_inside(schema, self._within, places)
        if "propertyNames" in known and "propertyNames" not in places:
            self._replace(known, self._pattern(schema["propertyNames"]))
        return known

    def _replace(self, known: dict[str, object], pattern: str | None) -> None:
        parts = known.get("allOf", [])
        if pattern is None or len(pattern) > self._left or not isinstance(parts, list):
            return
        left = self._left - _bytes_of(pattern)
        if left < 0:
            return
        del known["propertyNames"]
        if pattern != _ANY_NAME:
            self._left = left
            named: Schema = {} if pattern == _NO_NAME else {"patternProperties": {pattern: True}}
            known["allOf"] = [*cast("list[object]", parts), {**named, "additionalProperties": False}]

    def _pattern(self, names: object, refs_left: int = _MOST_REFERENCES) -> str | None:
        """Return the pattern of the names that a schema allows; None if it says more than names and that they are text."""
        if not isinstance(names, Mapping | bool) or names is False:
            return None
        given = cast("Schema", {} if names is True else names)
        keys = list(islice((key for key in given if key not in _NOTES), 3))
        match [key for key in keys if not (key == "type" and given[key] == "string")]:
            case []:
                return _ANY_NAME
            case ["$ref"] if len(keys) == 1:
                return self._pattern_at(given["$ref"], refs_left)
            case ["pattern"]:
                pattern = given["pattern"]
                return _SAME_PATTERNS.get(pattern, pattern) if isinstance(pattern, str) else None
            case ["const" | "enum" as key]:
                return _one_of([given[key]] if key == "const" else given[key])
            case _:
                return None

    def _pattern_at(self, ref: object, refs_left: int) -> str | None:
        if not isinstance(ref, str) or len(ref) > _LONGEST_REFERENCE or not refs_left:
            return None
        path = tuple(_steps_of(ref))
        if path not in self._known:
            self._known[path] = None  # first, because references may form a circle
            self._known[path] = self._pattern(schema_at(self._root, ref), refs_left - 1)
        return self._known[path]


def _one_of(names: object) -> str | None:
    """Return the pattern of listed names; None if they are too long together."""
    if not isinstance(names, list):
        return None
    texts: list[str] = []
    length = 0
    for name in cast("list[object]", names):
        if isinstance(name, str):
            texts.append(re.escape(name))
            length += _bytes_of(texts[-1]) + 1
        if length > _MOST_NAMES:
            return None
    return f"^({'|'.join(texts)})$" if texts else _NO_NAME


def _bytes_of(text: str) -> int:
    return len(text.encode(errors="replace"))


# ---- look-around


def without_look_around(schema: Schema) -> dict[str, object]:
    """Return a schema without the patterns that look around, which no grammar enforces, unless an equal one is known."""
    kept = _each_inside(schema, lambda inner, _: without_look_around(inner), _NOWHERE)
    _replace_patterns(kept, _NOWHERE)
    if _looks_around(kept.get("pattern")):
        del kept["pattern"]
    if isinstance(kept.get("patternProperties"), dict):
        patterns = cast("dict[str, object]", kept["patternProperties"])
        known = {key: each for key, each in patterns.items() if not _looks_around(key)}
        if len(known) < len(patterns):
            # The properties that the other patterns would describe are now further ones, so these may be any.
            kept |= {"patternProperties": known, "additionalProperties": True}
            kept.pop("unevaluatedProperties", None)
    return kept


def _looks_around(pattern: object) -> bool:
    return isinstance(pattern, str) and any(found["found"] for found in _LOOK_AROUND.finditer(pattern))


def _each_inside(
    schema: Schema, change: Callable[[Schema, _Places], object], places: _Places
) -> dict[str, object]:
    """Return a copy of a schema in which each schema directly within it is changed."""

    def inside(value: object, place: _Places) -> object:
        if isinstance(value, Mapping):
            return change(cast("Schema", value), place)
        if not isinstance(value, list):
            return value
        listed = enumerate(cast("list[object]", value))
        return [inside(each, place.at(str(index))) for index, each in listed]

    changed: dict[str, object] = {}
    for name, value in schema.items():
        place = places.at(name)
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            named = cast("Schema", value)
            changed[name] = {key: inside(each, place.at(key)) for key, each in named.items()}
        else:
            changed[name] = value if name in _VALUES else inside(value, place)
    return changed
