"""Names of the strategies that split a model's layers among machines. Values only.

`planner/strategies.py` has the method of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["auto", "uniform", "memory", "compute", "balanced", "custom", "tensor", "hybrid"]


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """Description of one strategy."""

    help: str
    """One line for the help of commands and the documentation."""
    former_name: str = ""
    """Name that an earlier prototype used for it."""
    is_tensor_parallel: bool = False
    """True if machines always compute layers together."""


STRATEGIES: Mapping[Strategy, StrategyInfo] = {
    "auto": StrategyInfo("the fastest plan, which may leave machines out"),
    "uniform": StrategyInfo("the same number of layers on every machine"),
    "memory": StrategyInfo("in proportion to usable memory", "memory_proportional"),
    "compute": StrategyInfo(
        "in proportion to the speed at which each machine reads weights", "compute_proportional"
    ),
    "balanced": StrategyInfo("the split whose slowest stage is fastest, in the given order"),
    "custom": StrategyInfo("in the given proportions"),
    "tensor": StrategyInfo("a share of each layer on every machine", is_tensor_parallel=True),
    "hybrid": StrategyInfo("a pipeline with stages of several machines", is_tensor_parallel=True),
}


def current_strategy(text: str) -> str:
    """Return the current name of a strategy; `memory_proportional` is now `memory`."""
    name = text.strip().lower()
    return next((key for key, info in STRATEGIES.items() if name and info.former_name == name), text)


def strategy_help() -> str:
    """Return the strategies with their help, as one sentence."""
    return "; ".join(f"{name}: {info.help}" for name, info in STRATEGIES.items())
