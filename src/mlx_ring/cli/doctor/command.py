"""`mlx-ring doctor`: run every check and print each result, with a fix for each problem."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mlx_ring.cli.doctor import Finding, Level
from mlx_ring.cli.flags import with_settings
from mlx_ring.host.addresses import parse_head_address
from mlx_ring.settings.settings_sources import load_settings

_STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "broken": "red"}


@with_settings(("port", "state_dir"))
def doctor(
    head: Annotated[
        str | None,
        typer.Argument(metavar="HEAD[:PORT]", help="Head to compare versions and clocks with."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST[:PORT]", help="Other machine to reach. Repeat it for several."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    *,
    flags: dict[str, object],
) -> None:
    """Check what keeps this machine from serving, alone or in a cluster.

    The exit code is 1 if something is broken.
    """
    from mlx_ring.cli.doctor.network import examine  # imports gRPC, which is slow

    settings = load_settings(flags)
    asked = parse_head_address(head) if head is not None else None
    peers = [parse_head_address(text) for text in peer or ()]
    findings: list[Finding] = []
    for finding in examine(settings, asked, peers):
        findings.append(finding)
        if not as_json:
            _show(finding)
    broken = sum(finding.level == "broken" for finding in findings)
    if as_json:
        print(json.dumps({"broken": broken, "findings": [one.as_json() for one in findings]}, indent=1))
    else:
        print(f"\n{broken} of {len(findings)} findings must be fixed." if broken else "\nNothing is broken.")
    if broken:
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    console = Console(soft_wrap=True, highlight=False)
    line = Text.assemble(
        (f"{finding.level:8}", _STYLES[finding.level]), (f"{finding.what}: ", "bold"), finding.value
    )
    console.print(line)
    if finding.fix:
        console.print(Text(f"        {finding.fix}"))
    sys.stdout.flush()
