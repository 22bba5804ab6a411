"""Kept answers of real servers that are killed: clients of OpenAI's SDK get the rest, and nothing twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from tests.end_to_end.loopback_cluster import running_cluster
from tests.eventually import eventually
from tests.lazily import lazily
from tests.machines import free_pair_of_ports
from tests.processes import Server, serving

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response, ResponseStreamEvent
else:
    openai = lazily("openai")

TOKENS = 500
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSE: dict[str, Any] = {
    "model": "demo",
    "input": "Tell me a story.",
    "max_output_tokens": TOKENS,
    "background": True,
    "extra_body": {"ignore_eos": True},
}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 1, "seed": 7}}


def flags(folder: Path) -> tuple[str, ...]:
    return ("--stages", "2", "--journal", "16MiB", "--journal-dir", str(folder / "journal"))


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def kill(server: Server) -> None:
    """Kill a head; its workers end with it."""
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def read_chat(
    server: Server, body: dict[str, Any], most: int | None = None, **headers: str
) -> list[tuple[str, str]]:
    """Return the ids and data of a chat's events, of which the client may read only the first ones."""
    events: list[tuple[str, str]] = []
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    with server.http.stream("POST", "/v1/chat/completions", json=body, headers=given) as answer:
        id_ = ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                id_ = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                events.append((id_, line.removeprefix("data: ")))
                if len(events) == most:
                    break
    return events


def read_until_stopped(server: Server, body: dict[str, Any], events: list[tuple[str, str]]) -> None:
    """Read a chat's events to the end of its connection, and stop the server after 20 of them."""
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        id_ = ""
        for line in answer.iter_lines():
            if line.startswith("id: "):
                id_ = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                events.append((id_, line.removeprefix("data: ")))
                if len(events) == 20:
                    server.process.send_signal(signal.SIGTERM)


def text_of(events: list[tuple[str, str]]) -> str:
    choices = (choice for _, data in events for choice in json.loads(data)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def continued(server: Server) -> float:
    """Return the number of answers that continued."""
    [line] = [
        line
        for line in server.http.get("/metrics").text.splitlines()
        if line.startswith("mlx_ring_journal_continued_total")
    ]
    return float(line.split()[1])


def begin(client: openai.OpenAI, **fields: Any) -> Response:
    """Begin a response in the background, without reading it."""
    return cast("Response", client.responses.create(**fields))


def first_events(stream: Iterator[ResponseStreamEvent], most: int) -> list[ResponseStreamEvent]:
    return [event for event, _ in zip(stream, range(most), strict=False)]


def delta_text(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


@pytest.mark.parametrize("sampling", [pytest.param("greedy", marks=pytest.mark.thorough), "seeded"])
def test_answers_in_progress_when_their_head_is_killed_continue_with_the_next(
    tmp_path: Path, sampling: str
) -> None:
    chat = CHAT | SAMPLINGS[sampling]
    response = {**RESPONSE, "temperature": chat["temperature"]}
    response["extra_body"] = {**RESPONSE["extra_body"], "seed": chat.get("seed", 0)}
    with serving("demo", *flags(tmp_path), folder=tmp_path) as server:
        whole = read_chat(server, chat)
        client = sdk(server)
        made = begin(client, **response)
        undisturbed = eventually(
            lambda: client.responses.retrieve(made.id), lambda state: state.status == "incomplete"
        )
        # Three answers are in progress: a chat, a background response with a reader, and one without.
        read = read_chat(server, chat, most=20)
        with client.responses.create(**response, stream=True) as stream:
            events = first_events(stream, 30)
        alone = begin(client, **response)
        kill(server)
    with serving("demo", *flags(tmp_path), folder=tmp_path) as server:
        rest = read_chat(server, {}, last_event_id=read[-1][0])
        assert text_of(read) + text_of(rest) == text_of(whole)
        assert [id_.split(":")[1] for id_, _ in read + rest] == [str(number) for number in range(len(whole))]
        [usage] = [json.loads(data)["usage"] for _, data in rest if json.loads(data).get("usage")]
        assert usage["completion_tokens"] == TOKENS
        client = sdk(server)
        [created] = [event for event in events if event.type == "response.created"]
        last = events[-1].sequence_number
        more = list(client.responses.retrieve(created.response.id, stream=True, starting_after=last))
        assert [event.sequence_number for event in more] == list(range(last + 1, last + 1 + len(more)))
        assert delta_text(events + more) == undisturbed.output_text
        # Nobody asked the second head to continue this one.
        ended = eventually(
            lambda: client.responses.retrieve(alone.id), lambda made: made.status == "incomplete"
        )
        assert ended.output_text == undisturbed.output_text
        # The last one may have been killed before its first token.
        assert continued(server) >= 2
        assert server.stop() == 0


def test_answer_that_a_stopped_head_suspends_continues_with_other_stages(tmp_path: Path) -> None:
    chat = CHAT | SAMPLINGS["seeded"]
    with serving("demo", *flags(tmp_path), "--shutdown-timeout-s", "0", folder=tmp_path) as server:
        whole = read_chat(server, chat)
        read: list[tuple[str, str]] = []
        with pytest.raises(httpx.TransportError):
            read_until_stopped(server, chat, read)
        assert server.process.wait() == 0
    with serving("demo", "--stages", "3", *flags(tmp_path)[2:], folder=tmp_path) as server:
        rest = read_chat(server, {}, last_event_id=read[-1][0])
    assert len(read) < len(whole)
    assert text_of(read + rest) == text_of(whole)


@pytest.mark.machines
def test_conversations_and_answers_go_on_after_all_machines_were_killed(tmp_path: Path) -> None:
    folders = (tmp_path / "head-kv", tmp_path / "node-kv")
    kv = ("--kv-disk", "1GiB", "--kv-disk-dir")
    own = ("--strategy", "uniform", "--journal", "16MiB", *kv, str(folders[0]))
    prompt = {
        "model": "demo",
        "prompt": " ".join(f"word{number}" for number in range(240)),
        "max_tokens": 8,
        "temperature": 0,
    }

    def ask(server: Server) -> tuple[str, int]:
        answer = server.http.post("/v1/completions", json=prompt).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def finished(client: openai.OpenAI, id_: str) -> str:
        state = eventually(lambda: client.responses.retrieve(id_), lambda made: made.status == "incomplete")
        return state.output_text

    port = free_pair_of_ports()
    with running_cluster("demo", 2, tmp_path, port, *own, join_flags=(*kv, str(folders[1]))) as server:
        client = sdk(server)
        text, cached = ask(server)
        assert cached == 0
        # Every block of 256 tokens is saved on both machines.
        eventually(
            lambda: [len(list(folder.glob("*/*/*-*"))) for folder in folders], lambda saved: min(saved) > 1
        )
        undisturbed = finished(client, begin(client, **RESPONSE, temperature=0).id)
        with client.responses.create(**RESPONSE, temperature=0, stream=True) as stream:
            events = first_events(stream, 30)
        # Leaving kills the head and ends the others, as a power cut would.
    with running_cluster("demo", 2, tmp_path, port, *own, join_flags=(*kv, str(folders[1]))) as server:
        client = sdk(server)
        again, cached = ask(server)
        assert again == text
        assert cached >= 256
        [created] = [event for event in events if event.type == "response.created"]
        assert finished(client, created.response.id) == undisturbed
        assert server.stop() == 0
