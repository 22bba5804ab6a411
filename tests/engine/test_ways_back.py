"""Choice of the way back of a sequence: predicted times, shared beginnings, waits for suspects, and what is recorded of it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.default_settings import make_policy
from tests.engine.engines import BYTES, collect, kv_of, make_request
from tests.engine.successions import Succession, run_to
from tests.engine.twin import TwinExecutor

from mlx_ring.core.engine_stats import Meter, StepTiming
from mlx_ring.core.generation import WaysBack
from mlx_ring.core.types import BLOCK_TOKENS, WAYS, RankId, Way
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_manager import KvManager
from mlx_ring.engine.resumption import (
    LEAST_MARGIN_S,
    MARGIN,
    WAIT_BONUS_S,
    Candidate,
    Destination,
    PrefillSpeed,
    ReadSpeeds,
    Silences,
    choose_destination,
    choose_way,
)
from mlx_ring.engine.sequence import Limits, make_sequence
from mlx_ring.engine.ways_back import Offer, Ways

SECONDS = st.floats(0.0, 1e4)
MAYBE = st.none() | SECONDS


# ---- the choice


@given(st.lists(st.builds(Candidate, st.sampled_from(WAYS), MAYBE), min_size=1, max_size=5))
def test_no_way_is_chosen_that_another_one_beats_by_more_than_the_margin(candidates: list[Candidate]) -> None:
    chosen = choose_way(candidates)
    if candidates[0].seconds is None:
        assert chosen is candidates[0]
        return
    assert chosen.seconds is not None
    least = min(each.seconds for each in candidates if each.seconds is not None)
    assert chosen.seconds <= least + max(LEAST_MARGIN_S, MARGIN * least)
    for preferred in candidates[: candidates.index(chosen)]:
        assert preferred.seconds is None or preferred.seconds > least + max(LEAST_MARGIN_S, MARGIN * least)


TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=60).map(tuple), min_size=1, max_size=6)


def own(ready_s: float | None = 1.0, token_s: float | None = 0.01) -> Destination:
    return Destination("recompute", ready_s, token_s, 0)


def other(token_s: float | None = 0.01, ahead: int = 0) -> Destination:
    return Destination("replica", 0.0, token_s, ahead)


@given(TEXTS, SECONDS, st.floats(1e-5, 1.0), st.floats(1e-5, 1.0), st.integers(0, 10_000))
def test_each_sequence_goes_where_its_next_token_is_predicted_first(
    texts: list[tuple[int, ...]], ready_s: float, own_s: float, other_s: float, ahead: int
) -> None:
    back, replicas = own(ready_s, own_s), [other(other_s, ahead), other(other_s, 2 * ahead)]
    for text in texts:
        times = [each.seconds(text) for each in (back, *replicas)]
        known = [seconds for seconds in times if seconds is not None]
        chosen = choose_destination(text, replicas, back)
        seconds = chosen.seconds(text)
        assert seconds is not None
        assert seconds <= min(known) + max(LEAST_MARGIN_S, MARGIN * min(known))
        chosen.give(text)


@given(st.integers(16, 500), st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_a_shared_beginning_counts_once(shared: int, rests: list[int]) -> None:
    place = other()
    for number, rest in enumerate(rests):
        place.give((*[7] * shared, *[100 + number] * rest))
    assert place.ahead_tokens == shared + sum(rests)


def test_without_figures_the_other_replica_with_least_to_compute_continues_it() -> None:
    busy, idle = other(None, 900), other(None, 100)
    assert choose_destination((1, 2, 3), [busy, idle], own()) is idle
    assert choose_destination((1, 2, 3), [busy, other(0.01, 10_000)], own(None)).way == "replica"


def test_own_instance_is_waited_for_only_if_the_other_one_is_much_busier() -> None:
    assert choose_destination((1,) * 100, [other(ahead=50)], back := own(1.0)).way == "replica"
    assert choose_destination((1,) * 100, [other(ahead=500)], back) is back


# ---- the speed of prefill


def chunk(tokens: int, context: int, seconds: float, stage: int = 0) -> StepTiming:
    return StepTiming(
        step=1,
        rank=RankId(stage, 0),
        rows=1,
        tokens=tokens,
        is_decode=False,
        started_us=0,
        finished_us=0,
        queue_us=0,
        link_wait_us=0,
        compute_us=round(seconds * 1e6),
        link_send_us=0,
        context_tokens=context,
    )


@given(st.floats(1e-5, 1e-2), st.floats(0.0, 1e-5), st.integers(0, 4000), st.integers(1, 4000))
def test_speed_follows_the_length_of_the_context(least: float, slope: float, start: int, more: int) -> None:
    meter = Meter()
    speed = PrefillSpeed(1, meter.measured)
    assert speed.seconds(start, start + more) is None
    for context in range(0, 4096, 256):
        meter.record_chunk(chunk(256, context, 256 * (least + slope * (context + 128))), 1)
    expected = more * (least + slope * (start + more / 2))
    assert speed.seconds(start, start + more) == pytest.approx(expected, rel=0.05)
    assert speed.seconds(start, start) == 0.0


def test_speed_outlives_its_engine_and_counts_the_slowest_stage() -> None:
    meter = Meter()
    measured = meter.measured
    for stage, seconds in enumerate((0.1, 0.3)):
        meter.record_chunk(chunk(100, 50, seconds, stage), 2)
    speed = PrefillSpeed(2, measured)
    assert speed.seconds(0, 10_000, 1) == pytest.approx(10.0)
    assert speed.seconds(0, 10_000) == pytest.approx(30.0 + 10.0 * 256 / 10_000)
    assert PrefillSpeed(3, measured).seconds(0, 100) is None
    assert PrefillSpeed(3, {}, lambda _stage, tokens, _context: tokens * 1e-3).seconds(
        0, 1000
    ) == pytest.approx(1.0 + 2.0 * 0.256)


# ---- suspects

HISTORIES = st.lists(st.none() | st.floats(2.0, 3.5), max_size=20)
LIMIT_S = 3.5


def silences(history: Sequence[float | None]) -> Silences:
    found = Silences()
    for silent_s in history:
        found.record(silent_s)
    return found


@given(HISTORIES, st.floats(2.0, 5.0), MAYBE)
def test_a_suspect_is_waited_for_within_the_limit_only(
    history: list[float | None], silent_s: float, recovery_s: float | None
) -> None:
    found = silences(history)
    waits = found.is_worth_waiting(silent_s, LIMIT_S, recovery_s)
    assert not (waits and silent_s >= LIMIT_S)
    assert waits or silent_s >= LIMIT_S or recovery_s is not None
    assert 0.0 <= found.wait_s(silent_s, LIMIT_S) <= max(0.0, LIMIT_S - silent_s)


@given(HISTORIES, st.floats(2.0, 3.4), SECONDS, SECONDS)
def test_the_slower_the_recovery_the_longer_the_wait(
    history: list[float | None], silent_s: float, one_s: float, other_s: float
) -> None:
    slower, faster = max(one_s, other_s), min(one_s, other_s)
    found = silences(history)
    if found.is_worth_waiting(silent_s, LIMIT_S, faster):
        assert found.is_worth_waiting(silent_s, LIMIT_S, slower)


@given(st.lists(st.floats(2.0, 3.4), max_size=20), st.floats(2.0, 3.3), SECONDS)
def test_a_wait_is_not_given_up_whose_silences_always_ended_and_that_is_shorter_than_the_recovery(
    history: list[float], silent_s: float, recovery_s: float
) -> None:
    found = silences(history)
    lost = 1.0 / (1.0 + 0.8)  # the assumed loss, and at least one assumed silence that is longer
    if (1 - lost) * (recovery_s + WAIT_BONUS_S) > LIMIT_S - silent_s:
        assert found.is_worth_waiting(silent_s, LIMIT_S, recovery_s)


def test_losses_make_a_wait_less_likely_to_pay() -> None:
    assert silences([]).is_worth_waiting(2.0, LIMIT_S, 1.5)
    assert not silences([None] * 8).is_worth_waiting(2.0, LIMIT_S, 1.5)
    assert silences([None] * 8).is_worth_waiting(2.0, LIMIT_S, 60.0)
    assert silences([None] * 16 + [2.3] * 16).is_worth_waiting(2.0, LIMIT_S, 1.5)


# ---- disks


def test_speed_of_disks_is_measured_and_a_low_one_is_forgotten() -> None:
    measured: dict[str, list[float]] = {}
    speeds = ReadSpeeds(measured, 1_000_000)
    assert speeds.disk_s(1000, 0.0) == pytest.approx(1.0)
    measured["disk"] = [0.5, 100.0]
    assert speeds.disk_s(1000, 200.0) == pytest.approx(500.0)
    assert speeds.disk_s(1000, 1000.0) == pytest.approx(1.0)


def test_speed_of_other_machines_is_measured_and_a_low_one_is_forgotten() -> None:
    measured: dict[str, list[float]] = {}
    speeds = ReadSpeeds(measured, 1000)
    assert speeds.peers_s(1000, 0.5, 0.0) == pytest.approx(0.001 + 0.02 + 0.5)
    speeds.record_peers(1000, 0.5, 5e7, 2.021, 0.0)
    assert speeds.peers_s(1000, 0.5, 1.0) == pytest.approx(0.021 + 0.5 * (1 + 4) / 2)
    speeds.record_peers(1000, 0.001, 1e5, 0.1, 2.0)
    assert measured["peers"][0] == pytest.approx(2.5)
    assert measured["peers"][1] > 0.02
    assert speeds.peers_s(1000, 0.5, 1000.0) == pytest.approx(0.521)


@pytest.mark.parametrize(
    ("peers_s", "token_s", "way"),
    [(0.1, 0.01, "peers"), (20.0, 0.01, "disk"), (20.0, 1e-6, "recompute"), (0.1, 1e-6, "recompute")],
)
def test_other_machines_are_asked_only_if_that_is_faster(
    peers_s: float, token_s: float, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    measured = {"prefill 0/1": [1.0, 0.0, token_s, 0.0, 0.0]}
    recorded: list[str] = []

    def record(taken: Way, _predicted_s: float | None, _taken_s: float) -> None:
        recorded.append(taken)

    kv = KvManager({RankId(0, 0): kv_of(100_000)}, prefix_cache=True)
    ways = Ways(PrefillSpeed(1, measured), kv, None, {}, {}, record)
    text = make_sequence(1, replace(make_request(), prompt_tokens=PROMPT), DISK_LIMITS, 0.0)
    offers = [Offer("disk", BLOCK_TOKENS, 1.0), Offer("peers", 3 * BLOCK_TOKENS, peers_s, 2.5e6, peers_s)]
    chosen = ways.choose([text], offers, 0.0)
    if way == "recompute":
        assert chosen is None
        assert text.back is not None
        text.back.arrive(1.0)
    else:
        assert chosen is not None
        offer, back = chosen
        assert offer.way == way
        assert back is not None
        back.arrive(1.0)
    assert recorded == [way]
    described = "2.5 MB of them from other machines"
    assert (described in caplog.text) == (way != "disk")


PROMPT = tuple(1 + place * 7 % 250 for place in range(3 * BLOCK_TOKENS + 40))
DISK_LIMITS = Limits(context_length=4096, vocab_size=256, eos=frozenset({0}))


def with_saved(twin: TwinExecutor) -> TwinExecutor:
    """Return new ranks with the disks of others."""
    after = TwinExecutor((1,) * len(twin.disks))
    after.copy_disks(twin)
    return after


@pytest.mark.parametrize(
    ("token_s", "way"), [(None, "disk"), (0.1, "disk"), (1e-6, "recompute")], ids=["unknown", "slow", "fast"]
)
def test_new_request_reads_disks_unless_computing_is_predicted_to_be_faster(
    caplog: pytest.LogCaptureFixture, token_s: float | None, way: Way
) -> None:
    caplog.set_level(logging.INFO)

    def engine_of(twin: TwinExecutor, meter: Meter) -> Engine:
        policy = make_policy(kv_disk=1 << 30, num_speculative_tokens=0)
        return Engine(twin, BYTES, DISK_LIMITS, instance="demo", epoch=1, policy=policy, meter=meter)

    async def run() -> None:
        request = replace(make_request(max_tokens=8, ignore_eos=True), prompt_tokens=PROMPT)
        twin, meter = TwinExecutor((1, 1)), Meter()
        first = await collect(engine_of(twin, Meter()).submit(request))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert all(len(disk) == 4 for disk in twin.disks.values())
        if token_s is not None:
            meter.measured |= {f"prefill {stage}/2": [1.0, 0.0, token_s, 0.0, 0.0] for stage in range(2)}
        meter.measured["disk"] = [1e-3, math.inf]
        engine = engine_of(with_saved(twin), meter)
        answers = await asyncio.gather(*(collect(engine.submit(request)) for _ in range(3)))
        assert [answer.token_ids for answer in answers] == [first.token_ids] * 3
        assert engine.stats().cache.restored_tokens == (len(PROMPT) - 1 if way == "disk" else 0)
        counts = {each: sum(meter.way_taken_s[each].counts) for each in WAYS}
        # Requests with the same beginning wait for one fetch, and count once.
        assert counts == {each: int(each == way) for each in WAYS}

    asyncio.run(run())
    (line,) = [each.getMessage() for each in caplog.records if "Ways back of r:" in each.getMessage()]
    assert line.startswith(f"Ways back of r: {way} (1), predicted ")


# ---- after a loss


@pytest.mark.parametrize(("first_stage", "way"), [(1, "kept"), (2, "recompute")])
def test_way_after_a_loss_is_recorded_with_its_prediction(
    caplog: pytest.LogCaptureFixture, first_stage: int, way: Way
) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        succession = Succession(policy=make_policy(num_speculative_tokens=0), kv=kv_of(40))
        succession.meter.measured |= {f"prefill {each}/2": [1.0, 0.0, 0.01, 0.0, 0.0] for each in range(2)}
        succession.load()
        streams = succession.submit(*(make_request(24, max_tokens=20, ignore_eos=True),) * 2)
        run_to(succession, streams[0], 4)
        succession.lose()
        kept = succession.choose_kept(first_stage) if first_stage < 2 else {}
        ways = WaysBack("demo", succession.meter.record_way)
        for live in list(succession.held._held):  # pyright: ignore[reportPrivateUsage] - as the head does
            live.set_way_back(ways, "recompute", 1.5)
        succession.patch(kept)
        succession.finish()
        counts = {each: sum(succession.meter.way_taken_s[each].counts) for each in WAYS}
        assert counts == {each: 2 * (each == way) for each in WAYS}
        predicted = succession.meter.way_predicted_s[way].total
        # Both begin with the same tokens, which count for the first one only.
        assert 3.0 <= predicted <= 3.0 + 2 * 2 * 0.01 * 28

    asyncio.run(run())
    (line,) = [each.getMessage() for each in caplog.records if "Ways back of demo" in each.getMessage()]
    assert line.startswith(f"Ways back of demo: {way} (2), predicted ")
