"""How many layers each machine gets by the simple strategies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mlx_ring.core.errors import PlanError


def proportional_counts(layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of layers in proportion to `shares`, one at least each: largest remainders first.

    Raises:
        PlanError: a share is not positive, or there are more shares than layers.
    """
    for share in shares:
        if not 0 < share < float("inf"):
            raise PlanError(f"A share of {share} was given; every share must be more than 0.")
    if not 1 <= len(shares) <= layers:
        raise PlanError(
            f"{len(shares)} shares were given and the model has {layers} layers: each machine needs a layer."
        )
    exact = [Fraction(share) for share in shares]
    total = sum(exact)
    wanted = [share * layers / total for share in exact]
    counts = [max(1, int(count)) for count in wanted]
    while sum(counts) != layers:
        missing = 1 if sum(counts) < layers else -1
        able = [place for place, count in enumerate(counts) if count + missing >= 1]
        # Of two that lack alike, the earlier gets the layer.
        place = max(able, key=lambda place: (missing * (wanted[place] - counts[place]), -missing * place))
        counts[place] += missing
    return tuple(counts)


def given_counts(layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Exact numbers of layers, as somebody gave them.

    Raises:
        PlanError: they are not the model's.
    """
    if sum(counts) != layers or min(counts, default=0) < 1:
        raise PlanError(
            f"The layers given are {', '.join(map(str, counts))}, which is {sum(counts)} of {layers}: "
            "each machine needs one or more, and together they must be all."
        )
    return tuple(counts)
