"""Brings mlx-lm in without what no worker needs of it: tokenizers and the hub's client are most of what it imports.

Two workers start in the time that one took, and each holds less memory. What is left out here comes in as ever
when something asks for it later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from importlib import import_module
from types import ModuleType

from mlx_ring.core.bare_package import import_bare

_UNUSED = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""What `mlx_lm.utils` takes from them: to load a tokenizer beside the model, and to fetch one that is not here."""


def import_mlx_lm() -> None:
    """Import what loads models. Call it first, in a process that does nothing else."""
    import_bare("mlx_lm")
    with _left_out():
        import_module("mlx_lm.utils")


@contextlib.contextmanager
def _left_out() -> Generator[None]:
    """Stand-ins for what is unused, gone again afterwards."""
    missing = [name for name in _UNUSED if name not in sys.modules]
    for name in missing:
        stand_in = ModuleType(name)
        stand_in.__dict__.update(dict.fromkeys(_UNUSED[name], object))
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
