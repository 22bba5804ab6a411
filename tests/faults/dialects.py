"""The same request in each dialect, streamed and whole. A stream must be one complete, unbroken answer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TEMPERATURE = 1.0
"""Temperature of seeded requests; the others are greedy."""
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
_ANSWER_WAIT_S = 600.0
"""Longest time without a byte of an answer, also on a busy machine. A whole answer comes after its recovery."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request without its dialect."""

    prompt: str
    max_tokens: int
    seed: int | None = None
    stop: str = ""
    schema: Mapping[str, object] | None = None
    choices: int = 1
    has_penalties: bool = False
    """True if `PENALTIES` apply."""
    echoes: bool = False
    """True if the answer begins with the prompt and its log-probabilities."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer."""

    text: str
    finish: str
    names: tuple[str, ...] = ()
    """Text of each token, where log-probabilities were asked for."""
    logprobs: tuple[float, ...] = ()
    vector: tuple[float, ...] = ()
    """Embedding of the prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    was_paused: bool = False
    """True if the answer says that it was interrupted."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect: its path, its body, and the reading of its answers."""

    path: str
    body: Callable[[Question], Json]
    whole: Callable[[Json], Answer]
    stream: Callable[[Sequence[str]], Answer]
    stream_fields: Mapping[str, object]
    """Fields of a streamed request; none if its answers are never streamed."""
    missing: frozenset[str] = frozenset()
    """Fields of a question that it does not have."""

    def whole_body(self, question: Question) -> Json:
        body = self.body(question)
        return {**body, "stream": False} if self.stream_fields else body

    def stream_body(self, question: Question) -> Json:
        return {**self.body(question), **self.stream_fields}


def ask(client: httpx.Client, url: str, dialect: Dialect, question: Question, *, streams: bool) -> Answer:
    """Send a question, and return the complete answer."""
    if not streams:
        answer = client.post(url + dialect.path, json=dialect.whole_body(question), timeout=_ANSWER_WAIT_S)
        assert answer.status_code == 200, answer.text
        found = dialect.whole(answer.json())
        was_resumed = answer.headers.get("x-mlx-ring-resumed") == "true"
        return Answer(found.choices, found.prompt_tokens, found.completion_tokens, was_resumed)
    body = dialect.stream_body(question)
    with client.stream("POST", url + dialect.path, json=body, timeout=_ANSWER_WAIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        return dialect.stream([line for line in answer.iter_lines() if line])


# ---- events


def _events(lines: Iterable[str]) -> tuple[list[Json], bool]:
    """Return a stream's events, and True if a comment announced a pause. Nothing may follow `[DONE]`."""
    events, comments, is_done = list[Json](), list[str](), False
    for line in lines:
        assert not is_done, f"{line} follows the end"
        if line.startswith(":"):
            comments.append(line)
        elif line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            event: Json = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event["error"]
            events.append(event)
    return events, ": resuming" in comments


@dataclass(slots=True)
class _Parts:
    """Parts of a choice."""

    text: str = ""
    finish: str = ""
    names: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()

    def end(self, reason: str) -> None:
        """Record the end, which a choice has once."""
        assert not self.finish, f"it ended twice: {self.finish}, {reason}"
        self.finish = reason

    @property
    def choice(self) -> Choice:
        assert self.finish, "it has no end"
        return Choice(self.text, self.finish, self.names, self.logprobs)


def _numbered(parts: Mapping[int, _Parts]) -> tuple[Choice, ...]:
    return tuple(parts[index].choice for index in sorted(parts))


def _sampling(question: Question, **names: str) -> Json:
    """Return the sampling fields that most dialects have, some under other names."""
    given: Json = {"temperature": 0 if question.seed is None else TEMPERATURE}
    if question.seed is not None:
        given["seed"] = question.seed
    given[names.get("max_tokens", "max_tokens")] = question.max_tokens
    if question.stop:
        given[names.get("stop", "stop")] = [question.stop]
    if question.choices > 1:
        given["n"] = question.choices
    if question.has_penalties:
        given |= {names.get(name, name): value for name, value in PENALTIES.items()}
    return given


def _messages(question: Question) -> list[Json]:
    return [{"role": "user", "content": question.prompt}]


# ---- OpenAI's chat completions and completions


def _chat_body(question: Question) -> Json:
    given = {"messages": _messages(question), "logprobs": True, **_sampling(question)}
    if question.schema is not None:
        schema = {"name": "answer", "schema": question.schema}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    return given


def _completion_body(question: Question) -> Json:
    return {"prompt": question.prompt, "logprobs": 0, "echo": question.echoes, **_sampling(question)}


def _add_chat_logprobs(parts: _Parts, entries: Sequence[Json]) -> None:
    parts.names += tuple(entry["token"] for entry in entries)
    parts.logprobs += tuple(entry["logprob"] for entry in entries)


def _add_openai(parts: _Parts, choice: Json) -> None:
    """Add a choice of an answer, or of a chunk."""
    message: Json = choice.get("message") or choice.get("delta") or {}
    parts.text += message.get("content") or choice.get("text") or ""
    logprobs: Json = choice.get("logprobs") or {}
    _add_chat_logprobs(parts, logprobs.get("content") or ())
    parts.names += tuple(logprobs.get("tokens") or ())
    # The first token of an echoed prompt has none.
    parts.logprobs += tuple(each or 0.0 for each in logprobs.get("token_logprobs") or ())
    if choice.get("finish_reason"):
        parts.end(choice["finish_reason"])


def _openai_answer(events: Sequence[Json], *, was_paused: bool) -> Answer:
    parts = defaultdict[int, _Parts](_Parts)
    for event in events:
        for choice in event["choices"]:
            _add_openai(parts[choice["index"]], choice)
    usages = [event["usage"] for event in events if event.get("usage")]
    assert len(usages) == 1
    assert len({event["id"] for event in events}) == 1
    used = usages[0]
    return Answer(_numbered(parts), used["prompt_tokens"], used["completion_tokens"], was_paused)


def _openai_whole(answer: Json) -> Answer:
    return _openai_answer([answer], was_paused=False)


def _openai_stream(lines: Sequence[str]) -> Answer:
    assert lines[-1] == "data: [DONE]"
    events, was_paused = _events(lines)
    return _openai_answer(events, was_paused=was_paused)


# ---- OpenAI's Responses


def _responses_body(question: Question) -> Json:
    given = {
        "input": question.prompt,
        "include": ["message.output_text.logprobs"],
        **_sampling(question, max_tokens="max_output_tokens"),
    }
    if question.schema is not None:
        given["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": question.schema}}
    return given


