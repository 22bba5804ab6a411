"""Requests that kill their worker each time: they end alone, and their neighbours finish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.eventually import eventually
from tests.faults.dialects import DIALECTS, Question, ask
from tests.faults.disturbances import question_of
from tests.faults.injection import (
    CUT_AT,
    Stopped,
    make_fatal,
    make_schema_fatal,
    serving_stages,
    stopping_at_steps,
)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_request_that_kills_its_worker_ends_alone_and_its_neighbours_finish(
    dense_model: Path, tmp_path: Path
) -> None:
    completions = DIALECTS["completions"]
    poison = replace(question_of("decode"), prompt="a" * 60)
    numbers = range(8)
    questions = [
        replace(question_of("decode"), prompt="b" * (20 + number), seed=number) for number in numbers
    ]
    with stopping_at_steps() as hook:
        make_fatal(hook, prompt=60, start=60)
        with serving_stages(dense_model, tmp_path, hook) as running:

            def answer(question: Question) -> str:
                (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
                return choice.text

            undisturbed = list(running.threads.map(answer, questions))
            first = len(questions[0].prompt)
            # The neighbours are in the middle of their answers when the request arrives.
            stopped = Stopped(hook, running.wait_until_ready()[0].pid)
            stopped.set(first, first + CUT_AT)
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
    dense_model: Path, tmp_path: Path
) -> None:
    completions, chat = DIALECTS["completions"], DIALECTS["chat"]
    poison = replace(question_of("grammar"), schema={"type": "object", "properties": {"fatal": {}}})
    questions = [
        replace(question_of("decode"), prompt="b" * (20 + number), seed=number, max_tokens=24)
        for number in range(8)
    ]
    with stopping_at_steps() as hook:
        make_schema_fatal(hook, "fatal")
        with serving_stages(dense_model, tmp_path, hook) as running:

            def answer(question: Question) -> str:
                (choice,) = ask(running.http, running.server.url, completions, question, streams=True).choices
                return choice.text

            undisturbed = list(running.threads.map(answer, questions))
            # The neighbours are in the middle of their answers when the request arrives.
            first = len(questions[0].prompt)
            stopped = Stopped(hook, running.wait_until_ready()[0].pid)
            stopped.set(first, first + CUT_AT)
            disturbed = [running.threads.submit(answer, question) for question in questions]
            stopped.wait()
            url, body = running.server.url + chat.path, chat.whole_body(poison)
            ended = running.threads.submit(running.http.post, url, json=body, timeout=250)
            eventually(lambda: running.metric("instance_losses_total") == 1)
            stopped.close()
            assert ended.result().json()["error"]["code"] == "repeated_loss"
            assert [each.result() for each in disturbed] == undisturbed
            assert running.metric("instance_losses_total") == 3
