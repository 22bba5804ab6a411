"""Lower bound of a text's number of tokens, without encoding it. To encode megabytes takes half a minute and a gigabyte.

A token that contains a byte is no longer than the vocabulary's longest token with that byte. So each byte counts as at
least 1 / that length of a token, and a text as at least the sum over its bytes. This holds if tokens contain each byte of
a text once. Tokenizers that drop bytes or replace texts have no bound.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_SLICE = 1 << 18
"""Number of bytes that are counted at a time, so that other threads run in between."""
_WORD_START = "\u2581"
"""SentencePiece's character for a space."""
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Steps that split texts and drop nothing."""
_CUTTING = frozenset({"Split", "Punctuation"})
"""Steps that can be configured to drop the separators."""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
Piece = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Lower bounds of one tokenizer."""

    weights: NDArray[np.float64]
    """Smallest fraction of a token for each byte; 0 if no token contains it."""
    has_word_starts: bool = False
    """True if tokens write a space as SentencePiece does."""
    swallows_space: bool = False
    """True if some tokens include all white space around them."""
    forms: tuple[Form, ...] = ()
    """Unicode forms to which texts are normalized first."""

    @classmethod
    def read(cls, tokenizer: object) -> TokenBounds | None:
        """Return the bounds of a Hugging Face tokenizer, possibly in mlx-lm's wrapper; None if there are none."""
        beneath = getattr(tokenizer, "_tokenizer", tokenizer)
        backend: Any = getattr(beneath, "backend_tokenizer", None)
        return None if backend is None else _read(json.loads(backend.to_str()))

    def of(self, text: str) -> int:
        """Return the smallest possible number of a text's tokens; 0 if there is no bound."""
        if not text.isascii() and not all(unicodedata.is_normalized(form, text) for form in self.forms):
            return 0
        if self.swallows_space:
            text = "".join(text.split())
        if self.has_word_starts:
            text = text.replace(_WORD_START, " ")
        data = np.frombuffer(text.encode(), np.uint8)
        sums = (self.weights[data[start : start + _SLICE]].sum() for start in range(0, len(data), _SLICE))
        # More than the rounding error of that many additions.
        return max(0, math.ceil(sum(sums) * (1 - 1e-9)))


def _read(tokenizer: Piece) -> TokenBounds | None:
    model: Piece = tokenizer["model"]
    vocabulary = _vocabulary(model)
    before, cutting = (
        _pieces(tokenizer["normalizer"], "normalizers"),
        _pieces(tokenizer["pre_tokenizer"], "pretokenizers"),
    )
    is_of_bytes = any(piece["type"] == "ByteLevel" for piece in cutting)
    if vocabulary is None or not all(map(_keeps, cutting)):
        return None
    if not is_of_bytes and not _falls_back(model, vocabulary):
        return None
    forms: tuple[Form, ...] = tuple(piece["type"] for piece in before if piece["type"] in _FORMS)
    if not all(piece["type"] in _FORMS or (not is_of_bytes and _marks_words(piece)) for piece in before):
        return None
    added: list[Piece] = tokenizer["added_tokens"]
    said = _said_in_bytes(vocabulary) if is_of_bytes else _said_in_words(vocabulary)
    names = (str(token["content"]) for token in added)
    said_by_name = (name if is_of_bytes else name.replace(_WORD_START, " ") for name in names)
    return TokenBounds(
        _weights([*said, *(name.encode() for name in said_by_name)]),
        has_word_starts=not is_of_bytes,
        swallows_space=any(token["lstrip"] or token["rstrip"] for token in added),
        forms=forms,
    )


def _vocabulary(model: Piece) -> list[str] | None:
    match model.get("type"):
        case "BPE":
            return list(model["vocab"])
        case "Unigram":
            return [str(entry[0]) for entry in model["vocab"]]
        case _:
            return None


def _pieces(piece: Piece | None, several: str) -> list[Piece]:
    """Return the steps in their order."""
    if piece is None:
        return []
    if piece["type"] == "Sequence":
        return [inner for each in piece[several] for inner in _pieces(each, several)]
    return [piece]


def _keeps(piece: Piece) -> bool:
    return piece["type"] in _KEEPING or (piece["type"] in _CUTTING and piece.get("behavior") != "Removed")


def _falls_back(model: Piece, vocabulary: Iterable[str]) -> bool:
    """Return True if text without tokens of its own is written byte by byte."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    return bool(model.get("byte_fallback")) and names <= set(vocabulary)


def _marks_words(piece: Piece) -> bool:
    match piece:
        case {"type": "Prepend", "prepend": "\u2581"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
            return True
        case _:
            return False


def _said_in_bytes(vocabulary: Iterable[str]) -> list[bytes]:
    """Return the bytes of a vocabulary in GPT-2's alphabet, which has a character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    return [bytes(letters[letter] for letter in token if letter in letters) for token in vocabulary]


def _said_in_words(vocabulary: Iterable[str]) -> list[bytes]:
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return [names.get(token) or token.replace(_WORD_START, " ").encode() for token in vocabulary]


def _weights(said: Iterable[bytes]) -> NDArray[np.float64]:
    longest = np.zeros(256)
    for token in said:
        places = list(token)
        longest[places] = np.maximum(longest[places], len(token))
    return np.divide(1.0, longest, out=np.zeros(256), where=longest > 0)
