"""Compilation of grammars for a model's tokens, in a separate thread so that steps continue.

The tokenizer is read when the first grammar comes, because few workers ever need it. A large one takes a second, in
which this process does little else, and some 150 MB.

Compiled grammars are cached by their text: those in use, and as many others as fit.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from mlx_ring.core.errors import ModelCorrupt, ProtocolError, RequestError
from mlx_ring.core.lean_imports import import_tokenizers
from mlx_ring.models.grammars import deep_thread, grammar_limits, in_one_line, to_llguidance
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.grammars.answer_state import AnswerGrammar, Compiled

KEPT_BYTES = 256 << 20
_LEAST_BYTES = 1 << 20
_BYTES_OF_TEXT = 350
"""Estimated bytes for a byte of a schema: measured with 150,000 tokens, where most take up to 200."""


@dataclass(slots=True, eq=False)
class KeptGrammar:
    """Grammar that is compiled, or will be."""

    key: bytes
    compiled: Future[Compiled]
    bytes: int
    """Bytes that it takes once compiled, at worst."""
    wanted_by: set[int] = field(default_factory=set[int])
    """Ids that the head uses for it."""


def key_of(grammar: step_pb2.Grammar) -> bytes:
    """Return a digest of the grammar, because texts may be of any length."""
    said = f"{grammar.kind}:{grammar.text}".encode(errors="surrogatepass")
    return blake2b(said, digest_size=16).digest()


class KeptGrammars:
    """Cache of grammars by their keys, the least recently used first. Not thread-safe."""

    def __init__(self, budget_bytes: int = KEPT_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[bytes, KeptGrammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> KeptGrammar | None:
        """Find a grammar that is not known to fail."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def add(self, grammar: step_pb2.Grammar, key: bytes, compiled: Future[Compiled]) -> KeptGrammar:
        """Add a grammar."""
        size = max(_LEAST_BYTES, _BYTES_OF_TEXT * len(grammar.text))
        kept = self._kept[key] = KeptGrammar(key, compiled, size)
        return kept

    def forget(self, kept: KeptGrammar) -> None:
        """Remove a grammar, so that later requests compile it again."""
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]

    def leave(self, kept: KeptGrammar, user: int) -> None:
        """End one use. A grammar without users is not compiled any more, and stays while it fits."""
        kept.wanted_by.discard(user)
        if not kept.wanted_by and kept.compiled.cancel():
            self.forget(kept)
        self._make_room()

    def _make_room(self) -> None:
        total = sum(kept.bytes for kept in self._kept.values())
        for kept in [kept for kept in self._kept.values() if not kept.wanted_by]:
            if total <= self._budget_bytes:
                return
            total -= kept.bytes
            self.forget(kept)


if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

OnCompiled = Callable[[BaseException | None], object]
"""Callback for the end of compilation, called in any thread: None, or the error."""


class GrammarCompiler:
    """Compiler of structured output for a last stage.

    Any thread may request a grammar, which is compiled in a separate one. A step names a compiled grammar, and never
    waits.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._tokenizer: LLTokenizer | ModelCorrupt | None = None
        """Tokenizer, or the error of reading it: it is read once."""
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._kept = KeptGrammars()
        self._wanted: dict[int, KeptGrammar] = {}
        """Grammars in use, by the head's ids."""

    def prepare(self, wanted: worker_pb2.PrepareGrammar, on_compiled: OnCompiled) -> None:
        """Keep a grammar until it is dropped, and call `on_compiled` when it is compiled, unless it is dropped before."""
        key = key_of(wanted.grammar)
        with self._lock:
            kept = self._kept.find(key)
            if kept is None:
                compiled = self._in_thread(wanted.grammar.kind, wanted.grammar.text)
                kept = self._kept.add(wanted.grammar, key, compiled)
            kept.wanted_by.add(wanted.id)
            self._wanted[wanted.id] = kept
        kept.compiled.add_done_callback(lambda _: self._report_compiled(wanted.id, kept, on_compiled))

    def drop(self, id_: int) -> None:
        """End the head's use of a grammar."""
        with self._lock:
            kept = self._wanted.pop(id_, None)
            if kept is not None:
                self._kept.leave(kept, id_)

    def reset(self) -> None:
        """End all uses, because another head has taken over."""
        for id_ in list(self._wanted):
            self.drop(id_)

    def begin(self, opened: step_pb2.Open) -> AnswerGrammar:
        """Start an answer that must match a compiled grammar."""
        with self._lock:
            kept = self._wanted.get(opened.grammar)
        if kept is None or not kept.compiled.done():
            compiled = Future[Compiled]()
            compiled.set_exception(ProtocolError(f"Grammar {opened.grammar} was not prepared."))
        else:
            compiled = kept.compiled
        return AnswerGrammar(compiled, opened.prompt_length, frozenset(opened.eos))

    def forget(self, opened: step_pb2.Open) -> None:
        """Forget a grammar that reached its limits, which all its answers share. The next request gets a fresh one."""
        with self._lock:
            kept = self._wanted.get(opened.grammar)
            if kept is not None:
                self._kept.forget(kept)

    def _in_thread(self, kind: str, text: str) -> Future[Compiled]:
        if self._thread is None:
            self._thread = deep_thread("grammar")
        return self._thread.submit(self._compile, kind, text)

    def _report_compiled(self, id_: int, kept: KeptGrammar, on_compiled: OnCompiled) -> None:
        if kept.compiled.cancelled():
            return
        error = kept.compiled.exception()
        with self._lock:
            if error is not None:
                self._kept.forget(kept)
            is_wanted = self._wanted.get(id_) is kept
        if is_wanted:
            on_compiled(error)

    def _compile(self, kind: str, text: str) -> Compiled:
        from llguidance import LLMatcher  # as for the tokenizer

        import_module("mlx_ring.worker.grammars.masks")  # with NumPy, for which no step may wait

        tokenizer = self._read_tokenizer()
        matcher = LLMatcher(tokenizer, to_llguidance(kind, text), log_level=0, limits=grammar_limits())
        if matcher.is_error():
            raise RequestError(f"This schema cannot be enforced: {in_one_line(matcher.get_error())}")
        ends = self._folder.eos_token_ids
        return Compiled(
            matcher,
            tuple(tokenizer.eos_tokens),
            lambda token: token in ends or tokenizer.is_special_token(token),
        )

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            started = time.monotonic()
            try:
                self._tokenizer = read_tokenizer(self._folder)
            except ModelCorrupt as error:
                self._tokenizer = error
            log.info("Read the tokenizer for grammars in %.2f s", time.monotonic() - started)
        if isinstance(self._tokenizer, ModelCorrupt):
            raise ModelCorrupt(str(self._tokenizer))
        return self._tokenizer


