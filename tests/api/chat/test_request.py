"""The order of tool results in a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_ring.api.chat.request import in_order_of_calls, template_call

USER = {"role": "user", "content": "Add, and add."}


def assistant_calls(*names: str) -> Mapping[str, object]:
    tool_calls = [template_call("add", {}, name) for name in names]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def result(content: str, call_id: str | None) -> Mapping[str, object]:
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


def contents(messages: Sequence[Mapping[str, object]]) -> str:
    return "".join(
        str(message["content"]) for message in in_order_of_calls(messages) if message["role"] == "tool"
    )


def test_tool_results_are_in_the_order_of_their_calls() -> None:
    first = [USER, assistant_calls("a", "b", "c"), result("3", "c"), result("1", "a"), result("2", "b")]
    second = [assistant_calls("b", "a"), result("5", "a"), result("4", "b"), USER]
    assert contents(first) == "123"
    assert contents(first + second) == "12345"
    assert in_order_of_calls(first + second)[-1] == USER


def test_results_without_a_matching_call_stay_last_in_their_order() -> None:
    assert (
        contents([USER, assistant_calls("a"), result("2", "y"), result("3", "x"), result("1", "a")]) == "123"
    )
    assert contents([USER, result("1", "b"), result("2", "a")]) == "12"
    without_ids = {"role": "assistant", "content": "", "tool_calls": [template_call("add", {}, None)] * 2}
    assert contents([USER, without_ids, result("1", None), result("2", None)]) == "12"
