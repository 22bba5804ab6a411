"""Published figures, which predictions are held against: each has its source, and stands in one half."""

from __future__ import annotations

import csv
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Row = Mapping[str, str]


def rows_of(name: str) -> Sequence[Row]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if not line.startswith("#")]
    return list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


def is_fitted(row: Row) -> bool:
    """Report whether predictions may be fitted to a row, by the rule in the file's header."""
    return zlib.crc32(f"44 {row['publisher']}/{row['machine']}".encode()) % 2 == 0


@pytest.mark.parametrize(
    ("name", "key", "numbers"),
    [
        ("golden_speeds.tsv", "quote", ("value",)),
        ("published_machines.tsv", "gb_s", ("gpu_cores", "gb_s")),
        ("published_model_bytes.tsv", "model", ("bytes",)),
    ],
)
def test_each_row_is_whole_and_has_its_source(name: str, key: str, numbers: tuple[str, ...]) -> None:
    rows = rows_of(name)
    assert rows
    for row in rows:
        assert None not in row
        assert all(row.values()), row
        assert row["source"] != "-"
        assert row[key] != "-"
        assert all(float(row[number]) > 0 for number in numbers), row


@pytest.mark.parametrize("group", ["decode", "prefill", "moe-streams", "nodes", "depth"])
def test_each_half_has_speeds_of_several_publishers(group: str) -> None:
    rows = [row for row in rows_of("golden_speeds.tsv") if group in row["groups"].split("+")]
    halves = Counter(is_fitted(row) for row in rows)
    publishers = [{row["publisher"] for row in rows if is_fitted(row) is half} for half in (True, False)]
    assert min(halves[True], halves[False]) >= 20
    assert min(map(len, publishers)) >= 3


def test_a_series_is_in_one_half() -> None:
    halves: dict[str, set[bool]] = {}
    for row in rows_of("golden_speeds.tsv"):
        if row["series"] != "-":
            halves.setdefault(row["series"], set()).add(is_fitted(row))
    assert halves
    assert all(len(found) == 1 for found in halves.values())
