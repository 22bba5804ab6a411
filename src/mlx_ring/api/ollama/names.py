"""Names of models as Ollama's clients write them, and how long they are to stay."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from mlx_ring.api.routes import ApiContext
from mlx_ring.api.service import ModelService
from mlx_ring.core.errors import UnknownModel

_LATEST = ":latest"
_NO_TIME = re.compile(r"[-+]?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
_DURATION = r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$"


def _duration(text: str) -> str:
    if re.match(_DURATION, text) is None:
        raise PydanticCustomError(
            "unsupported", "is no time; write it like '5m' or '1h30m', or as a number of seconds."
        )
    return text


Duration = Annotated[str, AfterValidator(_duration), Field(json_schema_extra={"pattern": _DURATION})]
"""As Go writes them: `5m`, `1h30m`, `-1s`."""
KeepAlive = Duration | int | float


def find_model(context: ApiContext, name: str | None) -> ModelService:
    """The model of that name, with or without the tag that Ollama puts behind those that have none.

    Raises:
        UnknownModel: there is none.
    """
    try:
        return context.model(name)
    except UnknownModel:
        if name is None or not name.endswith(_LATEST):
            raise
        return context.model(name.removesuffix(_LATEST))


def goes_at_once(keep_alive: KeepAlive | None) -> bool:
    """Whether no time at all is asked for: of a request without a prompt that means to unload."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return keep_alive is not None and keep_alive == 0
