"""A model that loads in a moment: random weights, a token for each byte, a chat template."""

from __future__ import annotations

from pathlib import Path

from tests.worker.random_models import QWEN3, write_random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)


def write_tiny_model(folder: Path) -> Path:
    """Five layers, 320 token ids of which 258 mean something. What it says is noise."""
    write_random_model(folder, QWEN3)
    vocabulary = {"<|pad|>": 0, "<|end|>": 1}
    vocabulary |= {
        character: 2 + at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # ruff takes the names of special tokens for passwords.
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")  # noqa: S106
    wrapped.chat_template = _TEMPLATE
    wrapped.save_pretrained(folder)
    return folder
