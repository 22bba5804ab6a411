"""Imports that leave out unneeded parts of mlx-lm, transformers and protobuf, by replacing entries of `sys.modules`.

They stay because they save much of a process's start. Medians of 5 runs in fresh processes with warm file caches, in
CPU seconds (Python 3.11, Linux x86-64, mlx-lm 0.32.2, transformers 5.23.0, tokenizers 0.23.3):

- Worker, `import_mlx_lm`: 0.38 s instead of 1.37 s, and 67 MiB instead of 97 MiB. mlx-lm imports tokenizers and the
  hub's client, which no worker needs.
- Head, `import_bare("mlx_lm")` and `import_tokenizers` before mlx-lm's `tokenizer_utils`: 0.43 s instead of 1.01 s.
  Either one alone saves at most 0.22 s. transformers reads some 3,300 of its files, twice, to list its models; with
  cold file caches this takes longer still. Without the API of the hub's client, it is 0.36 s instead of 0.47 s.
- Every process, `import_protobuf` before the generated messages: 0.07 s instead of 0.10 s for these. A worker's 0.5 s
  shrink by as much. The machine was half as fast (protobuf 7.36.2).

Parts that are left out are imported when something needs them. `tests/core/test_lean_imports.py` checks that the
installed versions still have the structure that these functions replace.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import threading
from collections.abc import Generator, Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType


@contextlib.contextmanager
def importing() -> Generator[None]:
    """Import without garbage collections, and leave what was imported out of later ones.

    Modules make lasting objects, and the searches among them take 0.3 s of a head's start, and a tenth of the imports
    of agents and workers. Only the main thread does so, as a process starts: beside the threads of others, these would
    make garbage that lasted, too.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        gc.enable()


class _Left:
    """Objects that garbage collections leave out, and instances whose they are."""

    serving = 0
    """Number of instances that serve."""
    is_frozen = False
    """True if objects of an instance were left out, which may have ended since."""


@contextlib.contextmanager
def left_out(*, is_quick: bool) -> Generator[None]:
    """Leave what serves an instance out of garbage collections meanwhile: to search it would delay every stream.

    Objects of instances that begin beside it are searched, so that their garbage does not last as long as the first one.
    So are those of a recovery (`is_quick`), because it takes no time for this.
    """
    _Left.serving += 1
    if not is_quick and not _Left.is_frozen:
        gc.freeze()
        _Left.is_frozen = True
    try:
        yield
    finally:
        _Left.serving -= 1


def collect_left() -> None:
    """Collect what earlier instances left, unless one serves. It takes a tenth of a second; before the first one, nothing."""
    if _Left.is_frozen and not _Left.serving:
        _Left.is_frozen = False
        gc.unfreeze()
        gc.collect()


def import_bare(package: str) -> None:
    """Let modules of `package` be imported one by one, without its `__init__`.

    `__init__` runs when something asks the package for a name that none of its modules has.
    If the package is imported already, or not installed, nothing changes.
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
        # Some packages replace themselves in sys.modules; then this one forwards to the replacement.
        if whole is not bare:
            bare.__dict__["__getattr__"] = partial(getattr, whole)
        return getattr(whole, name)

    bare.__dict__["__getattr__"] = run_init
    sys.modules[package] = bare
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, bare)


def import_tokenizers() -> None:
    """Import `AutoTokenizer` into a bare `transformers`.

    Call it before transformers is imported; the rest is imported when needed.
    """
    if "transformers" in sys.modules:
        return
    try:
        _import_bare()
    except (ImportError, AttributeError):
        # Another structure than expected: the next import loads the whole package.
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def _import_bare() -> None:
    from importlib.metadata import version  # no worker needs it

    import_bare("transformers")
    import_bare("transformers.models")
    package = sys.modules["transformers"]
    # Its modules read the version at once, before `__init__` has run.
    package.__dict__["__version__"] = version("transformers")
    # It works only now, without the rest.
    with _left_out(UNUSED_BY_TOKENIZERS):
        from transformers.models.auto.tokenization_auto import AutoTokenizer
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    package.__dict__.update(AutoTokenizer=AutoTokenizer, PreTrainedTokenizerFast=PreTrainedTokenizerFast)


UNUSED = {"mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"), "huggingface_hub": ("snapshot_download",)}
"""Names that `mlx_lm.utils` takes from them: to load a tokenizer beside the model, and to fetch a model."""


UNUSED_BY_TOKENIZERS = {
    "huggingface_hub._commit_api": ("CommitOperationAdd",),
    "huggingface_hub._snapshot_download": ("snapshot_download",),
    "huggingface_hub.hf_api": ("HfApi",),
    "huggingface_hub.repocard": ("ModelCard",),
    "huggingface_hub.repocard_data": ("ModelCardData",),
}
"""Names of the hub's client that `transformers.utils.hub` takes, to ask the hub. Tokenizers are read from folders."""


_PYTHON_MESSAGES = "google.protobuf.internal.python_message"


def import_mlx_lm() -> None:
    """Import mlx-lm's model loading. Call it first, in a process that does nothing else."""
    import_bare("mlx_lm")
    with _left_out(UNUSED), _limits_kept():
        import_module("mlx_lm.utils")


@contextlib.contextmanager
def _limits_kept() -> Generator[None]:
    """Let an import change no limit of this process.

    mlx-lm sets the limit of open files to 2048, and to 4096 for good. It fails if fewer are allowed.
    """

    def keep(_resource: int, _limits: tuple[int, int]) -> None:
        """Change nothing."""

    set_limit, resource.setrlimit = resource.setrlimit, keep
    try:
        yield
    finally:
        resource.setrlimit = set_limit


def import_protobuf() -> None:
    """Import protobuf without its messages in Python, which it never calls where it has them in C.

    Call it before the first generated module is imported.
    """
    from google.protobuf.internal import api_implementation

    if api_implementation.Type() != "python":
        with _left_out({_PYTHON_MESSAGES: ()}):
            import_module("google.protobuf.internal.builder")


@contextlib.contextmanager
def _left_out(unused: Mapping[str, Iterable[str]]) -> Generator[None]:
    """Put stand-ins for unused modules, with these names, into `sys.modules`, and remove them afterwards."""
    missing = [name for name in unused if name not in sys.modules]
    for name in missing:
        stand_in = ModuleType(name)
        stand_in.__dict__.update(dict.fromkeys(unused[name], object))
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
