"""Import a large library when a test first uses it. Every process of a run imports every test file."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest and its plugins ask every object in a test file for these.
        if attribute.startswith("_") or attribute == "is_hypothesis_test":
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """Return a proxy of a module. A type checker needs the real import under `TYPE_CHECKING`."""
    return _Lazy(name)
