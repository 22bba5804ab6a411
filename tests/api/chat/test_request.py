"""The order of tool results in a conversation, and adjacent messages that become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_ring.api.chat.request import in_order_of_calls, join_neighbours, template_call

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


class CountedResult(dict[str, object]):
    """Result of a tool that counts how often its id is read."""

    reads = 0

    def get(self, key: str, default: object = None) -> object:
        CountedResult.reads += key == "tool_call_id"
        return super().get(key, default)


def test_results_are_sorted_once_however_many_they_are() -> None:
    count = 500
    results = [CountedResult(result(str(number), str(number))) for number in reversed(range(count))]
    CountedResult.reads = 0
    ordered = in_order_of_calls([USER, assistant_calls(*map(str, range(count))), *results])
    assert [message["content"] for message in ordered[2:]] == list(map(str, range(count)))
    assert CountedResult.reads == count


class CountedText:
    """Text that counts how often it is copied."""

    copies = 0

    def __str__(self) -> str:
        CountedText.copies += 1
        return "a"


def test_adjacent_messages_are_copied_once_however_many_they_are() -> None:
    count = 500
    text = CountedText()
    CountedText.copies = 0
    [joined] = join_neighbours([{"role": "user", "content": text}] * count, ("user",))
    assert joined == {"role": "user", "content": "\n".join("a" * count)}
    assert CountedText.copies == count


def test_adjacent_messages_keep_calls_reasoning_and_the_last_of_other_fields() -> None:
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [1]},
        {"role": "assistant", "content": "a", "name": "x"},
        {"role": "assistant", "content": "b", "reasoning_content": "then", "tool_calls": [2, 3], "name": "y"},
        {"role": "tool", "content": "c"},
        {"role": "tool", "content": "d"},
    ]
    assert join_neighbours(messages, ("assistant",)) == [
        {
            "role": "assistant",
            "content": "a\nb",
            "reasoning_content": "so\nthen",
            "tool_calls": [1, 2, 3],
            "name": "y",
        },
        *messages[3:],
    ]
