"""Patches, applied as RFC 6902 says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.api.ops.events import json_patch

LEAVES = st.none() | st.text(max_size=3) | st.integers(2, 9)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/c", "~1", ""]), inner)
    ),
    max_leaves=12,
)


def applied(document: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    whole = {"root": copy.deepcopy(document)}
    for operation in operations:
        place: Any = whole
        path = ["root", *operation["path"].split("/")[1:]]
        *before, last = [part.replace("~1", "/").replace("~0", "~") for part in path]
        for part in before:
            place = place[_key(place, part)]
        name = _key(place, last)
        if operation["op"] == "remove":
            del place[name]
        else:
            assert (operation["op"] == "add") == (isinstance(place, dict) and name not in place)
            place[name] = operation["value"]
    return whole["root"]


def _key(place: Any, part: str) -> Any:
    return int(part) if isinstance(place, list) else part


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_turns_one_document_into_the_other(before: Any, after: Any) -> None:
    assert applied(before, json_patch(before, after)) == after


def test_equal_values_are_not_in_the_patch() -> None:
    before = {"nodes": [{"id": "a", "bytes": 1}, {"id": "b", "bytes": 2}], "time": 3}
    after = {"nodes": [{"id": "a", "bytes": 1}, {"id": "b", "bytes": 5}], "time": 3}
    assert json_patch(before, before) == []
    assert json_patch(before, after) == [{"op": "replace", "path": "/nodes/1/bytes", "value": 5}]
