"""Models that load in a moment: random weights, a token for each byte, a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.worker.random_models import QWEN3, write_random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)
_LARGE = {
    **QWEN3,
    "hidden_size": 512,
    "num_hidden_layers": 18,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 258,
}


def write_tiny_model(folder: Path, vocabulary: int = 320, kv_heads: int = 2) -> Path:
    """Write a model of five layers and 320 token ids, of which 258 have a text. Its answers are noise."""
    write_random_model(folder, QWEN3 | {"vocab_size": vocabulary, "num_key_value_heads": kv_heads})
    return write_tokenizer(folder, sorted(pre_tokenizers.ByteLevel.alphabet()))


def write_large_model(folder: Path) -> Path:
    """Write a model of 18 layers of 15.7 MB, large enough for placement to matter. Each of its 258 token ids has a text."""
    write_random_model(folder, _LARGE, spread=0.04, norm=1.0)
    return write_tokenizer(folder, sorted(pre_tokenizers.ByteLevel.alphabet()))


def write_tokenizer(folder: Path, characters: Sequence[str]) -> Path:
    """Write a tokenizer with a token for each of these bytes, as characters of `ByteLevel`, and two special ones before them."""
    vocabulary = {"<|pad|>": 0, "<|end|>": 1}
    vocabulary |= {character: 2 + at for at, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # ruff takes the names of special tokens for passwords.
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")  # noqa: S106 - no password
    wrapped.chat_template = _TEMPLATE
    wrapped.save_pretrained(folder)
    return folder
