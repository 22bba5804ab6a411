"""Generator of docs/clients.md, from the clients' pins and the names of their checks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.environments import ROOT
from tests.clients.manifest import CLIENTS, Client

PAGE = ROOT / "docs" / "clients.md"

_INTRODUCTION = """\
# Clients

Set your client's address, key and model. `URL` is the address that `serve` prints, such as `http://127.0.0.1:8100`.
`KEY` is one of `--api-key`, or any text if the server requires none. `MODEL` is an id from `GET /v1/models`. OpenAI
clients use `URL/v1`; Anthropic and Ollama clients use `URL`.

`make clients` generates this page. It runs each client, in the given version and in its own environment, against
the demo model on two stages. The server requires an API key, and the model id contains a slash. The page is written
if all checks pass. *Errors*: a wrong key, an unknown model, or a field out of bounds raises the client's own
exception for it. After each client, the server must become idle: cancelled requests must not run on.

| client | version | how | tried |
| --- | --- | --- | --- |
"""

_DIFFERENCES = """
## Differences from conformance suites

These tests of `llm-comply` fail on purpose:

- Images are rejected by name (400), because only text models are supported.
- A request without `model` is answered by the served model; the suite expects 400.
- Text blocks of the Anthropic API have no `citations`; the suite expects null, which broke `@ai-sdk/anthropic`.

If one of them passes, the run fails, so that this list stays accurate. The suite skips three more tests, which are
for models with certain names.
"""


def page() -> str:
    """Return the text of docs/clients.md."""
    by_program: dict[str, list[Client]] = {}
    for client in CLIENTS:
        by_program.setdefault(client.program, []).append(client)
    return _INTRODUCTION + "".join(map(_row, by_program.values())) + _DIFFERENCES


def _row(versions: Sequence[Client]) -> str:
    """Return the row of one program, whose clients are versions of one package."""
    client, where = versions[0], "npm " if versions[0].in_javascript else ""
    numbers = ", ".join(each.version for each in versions)
    return f"| {where}{client.package} | {numbers} | {client.settings} | {'; '.join(client.checks)} |\n"
