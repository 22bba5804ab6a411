"""How much room banks make ahead of need, and how soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 256
GROWS_AHEAD = 64
"""With so many tokens left, a bank begins to grow."""
STEP_BYTES = 32 << 20
"""What a step may write to bring arrays to another size ..."""
STEPS = 32
"""... or more, where so many steps would not do."""


def blocks(tokens: int) -> int:
    """The tokens of as many whole blocks as hold `tokens`."""
    return -(-tokens // BLOCK) * BLOCK


@dataclass(slots=True)
class Growth:
    """Of one store's banks."""

    held: Callable[[], int]
    """Bytes of all banks, once they have the sizes that are aimed at."""
    step_bytes: int = STEP_BYTES
    limit_bytes: int | None = None
    """What banks may hold; room that nobody needs yet is made within it only."""

    def capacity(self, present: int, need: int, most: int, more: Callable[[int], int]) -> int:
        """Tokens for a slot that has room for `present` and is about to need more than that.

        By a quarter, by a block or two, or by no more than it must: as much as the limit allows.

        Args:
            present: tokens, aimed at already.
            need: tokens, now.
            most: tokens that any row will ever need.
            more: the bytes that a capacity would add.
        """
        ahead = blocks(need + GROWS_AHEAD)
        generous = max(ahead, blocks(present + max(BLOCK, present // 4)) if present else 0)
        for capacity in (min(generous, max(most, need)), min(ahead, max(most, need))):
            if self._allows(more(capacity)):
                return max(present, capacity)
        return max(present, min(blocks(need), max(most, need)))

    def slots(self, present: int, need: int, more: Callable[[int], int]) -> int:
        """Slots of a bank that has `present` and needs more. `more` gives the bytes that a number of them would add."""
        generous = max(need, present * 3 // 2)
        return generous if self._allows(more(generous)) else need

    def _allows(self, more_bytes: int) -> bool:
        return self.limit_bytes is None or self.held() + more_bytes <= self.limit_bytes
