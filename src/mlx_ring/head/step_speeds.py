"""Measured and predicted times of steps: what the status shows, and the ratios that plans learn from them.

A machine's profile is measured with synthetic layers. The steps of a served model show how far it is off on that machine.
Plans multiply by that ratio. It is always that of the measured times to the profile's own prediction, without any ratio, so
it cannot add up. Decode steps and prompts have one each.

A ratio far from 1 of a machine that had another one says that something slows it down just now. It counts while it lasts,
and is not kept.

Stages compute for a part of the time from token to token. The rest does not grow with a stage's layers, so it is learned as
a time of each step, apart from the ratios.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, Protocol, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlx_ring.api.ops.status import StageTimesStatus, StepStatus
from mlx_ring.cluster.membership import Member
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import state_folder
from mlx_ring.engine.step_times import AlikeSteps, DecodeRound, StageTimes, StepTimes
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.private_files import read_private, write_private
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.profiles import StepRatios
from mlx_ring.planner.step_overheads import Round, StageStep, StepOverheads
from mlx_ring.settings.config import Settings

StepKind = Literal["decode", "prefill"]
log = logging.getLogger(__name__)

_FILE = "step-time-ratios.json"
_LEAST_STEPS: Mapping[StepKind, int] = {"decode": 32, "prefill": 4}
"""Number of measured steps from which their median counts."""
_LEAST_CHUNK, _LEAST_PROMPT = 16, 1024
"""Tokens of a prompt's chunk, and of all chunks together, from which they count: the rest of a cached prompt says little."""
_LEAST, _MOST = 0.5, 2.0
"""Bounds of a ratio that is kept. A machine that is farther off was measured under other conditions."""
_LEAST_NOW, _MOST_NOW = 0.05, 50.0
"""Bounds of a ratio that counts while it lasts."""
_FORGET_S = 1800.0
"""Time for which such a ratio counts without new measurements: a machine without layers has no steps."""
_CHANGE = 0.05
"""Relative change of a ratio that is kept, so that plans do not differ by noise."""
_LEAST_ROUNDS = 32
"""Number of measured rounds from which the rest of their time counts."""
_HALVINGS = 10
"""Halvings that find a ratio to within 0.4 %."""


class _Kept(TypedDict):
    profile: int
    """Checksum of the profile that the ratios refer to."""
    decode: float
    prefill: float


_FILE_FORM = TypeAdapter(dict[str, _Kept])


@dataclass(frozen=True, slots=True)
class _Now:
    """Ratio that counts while it lasts."""

    ratio: float
    """Ratio that plans count. It stays if the measured one hardly changes."""
    measured: float
    at: float
    """Time of the measurement."""


class MeasuredInstance(Protocol):
    """Instance whose steps are measured."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def nodes(self) -> Sequence[Sequence[str]]:
        """Nodes of each stage's ranks."""
        ...

    @property
    def forecast(self) -> Forecast | None:
        """Predictions; None without a profile."""
        ...

    @property
    def times(self) -> StepTimes:
        """Times of the last steps."""
        ...


