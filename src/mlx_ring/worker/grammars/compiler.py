"""Grammars for a model's own tokens, made in a thread of their own: the steps go on meanwhile.

The tokenizer is read when the first grammar comes, for few workers ever need it: it takes a large one a second, in which
this process does little else, and some 150 MB.

Compiled grammars by what they say: those that somebody wants, and as many others as there is room for.
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
from typing import TYPE_CHECKING, Any, cast

from mlx_ring.core.errors import ModelCorrupt, ProtocolError, RequestError
from mlx_ring.models.grammars import deep_thread, grammar_limits, in_one_line, to_llguidance
from mlx_ring.models.lean_imports import import_tokenizers
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.grammars.answer import AnswerGrammar, Compiled

KEPT_BYTES = 256 << 20
_LEAST_BYTES = 1 << 20
_BYTES_OF_TEXT = 350
"""A byte of a schema may take so many: measured with 150,000 tokens, where most take none to 200 of them."""


@dataclass(slots=True, eq=False)
class KeptGrammar:
    """A grammar that is compiled, or will be."""

    key: bytes
    compiled: Future[Compiled]
    bytes: int
    """That it takes once it is compiled, at worst."""
    wanted_by: set[int] = field(default_factory=set[int])
    """The head's ids of it."""


def key_of(grammar: step_pb2.Grammar) -> bytes:
    """A digest: texts are as long as clients like."""
    said = f"{grammar.kind}:{grammar.text}".encode(errors="surrogatepass")
    return blake2b(said, digest_size=16).digest()


class KeptGrammars:
    """By their keys, the least recently used first. Not for several threads at once."""

    def __init__(self, budget_bytes: int = KEPT_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[bytes, KeptGrammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> KeptGrammar | None:
        """One that is not known to fail."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def add(self, grammar: step_pb2.Grammar, key: bytes, compiled: Future[Compiled]) -> KeptGrammar:
        """Keep another one."""
        size = max(_LEAST_BYTES, _BYTES_OF_TEXT * len(grammar.text))
        kept = self._kept[key] = KeptGrammar(key, compiled, size)
        return kept

    def forget(self, kept: KeptGrammar) -> None:
        """Whoever asks for it from now on gets another."""
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]

    def leave(self, kept: KeptGrammar, user: int) -> None:
        """One wants it no more. What nobody wants is not compiled any more, and stays while there is room."""
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
"""Hears whether a grammar is there, in any thread: None, or why it never will be."""


class GrammarCompiler:
    """What a last stage needs to hold answers to grammars.

    They are asked for by any thread and compiled in one of their own; a step names one that is there, and never waits.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._tokenizer: LLTokenizer | ModelCorrupt | None = None
        """Or why there is none: it is read once."""
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._kept = KeptGrammars()
        self._wanted: dict[int, KeptGrammar] = {}
        """By the head's ids."""

    def prepare(self, wanted: worker_pb2.PrepareGrammar, on_compiled: OnCompiled) -> None:
        """Have a grammar until it is dropped. `on_compiled` hears when it is there, unless it is dropped before."""
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
        """The head wants a grammar no more."""
        with self._lock:
            kept = self._wanted.pop(id_, None)
            if kept is not None:
                self._kept.leave(kept, id_)

    def reset(self) -> None:
        """Nobody wants any more: another head has come."""
        for id_ in list(self._wanted):
            self.drop(id_)

    def begin(self, opened: step_pb2.Open) -> AnswerGrammar:
        """An answer that is to match a grammar which is there."""
        with self._lock:
            kept = self._wanted.get(opened.grammar)
        if kept is None or not kept.compiled.done():
            compiled = Future[Compiled]()
            compiled.set_exception(ProtocolError(f"Grammar {opened.grammar} was not prepared."))
        else:
            compiled = kept.compiled
        return AnswerGrammar(compiled, opened.prompt_length, frozenset(opened.eos))

    def forget(self, opened: step_pb2.Open) -> None:
        """A grammar has come to its limits, which all answers under it share: who asks for it next gets a fresh one."""
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
        from llguidance import LLMatcher  # as the tokenizer

        tokenizer = self._read_tokenizer()
        matcher = LLMatcher(tokenizer, to_llguidance(kind, text), log_level=0, limits=grammar_limits())
        if matcher.is_error():
            raise RequestError(
                f"The answer cannot be held to this schema: {in_one_line(matcher.get_error())}"
            )
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
            log.info("read the tokenizer for grammars in %.2f s", time.monotonic() - started)
        if isinstance(self._tokenizer, ModelCorrupt):
            raise ModelCorrupt(str(self._tokenizer))
        return self._tokenizer


def read_tokenizer(folder: ModelFolder) -> LLTokenizer:
    """The model's tokens with what each says. The model's vocabulary may be larger: what is past the tokenizer's says nothing.

    Raises:
        ModelCorrupt: there is no tokenizer that llguidance reads.
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
    """Of a file's path or its text; `read` gives the latter."""
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
    """A tokenizer less the tokens that its model lacks, such as those of pictures beside a model of text; None: there are none."""
    described = cast("dict[str, Any]", json.loads(tokenizer))
    added = cast("list[dict[str, Any]]", described.get("added_tokens") or [])
    described["added_tokens"] = [token for token in added if token["id"] < vocabulary]
    return json.dumps(described) if len(described["added_tokens"]) < len(added) else None


def _adds_tokens(folder: ModelFolder, tokenizer: bytes) -> bool:
    """Whether tokenizer_config.json names tokens that tokenizer.json lacks, as some older models' do."""
    config = folder.path / "tokenizer_config.json"
    if not config.is_file():
        return False
    added = cast("dict[str, Any]", json.loads(config.read_bytes()).get("added_tokens_decoder") or {})
    return not all(_is_named(str(token.get("content", "")), tokenizer) for token in added.values())


def _is_named(text: str, tokenizer: bytes) -> bool:
    spellings: Iterable[str] = (json.dumps(text), json.dumps(text, ensure_ascii=False))
    return any(spelling.encode() in tokenizer for spelling in spellings)


def _as_transformers_read_it(folder: ModelFolder) -> str:
    """The whole tokenizer as tokenizer.json would have it: slower, and for folders without that file."""
    import_tokenizers()
    from transformers import AutoTokenizer  # takes a second, and few folders need it

    wrapped: Any = cast("Any", AutoTokenizer).from_pretrained(
        folder.path, trust_remote_code=False, local_files_only=True
    )
    backend: Any = getattr(wrapped, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(wrapped).__name__} is no tokenizer of the tokenizers library")
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())
