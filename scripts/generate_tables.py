"""Write the tables of settings, strategies and models in the documentation from the code, or check them with `--check`."""

from __future__ import annotations

import sys
from pathlib import Path

from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.cluster_file import read_cluster
from mlx_ring.planner.known_models import popular_models
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.what_if import Question, what_if
from mlx_ring.settings.config import ENVIRONMENT_PREFIX, Settings
from mlx_ring.settings.fields import default_text, flag_name, flag_of
from mlx_ring.settings.settings_sources import allowed_values
from mlx_ring.settings.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parent.parent / "docs"
_LARGE = "machines: [{name: large, memory_gb: 4000, bandwidth_gb_s: 800, tflops: 28}]"
_CHIPS = {
    "m1-mac-mini": (8,),
    "m4-mac-mini": (16, 24, 32),
    "m4-max-mac-studio": (36, 48, 64),
    "m3-ultra-mac-studio": (96,),
    "m4-max": (128,),
    "m2-ultra-mac-studio": (192,),
    "m3-ultra": (256, 512),
}
"""Sizes of Macs' memory, each by a machine that has it; the chip makes no difference here."""
_MACS = {gigabytes: f"{chip}-{gigabytes}" for chip, sizes in _CHIPS.items() for gigabytes in sizes}


def settings_table() -> str:
    """Return a table with one row per setting, in the order of `mlx-ring serve --help`."""
    rows = ["| flag | variable | takes | default | |", "| --- | --- | --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        default = f"`{known}`" if (known := default_text(field)) else ""
        flag = "`MODEL`" if name == "model" else f"`{flag_name(name)}`"
        variable = f"`{ENVIRONMENT_PREFIX}{name.upper()}`"
        rows.append(f"| {flag} | {variable} | {allowed_values(field)} | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def other_names_table() -> str:
    """Return a table with the other flags for each setting that has some."""
    rows = ["| flags | mean |", "| --- | --- |"]
    for name, field in Settings.model_fields.items():
        flag = flag_of(field)
        for flags, value in ((flag.aliases, ""), (flag.switch_on, " on"), (flag.switch_off, " off")):
            if flags:
                rows.append(f"| {', '.join(f'`{each}`' for each in flags)} | `{flag_name(name)}{value}` |")
    return "\n".join(rows) + "\n"


def old_names_table() -> str:
    """Return a table with the former names of each setting that has some."""
    rows = ["| old | new |", "| --- | --- |"]
    for name, field in Settings.model_fields.items():
        for old in flag_of(field).old:
            variable = f"{ENVIRONMENT_PREFIX}{old.upper()}"
            rows.append(f"| `{flag_name(old)}`, `{variable}` | `{flag_name(name)}` |")
    return "\n".join(rows) + "\n"


def strategies_table() -> str:
    """Return a table with one row per strategy of the planner."""
    rows = ["| strategy | placement |", "| --- | --- |"]
    rows += [f"| `{name}` | {info.help[0].upper()}{info.help[1:]} |" for name, info in STRATEGIES.items()]
    return "\n".join(rows) + "\n"


def memory_table() -> str:
    """Return a table with one row per popular model: its memory in each format, and the least memory of a Mac for it."""
    machines = read_cluster(_LARGE, "the table")
    models = [(known.name, sizes_of(known.folder, known.name, machines)) for known in popular_models()]
    rows = ["| model | memory (least memory of one Mac) |", "| --- | --- |"]
    formats: dict[str, list[str]] = {}
    for outcome in what_if(models, machines, Question()).outcomes:
        name, _, weights = outcome.label.partition(" ")
        macs = (
            size for size, mac in _MACS.items() if known_profile(mac).usable_bytes >= outcome.memory_bytes
        )
        mac = next((f"{size} GB" for size in macs), "several")
        formats.setdefault(name, []).append(f"{weights}: {outcome.memory_bytes / 1e9:.1f} GB ({mac})")
    rows += [f"| {name} | {', '.join(each)} |" for name, each in formats.items()]
    return "\n".join(rows) + "\n"


TABLES = (
    ("configuration.md", "settings", settings_table),
    ("configuration.md", "other names", other_names_table),
    ("configuration.md", "old names", old_names_table),
    ("planning.md", "strategies", strategies_table),
    ("models.md", "memory", memory_table),
)
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
