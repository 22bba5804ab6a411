"""Small real tokenizers, made in the test, one for each way of decoding."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from mlx_ring.engine.streams import Tokenizer

END = "<|end|>"
TOOL = "<tool>"


def byte_level() -> Tokenizer:
    """Make a tokenizer like that of GPT, Llama 3 and Qwen.

    Every byte is a token, and some merges cut a character in two.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in (" the", "hello", "é", "ß", "你", "👋"):
        for left, right in _merges(_as_letters(word)):
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer)


def byte_fallback() -> Tokenizer:
    """Make a tokenizer like that of SentencePiece models.

    It has a mark for the space, drops the first space, and writes rare characters as bytes.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁a", "▁the", "a", "b", "hello", "é", "▁hello"):
        vocabulary[word] = len(vocabulary)
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _finish(tokenizer)


def _finish(tokenizer: FastTokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(TOOL, special=False)])
    return cast("Any", PreTrainedTokenizerFast)(tokenizer_object=tokenizer, eos_token=END)


def _as_letters(text: str) -> list[str]:
    byte_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list("".join(piece for piece, _ in byte_letters.pre_tokenize_str(text)))


def _merges(letters: list[str]) -> list[tuple[str, str]]:
    return [("".join(letters[:index]), letters[index]) for index in range(1, len(letters))]
