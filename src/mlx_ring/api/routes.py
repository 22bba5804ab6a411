"""What every route has at hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request

from mlx_ring.api.body import Body, read_body
from mlx_ring.api.prompts import PromptEncoder
from mlx_ring.api.service import ModelService, ServingEngine, WorkerInfo
from mlx_ring.api.settings import ApiSettings
from mlx_ring.engine.executor import RankId

BodyT = TypeVar("BodyT", bound=Body)


@dataclass(frozen=True, slots=True)
class ApiContext:
    service: ModelService
    settings: ApiSettings
    prompts: PromptEncoder = field(default_factory=PromptEncoder)

    async def read(self, request: Request, schema: type[BodyT]) -> BodyT:
        return await read_body(request, schema, self.settings.max_body_bytes)

    def engine(self) -> ServingEngine:
        """Raises the error for which the model cannot answer now."""
        error = self.service.error
        if error is not None:
            raise error.with_traceback(None)
        return self.service.engine

    def workers(self) -> tuple[WorkerInfo, ...]:
        """As they measured themselves last; what their KV holds as they said in their last answer."""
        workers = self.service.instance().workers
        if self.service.error is not None:
            return workers
        held = self.service.engine.stats().scheduler.kv_bytes
        return tuple(
            replace(worker, kv_bytes=held.get(RankId(worker.stage, worker.rank), worker.kv_bytes))
            for worker in workers
        )