class StepSpeeds:
    """Ratios of measured to predicted times, by node; kept in the state folder."""

    def __init__(self, folder: Path, *, learns: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the ratios of earlier runs, unless none are to be used; `clock` returns seconds."""
        self._path, self._clock = folder / _FILE, clock
        self._learns = learns
        self._kept = self._read() if learns else {}
        self._now: dict[str, dict[StepKind, _Now]] = {}
        """Ratios outside the bounds, by node. The inner ones are replaced, as plans read them in other threads."""
        self._overheads = StepOverheads(clock, _FORGET_S)
        self._sessions: dict[str, tuple[int, bool]] = {}
        """Session of each node, and whether it yields to its user."""
        self._usual = set[tuple[str, StepKind]]()
        """Nodes and kinds of steps that have had a ratio within the bounds: one far off will pass."""

    def of(self, node: str, profile: MachineProfile, speed_share: float = 1.0) -> StepRatios:
        """Return a node's ratios for this profile; 1 for another one, unless they are far from 1 just now.

        Where its user leaves it only a share of its speed, they are that much larger, or as large as they are just now.
        """
        since = self._clock() - _FORGET_S
        now: Mapping[str, float] = {
            kind: one.ratio for kind, one in self._now.get(node, {}).items() if one.at >= since
        }
        overhead_s, alone_s = self._overheads.of(node), self._overheads.of(node, is_alone=True)
        kept = replace(
            self._kept_of(node, profile),
            overhead_s=overhead_s,
            alone_s=None if alone_s == overhead_s else alone_s,
        )
        if speed_share == 1.0:
            return replace(kept, **now)
        return replace(
            kept,
            decode=max(kept.decode / speed_share, now.get("decode", 0.0)),
            prefill=max(kept.prefill / speed_share, now.get("prefill", 0.0)),
        )

    def _kept_of(self, node: str, profile: MachineProfile) -> StepRatios:
        kept = self._kept.get(node)
        if kept is None or kept["profile"] != _checksum(profile):
            return StepRatios()
        return StepRatios(kept["decode"], kept["prefill"])

    def by_node(self, members: Iterable[Member]) -> dict[str, StepRatios]:
        """Return the ratios of all nodes."""
        return {member.node: self.of(member.node, member.profile) for member in members}

    def learn(self, views: Iterable[MeasuredInstance], members: Iterable[Member]) -> None:
        """Learn from the last steps of all instances, and write what has changed."""
        if not self._learns:
            return
        instances, present = list(views), {member.node: member for member in members}
        for node, member in present.items():
            session = member.session, member.yielding is not None
            if self._sessions.get(node) != session:
                self._sessions[node] = session
                self._now.pop(node, None)
                self._overheads.forget(node)
        workers = _workers(instances)
        yields = {node for node, member in present.items() if member.yielding is not None}
        rounds = {
            view.name: found
            for view in instances
            if yields.isdisjoint(chain.from_iterable(view.nodes))
            and (found := _round(view, workers)) is not None
        }
        if self._overheads.learn(rounds, {view.name for view in instances}):
            log.info(
                "Decode steps take %.1f ms beside computing, which the next plan counts",
                1e3 * self._overheads.of(""),
            )
        limited = [*_under_quotas(instances, workers)]
        for (node, kind), ratio in chain(_ratios(instances, are_last=True), limited):
            self._note_now(node, kind, ratio)
        changed = [
            self._note(node, kind, ratio, present[node].profile)
            for (node, kind), ratio in chain(_ratios(instances, are_last=False), limited)
            # While it yields, its steps say little about the machine.
            if node in present and present[node].yielding is None
        ]
        if any(changed):
            self._write()

    def _note_now(self, node: str, kind: StepKind, ratio: float) -> None:
        """Count a ratio outside the bounds while it lasts. An equal one has no new steps."""
        before: Mapping[StepKind, _Now] = self._now.get(node, {})
        others: dict[StepKind, _Now] = {other: one for other, one in before.items() if other != kind}
        if _LEAST <= ratio <= _MOST:
            self._now[node] = others
        elif kind not in before or before[kind].measured != ratio:
            counted = min(max(ratio, _LEAST_NOW), _MOST_NOW)
            if kind in before and abs(counted / before[kind].ratio - 1) < _CHANGE:
                counted = before[kind].ratio
            self._now[node] = {**others, kind: _Now(counted, ratio, self._clock())}

    def _note(self, node: str, kind: StepKind, ratio: float, profile: MachineProfile) -> bool:
        """Keep a ratio within the bounds; return False if it is about the same as before, or will pass."""
        before, bounded = self._kept_of(node, profile), min(max(ratio, _LEAST), _MOST)
        kept: float = asdict(before)[kind]
        if ratio == bounded:
            self._usual.add((node, kind))
        elif (node, kind) in self._usual or (kept != 1.0 and _LEAST < kept < _MOST):
            return False
        if abs(bounded / kept - 1) < _CHANGE:
            return False
        changes: Mapping[str, float] = {kind: bounded}
        after = replace(before, **changes)
        self._kept[node] = _Kept(profile=_checksum(profile), decode=after.decode, prefill=after.prefill)
        log.info(
            "Steps of %s on %s take %.2f of the predicted time, which the next plan counts",
            kind,
            node,
            bounded,
        )
        return True

    def _read(self) -> dict[str, _Kept]:
        try:
            content = read_private(self._path)
            return {} if content is None else _FILE_FORM.validate_json(content, strict=True)
        except (ConfigError, OSError, ValidationError) as error:
            log.warning(
                "%s is not used, and will be written again: %s", self._path, str(error).splitlines()[0]
            )
            return {}

    def _write(self) -> None:
        try:
            write_private(self._path, json.dumps(self._kept, indent=1).encode())
        except (ConfigError, OSError) as error:
            log.warning("Measured speeds are not kept: %s", error)


@cache
def _shared(folder: Path, *, learns: bool) -> StepSpeeds:
    return StepSpeeds(folder, learns=learns)


def step_speeds(settings: Settings) -> StepSpeeds:
    """Return the ratios of the state folder of these settings, the same object for all plans of this process."""
    return _shared(state_folder(settings.state_dir), learns=settings.learn_speeds == "on")


def _checksum(profile: MachineProfile) -> int:
    measured = profile.model_dump_json(
        include={"version", "mlx", "kernels", "blas", "blas_threads", "rates", "costs"}
    )
    return zlib.crc32(measured.encode())


@dataclass(frozen=True, slots=True)
class _Measured:
    """Alike steps on one machine."""

    ratio: float
    """Measured over predicted time."""
    predicted_s: float
    """Predicted time of one step."""
    steps: int
    tokens: int
    """Tokens of each step."""


def _ratios(
    views: Sequence[MeasuredInstance], *, are_last: bool
) -> Iterator[tuple[tuple[str, StepKind], float]]:
    """Yield node and kind of steps that are enough, with their median ratio; `are_last` as in `_measured`."""
    workers = _workers(views)
    found: dict[tuple[str, StepKind], list[_Measured]] = defaultdict(list)
    for view in views:
        for node, kind, measured in _measured(view, workers, are_last=are_last):
            found[node, kind].append(measured)
    for (node, kind), measured in found.items():
        if _are_enough(kind, measured):
            yield (node, kind), _median(measured)


def _workers(views: Sequence[MeasuredInstance]) -> Counter[str]:
    """Return the number of workers of each node, of all instances together."""
    return Counter(node for view in views for stage in view.nodes for node in stage)


def _round(view: MeasuredInstance, workers: Mapping[str, int]) -> Round | None:
    """Return a measured round; None without enough of them, or where workers or a quota share a machine's speed."""
    measured = view.times.round
    if view.forecast is None or measured is None or measured.rounds < _LEAST_ROUNDS:
        return None
    profile, found = view.forecast.corrected({}), list[StageStep]()
    if len(profile) != len(measured.compute_us):
        return None
    for stage, (compute_us, mean_us) in enumerate(zip(measured.compute_us, measured.mean_us, strict=True)):
        node = profile.node(stage)
        if node.cpu_quota is not None or workers[node.name] > 1:
            return None
        predicted_s = profile.decode_s(stage, measured.tokens, measured.context_tokens)
        if mean_us <= 0 or predicted_s <= 0:
            return None
        found.append(StageStep(node.name, compute_us / 1e6, mean_us / 1e6 / predicted_s))
    hops_s = profile.pipeline.around_s(measured.tokens)
    return Round(tuple(found), measured.batches, measured.rows, measured.round_us / 1e6, hops_s)


def _measured(
    view: MeasuredInstance, workers: Mapping[str, int], *, are_last: bool
) -> Iterator[tuple[str, StepKind, _Measured]]:
    """Yield node, kind and alike steps, for stages of one rank that have their machine's whole speed.

    Args:
        view: the instance.
        workers: number of workers by node, of all instances together.
        are_last: True for the last decode steps, also those with drafts, whose tokens count as rows. False for the last
            ones without drafts, which may be older.
    """
    if view.forecast is None:
        return
    profile = view.forecast.corrected({})
    for times in view.times.stages:
        node = profile.node(times.stage)
        crowded = workers[node.name] > node.workers_at_once
        if len(view.nodes[times.stage]) > 1 or crowded or node.cpu_quota is not None:
            continue
        chunks = [alike for alike in times.chunks if alike.tokens >= _LEAST_CHUNK]
        for kind, alike in (("decode", times.last if are_last else times.decode), ("prefill", chunks)):
            for steps in alike:
                predicted_s = _predicted_s(profile, times.stage, steps, cast("StepKind", kind))
                ratio = steps.compute_us / 1e6 / predicted_s
                yield (
                    node.name,
                    cast("StepKind", kind),
                    _Measured(ratio, predicted_s, steps.steps, steps.tokens),
                )


def _under_quotas(
    views: Sequence[MeasuredInstance], workers: Mapping[str, int]
) -> Iterator[tuple[tuple[str, StepKind], float]]:
    """Yield nodes with a CPU quota, with the ratio of their decode steps: 1 if they are not slower than predicted.

    A step that finds its quota unused is fast, but more layers would not be. Only a mean says how long steps take, because
    some of them wait for the next quota, and others do not.
    """
    for view in views:
        measured = view.times.round
        if view.forecast is None or measured is None or measured.rounds < _LEAST_ROUNDS:
            continue
        profile = view.forecast.corrected({})
        for stage, mean_us in enumerate(measured.mean_us if len(profile) == len(measured.mean_us) else ()):
            node = profile.node(stage)
            if node.cpu_quota is not None and workers[node.name] == len(view.nodes[stage]) == 1:
                yield (node.name, "decode"), _slowness(profile, stage, measured, mean_us / 1e6)


def _slowness(profile: Forecast, stage: int, measured: DecodeRound, mean_s: float) -> float:
    """Return the ratio, 1 or more, with which a stage's decode step is predicted to take as long as measured."""

    def predicted_s(ratio: float) -> float:
        corrected = profile.corrected({profile.node(stage).name: StepRatios(decode=ratio)})
        return corrected.decode_s(stage, measured.tokens, measured.context_tokens)

    low, high = 1.0, _MOST_NOW
    if mean_s <= predicted_s(low):
        return 1.0
    # Times do not grow in proportion, because a longer step waits for more quotas.
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted_s(middle) < mean_s else (low, middle)
    return high


def _are_enough(kind: StepKind, measured: Iterable[_Measured]) -> bool:
    steps, tokens = (
        sum(each) for each in zip(*((one.steps, one.steps * one.tokens) for one in measured), strict=True)
    )
    return steps >= _LEAST_STEPS[kind] and (kind == "decode" or tokens >= _LEAST_PROMPT)


def _median(measured: Iterable[_Measured]) -> float:
    """Return the median of ratios, by the predicted time of their steps."""
    ordered = sorted((one.ratio, one.steps * one.predicted_s) for one in measured)
    half = sum(seconds for _, seconds in ordered) / 2
    reached = accumulate(seconds for _, seconds in ordered)
    return next(ratio for (ratio, _), so_far in zip(ordered, reached, strict=True) if so_far >= half)


# ---- the status


def stage_times(
    forecast: Forecast | None, stage: int, times: StepTimes, ratios: Mapping[str, StepRatios]
) -> StageTimesStatus:
    """Return the measured, predicted and corrected times of a stage's steps."""
    found = next((each for each in times.stages if each.stage == stage), StageTimes(stage, (), ()))
    decode = found.decode or (() if forecast is None else (_half_way(forecast),))
    computing = {node: replace(each, overhead_s=0.0, alone_s=None) for node, each in ratios.items()}
    both = None if forecast is None else (forecast.corrected({}), forecast.corrected(computing))
    return StageTimesStatus(
        decode=[_step(both, stage, steps, "decode") for steps in decode],
        prefill=[_step(both, stage, steps, "prefill") for steps in found.chunks],
    )


def _half_way(forecast: Forecast) -> AlikeSteps:
    """Return a decode step that was not measured, of one row after half of the promised context, as plans predict."""
    return AlikeSteps(1, 1, 0, forecast.demand.mean_context_tokens, 0.0, 0.0, 0.0, 0.0)


def _predicted_s(forecast: Forecast, stage: int, steps: AlikeSteps, kind: StepKind) -> float:
    if kind == "decode":
        return forecast.decode_s(stage, steps.tokens, steps.context_tokens)
    return forecast.chunk_s(stage, steps.tokens, steps.context_tokens)


def _step(
    forecasts: tuple[Forecast, Forecast] | None, stage: int, steps: AlikeSteps, kind: StepKind
) -> StepStatus:
    """Return the status of alike steps, with the profile's prediction and the corrected one."""
    predicted, corrected = (
        (None, None)
        if forecasts is None
        else (1e3 * _predicted_s(each, stage, steps, kind) for each in forecasts)
    )
    return StepStatus(
        rows=steps.rows,
        tokens=steps.tokens,
        context_tokens=steps.context_tokens,
        steps=steps.steps,
        measured_ms=steps.compute_us / 1e3 if steps.steps else None,
        predicted_ms=predicted,
        corrected_ms=corrected,
        link_wait_ms=steps.link_wait_us / 1e3,
        link_send_ms=steps.link_send_us / 1e3,
    )
