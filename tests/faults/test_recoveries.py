"""Recoveries on one machine: what stays of an instance, and what its answers keep."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually
from tests.faults.comparison import Judge
from tests.faults.dialects import DIALECTS, EMBEDDINGS, Question, ask
from tests.faults.disturbances import PLACES, SCORED, TOGETHER, Cover, Disturber, Ledger, question_of
from tests.faults.injection import (
    CUT_AT,
    Rank,
    Served,
    Stopped,
    held_input,
    held_loads,
    serving_stages,
    stopping_at_steps,
)
from tests.processes import serving

_DRAWN_AGAIN = 2
"""Known tokens of an answer that are computed again if all stages keep its KV, to draw the last one again."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A server whose workers are lost, one after the other, in the middle of answers."""

    served: Served
    logs: Path

    def answer(self, question: Question) -> str:
        url, completions = self.served.server.url, DIALECTS["completions"]
        (choice,) = ask(self.served.http, url, completions, question, streams=True).choices
        return choice.text

    def stop_within_answer(self, question: Question, worker: Rank) -> tuple[Stopped, Future[str]]:
        """Ask, and wait until a worker stops in the middle of the answer. It continues when `Stopped` is closed."""
        stopped = Stopped(self.served.hook, worker.pid)
        stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
        reading = self.served.threads.submit(self.answer, question)
        stopped.wait()
        return stopped, reading

    def tokens(self, way: str) -> float:
        """Return the tokens of resumed answers whose KV was kept, or replayed."""
        return self.served.metric(rf'resumed_tokens_total{{[^}}]*way="{way}"[^}}]*}}')

    def log(self, process: str) -> str:
        return (self.logs / f"{process}.log").read_text()

    def problems(self) -> float:
        """Return the number of failed steps, and of resumed answers that differed."""
        metric = self.served.metric
        return metric("resume_disagreements_total") + metric("steps_failed_total")


@contextlib.contextmanager
def disturbing(model: Path, folder: Path, *flags: str) -> Generator[Disturbed]:
    logs = ("--log-dir", str(folder / "logs"))
    with stopping_at_steps() as hook, serving_stages(model, folder, hook, *logs, *flags) as served:
        yield Disturbed(served, folder / "logs")


@pytest.fixture(scope="module")
def two_stages(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Disturbed]:
    folder = tmp_path_factory.mktemp("two-stages")
    with disturbing(dense_model, folder, "--max-num-seqs", str(PLACES)) as disturbed:
        yield disturbed


@pytest.fixture(scope="module")
def three_stages(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Disturbed]:
    folder = tmp_path_factory.mktemp("three-stages")
    with disturbing(dense_model, folder, "--stages", "3") as disturbed:
        yield disturbed


@pytest.fixture(scope="module")
def groups(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Disturbed]:
    """Serve in two stages of two ranks each."""
    with disturbing(dense_model, tmp_path_factory.mktemp("groups"), "--tp", "2") as disturbed:
        yield disturbed


@pytest.mark.timeout(600)
def test_answers_of_every_dialect_continue_after_the_loss_of_a_worker_at_any_moment(
    dense_model: Path, two_stages: Disturbed
) -> None:
    ledger = Ledger()
    disturber = Disturber(two_stages.served, "dense", Judge(dense_model), Cover(), ledger)
    for moments in (TOGETHER, SCORED, SCORED):
        disturber.disturb("worker killed", moments)
    assert ledger.wrong() == []
    assert all(run.was_hit and run.was_resumed for run in ledger.runs if run.moment != "drafts")
    assert {run.dialect for run in ledger.runs} == {*DIALECTS, *EMBEDDINGS}


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_while_another_loads_is_replaced_like_the_first(
    dense_model: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    flags = ("--stages", "3", "--max-model-len", "1024", "--spare-worker", "off", "--log-dir", str(logs))
    with serving(dense_model, *flags, folder=tmp_path) as server:
        body = {"model": "dense", "prompt": "Tell me", "max_tokens": 8, "temperature": 0}
        expected = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        pids = [device["pid"] for device in server.status()["devices"]]
        os.kill(pids[1], signal.SIGKILL)
        log = logs / "agent.log"
        started = eventually(
            lambda: re.findall(r"Started worker-1-0 .*, pid (\d+)", log.read_text()),
            lambda seen: len(seen) == 2,
        )
        # The new worker never loads, so only the second loss can end its load in time.
        os.kill(int(started[1]), signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        answer = server.http.post("/v1/completions", json=body, timeout=200).raise_for_status().json()
        assert answer["choices"] == expected
        after = [device["pid"] for device in server.status()["devices"]]
        assert after[2] == pids[2], "the third stage stays loaded"
        assert not set(after[:2]) & {*pids, int(started[1])}
        assert server.stop() == 0
        assert not psutil.pid_exists(int(started[1])), "no agent ends before a worker that it stops"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fixture", "victims"),
    [pytest.param("three_stages", (1, 0, 2), marks=pytest.mark.faults), ("two_stages", (0,))],
)
@pytest.mark.timeout(200)
def test_stages_behind_a_lost_one_keep_the_kv_of_its_answers(
    fixture: str, victims: Sequence[int], request: pytest.FixtureRequest
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)
    disturbed: Disturbed = request.getfixturevalue(fixture)
    served, tokens = disturbed.served, disturbed.tokens
    problems = disturbed.problems()  # noised scores of earlier answers may have tied
    expected = disturbed.answer(question)
    for number in victims:
        ranks = served.wait_until_ready()
        kept, replayed = tokens("kept"), tokens("replayed")
        stopped, reading = disturbed.stop_within_answer(question, ranks[number])
        ranks[number].process.kill()
        stopped.close()
        assert reading.result() == expected
        known = tokens("kept") - kept + tokens("replayed") - replayed
        assert known > len(question.prompt)
        if number == len(ranks) - 1:
            assert tokens("kept") == kept, "no stage is behind the last one"
        else:
            assert tokens("kept") - kept >= known - 4
    assert disturbed.problems() == problems


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_all_workers_stay_if_a_lost_one_answers_before_another_is_linked(three_stages: Disturbed) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)
    served, tokens = three_stages.served, three_stages.tokens

    def phase() -> str:
        (instance,) = served.status()["instances"]
        return instance["recovery"]["phase"]

    def started() -> set[int]:
        return {
            int(pid) for pid in re.findall(r"Started worker-\d-0 .*, pid (\d+)", three_stages.log("agent"))
        }

    expected = three_stages.answer(question)
    ranks = served.wait_until_ready()
    before = started()
    for number in (1, 0, 2):
        kept, replayed = tokens("kept"), tokens("replayed")
        with held_loads(served.hook) as wait_for_load:
            stopped, reading = three_stages.stop_within_answer(question, ranks[number])
            ranks[number].process.send_signal(signal.SIGSTOP)
            stopped.close()
            wait_for_load()
            assert phase() == "loading"
            ranks[number].process.send_signal(signal.SIGCONT)
            assert reading.result() == expected, "it continues although the other worker never loads"
        assert served.wait_until_ready() == ranks
        assert tokens("kept") - kept >= len(question.prompt)
        assert tokens("replayed") - replayed <= _DRAWN_AGAIN
    assert len(started() - before) == 3
    eventually(lambda: {pid for pid in started() if psutil.pid_exists(pid)} == {rank.pid for rank in ranks})
    assert three_stages.problems() == 0


