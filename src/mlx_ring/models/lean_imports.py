"""Modules of a library without what its package brings along: seconds of a process's start, and much of its memory.

Brings transformers' tokenizers in without the list of all its models.

It reads some 3,300 of its own files for that list, twice: a third of what a head takes to start, and more where they are not in
the system's cache.

Brings mlx-lm in without what no worker needs of it: tokenizers and the hub's client are most of what it imports.

Two workers start in the time that one took, and each holds less memory. What is left out here comes in as ever
when something asks for it later.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType


def import_bare(package: str) -> None:
    """Let modules of `package` come in one by one.

    Its `__init__` runs only when something is asked of the package that no module of it is, and then as ever.
    Where it has come in already, or is not installed, nothing changes.
    """
    if package in sys.modules:
        return
    spec = find_spec(package)
    if spec is None or spec.loader is None:
        return
    loader, bare = spec.loader, module_from_spec(spec)

    def run_init(name: str) -> object:
        del bare.__dict__["__getattr__"]
        loader.exec_module(bare)
        whole = sys.modules[package]
        # Some put another module in their own place; who has this one asks that one.
        if whole is not bare:
            bare.__dict__["__getattr__"] = partial(getattr, whole)
        return getattr(whole, name)

    bare.__dict__["__getattr__"] = run_init
    sys.modules[package] = bare
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, bare)


def import_tokenizers() -> None:
    """Have `AutoTokenizer` in `transformers`. Call it before that is imported; all else of it comes in whole when it is asked for."""
    if "transformers" in sys.modules:
        return
    try:
        _import_bare()
    except (ImportError, AttributeError):
        # A version that is made otherwise: whoever imports it next has it whole.
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def _import_bare() -> None:
    import_bare("transformers")
    import_bare("transformers.models")
    package = sys.modules["transformers"]
    # Its modules ask for that at once, before the rest could come in.
    package.__dict__["__version__"] = version("transformers")
    from transformers.models.auto.tokenization_auto import AutoTokenizer  # only now without the rest
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    package.__dict__.update(AutoTokenizer=AutoTokenizer, PreTrainedTokenizerFast=PreTrainedTokenizerFast)


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
