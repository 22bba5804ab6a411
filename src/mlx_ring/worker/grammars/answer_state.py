"""State of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_ring.core.errors import RequestError, RingError, ServingError
from mlx_ring.models.grammars import in_one_line

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Compiled:
    """Grammar compiled for a model's tokens."""

    matcher: LLMatcher
    """Matcher at its start. Copies share what it learns."""
    ends: tuple[int, ...]
    """Tokens with which llguidance can end an answer."""
    is_end: Callable[[int], bool]
    """Function that reports whether a token that ends answers is no text."""


def grammar_error(error: BaseException) -> RingError:
    """Convert the compiler's exception to the error for the request."""
    if isinstance(error, RingError):
        return error
    return ServingError(
        f"The answer's grammar cannot be created: {type(error).__name__}: {in_one_line(str(error))}"
    )


class AnswerGrammar:
    """Progress of an answer. It can be moved to any position in its tokens, forwards and back."""

    def __init__(
        self,
        compiled: Future[Compiled],
        prompt_length: int,
        stops: frozenset[int],
    ) -> None:
        """Start an answer; `stops` are the tokens that end it."""
        self._compiled = compiled
        self._prompt_length = prompt_length
        self._stops = stops
        self._matcher: LLMatcher | None = None
        self.ends: tuple[int, ...] = ()
        """Tokens that may only come where the grammar is satisfied: those of `stops` that are no text."""
        self.tokenizer_ends: tuple[int, ...] = ()
        """Tokens that llguidance uses for these ends."""
        self._fed: list[int] = []
        """Tokens of the answer that the matcher has taken."""

    @property
    def matcher(self) -> LLMatcher:
        """Matcher of this answer alone.

        Raises:
            RequestError: the grammar cannot be enforced.
            ServingError: the compiler failed.
        """
        if self._matcher is None:
            compiled = self._taken()
            self._matcher = compiled.matcher.deep_copy()
            self.ends = tuple(sorted(filter(compiled.is_end, self._stops)))
            self.tokenizer_ends = compiled.ends
        return self._matcher

    def _taken(self) -> Compiled:
        """Return the compiled grammar. An error of the compiler fails this answer, and not its step."""
        try:
            return self._compiled.result()
        except (RingError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise grammar_error(error) from error

    def go_to(self, tokens: Sequence[int], position: int) -> bool:
        """Move the matcher to `position` of the sequence's tokens.

        Returns:
            True if a token there belongs to the answer, which ends at its first stop token.

        Raises:
            RequestError: the grammar cannot be enforced.
            ServingError: the grammar does not allow a token before it.
        """
        matcher = self.matcher
        self.check()
        if not self._is_before(tokens, position):
            self.go_back(self._shared(tokens, position))
        fresh = list(tokens[self._prompt_length + len(self._fed) : position])
        over = next((at for at, token in enumerate(fresh) if token in self._stops), len(fresh))
        taken = matcher.try_consume_tokens(fresh[:over]) if over else 0
        self._fed += fresh[:taken]
        if taken < over:
            self.check()
            raise ServingError(
                f"Token {fresh[taken]} of the answer, number {len(self._fed) + 1}, violates its grammar."
            )
        return over == len(fresh)

    def _is_before(self, tokens: Sequence[int], position: int) -> bool:
        """Return True if the matcher stands before `position`.

        It compares one token, because those before are settled.
        """
        count = len(self._fed)
        return not count or (
            self._prompt_length + count <= position
            and tokens[self._prompt_length + count - 1] == self._fed[-1]
        )

    def _shared(self, tokens: Sequence[int], position: int) -> int:
        """Return how many of the tokens that the matcher has taken are still the answer's."""
        answer = tokens[self._prompt_length : position]
        pairs = zip(self._fed, answer, strict=False)
        most = min(len(self._fed), len(answer))
        return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), most)

    @property
    def place(self) -> int:
        """Number of the answer's tokens before the matcher's position."""
        return len(self._fed)

    def go_back(self, place: int) -> None:
        """Roll back to the first `place` tokens of the answer."""
        if place < len(self._fed):
            self.matcher.rollback(len(self._fed) - place)
            del self._fed[place:]

    def try_token(self, token: int) -> bool:
        """Advance by a draft token, if the grammar allows it and it does not end the answer."""
        if token in self._stops or self.matcher.try_consume_tokens([token]) != 1:
            return False
        self._fed.append(token)
        return True

    def check(self) -> None:
        """Check the matcher. Raises `RequestError` if it has reached its limits."""
        if self.matcher.is_error():
            raise RequestError(
                f"The schema can no longer be enforced: {in_one_line(self.matcher.get_error())}"
            )


@dataclass(frozen=True, slots=True)
class Drawing:
    """Row that draws under a grammar."""

    sequence: int
    grammar: AnswerGrammar
    tokens: Sequence[int]
    """Tokens of the sequence, those of this row among them."""
    positions: Sequence[int]
    """Indices of the tokens that are drawn, ascending."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens that one position may draw."""

    tokens: NDArray[np.bool_]
    """(vocabulary,) true for allowed tokens."""
    must_end: bool
    """True if the answer can only end here."""


@dataclass(slots=True)
class StepMasks:
    """Masks for all rows of a step."""

    allowed: dict[tuple[int, int], Allowed] = field(default_factory=dict[tuple[int, int], Allowed])
    """Allowed tokens by sequence and position, for all that draw under a grammar."""
    failed: dict[int, RingError] = field(default_factory=dict[int, RingError])
    """Errors of grammars that failed, by sequence."""
