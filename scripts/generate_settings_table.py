"""Write the table of settings in docs/configuration.md from the settings model, or check it with `--check`."""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_ring.settings.config import ENVIRONMENT_PREFIX, Settings, flag_name
from mlx_ring.settings.settings_sources import allowed_values

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def settings_table() -> str:
    """Return a table with one row per setting, in the order of `mlx-ring serve --help`."""
    rows = ["| flag | variable | takes | default | |", "| --- | --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        flag = "`MODEL`" if name == "model" else f"`{flag_name(name)}`"
        variable = f"`{ENVIRONMENT_PREFIX}{name.upper()}`"
        rows.append(f"| {flag} | {variable} | {allowed_values(field)} | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write or check the table."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    fresh = before + BEGIN + settings_table() + END + after
    if sys.argv[1:] == ["--check"]:
        if fresh != text:
            sys.exit(f"The table in {PAGE.name} is out of date. Run `make docs`.")
        return
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