def _responses_whole(answer: Json) -> Answer:
    parts = _Parts()
    for item in answer["output"]:
        for content in item["content"]:
            parts.text += content["text"]
            _add_chat_logprobs(parts, content["logprobs"])
    details: Json = answer.get("incomplete_details") or {}
    parts.end(details.get("reason") or answer["status"])
    used = answer["usage"]
    return Answer((parts.choice,), used["input_tokens"], used["output_tokens"])


def _responses_stream(lines: Sequence[str]) -> Answer:
    assert lines[-1] == "data: [DONE]"
    events, was_paused = _events(lines)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = _Parts("".join(event["delta"] for event in deltas))
    for event in deltas:
        _add_chat_logprobs(streamed, event["logprobs"])
    found = _responses_whole(last["response"])
    (choice,) = found.choices
    assert (streamed.text, streamed.names) == (choice.text, choice.names)
    return Answer(found.choices, found.prompt_tokens, found.completion_tokens, was_paused)


# ---- Anthropic's messages


def _anthropic_body(question: Question) -> Json:
    given = {"messages": _messages(question), **_sampling(question, stop="stop_sequences")}
    if question.schema is not None:
        given["output_config"] = {"format": {"type": "json_schema", "schema": question.schema}}
    return given


def _anthropic_whole(answer: Json) -> Answer:
    parts = _Parts("".join(block["text"] for block in answer["content"]))
    parts.end(answer["stop_reason"])
    used = answer["usage"]
    return Answer((parts.choice,), used["input_tokens"], used["output_tokens"])


