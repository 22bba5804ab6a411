"""Context of every route."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from mlx_ring.api.chat.answer_grammars import GrammarChecks
from mlx_ring.api.chat.model_format import ChatFormat, read_format
from mlx_ring.api.journal import Journal
from mlx_ring.api.middleware.access_log import note_model
from mlx_ring.api.middleware.guard import Admission
from mlx_ring.api.prompts import PromptEncoder
from mlx_ring.api.request_body import BODY, Body, read_body, read_bytes
from mlx_ring.api.service import Answering, ModelCatalog, ModelService, ServedInstance, Tokenizer
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import PLAYBACK, note_read, note_stream
from mlx_ring.core.errors import NotReady, RequestError, UnknownAnswer, UnknownModel, WorkerLost, WorkerStuck
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import RankId
from mlx_ring.core.worker_status import WorkerInfo

BodyT = TypeVar("BodyT", bound=Body)


class ChatFormats:
    """Formats by tokenizer, each made on first use."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Tokenizer, ChatFormat] = WeakKeyDictionary()

    def __getitem__(self, tokenizer: Tokenizer) -> ChatFormat:
        known = self._known.get(tokenizer)
        if known is None:
            known = self._known[tokenizer] = read_format(tokenizer)
        return known


@dataclass(frozen=True, slots=True)
class ApiContext:
    catalog: ModelCatalog
    settings: ApiSettings
    admission: Admission = field(default_factory=Admission)
    prompts: PromptEncoder = field(default_factory=PromptEncoder)
    formats: ChatFormats = field(default_factory=ChatFormats)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    journal: Journal | None = None
    began_s: float = field(default_factory=time.monotonic)
    """Start of the server, by the monotonic clock."""

    @property
    def uptime_s(self) -> float:
        """Seconds since the server started, whatever the wall clock does. While the machine sleeps, none pass."""
        return time.monotonic() - self.began_s

    async def read(self, request: Request, schema: type[BodyT]) -> BodyT:
        settings = self.settings
        fields = await read_body(request, schema, settings.max_body_bytes, settings.client_timeout_s)
        playback = PLAYBACK.get()
        if playback is not None and not playback.is_first:
            options = {} if playback.streams else {"stream_options": None}
            fields = fields.model_copy(update={"stream": playback.streams, **options})
        note_read(request, fields)
        body: bytes = request.scope.pop(BODY)
        if self.journal is not None and getattr(fields, "is_kept", False):
            self.journal.record(request, body)
        return fields

    @property
    def kept(self) -> Journal:
        """Journal of the server.

        Raises:
            UnknownAnswer: it has none.
        """
        if self.journal is None:
            raise UnknownAnswer("This server keeps no answers: start it with `--journal SIZE`.")
        return self.journal

    async def rest(self, request: Request) -> Response:
        """Return the events of a kept answer that follow the one in `Last-Event-ID`. Raises what `kept` raises."""
        journal = self.kept
        # The body, which is that of the first request, must have been read before a disconnect can be noticed.
        await read_bytes(request, self.settings.max_body_bytes, self.settings.client_timeout_s)
        note_read(request, None)
        note_stream(request)
        return await journal.rest(request)

    @property
    def default(self) -> ModelService:
        """Model that `/` and `/health` describe."""
        return self.catalog.models[0]

    def model(self, name: str | None) -> ModelService:
        """Return the model of that name; without a name, the only one that the server was started with.

        Raises:
            UnknownModel: no model has that name.
            RequestError: the request names no model, and the server was started with several.
        """
        for model in self.catalog.models:
            if (
                name == model.model_id
                or name in model.aliases
                or (name is None and model is self.catalog.only)
            ):
                note_model(model.model_id)
                return model
        if name is None:
            raise RequestError(
                f"'model' is missing; this server has {self._names()}: name one.", param="model"
            )
        raise UnknownModel(
            f"The model '{name}' is not served here; this server has {self._names()}.", param="model"
        )

    def _names(self) -> str:
        return ", ".join(f"'{model.model_id}'" for model in self.catalog.models)

    async def answering(self, model: ModelService) -> Answering:
        """Return the engine of a model. Load the model first if necessary.

        Raises:
            RingError: the model cannot answer now. After a loss of workers it is loaded again automatically.
        """
        playback = PLAYBACK.get()
        if playback is not None and playback.ended is not None:
            return _NO_ENGINE
        if not model.keeps_requests and model.state in ("unloaded", "loading"):
            await self.catalog.ready(model)
        if playback is not None:
            playback.model = str(model.metadata.get("digest", ""))
        if model.keeps_requests:
            return model.engine
        match model.error:
            case None:
                return model.engine
            case WorkerLost() | WorkerStuck() as lost:
                raise NotReady(f"{lost} The model is loaded again.") from None
            case error:
                raise error.with_traceback(None)

    def instances(self) -> Iterator[tuple[ModelService, ServedInstance]]:
        """Yield every instance of every model."""
        for model in self.catalog.models:
            for instance in model.instances:
                yield model, instance


class _NoEngine:
    """Engine of an answer that has ended."""

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        raise NotReady(f"{len(requests)} requests belong to an answer that has ended.")


_NO_ENGINE = _NoEngine()


def workers_of(instance: ServedInstance) -> tuple[WorkerInfo, ...]:
    """Return an instance's workers with their last measurements and the KV bytes of their last answers."""
    workers = instance.info.workers
    if instance.error is not None:
        return workers
    held = instance.engine.stats().scheduler.kv_bytes
    return tuple(
        replace(worker, memory={**worker.memory, "kv_bytes": held[rank]}) if rank in held else worker
        for worker in workers
        for rank in [RankId(worker.stage, worker.rank)]
    )


def workers_of_model(model: ModelService) -> list[WorkerInfo]:
    """Return the workers of all instances of a model."""
    return [worker for instance in model.instances for worker in workers_of(instance)]
