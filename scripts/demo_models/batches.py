"""Turn conversations into padded batches of token ids, in which only the answers are learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from corpus import Corpus
from tokenizer import END, PAD, START, render
from transformers import PreTrainedTokenizerFast

CONVERSATIONS_SORTED_TOGETHER = 4096
IGNORED = -100
# With few distinct widths the matrix library can reuse its compiled kernels.
WIDTH_STEP = 8


@dataclass(frozen=True)
class Batch:
    """Token ids and the targets of each position, both (batch, tokens); -100 is not learned."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Masker:
    """Finder of the assistant's own tokens in a rendered conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Look up the tokens before and after an answer."""
        self.start, self.end, self.think = (
            tokenizer.convert_tokens_to_ids(token) for token in (START, END, "<think>")
        )
        self.assistant = tokenizer.encode("assistant", add_special_tokens=False)

    def targets(self, ids: list[int]) -> list[int]:
        """Return the tokens of the answers with their end token, and -100 for all others."""
        masked = [IGNORED] * len(ids)
        head = [self.start, *self.assistant]
        position = 0
        while position < len(ids):
            if ids[position : position + len(head)] != head:
                position += 1
                continue
            begin = position + len(head) + 1
            # The prompt itself opens the reasoning: "<think>" and a new line.
            begin += 2 if ids[begin] == self.think else 0
            stop = ids.index(self.end, begin) + 1
            masked[begin:stop] = ids[begin:stop]
            position = stop
        return masked


def batches(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, tokens_per_batch: int, stream: str, mix: str
) -> Iterator[Batch]:
    """Yield batches without end: conversations of similar length together, in shuffled order."""
    masker = Masker(tokenizer)
    rng = Random(f"batches {stream} {corpus.seed}")
    conversations = corpus.conversations(stream, mix)
    while True:
        texts = [render(tokenizer, one) for one in islice(conversations, CONVERSATIONS_SORTED_TOGETHER)]
        rows = sorted(tokenizer(texts, add_special_tokens=False)["input_ids"], key=len)
        groups = list(_groups(rows, tokens_per_batch))
        rng.shuffle(groups)
        for group in groups:
            yield _pad(group, masker, tokenizer.convert_tokens_to_ids(PAD))


def _groups(rows: list[list[int]], tokens_per_batch: int) -> Iterator[list[list[int]]]:
    group: list[list[int]] = []
    for row in rows:
        if group and (len(group) + 1) * len(row) > tokens_per_batch:
            yield group
            group = []
        group.append(row)
    yield group


def _pad(rows: list[list[int]], masker: Masker, pad: int) -> Batch:
    longest = max(len(row) for row in rows) - 1
    width = -(-longest // WIDTH_STEP) * WIDTH_STEP
    inputs = torch.full((len(rows), width), pad)
    targets = torch.full((len(rows), width), IGNORED)
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
        targets[index, : len(row) - 1] = torch.tensor(masker.targets(row)[1:])
    return Batch(inputs, targets)
