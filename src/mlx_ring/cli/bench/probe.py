"""Small requests that find out what a server takes which does not say so itself."""

from __future__ import annotations

import time
from dataclasses import replace

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target
from mlx_ring.cli.bench.summary import Record
from mlx_ring.cli.bench.workload import Job, Words, as_text, draw
from mlx_ring.core.errors import ConfigError, NotReady

_REFUSED = (400, 422)
_FEW, _MANY = 32, 160
"""Words of the prompts by which words are measured."""


async def probe(client: BenchClient, target: Target, options: RequestOptions) -> tuple[Target, list[str]]:
    """What the server takes and how it counts words, and what a person should know of it.

    Fields beyond OpenAI's first ones are tried and left out where they are refused.

    Raises:
        ConfigError: it refuses whatever is tried.
        NotReady: it fails.
    """
    tried: Target | None = replace(target, vocabulary=None, ignores_eos=True)
    record = Record(0, 0.0)
    while tried is not None:
        target = tried
        record = await _ask(client, target, options, _FEW)
        tried = _without_what_is_refused(target, record)
    if record.error is not None:
        raise _failure(client.url, options, record)
    if not record.has_usage:
        return replace(target, tells_usage=False), _notes(replace(target, tells_usage=False))
    more = await _ask(client, target, options, _MANY)
    counted = (_MANY, more.prompt_tokens) if more.error is None else (_FEW + 1, record.prompt_tokens)
    words = Words.measured((_FEW, record.prompt_tokens), counted)
    return replace(target, words=words), _notes(target)


async def _ask(client: BenchClient, target: Target, options: RequestOptions, words: int) -> Record:
    record = Record(0, 0.0)
    job = Job(0, as_text(draw(f"probe {words}", words)), output_tokens=1, arrives_s=0.0)
    await client.ask(target, job, options, record, time.perf_counter())
    return record


def _without_what_is_refused(target: Target, record: Record) -> Target | None:
    """The next to try, a field that the refusal names before any other; None where there is none to try."""
    if record.status not in _REFUSED:
        return None
    weaker: dict[str, Target] = {}
    if target.limit_field == "max_tokens" and "max_completion_tokens" in (record.error or ""):
        return replace(target, limit_field="max_completion_tokens")
    if target.ignores_eos:
        weaker["ignore_eos"] = replace(target, ignores_eos=False)
    if target.tells_usage:
        weaker["stream_options"] = replace(target, tells_usage=False)
    named = [field for field in weaker if field in (record.error or "")]
    return weaker[named[0]] if named else next(iter(weaker.values()), None)


def _notes(target: Target) -> list[str]:
    notes: list[str] = []
    if not target.ignores_eos:
        notes.append("The server does not take ignore_eos: answers may be shorter than asked for.")
    if not target.tells_usage:
        notes.append(
            "The server tells no usage: a word of a prompt and an event of an answer each count as a token, "
            "and prompts' tokens are not known."
        )
    return notes


def _failure(url: str, options: RequestOptions, record: Record) -> ConfigError | NotReady:
    said = f"A first small request to {options.path(url)} fails: {record.error}."
    if record.status is not None and 400 <= record.status < 500:  # noqa: PLR2004 - HTTP's classes
        other = "chat" if options.endpoint == "completions" else "completions"
        return ConfigError(f"{said} Check --model, --api-key, or try --endpoint {other}.")
    return NotReady(f"{said} Look at the server's log.")
