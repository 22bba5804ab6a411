"""The sequence that a request becomes in the scheduler, and the checks of the request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import ContextExceeded, RequestError, RingError
from mlx_ring.core.generation import GenerateRequest, WayBack, context_exceeded
from mlx_ring.core.types import FinishReason, TokenLogprob
from mlx_ring.engine.prefix_cache import (
    LEAST_TOKENS,
    OFFERED_TOKENS,
    TOKEN_BYTES,
    Extent,
    Found,
    shared_length,
    token_bytes,
)
from mlx_ring.engine.prompt_lookup import PromptLookup

_MOST_REPLAYS = 2
_PROGRESS_TOKENS = 32
"""Tokens after a failed step that are progress: the next failure has another cause."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a model."""

    context_length: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    eos: frozenset[int]
    model: str = ""
    """Digest of the model as it was loaded; empty if it is unknown."""

    def within(self, tokens: int | None) -> Limits:
        """Return these limits with a context of at most `tokens`, if a number is given."""
        is_less = tokens is not None and tokens < self.context_length
        return replace(self, context_length=tokens) if is_less else self


@dataclass(slots=True, eq=False)
class Sequence:
    """State of a request: its tokens, and how many of them are computed. Only the scheduler and `Grammars` change it."""

    id: int
    request: GenerateRequest
    max_length: int
    """Most tokens of prompt and answer."""
    ends: frozenset[int]
    """Tokens that end the answer."""
    submitted_at: float
    """Time of submission. All times are in seconds of the engine's clock."""
    tokens: list[int]
    """Tokens of the prompt and those sampled since; all are final."""
    grammar_id: int = 0
    """Id of its grammar on the ranks; 0 if it has none."""
    awaits_grammar: bool = False
    """True until all sampling ranks have compiled its grammar."""
    awaits_kv: int = 0
    """Id of the fetch of its KV from the ranks' disks, until all of them have answered."""
    owner: str = ""
    """Digest of its client's API key, whose prompts alone restore its KV from disks; empty: it has none."""
    traceparent: str = ""
    """Trace context of its span; empty if it is not traced."""
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list[TokenLogprob | None])
    """Log-probability of each prompt token, if requested; the first token has none."""
    hidden_sum: NDArray[np.float64] | None = None
    """Sum of the hidden states of the pooled tokens so far, (hidden,)."""
    fill_to: int = 0
    """Tokens to prefill: the prompt, and after a preemption also the tokens sampled before it."""
    scheduled: int = 0
    """KV length after the last step that was sent."""
    reached: int = 0
    """Largest number of tokens that the KV ever held: a sliding window does not move back."""
    reused: int = 0
    """KV length that the prefix cache supplied this time."""
    kept: int = 0
    """KV length that the stages from `kept_from` on have kept since a loss. Only the others compute up to there."""
    kept_from: int = 0
    taken: int = 0
    """Tokens of cached KV that this sequence took over."""
    unanswered: int = 0
    """Number of rows in flight that sample a token."""
    verifying: bool = False
    """True while a row with a draft is in flight: until its answer the KV length is unknown."""
    longest_chunk: int | None = None
    """Most tokens of it in a step, if answers elsewhere on the same machines must not wait long; None: no limit."""
    cut_at: int = 0
    """Length at which a chunk must end, so that a snapshot of the KV can be kept; 0 if none."""
    save_at: tuple[int, ...] = ()
    """Lengths at which a chunk must end, so that KV of layers that forget can be saved on disks."""
    saved_to: int = 0
    """Last end of a block at which such KV was saved while the answer grows."""
    offer_at: int = OFFERED_TOKENS
    """Length at which its tokens are offered next, which other sequences may reuse while it runs."""
    fill_bytes: bytes = b""
    """Last result of `text`."""
    generation: int = 0
    """Number that grows with each preemption; answers to rows of earlier generations are ignored."""
    replays: int = 0
    """Number of preemptions because of failed steps, without progress between them."""
    failed_at: int = 0
    """Number of known tokens at the last of them."""
    is_resumed: bool = False
    """True if another engine began the request; its known tokens are then prefilled again."""
    alone_until: int = 0
    """Length up to which it runs without others, because it may be the cause of a loss; 0: it runs with others."""
    redraws: bool = False
    """True until the last known token was drawn again, to compare it."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at first admission."""
    found: tuple[int, int, Found] | None = None
    """Last lookup in the prefix cache, with the cache's version and the number of tokens at that time."""
    back: WayBack | None = None
    """Its way back to its next token, after a loss or if disks have KV of it, until it has that token."""
    reads_s: float = 0.0
    """Predicted seconds to compute what is left to prefill, without what others compute before; 0: unknown."""
    lookup: PromptLookup = field(default_factory=PromptLookup)
    admitted_at: float = 0.0
    """Time of its last admission."""
    opened_at: float | None = None
    """Time of its first admission."""
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def text(self) -> bytes:
        """Tokens to prefill, as `token_bytes` returns them. Two texts are compared much faster so than as lists."""
        if len(self.fill_bytes) != TOKEN_BYTES * self.fill_to:
            self.fill_bytes = token_bytes(self.tokens[: self.fill_to])
        return self.fill_bytes

    def shared_with(self, other: Sequence) -> int:
        """Return the number of first tokens that another sequence has too, and could reuse: it computes one at least."""
        one, least = self.text, TOKEN_BYTES * LEAST_TOKENS
        if one[:least] != other.text[:least]:
            return 0
        return min(shared_length(one, other.text) // TOKEN_BYTES, other.fill_to - 1)

    @property
    def snapshot_lengths(self) -> tuple[int, int]:
        """Lengths of its prompt at which its KV may be kept for others."""
        return self.cut_at, self.fill_to

    def shared_by_one_of(self, others: Iterable[Sequence]) -> int:
        """Return the most first tokens that one of some other sequences could reuse."""
        able = (other for other in others if other is not self and not other.request.computes_all)
        return 0 if self.request.computes_all else max(map(self.shared_with, able), default=0)

    @property
    def length(self) -> int:
        """Number of known tokens."""
        return len(self.tokens)

    @property
    def is_ready(self) -> bool:
        """True once it may be admitted."""
        return not self.awaits_grammar and not self.awaits_kv

    @property
    def lacks_grammar(self) -> bool:
        """True until the ranks were asked to compile its grammar."""
        return self.awaits_grammar and not self.grammar_id

    @property
    def runs_alone(self) -> bool:
        return self.length < self.alone_until

    @property
    def has_progress(self) -> bool:
        """True once it has a token of its own, and after a loss the last one was drawn again."""
        return self.is_prefilled and not self.redraws and self.first_token_at is not None

    @property
    def output(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[self.prompt_length :]

    @property
    def least_answer(self) -> int:
        """Number of tokens before which the answer does not end, unless its grammar leaves nothing else."""
        sampling = self.request.sampling
        goes_on = sampling.ignore_eos and sampling.grammar is not None
        return self.max_length if goes_on else min(sampling.min_tokens, self.max_length)

    @property
    def is_prefilled(self) -> bool:
        """True once every token to prefill is in a step that was sent."""
        return self.scheduled >= self.fill_to

    @property
    def is_catching_up(self) -> bool:
        """True while only the stages before `kept_from` compute its tokens."""
        return self.scheduled < self.kept

    @property
    def may_be_continued(self) -> bool:
        """True if prompts can continue its text, and may reuse its KV."""
        return not self.request.computes_all and self.request.pooling is None

    @property
    def wants_tokens(self) -> bool:
        """False if only results for the prompt were requested."""
        return self.max_length > self.prompt_length

    @property
    def computed(self) -> int:
        """Number of known tokens in the KV, once all sent steps are complete."""
        return min(self.scheduled, self.length)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for which the tokens alone end the answer. Stop strings are found in the text."""
        if self.length > self.prompt_length and self.tokens[-1] in self.ends:
            return "stop"
        if self.length >= self.max_length:
            return "length"
        return None

    def add_hidden(self, hidden_sum: NDArray[np.float32]) -> None:
        """Add a chunk's part of the pooled hidden states."""
        more = hidden_sum.astype(np.float64)
        self.hidden_sum = more if self.hidden_sum is None else self.hidden_sum + more

    @property
    def pooled(self) -> tuple[float, ...] | None:
        """The prompt's vector, if requested, once all of it is computed."""
        if self.hidden_sum is None:
            return None
        pooled_tokens = self.prompt_length if self.request.pooling == "mean" else 1
        return tuple((self.hidden_sum / pooled_tokens).tolist())

    def can_step(self, steps_ahead: int) -> bool:
        """Return True if a decode row can be sent, which would sample a token of the answer."""
        return self.unanswered < steps_ahead and not self.verifying and self.scheduled + 1 < self.max_length

    def chunk_end(self, most: int) -> int:
        """Return the KV length after a chunk of at most `most` tokens; a chunk ends where a snapshot is kept or saved."""
        most = most if self.longest_chunk is None else min(most, self.longest_chunk)
        end = min(self.scheduled + most, self.kept if self.is_catching_up else self.fill_to)
        return min((cut for cut in (self.cut_at, *self.save_at) if self.scheduled < cut < end), default=end)

    def admit(self, now: float) -> None:
        """Record an admission."""
        self.admitted_at = now
        self.opened_at = now if self.opened_at is None else self.opened_at

    def feed(self, tokens: int) -> None:
        """Count tokens that are sent with a step."""
        self.scheduled += tokens
        self.reached = max(self.reached, self.scheduled)

    def commit(self, sampled: Iterable[TokenLogprob], now: float) -> tuple[TokenLogprob, ...]:
        """Append sampled tokens up to the end of the answer, and return those appended."""
        taken: list[TokenLogprob] = []
        for token in sampled:
            if self.finish_reason is not None:
                break
            self.tokens.append(token.token)
            taken.append(token)
        if taken:
            self.last_token_at = now
            self.first_token_at = now if self.first_token_at is None else self.first_token_at
        return tuple(taken)

    def record_failure(self) -> bool:
        """Count a failed step; return False if it failed too often without progress."""
        if self.length >= self.failed_at + _PROGRESS_TOKENS:
            self.replays = 0
        self.replays, self.failed_at = self.replays + 1, self.length
        return self.replays <= _MOST_REPLAYS

    def move(self) -> None:
        """Continue a sequence of an engine that was not lost: nothing is drawn again, and others need not wait for it."""
        self.is_resumed = self.redraws = False
        self.fill_to = self.length

    def preempt(self) -> None:
        """Discard what was computed: all known tokens are prefilled again, and the answer then continues."""
        self.generation += 1
        self.scheduled = self.reached = self.reused = self.taken = self.kept = 0
        self.unanswered = self.cut_at = self.saved_to = 0
        self.offer_at = OFFERED_TOKENS
        self.save_at = ()
        self.verifying = self.redraws = False
        self.fill_to = self.length
        self.hidden_sum = None
        if self.length == self.prompt_length and self.request.prompt_logprobs is not None:
            self.prompt_logprobs = [None]


class Extents(Mapping[int, Extent]):
    """KV extents of running sequences, except `besides`. A look-up needs few of them, so none is kept."""

    def __init__(self, running: Mapping[int, Sequence], *, besides: int | None = None) -> None:
        self._running = running
        self._besides = besides

    def __getitem__(self, sequence: int) -> Extent:
        if sequence == self._besides:
            raise KeyError(sequence)
        found = self._running[sequence]
        return Extent(found.scheduled, found.reached)

    def __iter__(self) -> Iterator[int]:
        return (sequence for sequence in self._running if sequence != self._besides)

    def __len__(self) -> int:
        return len(self._running) - (self._besides in self._running)


@dataclass(frozen=True, slots=True)
class Advance:
    """Effect of an answer on one sequence: new tokens, or its end with an error."""

    sequence: Sequence
    tokens: tuple[TokenLogprob, ...] = ()
    error: RingError | None = None


def make_sequence(sequence_id: int, request: GenerateRequest, limits: Limits, now: float) -> Sequence:
    """Check a request against the model and make its sequence.

    Raises:
        RequestError: a value that no worker could take.
        ContextExceeded: no room for a prompt of that length and one token.
    """
    _check_length(request, limits)
    _check_tokens(request, limits.vocab_size)
    _check_counts(request)
    sampling = request.sampling
    room = limits.context_length - len(request.prompt_tokens)
    answer = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    # A complete grammar ends the answer, whatever was requested.
    goes_on = sampling.ignore_eos and sampling.grammar is None
    model_ends = frozenset[int]() if goes_on else limits.eos
    sequence = Sequence(
        id=sequence_id,
        request=request,
        max_length=len(request.prompt_tokens) + answer,
        ends=model_ends | frozenset(sampling.stop_token_ids),
        submitted_at=now,
        tokens=list(request.prompt_tokens),
        fill_to=len(request.prompt_tokens),
        awaits_grammar=sampling.grammar is not None,
        prompt_logprobs=[] if request.prompt_logprobs is None else [None],
    )
    if request.answered:
        _add_answered(sequence, request.answered)
        sequence.is_resumed = True
        if sequence.length > sequence.max_length:
            raise ContextExceeded(
                f"The answer cannot be continued: prompt and answer have {sequence.length} tokens, and the model's "
                f"context is only {limits.context_length} tokens now.",
                prompt_tokens=sequence.length,
                context_tokens=limits.context_length,
            )
    return sequence


def continue_sequence(before: Sequence, sequence_id: int, limits: Limits) -> Sequence:
    """Make the sequence with which another engine continues a request.

    The known tokens are prefilled up to the last one, which is then drawn again and compared. Nothing else of the
    earlier sequence holds for another engine, neither grammar ids nor lookups in its cache. Of its KV, some stages
    may keep a part.

    Args:
        before: the request's sequence in an engine that was lost, or in none so far.
        sequence_id: id in the new engine.
        limits: limits of the new engine.

    Raises:
        ContextExceeded: the known tokens do not fit the new engine.
    """
    request = before.request
    sequence = make_sequence(sequence_id, request, limits, before.submitted_at)
    sequence.is_resumed = before.opened_at is not None
    if before.length > sequence.max_length:
        raise ContextExceeded(
            f"The answer cannot be continued: prompt and answer have {before.length} tokens, and the model's context "
            f"is only {limits.context_length} tokens since a machine was lost.",
            prompt_tokens=before.length,
            context_tokens=limits.context_length,
        )
    sequence.traceparent, sequence.back, sequence.owner = before.traceparent, before.back, before.owner
    sequence.cached_tokens = before.cached_tokens
    sequence.opened_at = before.opened_at
    sequence.first_token_at, sequence.last_token_at = before.first_token_at, before.last_token_at
    if before.length > before.prompt_length:
        _add_answered(sequence, before.output)
        sequence.prompt_logprobs = list(before.prompt_logprobs)
    return sequence


def _add_answered(sequence: Sequence, answered: Iterable[int]) -> None:
    """Add delivered tokens to a new sequence. They are prefilled up to the last one, which is drawn again and compared."""
    sequence.tokens = [*sequence.request.prompt_tokens, *answered]
    sequence.fill_to = sequence.length - 1
    sequence.redraws = True


def _check_length(request: GenerateRequest, limits: Limits) -> None:
    prompt_tokens = len(request.prompt_tokens)
    if not prompt_tokens:
        raise RequestError("The prompt is empty; give it at least one token.", param="prompt")
    least_answer = 0 if request.sampling.max_tokens == 0 else 1
    if prompt_tokens + least_answer > limits.context_length:
        raise context_exceeded(prompt_tokens, limits.context_length)


def _check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    sampling = request.sampling
    given = {
        "prompt": request.prompt_tokens,
        "logit_bias": tuple(token for token, _ in sampling.logit_bias),
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in given.items():
        for token in {min(tokens, default=0), max(tokens, default=0)}:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"Token id {token} in {name} is not in the vocabulary, "
                    f"whose ids are 0 to {vocab_size - 1}.",
                    param=name,
                )


def _check_counts(request: GenerateRequest) -> None:
    sampling = request.sampling
    given = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "top_k": sampling.top_k,
        "top_logprobs": sampling.top_logprobs,
        "prompt_logprobs": request.prompt_logprobs,
    }
    for name, count in given.items():
        if count is not None and count < 0:
            raise RequestError(f"{name} is {count}; it must be 0 or more.", param=name)
