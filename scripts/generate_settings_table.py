"""Write the tables of settings and of strategies in the documentation from the code, or check them with `--check`."""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_ring.settings.config import ENVIRONMENT_PREFIX, Settings
from mlx_ring.settings.fields import default_text, flag_name
from mlx_ring.settings.settings_sources import allowed_values
from mlx_ring.settings.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parent.parent / "docs"


def settings_table() -> str:
    """Return a table with one row per setting, in the order of `mlx-ring serve --help`."""
    rows = ["| flag | variable | takes | default | |", "| --- | --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{known}`" if (known := default_text(field)) else ""
        flag = "`MODEL`" if name == "model" else f"`{flag_name(name)}`"
        variable = f"`{ENVIRONMENT_PREFIX}{name.upper()}`"
        rows.append(f"| {flag} | {variable} | {allowed_values(field)} | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def strategies_table() -> str:
    """Return a table with one row per strategy of the planner."""
    rows = ["| strategy | placement |", "| --- | --- |"]
    rows += [f"| `{name}` | {info.help[0].upper()}{info.help[1:]} |" for name, info in STRATEGIES.items()]
    return "\n".join(rows) + "\n"


TABLES = (("configuration.md", "settings", settings_table), ("planning.md", "strategies", strategies_table))
"""Page, name of the table within it, and what writes it."""


def main() -> None:
    """Write or check the tables."""
    for page, name, write in TABLES:
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        fresh = before + begin + write() + end + after
        if sys.argv[1:] != ["--check"]:
            path.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            sys.exit(f"The table in {page} is out of date. Run `make docs`.")


if __name__ == "__main__":
    main()
