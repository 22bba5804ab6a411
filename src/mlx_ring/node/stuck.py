"""Who is stuck: a rank that owes an answer past its deadline. Pure."""

from __future__ import annotations

from mlx_ring.engine.stats import Unanswered

LOOK_S = 1.0
"""From one look to the next."""


class StuckWatch:
    """Looks at who is owed an answer, now and then.

    Somebody is stuck who is late at two looks in a row. A head that was stopped for a while itself finds everybody late
    at the first; by the second it has read the answers that had come meanwhile.
    """

    def __init__(self) -> None:
        self._late: tuple[object, int] | None = None

    def look(self, owed: Unanswered | None) -> Unanswered | None:
        """Who is stuck, where somebody is."""
        before, self._late = self._late, None
        if owed is None or not owed.is_late:
            return None
        self._late = (owed.rank, owed.step)
        return owed if self._late == before else None
