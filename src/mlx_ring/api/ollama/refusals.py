"""Fields that clients of Ollama send, and that may say nothing here."""

from __future__ import annotations

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def refused(reason: str) -> AfterValidator:
    """Of a field: anything but an empty value is refused, with why."""

    def check(value: object) -> object:
        if value:
            raise PydanticCustomError(
                "unsupported", "is not supported: {reason}; leave it out.", {"reason": reason}
            )
        return value

    return AfterValidator(check)
