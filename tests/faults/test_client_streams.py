"""Published clients see one unbroken stream although a worker is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.faults.injection import CUT_AT, Served, Stopped, serving_stages, stopping_at_steps
from tests.lazily import lazily

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai
else:
    anthropic, ollama, openai = lazily("anthropic"), lazily("ollama"), lazily("openai")

_PROMPT, _TOKENS = "Tell me", 60


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
def test_published_clients_see_one_unbroken_stream(dense_model: Path, tmp_path: Path) -> None:
    with stopping_at_steps() as hook, serving_stages(dense_model, tmp_path, hook) as running:
        for read in CLIENTS.values():
            undisturbed, disturbed = list[str](), list[str]()
            reason = read(running.server.url, undisturbed.append)
            ranks = running.wait_until_ready()
            stopped = Stopped(hook, ranks[1].pid)
            length = _prompt_length(running)
            stopped.set(length, length + CUT_AT)
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