def _anthropic_stream(lines: Sequence[str]) -> Answer:
    events, _ = _events(lines)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert all(kinds.count(kind) == 1 for kind in ("message_start", "message_delta", "message_stop"))
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") <= 1
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    parts = _Parts("".join(delta["text"] for delta in deltas))
    end = events[kinds.index("message_delta")]
    parts.end(end["delta"]["stop_reason"])
    prompt_tokens = events[0]["message"]["usage"]["input_tokens"]
    return Answer((parts.choice,), prompt_tokens, end["usage"]["output_tokens"], "ping" in kinds)


# ---- Ollama's chat and generate


def _ollama_body(question: Question) -> Json:
    options = _sampling(question, max_tokens="num_predict", repetition_penalty="repeat_penalty")
    given: Json = {"logprobs": True, "options": options}
    return given if question.schema is None else given | {"format": question.schema}


def _ollama_chat_body(question: Question) -> Json:
    return {"messages": _messages(question), **_ollama_body(question)}


def _ollama_generate_body(question: Question) -> Json:
    return {"prompt": question.prompt, **_ollama_body(question)}


def _ollama_answer(events: Sequence[Json], *, was_paused: bool) -> Answer:
    parts = _Parts()
    for event in events:
        assert "error" not in event, event["error"]
        parts.text += event["message"]["content"] if "message" in event else event["response"]
        _add_chat_logprobs(parts, event.get("logprobs") or ())
    assert [bool(event["done"]) for event in events] == [False] * (len(events) - 1) + [True]
    last = events[-1]
    parts.end(last["done_reason"])
    return Answer((parts.choice,), last["prompt_eval_count"], last["eval_count"], was_paused)


def _ollama_whole(answer: Json) -> Answer:
    return _ollama_answer([answer], was_paused=False)


def _ollama_stream(lines: Sequence[str]) -> Answer:
    events: list[Json] = [json.loads(line) for line in lines]
    # A line without text, before the end, announces a pause.
    empty = [
        event
        for event in events[:-1]
        if not (event.get("response") or event.get("message", {}).get("content"))
    ]
    return _ollama_answer(events, was_paused=bool(empty))


# ---- embeddings, which are never streamed


def _embedding_body(question: Question) -> Json:
    return {"input": question.prompt}


def _embedded(vector: Sequence[float], prompt_tokens: int) -> Answer:
    return Answer((Choice("", "embedded", vector=tuple(vector)),), prompt_tokens, 0)


def _openai_embedding(answer: Json) -> Answer:
    (item,) = answer["data"]
    return _embedded(item["embedding"], answer["usage"]["prompt_tokens"])


def _ollama_embedding(answer: Json) -> Answer:
    (vector,) = answer["embeddings"]
    return _embedded(vector, answer["prompt_eval_count"])


def _refuse_stream(lines: Sequence[str]) -> Answer:
    raise AssertionError(lines)


_WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_STREAMED = {"stream": True}
DIALECTS: Mapping[str, Dialect] = {
    "chat": Dialect(
        *("/v1/chat/completions", _chat_body, _openai_whole, _openai_stream, _WITH_USAGE),
        missing=frozenset({"echoes"}),
    ),
    "completions": Dialect(
        *("/v1/completions", _completion_body, _openai_whole, _openai_stream, _WITH_USAGE),
        missing=frozenset({"schema"}),
    ),
    "responses": Dialect(
        *("/v1/responses", _responses_body, _responses_whole, _responses_stream, _STREAMED),
        missing=frozenset({"stop", "choices", "echoes"}),
    ),
    "messages": Dialect(
        *("/v1/messages", _anthropic_body, _anthropic_whole, _anthropic_stream, _STREAMED),
        missing=frozenset({"choices", "echoes"}),
    ),
    "ollama chat": Dialect(
        *("/api/chat", _ollama_chat_body, _ollama_whole, _ollama_stream, _STREAMED),
        missing=frozenset({"choices", "echoes"}),
    ),
    "ollama generate": Dialect(
        *("/api/generate", _ollama_generate_body, _ollama_whole, _ollama_stream, _STREAMED),
        missing=frozenset({"choices", "echoes"}),
    ),
}
EMBEDDINGS: Mapping[str, Dialect] = {
    "embeddings": Dialect("/v1/embeddings", _embedding_body, _openai_embedding, _refuse_stream, {}),
    "ollama embed": Dialect("/api/embed", _embedding_body, _ollama_embedding, _refuse_stream, {}),
}
"""Dialects whose answer is a vector."""
