"""Train the tokenizer on the corpus: byte-level BPE, so that every Unicode text has tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from corpus import Conversation, Corpus
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCABULARY = 3072
TRAINING_CONVERSATIONS = 60_000
LONGEST_CONTEXT = 32_768
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (PAD, START, END)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Words with the preceding space, single digits, runs of punctuation, and white space.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The class that every version of transformers supports.
TOKENIZER_CONFIG = {
    "clean_up_tokenization_spaces": False,
    "eos_token": END,
    "model_max_length": LONGEST_CONTEXT,
    "pad_token": PAD,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    """Write a conversation exactly as it is served."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in conversation.messages],
        tools=list(conversation.tools) or None,
        tokenize=False,
    )
    return str(text)


def _bare_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PIECES), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=LONGEST_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return wrapped


def _plain_texts(corpus: Corpus) -> Iterator[str]:
    """Yield the corpus without control tokens, which no merge may learn."""
    renderer = _wrap(_bare_tokenizer())
    control = re.compile("|".join(re.escape(token) for token in (*CONTROL, *MARKS)))
    for conversation in islice(corpus.conversations("tokenizer"), TRAINING_CONVERSATIONS):
        yield from (part for part in control.split(render(renderer, conversation)) if part)


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Learn the merges from the corpus and add the control tokens at the front."""
    tokenizer = _bare_tokenizer()
    added = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    added += [AddedToken(text, special=False, normalized=False) for text in MARKS]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=added,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(corpus), trainer)
    return _wrap(tokenizer)
