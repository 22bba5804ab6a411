"""Predicted throughput of a pipeline, from the measured times of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine.step_simulation import Simulation, Times
from tests.planner.closed_loop import ClosedLoop, Load
from tests.planner.costs import MeasuredCost, StageCosts

_WARM_ROUNDS, _ROUNDS = 5, 40
_WARM_ANSWERS, _ANSWERS = 1, 6


def predict_throughput(
    stages: Sequence[MeasuredCost],
    groups: Sequence[int],
    *,
    load: Load | None = None,
    steps_ahead: int = 2,
    hop_us: float = 0.0,
    head_us: float = 0.0,
    head_event_us: float = 0.0,
) -> float:
    """Output tokens a second that clients get who ask again as soon as they are answered.

    Args:
        stages: what each stage computes for a step of a full group, and for a chunk of a prompt.
        groups: rows of each decode group.
        load: what every client asks for; answers that never end unless given.
        steps_ahead: decode steps of one group that are in flight at once.
        hop_us: between stages, and from the last to the first.
        head_us: microseconds between head and stages, in one direction.
        head_event_us: what the head does for one answer of one stage.
    """
    load = Load() if load is None else load
    costs = StageCosts(stages)
    times = Times(costs, hop_us / 1e6, head_us / 1e6, head_event_us / 1e6)
    # No longer than this from a token to the next, or from a question to its answer's end.
    step_us = len(stages) * (hop_us + head_event_us) + 2 * head_us
    token_us = len(groups) * (step_us + sum(stage.decode_us for stage in stages))
    warm, rounds, round_us = _WARM_ROUNDS, _ROUNDS, token_us
    if load.answer_tokens is not None:
        chunk_us = step_us + sum(stage.prefill_us for stage in stages) + token_us
        warm, rounds = _WARM_ANSWERS, _ANSWERS
        round_us = load.answer_tokens * token_us + sum(groups) * load.prompt_chunks * chunk_us
    begin_s, end_s = warm * round_us / 1e6, (warm + rounds) * round_us / 1e6
    simulation = Simulation(
        ClosedLoop(len(stages), groups, steps_ahead=steps_ahead, load=load), times, len(stages)
    )
    return simulation.run([(0.0, _begin)], until_s=end_s).tokens_per_s(begin_s, end_s)


def _begin(_now: float) -> None:
    """Do nothing: all clients are present from the start."""