def read_tokenizer(folder: ModelFolder) -> LLTokenizer:
    """Read the model's tokens with the text of each.

    The model's vocabulary may be larger; further tokens have no text.

    Raises:
        ModelCorrupt: there is no tokenizer that llguidance can read.
    """
    file = folder.path / "tokenizer.json"
    try:
        if file.is_file() and not _adds_tokens(folder, file.read_bytes()):
            return _make(folder, str(file), file.read_bytes)
        text = _as_transformers_read_it(folder)
        return _make(folder, text, text.encode)
    except (OSError, ValueError, ImportError) as error:
        raise ModelCorrupt(
            f"The tokenizer in {folder.path} cannot be read for grammars: {in_one_line(str(error))}"
        ) from error


def _make(folder: ModelFolder, source: str, read: Callable[[], bytes]) -> LLTokenizer:
    """Make a tokenizer from a file's path or its text; `read` returns the latter."""
    from llguidance import LLTokenizer

    ends = sorted(folder.eos_token_ids) or None
    try:
        return LLTokenizer(source, n_vocab=folder.vocab_size, eos_token=ends)
    except ValueError:
        fewer = _without_surplus(read(), folder.vocab_size)
        if fewer is None:
            raise
        return LLTokenizer(fewer, n_vocab=folder.vocab_size, eos_token=ends)


def _without_surplus(tokenizer: bytes, vocabulary: int) -> str | None:
    """Return a tokenizer without tokens that its model lacks, such as those of images beside a text model; None if there are none."""
    described = cast("dict[str, Any]", json.loads(tokenizer))
    added = cast("list[dict[str, Any]]", described.get("added_tokens") or [])
    described["added_tokens"] = [token for token in added if token["id"] < vocabulary]
    return json.dumps(described) if len(described["added_tokens"]) < len(added) else None


def _adds_tokens(folder: ModelFolder, tokenizer: bytes) -> bool:
    """Report whether tokenizer_config.json names tokens that tokenizer.json lacks, as in some older models."""
    config = folder.path / "tokenizer_config.json"
    if not config.is_file():
        return False
    added = cast("dict[str, Any]", json.loads(config.read_bytes()).get("added_tokens_decoder") or {})
    return not all(_is_named(str(token.get("content", "")), tokenizer) for token in added.values())


def _is_named(text: str, tokenizer: bytes) -> bool:
    spellings: Iterable[str] = (json.dumps(text), json.dumps(text, ensure_ascii=False))
    return any(spelling.encode() in tokenizer for spelling in spellings)


def _as_transformers_read_it(folder: ModelFolder) -> str:
    """Return the tokenizer as tokenizer.json would hold it. This is slower, for folders without that file."""
    import_tokenizers()
    from transformers import AutoTokenizer  # takes half a second, and few folders need it

    wrapped: Any = cast("Any", AutoTokenizer).from_pretrained(
        folder.path, trust_remote_code=False, local_files_only=True
    )
    backend: Any = getattr(wrapped, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(wrapped).__name__} is no tokenizer of the tokenizers library")
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
