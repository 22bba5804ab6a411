"""Decode groups (micro-batches): which sequences step together, so that every stage has a group to work on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_ring.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Sequences that step together."""

    members: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    in_flight: int = 0
    """Decode steps that the last stage has not answered."""
    last_step: int = 0
    """Number of its last decode step."""

    def is_going(self, steps_ahead: int) -> bool:
        """Whether it has a step under way, or could have."""
        return self.in_flight > 0 or any(member.can_step(steps_ahead) for member in self.members.values())


class DecodeGroups:
    """As many groups as stages, whose sizes differ by one at most."""

    def __init__(self, count: int) -> None:
        self._groups = [DecodeGroup() for _ in range(count)]
        self._group_of: dict[int, DecodeGroup] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._group_of

    def __iter__(self) -> Iterator[DecodeGroup]:
        """Groups that have members, the one that has waited longest first."""
        return iter(
            sorted((group for group in self._groups if group.members), key=lambda group: group.last_step)
        )

    def add(self, sequence: Sequence) -> None:
        group = min(self._groups, key=lambda group: len(group.members))
        group.members[sequence.id] = sequence
        self._group_of[sequence.id] = group

    def remove(self, sequence: int) -> None:
        """Let a sequence go, and even out what is left: the youngest of the largest group moves."""
        group = self._group_of.pop(sequence, None)
        if group is None:
            return
        del group.members[sequence]
        largest = max(self._groups, key=lambda group: len(group.members))
        if len(largest.members) > len(group.members) + 1:
            moved = max(largest.members)
            group.members[moved] = largest.members.pop(moved)
            self._group_of[moved] = group
