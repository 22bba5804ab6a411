"""The lower bound on a text's tokens never exceeds their number, for any text and tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from mlx_ring.api.prompts import TokenBounds

WORDS = ["the", "he", "th", "in", "ing", "é", "e", "日本", "日", "\u2581the", "\u2581", "ain", "ai"]


class Wrapper:
    """Wrapper like mlx-lm's around a tokenizer of Hugging Face."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self._tokenizer = self


def bpe(symbols: list[str], **options: object) -> models.BPE:
    """Return a BPE model of these symbols, of `WORDS` made of them, and of all merges that lead to them."""
    vocabulary = dict.fromkeys(symbols)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = list(word)
        if all(letter in vocabulary for letter in letters):
            for end in range(1, len(letters)):
                pair = ("".join(letters[:end]), letters[end])
                merges.append(pair)
                vocabulary["".join(pair)] = None
    ids = {token: place for place, token in enumerate(vocabulary)}
    return models.BPE(vocab=ids, merges=list(dict.fromkeys(merges)), **options)  # pyright: ignore[reportArgumentType]


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer like GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(bpe(sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Return a tokenizer like Llama 2's and Gemma's."""
    letters = [*"theinga", "é", "\u2581"]
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        bpe(["<unk>", *names, *letters], unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106 - text
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def with_stripping_token(tokenizer: Tokenizer) -> Tokenizer:
    """Add a special token that strips all space around it, and return the tokenizer."""
    tokenizer.add_special_tokens([AddedToken("<|a\u2581b|>", lstrip=True, rstrip=True), AddedToken("<e>")])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level_tokenizer,
    "SentencePiece": sentencepiece_tokenizer,
    "byte level, stripping token": lambda: with_stripping_token(byte_level_tokenizer()),
    "SentencePiece, stripping token": lambda: with_stripping_token(sentencepiece_tokenizer()),
}
PIECES = [
    *WORDS,
    " ",
    "   ",
    "\n",
    "\u3000",
    "7",
    "x",
    "\u0301",
    "\u212b",
    "\u0338",
    "🙂",
    "<|a\u2581b|>",
    "<e>",
    "\x1c",
]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


@pytest.mark.parametrize("kind", KINDS)
def test_bound_never_exceeds_the_number_of_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    bounds = TokenBounds.read(Wrapper(tokenizer))
    assert bounds is not None

    @given(TEXTS)
    def holds(text: str) -> None:
        assert bounds.of(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_bound_is_exact_for_the_longest_tokens(kind: str) -> None:
    bounds = TokenBounds.read(Wrapper(KINDS[kind]()))
    assert bounds is not None
    assert bounds.of("g" * 3000) == 1000
    assert bounds.of("") == 0


def dropping_whitespace() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def fusing_unknown_letters() -> Tokenizer:
    return Tokenizer(bpe(["<unk>", *"theinga"], unk_token="<unk>", fuse_unk=True))  # noqa: S106 - text


def without_accents() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.StripAccents()
    return tokenizer


def removing_spaces() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "make", [dropping_whitespace, fusing_unknown_letters, without_accents, removing_spaces, None]
)
def test_tokenizer_that_drops_text_has_no_bound(
    make: Callable[[], Tokenizer] | None,
) -> None:
    wrapper = object() if make is None else Wrapper(make())
    assert TokenBounds.read(wrapper) is None
