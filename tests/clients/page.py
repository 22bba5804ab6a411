"""docs/clients.md, made from the clients' pins and the names of their checks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.environments import ROOT
from tests.clients.manifest import CLIENTS, Client

PAGE = ROOT / "docs" / "clients.md"

_INTRODUCTION = """\
# Clients

Point the client that you have at mlx-ring. `URL` is what `serve` prints, such as `http://127.0.0.1:8100`; `KEY` is one of
`--api-key`, or any word where the server asks for none; `MODEL` is an id that `GET /v1/models` lists. OpenAI's clients want `URL/v1`,
Anthropic's and Ollama's `URL`.

`make clients` makes this page: it runs each client, in the versions named and in environments of their own, against the
demo model on two stages with a key and an id that has a slash in it, and writes the page when every check has passed. *Errors*: what is refused (a wrong key, an
unknown model, a field out of bounds) is raised as the client's own class for it. After each client the server must come to
rest: what was cancelled is computed no longer.

| client | version | how | tried |
| --- | --- | --- | --- |
"""

_DIFFERENCES = """
## Where suites expect otherwise

Of `llm-comply`'s tests these end otherwise here, on purpose:

- images are refused by name (400): the models are of text;
- a request without `model` is answered by the one that is served, where the suite wants 400.

A test of these that passes fails the run, so that the list stays true. Three more it leaves out by itself, because they are for
models by certain names.
"""


def page() -> str:
    by_program: dict[str, list[Client]] = {}
    for client in CLIENTS:
        by_program.setdefault(client.program, []).append(client)
    return _INTRODUCTION + "".join(map(_row, by_program.values())) + _DIFFERENCES


def _row(versions: Sequence[Client]) -> str:
    """One program's: all of its clients are versions of one package."""
    client, where = versions[0], "npm " if versions[0].in_javascript else ""
    numbers = ", ".join(each.version for each in versions)
    return f"| {where}{client.package} | {numbers} | {client.settings} | {'; '.join(client.checks)} |\n"
