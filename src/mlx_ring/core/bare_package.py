"""Modules of a library without what its package brings along: seconds of a process's start, and much of its memory."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec, module_from_spec


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
