"""How much room banks make, and how soon."""

from __future__ import annotations

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

    step_bytes: int = STEP_BYTES
    is_scarce: bool = False
    """Whether memory is nearly all in use: then banks hold no more than they need, though they copy more often."""

    def capacity(self, present: int, need: int) -> int:
        """Tokens in a slot that has `present` and needs more: by blocks, and by a quarter where a block is less."""
        if present and not self.is_scarce:
            need = max(need, present + max(BLOCK, present // 4))
        return blocks(need)

    def slots(self, present: int, need: int) -> int:
        """Slots of a bank that has `present` and needs more."""
        return need if self.is_scarce else max(need, present * 3 // 2)

    def slots_to_keep(self, present: int, used: int) -> int:
        """Slots of a bank that uses fewer than it has."""
        return used if self.is_scarce or used <= present // 2 else present

    def has_far_too_much(self, capacity: int, longest: int) -> bool:
        """Whether slots are so much longer than any row that it pays to copy them."""
        if self.is_scarce:
            return capacity > blocks(longest + GROWS_AHEAD)
        return capacity > 4 * (longest + BLOCK)
