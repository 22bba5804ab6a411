"""Recoveries on one machine: published clients, a request that kills its worker, and what many recoveries leave behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.eventually import eventually
from tests.faults.comparison import Judge
from tests.faults.dialects import DIALECTS, EMBEDDINGS, Question, ask
from tests.faults.disturbances import CHUNK, PLACES, SCORED, TOGETHER, Cover, Disturber, Ledger, question_of
from tests.faults.injection import (
    Served,
    Stopped,
    count_tasks,
    held_loads,
    make_fatal,
    make_schema_fatal,
    stopping_at_steps,
)
from tests.faults.models import write_model
from tests.lazily import lazily
from tests.processes import serving

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai
else:
    anthropic, ollama, openai = lazily("anthropic"), lazily("ollama"), lazily("openai")

_FLAGS = (
    *("--stages", "2", "--prefill-chunk", str(CHUNK), "--prefix-cache", "off", "--max-model-len", "1024"),
    *("--pooling", "mean"),
)
_DRAWN_AGAIN = 2
"""Known tokens of an answer that are computed again if all stages keep its KV, to draw the last one again."""
RECOVERIES, WARM_UP = 100, 10
"""Number of recoveries, and of those after which the first count is taken."""


@contextmanager
def served(model: Path, folder: Path, hook: Path, *flags: str) -> Generator[Served]:
    """Serve a model in two stages."""
    with serving(model, *_FLAGS, *flags, folder=folder) as server, ThreadPoolExecutor(16) as threads:
        yield Served(server, hook, server.http, threads)
        assert server.stop() == 0
        assert server.all_ended()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", "dense")


@pytest.mark.timeout(600)
def test_answers_of_every_dialect_continue_after_the_loss_of_a_worker_at_any_moment(
    model: Path, tmp_path: Path
) -> None:
    ledger = Ledger()
    with stopping_at_steps() as hook, served(model, tmp_path, hook, "--max-num-seqs", str(PLACES)) as running:
        disturber = Disturber(running, "dense", Judge(model), Cover(), ledger)
        for moments in (TOGETHER, TOGETHER, SCORED, SCORED):
            disturber.disturb("worker killed", moments)
    assert ledger.wrong() == []
    assert all(run.was_hit and run.was_resumed for run in ledger.runs if run.moment != "drafts")
    assert {run.dialect for run in ledger.runs} == {*DIALECTS, *EMBEDDINGS}


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_while_another_loads_is_replaced_like_the_first(
    model: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    flags = ("--stages", "3", "--max-model-len", "1024", "--spare-worker", "off", "--log-dir", str(logs))
    with serving(model, *flags, folder=tmp_path) as server:
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
    stages: int, victims: Sequence[int], model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)
    flags = ("--stages", str(stages))

    with stopping_at_steps() as hook, served(model, tmp_path, hook, *flags) as running:

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
            stopped.set(len(question.prompt), len(question.prompt) + _CUT_AT)
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
def test_all_workers_stay_if_a_lost_one_answers_before_another_is_linked(model: Path, tmp_path: Path) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 50, max_tokens=40)

    flags = ("--stages", "3", "--log-dir", str(tmp_path / "logs"))

    with stopping_at_steps() as hook, served(model, tmp_path, hook, *flags) as running:

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
            stopped.set(len(question.prompt), len(question.prompt) + _CUT_AT)
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
def test_a_group_stays_around_a_lost_stage_and_its_answers_continue(model: Path, tmp_path: Path) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)

    with stopping_at_steps() as hook, served(model, tmp_path, hook, "--tp", "2") as running:

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
            stopped.set(len(question.prompt), len(question.prompt) + _CUT_AT)
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
    model: Path, tmp_path: Path
) -> None:
    question = replace(question_of("stop"), prompt="abcdefgh" * 20, max_tokens=30)
    logs = tmp_path / "logs"

    with (
        stopping_at_steps() as hook,
        served(model, tmp_path, hook, "--tp", "2", "--log-dir", str(logs)) as running,
    ):

        def answer() -> str:
            (choice,) = ask(
                running.http, running.server.url, DIALECTS["completions"], question, streams=True
            ).choices
            return choice.text

        def waits() -> Any:
            (device,) = (
                each for each in running.status()["devices"] if (each["stage"], each["rank"]) == (0, 0)
            )
            return device["waits"]

        def halts() -> list[str]:
            return re.findall(r"halted after step \d+", (logs / "worker-0-1.log").read_text())

        expected = answer()
        before = running.wait_until_ready()
        late = next(rank for rank in before if (rank.stage, rank.rank) == (0, 1))
        stopped = Stopped(hook, late.pid)
        stopped.set(len(question.prompt), len(question.prompt) + _CUT_AT)
        reading = running.threads.submit(answer)
        stopped.wait()
        eventually(waits, lambda found: found and found["kind"] == "collective" and found["seconds"] > 0.2)
        next(rank for rank in before if rank.stage == 1).process.kill()
        eventually(halts)
        stopped.close()
        assert reading.result() == expected
        after = running.wait_until_ready()
        assert [rank for rank in after if not rank.stage] == [rank for rank in before if not rank.stage]
        assert running.metric("resume_disagreements_total") == 0


# ---- published clients


_PROMPT, _TOKENS, _CUT_AT = "Tell me", 60, 12


def _read_openai(url: str, add: Callable[[str], None]) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    reasons: list[str] = []
    messages: Any = [{"role": "user", "content": _PROMPT}]
    for chunk in client.chat.completions.create(
        model="dense", messages=messages, stream=True, max_tokens=_TOKENS, temperature=1, seed=7
    ):
        for choice in chunk.choices:
            add(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    return reason


def _read_responses(url: str, add: Callable[[str], None]) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    kinds: list[str] = []
    extra = {"seed": 7}
    with client.responses.stream(
        model="dense", input=_PROMPT, max_output_tokens=_TOKENS, temperature=1, extra_body=extra
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                add(event.delta)
    return kinds[-1]


def _read_anthropic(url: str, add: Callable[[str], None]) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": _PROMPT}]
    sampling = {"temperature": 1, "seed": 7}
    with client.messages.stream(
        model="dense", messages=messages, max_tokens=_TOKENS, extra_body=sampling
    ) as stream:
        for text in stream.text_stream:
            add(text)
        return str(stream.get_final_message().stop_reason)


def _read_ollama(url: str, add: Callable[[str], None]) -> str:
    client = ollama.Client(host=url)
    options = {"temperature": 1, "seed": 7, "num_predict": _TOKENS}
    messages = [{"role": "user", "content": _PROMPT}]
    reasons: list[str] = []
    for part in client.chat(model="dense", messages=messages, stream=True, options=options):
        add(part.message.content or "")
        reasons += [part.done_reason] if part.done_reason else []
    (reason,) = reasons
    return reason


CLIENTS = {
    "openai chat": _read_openai,
    "openai responses": _read_responses,
    "anthropic": _read_anthropic,
    "ollama": _read_ollama,
}


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_published_clients_see_one_unbroken_stream(model: Path, tmp_path: Path) -> None:
    with stopping_at_steps() as hook, served(model, tmp_path, hook) as running:
        for read in CLIENTS.values():
            undisturbed, disturbed = list[str](), list[str]()
            reason = read(running.server.url, undisturbed.append)
            ranks = running.wait_until_ready()
            stopped = Stopped(hook, ranks[1].pid)
            length = _prompt_length(running)
            stopped.set(length, length + _CUT_AT)
            reading = running.threads.submit(read, running.server.url, disturbed.append)
            stopped.wait()
            ranks[1].process.kill()
            stopped.close()
            assert reading.result() == reason
            assert "".join(disturbed) == "".join(undisturbed)
            assert len("".join(undisturbed)) == _TOKENS
        assert running.metric("requests_resumed_total") == len(CLIENTS)


def _prompt_length(running: Served) -> int:
    body = {"messages": [{"role": "user", "content": _PROMPT}]}
    return running.http.post(running.server.url + "/tokenize", json=body).json()["count"]


# ---- a request that kills its worker


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_request_that_kills_its_worker_ends_alone_and_its_neighbours_finish(
    model: Path, tmp_path: Path
) -> None:
    completions = DIALECTS["completions"]
    poison = replace(question_of("decode"), prompt="a" * 60)
    numbers = range(8)
    questions = [
        replace(question_of("decode"), prompt="b" * (20 + number), seed=number) for number in numbers
    ]
    with stopping_at_steps() as hook:
        make_fatal(hook, prompt=60, start=60)
        with served(model, tmp_path, hook) as running:

            def answer(question: Question) -> str:
                (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
                return choice.text

            undisturbed = list(running.threads.map(answer, questions))
            first = len(questions[0].prompt)
            # The neighbours are in the middle of their answers when the request arrives.
            stopped = Stopped(hook, running.wait_until_ready()[0].pid)
            stopped.set(first, first + _CUT_AT)
            disturbed = [running.threads.submit(answer, question) for question in questions]
            stopped.wait()
            eventually(lambda: running.metric("num_requests_running") == len(questions))
            url, body = running.server.url + completions.path, completions.whole_body(poison)
            ended = running.threads.submit(running.http.post, url, json=body, timeout=600)
            eventually(lambda: running.metric("num_requests_running") > len(questions))
            stopped.close()
            error = ended.result()
            assert error.json()["error"]["code"] == "repeated_loss"
            assert [each.result() for each in disturbed] == undisturbed
            assert running.metric("instance_losses_total") == 3
            assert running.metric("requests_resumed_total") >= len(questions)
            assert [answer(question) for question in questions] == undisturbed


@pytest.mark.timeout(300)
def test_a_schema_that_kills_its_worker_ends_alone_and_its_neighbours_finish(
    model: Path, tmp_path: Path
) -> None:
    completions, chat = DIALECTS["completions"], DIALECTS["chat"]
    poison = replace(question_of("grammar"), schema={"type": "object", "properties": {"fatal": {}}})
    questions = [
        replace(question_of("decode"), prompt="b" * (20 + number), seed=number, max_tokens=24)
        for number in range(8)
    ]
    with stopping_at_steps() as hook:
        make_schema_fatal(hook, "fatal")
        with served(model, tmp_path, hook) as running:

            def answer(question: Question) -> str:
                (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
                return choice.text

            undisturbed = list(running.threads.map(answer, questions))
            # The neighbours are in the middle of their answers when the request arrives.
            first = len(questions[0].prompt)
            stopped = Stopped(hook, running.wait_until_ready()[0].pid)
            stopped.set(first, first + _CUT_AT)
            disturbed = [running.threads.submit(answer, question) for question in questions]
            stopped.wait()
            url, body = running.server.url + chat.path, chat.whole_body(poison)
            ended = running.threads.submit(running.http.post, url, json=body, timeout=250)
            eventually(lambda: running.metric("instance_losses_total") == 1)
            stopped.close()
            assert ended.result().json()["error"]["code"] == "repeated_loss"
            assert [each.result() for each in disturbed] == undisturbed
            assert running.metric("instance_losses_total") == 3


# ---- leaks


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
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, completions = question_of("stop"), DIALECTS["completions"]
    with stopping_at_steps() as hook, served(model, tmp_path, hook) as running:

        def answer() -> str:
            (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
            return choice.text

        expected, counts = answer(), list[Held]()
        for number in range(RECOVERIES):
            if number in (WARM_UP, RECOVERIES // 2):
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
        assert running.metric("requests_resumed_total") == RECOVERIES
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
