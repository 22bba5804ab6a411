"""Compiled grammars by what they say: those that somebody wants, and as many others as there is room for."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.grammars.answer import Compiled

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