GROUPED = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)
"""Question to servers of two ranks per stage."""


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_group_stays_around_a_lost_stage_and_its_answers_continue(groups: Disturbed) -> None:
    expected = groups.answer(GROUPED)
    for stage in (1, 0):
        before = groups.served.wait_until_ready()
        victim = next(rank for rank in before if (rank.stage, rank.rank) == (stage, 1))
        stopped, reading = groups.stop_within_answer(GROUPED, victim)
        victim.process.kill()
        stopped.close()
        assert reading.result() == expected
        after = groups.served.wait_until_ready()
        assert of_stage(after, 1 - stage) == of_stage(before, 1 - stage)
        assert not {rank.pid for rank in of_stage(after, stage)} & {rank.pid for rank in before}
    assert groups.problems() == 0


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_group_stays_although_one_rank_has_begun_a_step_and_the_other_has_not(groups: Disturbed) -> None:
    expected = groups.answer(GROUPED)
    before = groups.served.wait_until_ready()
    halts = halts_of(groups, "worker-0-1")
    late = next(rank for rank in before if (rank.stage, rank.rank) == (0, 1))
    stopped, reading = groups.stop_within_answer(GROUPED, late)
    wait_in_collective(groups.served, 0)
    of_stage(before, 1)[0].process.kill()
    eventually(lambda: halts_of(groups, "worker-0-1") > halts)
    stopped.close()
    assert reading.result() == expected
    assert of_stage(groups.served.wait_until_ready(), 0) == of_stage(before, 0)
    assert groups.problems() == 0


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_group_stays_although_input_has_reached_only_one_rank(groups: Disturbed) -> None:
    expected = groups.answer(GROUPED)
    before = groups.served.wait_until_ready()
    halts = halts_of(groups, "worker-1-1")
    late = next(rank for rank in before if (rank.stage, rank.rank) == (1, 1))
    stopped, reading = groups.stop_within_answer(GROUPED, late)
    with held_input(groups.served.hook, late.pid) as wait_for_input:
        stopped.close()
        wait_for_input()
        wait_in_collective(groups.served, 1)
        of_stage(before, 0)[0].process.kill()
        eventually(lambda: halts_of(groups, "worker-1-1") > halts)
    assert reading.result() == expected
    assert of_stage(groups.served.wait_until_ready(), 1) == of_stage(before, 1)
    assert groups.problems() == 0


def of_stage(ranks: Sequence[Rank], stage: int) -> list[Rank]:
    return [rank for rank in ranks if rank.stage == stage]


def halts_of(disturbed: Disturbed, worker: str) -> int:
    """Return how often a worker has halted after a step."""
    return disturbed.log(worker).count("Halted after step")


def wait_in_collective(running: Served, stage: int) -> None:
    """Wait until the first rank of a stage waits for the other one."""

    def waits() -> Any:
        devices = running.status()["devices"]
        return next(each["waits"] for each in devices if (each["stage"], each["rank"]) == (stage, 0))

    eventually(waits, lambda found: found and found["kind"] == "collective" and found["seconds"] > 0.2)
