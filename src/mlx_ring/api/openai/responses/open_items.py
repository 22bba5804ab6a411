"""The items of an answer while they are written: what each tells as it begins, grows and ends."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

from mlx_ring.api.json_lines import Json
from mlx_ring.api.openai.responses.items import seal

Status = Literal["in_progress", "completed", "incomplete"]
Event = tuple[str, Json]
"""Its kind, and what it tells; the writer adds where and in which order."""


class OpenItem(ABC):
    """One item of an answer, which grows."""

    prefix: str
    """Of its id."""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self.text: str = ""

    @abstractmethod
    def item(self, status: Status) -> Json:
        """As it stands."""

    @abstractmethod
    def opens(self) -> Iterator[Event]: ...

    @abstractmethod
    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]: ...

    @abstractmethod
    def ends(self) -> Iterator[Event]: ...


class _TextItem(OpenItem):
    """An item with a single part of text."""

    kind: str
    """Of its text's events."""
    at: Json

    def __init__(self) -> None:
        super().__init__()
        self.at = {"item_id": self.id, "content_index": 0}

    @abstractmethod
    def part(self) -> Json:
        """Its text as it stands."""

    def opens(self) -> Iterator[Event]:
        yield "response.content_part.added", self.at | {"part": self.part()}

    def ends(self) -> Iterator[Event]:
        yield f"response.{self.kind}.done", self.at | self._done()
        yield "response.content_part.done", self.at | {"part": self.part()}

    def _done(self) -> Json:
        return {"text": self.text}


class Message(_TextItem):
    prefix = "msg"
    kind = "output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Json] = []

    def item(self, status: Status) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self.part()] if status != "in_progress" else [],
        }

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        self.text += text
        self._logprobs += logprobs
        yield "response.output_text.delta", self.at | {"delta": text, "logprobs": list(logprobs)}

    def _done(self) -> Json:
        return {"text": self.text, "logprobs": list(self._logprobs)}


class Thought(_TextItem):
    prefix = "rs"
    kind = "reasoning_text"

    def __init__(self, *, seals: bool) -> None:
        """`seals` it for clients that keep nothing else."""
        super().__init__()
        self._seals = seals

    def item(self, status: Status) -> Json:
        ended = status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self.part()] if ended else [],
            "encrypted_content": seal(self.text) if ended and self._seals else None,
        }

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        del logprobs
        self.text += text
        yield "response.reasoning_text.delta", self.at | {"delta": text}


class Call(OpenItem):
    prefix = "fc"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call = {"call_id": call_id, "name": name}

    def item(self, status: Status) -> Json:
        head: Json = {"id": self.id, "type": "function_call", "status": status}
        return head | self._call | {"arguments": self.text}

    def opens(self) -> Iterator[Event]:
        yield from ()

    def grows(self, text: str, logprobs: Sequence[Json]) -> Iterator[Event]:
        del logprobs
        self.text += text
        yield "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def ends(self) -> Iterator[Event]:
        done: Json = {"item_id": self.id, "name": self._call["name"], "arguments": self.text}
        yield "response.function_call_arguments.done", done
