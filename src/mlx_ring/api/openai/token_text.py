"""Single tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from mlx_ring.api.openai.schemas import ScoredAlternative, ScoredToken
from mlx_ring.api.service import Tokenizer
from mlx_ring.core.types import TokenLogprob

_NO_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no infinity."""
_REPLACEMENT = "\ufffd"
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_PIECE = 6
"""Length of `<0x0A>`, SentencePiece's name of a byte."""


class TokenText(NamedTuple):
    text: str
    data: bytes
    special: bool
    """True for a token that answers and echoed prompts omit."""

    @property
    def name(self) -> str:
        """Unique name of the token, unlike `text`. Bytes that are no text are spelt out, as in OpenAI's API."""
        if _REPLACEMENT not in self.text:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


_KNOWN: WeakKeyDictionary[Tokenizer, dict[int, TokenText]] = WeakKeyDictionary()


class TokenTexts:
    """Tokens of one tokenizer. If a token contains a part of a character, its text shows U+FFFD.

    All objects of one tokenizer share a cache.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = _KNOWN.setdefault(tokenizer, {})

    def __getitem__(self, token: int) -> TokenText:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def scored(self, scored: TokenLogprob) -> ScoredToken:
        """Return a token with its log-probability and its alternatives."""
        return {
            **self._alternative(scored.token, scored.logprob),
            "top_logprobs": [self._alternative(token, logprob) for token, logprob in scored.top],
        }

    def _alternative(self, token: int, logprob: float) -> ScoredAlternative:
        text = self[token]
        return {"token": text.text, "logprob": finite_logprob(logprob), "bytes": list(text.data)}

    def _look_up(self, token: int) -> TokenText:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if _REPLACEMENT in text:
            return TokenText(text, _bytes_of(piece, text), special=False)
        if piece.startswith(_SENTENCEPIECE_SPACE):
            # Decoded alone it starts a text, so the tokenizer drops one space.
            text = piece.replace(_SENTENCEPIECE_SPACE, " ")
        shown = self._tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return TokenText(text, text.encode(errors="replace"), special=bool(text.strip(" ")) and not shown)


def finite_logprob(logprob: float) -> float:
    return max(_NO_LOGPROB, logprob)


def _bytes_of(piece: str, text: str) -> bytes:
    """Return the bytes that a token's name stands for: `<0x0A>` in SentencePiece, GPT-2's alphabet in byte-level BPE."""
    if len(piece) == _BYTE_PIECE and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    alphabet = _byte_alphabet()
    if piece and all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return text.encode(errors="replace")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable byte stands for itself, the others are numbered from U+0100."""
    return {character: byte for byte, character in _spelt_bytes()}


def _spelt_bytes() -> Iterator[tuple[int, str]]:
    unprintable = 0
    for byte in range(256):
        if ord("!") <= byte <= ord("~") or ord("¡") <= byte <= ord("¬") or ord("®") <= byte:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + unprintable)
            unprintable += 1
