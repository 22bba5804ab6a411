"""What is asked of a plan. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_ring.planner.plan import Aim, Strategy
from mlx_ring.planner.stage_costs import Demand


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a plan."""

    demand: Demand
    strategy: Strategy = "auto"
    aim: Aim = "latency"
    proportions: tuple[float, ...] = ()
    """With `custom`: of the layers, by machine."""
    counts: tuple[int, ...] = ()
    """With `custom`: layers by machine, instead of proportions."""
    shares_layers: bool = True
    """Whether several machines may compute layers together, where the interfaces between them are trusted."""
    prompt_tokens: int = 1024
    """Of the prompt for which the time to the first token is told."""
