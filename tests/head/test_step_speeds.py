"""Ratios of measured to predicted step times: learned, bounded, kept, and counted by plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.head.test_status import NODES, RANGES, member
from tests.planner.clusters import cluster_of, model_of, node_of
from tests.profiles import made_up_profile

from mlx_ring.cluster.membership import Membership
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.step_times import AlikeSteps, DecodeRound, StageTimes, StepTimes
from mlx_ring.head.plan_requests import measured_cluster
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_speeds import StepSpeeds, stage_times, step_speeds
from mlx_ring.host.yielding import Yielding
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import CpuQuota, StepRatios
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.settings.settings_sources import load_settings

DEMAND = Demand(context_tokens=4096, sequences=1)
MEMBERS = [member("a"), member("b")]
PLAIN = Forecast(model_of(28), DEMAND, cluster_of(*NODES), list(zip(NODES, RANGES, strict=True)))


@dataclass
class Instance:
    """Instance whose steps took these multiples of the prediction by the profile."""

    decode: Sequence[float] = ()
    prefill: Sequence[float] = ()
    steps: int = 40
    name: str = "demo-1"
    forecast: Forecast | None = PLAIN
    nodes: Sequence[Sequence[str]] = field(default_factory=lambda: (("a",), ("b",)))

    @property
    def times(self) -> StepTimes:
        """Steps of stage 0."""
        decode = [
            alike(1, ratio * PLAIN.decode_s(0, 1, 100 + place), 100 + place, self.steps)
            for place, ratio in enumerate(self.decode)
        ]
        chunks = [alike(256, ratio * PLAIN.chunk_s(0, 256, 0), 0, self.steps) for ratio in self.prefill]
        return StepTimes((StageTimes(0, tuple(decode), tuple(chunks), tuple(decode)),))


def alike(tokens: int, seconds: float, context: int, steps: int) -> AlikeSteps:
    return AlikeSteps(1, tokens, steps, context, 1e6 * seconds, 0.0, 0.0, 0.0)


def learned(folder: Path, *instances: Instance) -> StepRatios:
    speeds = StepSpeeds(folder, learns=True)
    speeds.learn(instances, MEMBERS)
    return speeds.of("a", made_up_profile())


def test_the_median_ratio_of_each_kind_of_step_is_learned_and_read_again(tmp_path: Path) -> None:
    found = learned(tmp_path, Instance(decode=[1.3, 1.2, 40.0], prefill=[0.8]))
    assert (found.decode, found.prefill) == (pytest.approx(1.3), pytest.approx(0.8))
    again = StepSpeeds(tmp_path, learns=True)
    assert again.by_node(MEMBERS) == {"a": found, "b": StepRatios()}
    assert StepSpeeds(tmp_path, learns=False).by_node(MEMBERS) == {"a": StepRatios(), "b": StepRatios()}


def chunks_of(*sizes_ratios_and_numbers: tuple[int, float, int]) -> Instance:
    """Return an instance with chunks: tokens, time over the prediction, and number."""

    class WithChunks(Instance):
        @property
        def times(self) -> StepTimes:
            found = [
                alike(tokens, ratio * PLAIN.chunk_s(0, tokens, 0), 0, number)
                for tokens, ratio, number in sizes_ratios_and_numbers
            ]
            return StepTimes((StageTimes(0, (), tuple(found)),))

    return WithChunks()


def test_the_last_tokens_of_cached_prompts_do_not_count(tmp_path: Path) -> None:
    """Five cached prompts of which one token each was left, and one that was computed."""
    assert learned(tmp_path, chunks_of((1, 0.5, 5), (47, 1.94, 1))) == StepRatios()
    assert learned(tmp_path, chunks_of((1, 0.5, 50), (256, 1.2, 4))).prefill == pytest.approx(1.2)


def test_a_prompt_counts_by_its_time_and_not_by_its_chunks(tmp_path: Path) -> None:
    assert learned(tmp_path, chunks_of((64, 0.6, 9), (512, 1.3, 4))).prefill == pytest.approx(1.3)


def test_few_tokens_of_prompts_are_not_learned(tmp_path: Path) -> None:
    assert learned(tmp_path, chunks_of((128, 1.5, 7))) == StepRatios()
    assert learned(tmp_path, chunks_of((128, 1.5, 8))).prefill == pytest.approx(1.5)


def test_nothing_is_learned_while_other_instances_compute_on_the_machine(tmp_path: Path) -> None:
    """Expect it of replicas on one machine, and of another model without predictions."""
    assert learned(tmp_path, *(Instance(decode=[1.5], nodes=(("a",), ("b",))),) * 2) == StepRatios()
    other = Instance(forecast=None, nodes=(("a",),))
    assert learned(tmp_path, Instance(decode=[1.5]), other) == StepRatios()
    elsewhere = Instance(forecast=None, nodes=(("b",),))
    assert learned(tmp_path, Instance(decode=[1.5]), elsewhere).decode == pytest.approx(1.5)


def test_a_ratio_that_was_always_far_from_one_is_kept_within_bounds(tmp_path: Path) -> None:
    assert learned(tmp_path, Instance(decode=[90.0], prefill=[0.001])) == StepRatios(50.0, 0.05)
    assert StepSpeeds(tmp_path, learns=True).of("a", made_up_profile()) == StepRatios(2.0, 0.5)


def test_a_ratio_far_from_one_counts_while_it_lasts(tmp_path: Path) -> None:
    now = 0.0
    speeds = StepSpeeds(tmp_path, learns=True, clock=lambda: now)

    def ratio(*measured: float) -> float:
        speeds.learn([Instance(decode=measured)], MEMBERS)
        return speeds.of("a", made_up_profile()).decode

    assert ratio(1.0) == 1.0
    assert ratio(4.0) == pytest.approx(4.0)
    now = 1799.0
    assert ratio() == pytest.approx(4.0)
    now = 1801.0
    assert ratio() == 1.0
    assert ratio(8.0) == pytest.approx(8.0)
    # The same steps again say nothing new, and a small change is noise.
    now = 1801.0 + 1799.0
    assert ratio(8.0) == pytest.approx(8.0)
    now = 1801.0 + 1801.0
    assert ratio(8.0) == 1.0
    assert ratio(9.0) == pytest.approx(9.0)
    assert ratio(9.2) == pytest.approx(9.0)
    assert ratio(1.1) == pytest.approx(1.1)


def test_a_machine_that_joins_again_may_be_as_fast_as_before(tmp_path: Path) -> None:
    speeds = StepSpeeds(tmp_path, learns=True)
    for measured in (1.0, 4.0):
        speeds.learn([Instance(decode=[measured])], MEMBERS)
    assert speeds.of("a", made_up_profile()).decode == pytest.approx(4.0)
    assert not list(tmp_path.iterdir())
    speeds.learn([], [replace(one, session=one.session + 1) for one in MEMBERS])
    assert speeds.of("a", made_up_profile()) == StepRatios()


def test_a_machine_that_yields_counts_as_slow_as_its_user_leaves_it_or_as_it_is(tmp_path: Path) -> None:
    speeds, profile = StepSpeeds(tmp_path, learns=True), made_up_profile()
    speeds.learn([Instance(decode=[1.5])], MEMBERS)
    half = speeds.of("a", profile, 0.5)
    assert (half.decode, half.prefill) == (pytest.approx(3.0), 2.0)
    yielding = [replace(one, yielding=Yielding("it is busy", 0.5)) for one in MEMBERS]
    # Slow steps count as long as its user needs it, and change nothing of what is kept.
    speeds.learn([Instance(decode=[1.9])], yielding)
    assert speeds.of("a", profile).decode == pytest.approx(1.5)
    speeds.learn([Instance(decode=[6.0])], yielding)
    assert speeds.of("a", profile, 0.5).decode == pytest.approx(6.0)
    speeds.learn([], MEMBERS)
    assert speeds.of("a", profile).decode == pytest.approx(1.5)


@dataclass
class WithRounds(Instance):
    """Instance of two stages, whose rounds have time beside computing."""

    overhead_s: float = 0.004
    ratios: Sequence[float] = (1.5, 1.2)
    rounds: int = 40

    @property
    def times(self) -> StepTimes:
        """Steps of both stages, and their rounds: of a single stream, so that all of them take part."""
        seconds = [ratio * PLAIN.decode_s(stage, 1, 100) for stage, ratio in enumerate(self.ratios)]
        steps = [(alike(1, each, 100, self.steps),) for each in seconds]
        around_s = PLAIN.pipeline.around_s(1)
        round_s = sum(seconds) + around_s + 2 * self.overhead_s
        return StepTimes(
            tuple(StageTimes(stage, each, (), each) for stage, each in enumerate(steps)),
            round=DecodeRound(
                1, 1, 1, self.rounds, 100, 1e6 * round_s, *(tuple(1e6 * each for each in seconds),) * 2
            ),
        )


def test_time_beside_computing_is_learned_apart_from_the_ratios(tmp_path: Path) -> None:
    speeds = StepSpeeds(tmp_path, learns=True)
    speeds.learn([WithRounds()], MEMBERS)
    for node, ratio in (("a", 1.5), ("b", 1.2), ("c", 1.0)):
        found = speeds.of(node, made_up_profile())
        assert (found.decode, found.overhead_s) == (pytest.approx(ratio), pytest.approx(0.004)), node
    # The stream of a plan that counts both is as fast as the measured one.
    corrected = PLAIN.corrected(speeds.by_node(MEMBERS))
    assert 1e6 * corrected.token_s(100) == pytest.approx(WithRounds().times.round.round_us)  # pyright: ignore[reportOptionalMemberAccess]
    shown = stage_times(corrected, 0, WithRounds().times, speeds.by_node(MEMBERS)).decode[0]
    assert shown.measured_ms == pytest.approx(shown.corrected_ms)


def test_time_beside_computing_needs_rounds_and_machines_of_ones_own(tmp_path: Path) -> None:
    speeds = StepSpeeds(tmp_path, learns=True)
    beside = Instance(name="other-1", forecast=None, nodes=(("a",),))
    for instances in ([WithRounds(rounds=31)], [WithRounds(forecast=None)], [WithRounds(), beside]):
        speeds.learn(instances, MEMBERS)
        assert speeds.of("a", made_up_profile()).overhead_s == 0.0
    speeds.learn([WithRounds(ratios=(0.0, 1.2))], MEMBERS)
    speeds.learn([WithRounds()], [replace(one, yielding=Yielding("it is busy", 0.5)) for one in MEMBERS])
    assert speeds.of("a", made_up_profile()).overhead_s == 0.0
    off = StepSpeeds(tmp_path, learns=False)
    off.learn([WithRounds()], MEMBERS)
    assert off.of("a", made_up_profile()).overhead_s == 0.0


def test_the_wait_of_a_slow_machine_ends_with_its_session(tmp_path: Path) -> None:
    speeds = StepSpeeds(tmp_path, learns=True)
    speeds.learn([WithRounds()], MEMBERS)
    speeds.learn([WithRounds(ratios=(1.5, 6.0), overhead_s=0.02)], MEMBERS)
    assert speeds.of("a", made_up_profile()).overhead_s == pytest.approx(0.004)
    # A single stream shows how long both stages wait together.
    assert speeds.of("b", made_up_profile()).overhead_s == pytest.approx(0.004 + 2 * 0.016)
    speeds.learn([], [replace(one, session=one.session + 1) for one in MEMBERS])
    assert speeds.of("b", made_up_profile()).overhead_s == pytest.approx(0.004)


def test_few_steps_and_small_changes_are_not_learned(tmp_path: Path) -> None:
    assert learned(tmp_path, Instance(decode=[1.5], prefill=[1.5], steps=3)) == StepRatios()
    assert learned(tmp_path, Instance(decode=[1.04])) == StepRatios()
    assert not list(tmp_path.iterdir())


def test_ratios_of_a_corrected_instance_do_not_add_up(tmp_path: Path) -> None:
    first = learned(tmp_path, Instance(decode=[1.5]))
    again = learned(tmp_path, Instance(decode=[1.5], forecast=PLAIN.corrected({"a": first})))
    assert first == again
    assert first.decode == pytest.approx(1.5)


def test_nothing_is_learned_where_a_machine_s_speed_is_shared_or_limited(tmp_path: Path) -> None:
    limited = replace(NODES[0], cpu_quota=CpuQuota(0.5, 0.1))
    under_quota = Forecast(
        model_of(28), DEMAND, cluster_of(limited, NODES[1]), [(limited, RANGES[0]), (NODES[1], RANGES[1])]
    )
    for instance in (
        Instance(decode=[1.5], forecast=None),
        Instance(decode=[1.5], forecast=under_quota),
        Instance(decode=[1.5], nodes=(("a", "b"), ("b",))),
        Instance(decode=[1.5], nodes=(("a",), ("a",))),
    ):
        assert learned(tmp_path, instance) == StepRatios()


@dataclass
class UnderQuota(Instance):
    """Instance whose first machine has a CPU quota, and whose steps take as long as this ratio predicts."""

    ratio: float = 1.0
    tokens: int = 1

    def __post_init__(self) -> None:
        limited = replace(NODES[0], cpu_quota=CpuQuota(0.5, 0.1))
        stages = [(limited, RANGES[0]), (NODES[1], RANGES[1])]
        self.forecast = Forecast(model_of(28), DEMAND, cluster_of(limited, NODES[1]), stages)

    @property
    def times(self) -> StepTimes:
        """Rounds alone."""
        assert self.forecast is not None
        slowed = self.forecast.corrected({"a": StepRatios(decode=self.ratio)})
        means = tuple(1e6 * slowed.decode_s(stage, self.tokens, 100) for stage in (0, 1))
        return StepTimes((), round=DecodeRound(1, 1, self.tokens, 40, 100, 2 * sum(means), means, means))


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.6, 7.0])
def test_a_machine_with_a_quota_counts_as_slower_than_predicted_but_never_as_faster(
    tmp_path: Path, ratio: float, tokens: int
) -> None:
    slow = UnderQuota(ratio=ratio, tokens=tokens)
    found = learned(tmp_path, slow)
    assert (found.decode, found.prefill) == (pytest.approx(max(1.0, ratio), rel=0.01), 1.0)
    beside = Instance(name="other-1", forecast=None, nodes=(("a",),))
    assert learned(tmp_path / "beside", slow, beside) == StepRatios()


def test_all_plans_of_a_process_use_the_same_ratios(tmp_path: Path) -> None:
    settings = load_settings({"state_dir": str(tmp_path)})
    speeds = step_speeds(settings)
    speeds.learn([Instance(decode=[1.5])], MEMBERS)
    (tmp_path / "step-time-ratios.json").write_text("{}")
    assert step_speeds(settings) is speeds, "the file is not read again"
    view = ClusterView("a", Membership({each.node: each for each in MEMBERS}))
    own, other = measured_cluster(settings, view, {}, {}).nodes
    assert (own.ratios.decode, other.ratios) == (pytest.approx(1.5), StepRatios())


def test_another_profile_begins_anew(tmp_path: Path) -> None:
    learned(tmp_path, Instance(decode=[1.5]))
    profile = made_up_profile()
    faster = profile.model_copy(
        update={"rates": tuple(rate.model_copy(update={"bandwidth": 1e12}) for rate in profile.rates)}
    )
    assert StepSpeeds(tmp_path, learns=True).of("a", faster) == StepRatios()


@pytest.mark.parametrize("content", ["", "[1]", '{"a": {"decode": "fast"}}'])
def test_a_damaged_file_is_named_and_written_again(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-time-ratios.json").write_text(content)
    assert learned(tmp_path, Instance(decode=[1.5])).decode == pytest.approx(1.5)
    assert "step-time-ratios.json is not used, and will be written again" in caplog.messages[0]
    assert StepSpeeds(tmp_path, learns=True).of("a", made_up_profile()).decode == pytest.approx(1.5)


def test_the_status_has_measured_predicted_and_corrected_times() -> None:
    ratios = {"a": StepRatios(decode=1.5, prefill=0.5)}
    shown = stage_times(PLAIN.corrected(ratios), 0, Instance(decode=[1.4], prefill=[0.6]).times, ratios)
    for (step,), measured, corrected in ((shown.decode, 1.4, 1.5), (shown.prefill, 0.6, 0.5)):
        assert step.predicted_ms is not None
        assert step.measured_ms == pytest.approx(measured * step.predicted_ms)
        assert step.corrected_ms == pytest.approx(corrected * step.predicted_ms, rel=0.02)


def test_a_slower_machine_than_its_profile_says_gets_fewer_layers() -> None:
    fast, slow = node_of("a"), replace(node_of("b"), ratios=StepRatios(decode=2.0, prefill=2.0))
    request = PlanRequest(DEMAND, strategy="balanced")
    plan = place(model_of(30), cluster_of(fast, slow), request)
    assert [stage.layers for stage in plan.stages] == [LayerRange(0, 20), LayerRange(20, 30)]
    alone = [place(model_of(30), cluster_of(node), PlanRequest(DEMAND)).prediction for node in (fast, slow)]
    assert alone[1].token_s == pytest.approx(2 * alone[0].token_s)
    assert alone[1].request_s == pytest.approx(2 * alone[0].request_s)
