"""Recoveries on one machine: what stays of an instance, and what its answers keep."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually
from tests.faults.comparison import Judge
from tests.faults.dialects import DIALECTS, EMBEDDINGS, ask
from tests.faults.disturbances import PLACES, SCORED, TOGETHER, Cover, Disturber, Ledger, question_of
from tests.faults.injection import (
    CUT_AT,
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


@pytest.mark.timeout(600)
def test_answers_of_every_dialect_continue_after_the_loss_of_a_worker_at_any_moment(
    dense_model: Path, tmp_path: Path
) -> None:
    ledger = Ledger()
    with (
        stopping_at_steps() as hook,
        serving_stages(dense_model, tmp_path, hook, "--max-num-seqs", str(PLACES)) as running,
    ):
        disturber = Disturber(running, "dense", Judge(dense_model), Cover(), ledger)
        for moments in (TOGETHER, TOGETHER, SCORED, SCORED):
            disturber.disturb("worker killed", moments)
    assert ledger.wrong() == []
    assert all(run.was_hit and run.was_resumed for run in ledger.runs if run.moment != "drafts")
    assert {run.dialect for run in ledger.runs} == {*DIALECTS, *EMBEDDINGS}


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
            lambda: re.findall(r"started worker-1-0 .*, pid (\d+)", log.read_text()),
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


@pytest.mark.parametrize(("stages", "victims"), [(3, (1, 0, 2)), (2, (0,))])
@pytest.mark.timeout(200)
def test_stages_behind_a_lost_one_keep_the_kv_of_its_answers(
    stages: int, victims: Sequence[int], dense_model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)
    flags = ("--stages", str(stages))

    with stopping_at_steps() as hook, serving_stages(dense_model, tmp_path, hook, *flags) as running:

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        def tokens(way: str) -> float:
            return running.metric(rf'resumed_tokens_total{{[^}}]*way="{way}"[^}}]*}}')

        expected = answer()
        for number in victims:
            kept, replayed = tokens("kept"), tokens("replayed")
            ranks = running.wait_until_ready()
            stopped = Stopped(hook, ranks[number].pid)
            stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
            reading = running.threads.submit(answer)
            stopped.wait()
            ranks[number].process.kill()
            stopped.close()
            assert reading.result() == expected
            known = tokens("kept") - kept + tokens("replayed") - replayed
            assert known > len(question.prompt)
            if number == stages - 1:
                assert tokens("kept") == kept, "no stage is behind the last one"
            else:
                assert tokens("kept") - kept >= known - 4
        assert running.metric("resume_disagreements_total") == 0
        assert running.metric("steps_failed_total") == 0


@pytest.mark.timeout(300)
def test_all_workers_stay_if_a_lost_one_answers_before_another_is_linked(
    dense_model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)

    flags = ("--stages", "3", "--log-dir", str(tmp_path / "logs"))

    with stopping_at_steps() as hook, serving_stages(dense_model, tmp_path, hook, *flags) as running:

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        def tokens(way: str) -> float:
            return running.metric(rf'resumed_tokens_total{{[^}}]*way="{way}"[^}}]*}}')

        def phase() -> str:
            (instance,) = running.status()["instances"]
            return instance["recovery"]["phase"]

        expected = answer()
        ranks = running.wait_until_ready()
        for number in (1, 0, 2):
            kept, replayed = tokens("kept"), tokens("replayed")
            stopped = Stopped(hook, ranks[number].pid)
            stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
            with held_loads(hook) as wait_for_load:
                reading = running.threads.submit(answer)
                stopped.wait()
                ranks[number].process.send_signal(signal.SIGSTOP)
                stopped.close()
                wait_for_load()
                assert phase() == "loading"
                ranks[number].process.send_signal(signal.SIGCONT)
                assert reading.result() == expected, "it continues although the other worker never loads"
            assert running.wait_until_ready() == ranks
            assert tokens("kept") - kept >= len(question.prompt)
            assert tokens("replayed") - replayed <= _DRAWN_AGAIN
        log = (tmp_path / "logs" / "agent.log").read_text()
        started = {int(pid) for pid in re.findall(r"started worker-\d-0 .*, pid (\d+)", log)}
        assert len(started) == 6
        eventually(lambda: {pid for pid in started if psutil.pid_exists(pid)} == {rank.pid for rank in ranks})
        assert running.metric("resume_disagreements_total") == 0
        assert running.metric("steps_failed_total") == 0


@pytest.mark.timeout(300)
def test_a_group_stays_around_a_lost_stage_and_its_answers_continue(
    dense_model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)

    with stopping_at_steps() as hook, serving_stages(dense_model, tmp_path, hook, "--tp", "2") as running:

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        expected = answer()
        for stage in (1, 0):
            before = running.wait_until_ready()
            victim = next(rank for rank in before if (rank.stage, rank.rank) == (stage, 1))
            stopped = Stopped(hook, victim.pid)
            stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
            reading = running.threads.submit(answer)
            stopped.wait()
            victim.process.kill()
            stopped.close()
            assert reading.result() == expected
            after = running.wait_until_ready()
            assert [rank for rank in after if rank.stage != stage] == [
                rank for rank in before if rank.stage != stage
            ]
            assert not {rank.pid for rank in after if rank.stage == stage} & {rank.pid for rank in before}
        assert running.metric("resume_disagreements_total") == 0
        assert running.metric("steps_failed_total") == 0


@pytest.mark.timeout(300)
def test_a_group_stays_although_one_rank_has_begun_a_step_and_the_other_has_not(
    dense_model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)
    logs = tmp_path / "logs"

    with (
        stopping_at_steps() as hook,
        serving_stages(dense_model, tmp_path, hook, "--tp", "2", "--log-dir", str(logs)) as running,
    ):

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        expected = answer()
        before = running.wait_until_ready()
        late = next(rank for rank in before if (rank.stage, rank.rank) == (0, 1))
        stopped = Stopped(hook, late.pid)
        stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
        reading = running.threads.submit(answer)
        stopped.wait()
        wait_in_collective(running, 0)
        next(rank for rank in before if rank.stage == 1).process.kill()
        eventually(lambda: "halted after step" in (logs / "worker-0-1.log").read_text())
        stopped.close()
        assert reading.result() == expected
        after = running.wait_until_ready()
        assert [rank for rank in after if not rank.stage] == [rank for rank in before if not rank.stage]
        assert running.metric("resume_disagreements_total") == 0


@pytest.mark.timeout(300)
def test_a_group_stays_although_input_has_reached_only_one_rank(dense_model: Path, tmp_path: Path) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)
    logs = tmp_path / "logs"

    with (
        stopping_at_steps() as hook,
        serving_stages(dense_model, tmp_path, hook, "--tp", "2", "--log-dir", str(logs)) as running,
    ):

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        expected = answer()
        before = running.wait_until_ready()
        late = next(rank for rank in before if (rank.stage, rank.rank) == (1, 1))
        stopped = Stopped(hook, late.pid)
        stopped.set(len(question.prompt), len(question.prompt) + CUT_AT)
        reading = running.threads.submit(answer)
        stopped.wait()
        with held_input(hook, late.pid) as wait_for_input:
            stopped.close()
            wait_for_input()
            wait_in_collective(running, 1)
            next(rank for rank in before if not rank.stage).process.kill()
            eventually(lambda: "halted after step" in (logs / "worker-1-1.log").read_text())
        assert reading.result() == expected
        after = running.wait_until_ready()
        assert [rank for rank in after if rank.stage] == [rank for rank in before if rank.stage]
        assert running.metric("resume_disagreements_total") == 0


def wait_in_collective(running: Served, stage: int) -> None:
    """Wait until the first rank of a stage waits for the other one."""

    def waits() -> Any:
        devices = running.status()["devices"]
        return next(each["waits"] for each in devices if (each["stage"], each["rank"]) == (stage, 0))

    eventually(waits, lambda found: found and found["kind"] == "collective" and found["seconds"] > 0.2)
