"""Many recoveries leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.eventually import eventually
from tests.faults.dialects import DIALECTS, ask
from tests.faults.disturbances import question_of
from tests.faults.injection import Served, Stopped, count_tasks, serving_stages, stopping_at_steps

_RECOVERIES, _WARM_UP = 100, 10
"""Number of recoveries, and of those after which the first count is taken."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of the head and its agent."""

    descriptors: Sequence[int]
    threads: Sequence[int]
    tasks: Sequence[int]
    processes: int
    memory_mb: float

    @classmethod
    def by(cls, running: Served) -> Held:
        head = psutil.Process(running.server.process.pid)
        agent = running.server.child("mlx_ring.agent")
        both = (head, agent)
        return cls(
            [process.num_fds() for process in both],
            [process.num_threads() for process in both],
            [count_tasks(running.hook, process.pid) for process in both],
            len(head.children(recursive=True)),
            sum(process.memory_info().rss for process in both) / 1e6,
        )


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_a_hundred_recoveries_leave_nothing_behind(
    dense_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, completions = question_of("stop"), DIALECTS["completions"]
    with stopping_at_steps() as hook, serving_stages(dense_model, tmp_path, hook) as running:

        def answer() -> str:
            (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
            return choice.text

        expected, counts = answer(), list[Held]()
        for number in range(_RECOVERIES):
            if number in (_WARM_UP, _RECOVERIES // 2):
                counts.append(Held.by(running))
            ranks = running.wait_until_ready()
            victim = ranks[number % 2]
            stopped = Stopped(hook, victim.pid)
            stopped.set(len(question.prompt), len(question.prompt) + number % 40)
            reading = running.threads.submit(answer)
            stopped.wait()
            victim.process.kill()
            stopped.close()
            assert reading.result() == expected
        running.wait_until_ready()
        assert running.metric("requests_resumed_total") == _RECOVERIES
        counts.append(
            eventually(lambda: Held.by(running), lambda held: held.processes <= counts[0].processes)
        )
    with capsys.disabled():
        print("", *counts, sep="\n")  # noqa: T201 - the counts are the result
    first, half, last = counts
    for name in ("descriptors", "threads", "tasks"):
        for before, after in zip(getattr(first, name), getattr(last, name), strict=True):
            assert after <= before + 4, name
    assert last.memory_mb - half.memory_mb < 10
