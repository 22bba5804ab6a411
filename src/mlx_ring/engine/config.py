"""What the person who serves decides about scheduling, and what the ranks say of their KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How steps are made."""

    max_num_seqs: int = 16
    """Sequences that are computed at the same time; more wait."""
    max_waiting: int = 256
    """Requests that wait for a place; more are refused."""
    prefill_chunk: int = 512
    """Most tokens of one prompt in one step."""
    max_itl_ratio: float = 2.5
    """How many times longer a running sequence's next token may take while prompts are prefilled."""
    steps_ahead: int = 2
    """Decode steps of one group that are under way at once: 1 waits for every result."""
    prefix_cache: bool = True
    """Whether KV is kept after a sequence's end, and reused."""
    draft_tokens: int = 8
    """Most tokens that prompt look-up proposes in one step; 0: no speculation."""
    step_deadline_s: float = 0.0
    """The least that a rank may take for a step before it counts as stuck; 0: it never does."""
    request_timeout_s: float | None = None
    """For one request, from its arrival."""


@dataclass(frozen=True, slots=True)
class RankKv:
    """One rank's KV: its budget, what sequences take of it, and where they can be cut or forked. Bytes and tokens."""

    limit_bytes: int
    bytes_per_token: int
    """In layers that see every token."""
    bytes_per_sequence: int = 0
    """Besides, at most: sliding windows, recurrent states."""
    recurrent: bool = False
    """Forks only where the source stands, and cannot be cut."""
    slack: int = 0
    """Sliding layers: so many tokens can be dropped at any length; 0: no layer slides."""
    exact_length: int = 0
    """Sliding layers: up to this length a sequence can be cut and forked anywhere."""
