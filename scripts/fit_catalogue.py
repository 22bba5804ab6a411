"""Fit the catalogue's efficiencies and overheads to the fitted half of the published speeds, and write them into it.

    .venv/bin/python -m scripts.fit_catalogue [--write | --cross-validate 8]

Only rows of the fitted half are read, and of those only the ones on one machine. Squared logarithms of predicted over
published are added, bounded for outliers (Huber). Each number's squared distance from its start is added to them, in units
of the distance that is usual for it. The numbers with the least sum are taken. This is done twice. The second time,
generations start from the mean of those with the same backend, and engines from that of their family. Numbers that no row
shows stay there.
Engines' factors are relative to llama.cpp, which has 1.

Alternatives are compared by cross-validation inside the fitted half, never by the held-out one. The publishers' machines
are dealt to so many parts. Each part is predicted by a fit to the others.
"""

from __future__ import annotations

import argparse
import copy
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray
from scripts.published import Row, engine_of, golden_nodes, is_fitted, packing_of, predict, rows_of

from mlx_ring.planner.catalogue import chips

CATALOGUE = Path(__file__).parents[1] / "src" / "mlx_ring" / "planner" / "catalogue.yaml"
_MARK = "# --- fitted ---\n"
_FAULT = "fault of the engine"
"""Start of the note of a row that tells nothing of its machine."""
Key = tuple[str, ...]
Numbers = NDArray[np.float64]
_NOISE, _BEND = 0.15, 1.5
"""Usual error of a row, and the number of them from which an outlier counts less."""
_STEP, _ROUNDS, _TRIES, _ENOUGH = 0.05, 12, 6, 0.02
_HALF_TILES = {"metal": 16.0, "cuda": 64.0, "vulkan": 16.0, "cpu": 4.0}
"""Rows of half a tile of the kernels that multiply experts: of each expert's last tile, half is empty on average."""
_VECTORS = {"metal": 0.25, "cuda": 2.0, "vulkan": 0.25, "cpu": 0.25}
"""Share of plain arithmetic's speed for each further row of a step. CUDA's kernels take up to eight rows at once."""
_UNPACK = {"metal": 12.0, "cuda": 12.0, "vulkan": 12.0, "cpu": 8.0}
"""Operations of plain arithmetic for each quantized weight, as backends start."""
_START: dict[str, Any] = {
    "generations": {
        **{
            name: {"read": 0.8, "matrix": 0.6, "layer": 1.0, "unpack": 1.0}
            for name in ("m1", "m2", "m3", "m4", "m5", "spark", "strix", "cpu")
        },
        **{
            name: {"read": 0.8, "matrix": 0.4, "layer": 1.0, "unpack": 1.0}
            for name in ("ampere", "ada", "blackwell", "hopper")
        },
        # Without accelerators, M5 has the units of M4: 0.65 of 18.4 out of 60 teraflops.
        "m5": {"read": 0.8, "matrix": 0.6, "layer": 1.0, "unpack": 1.0, "older": 0.2},
        "hopper": {"read": 0.8, "matrix": 0.59, "layer": 1.0, "unpack": 1.0, "older": 0.25},
    },
    "tiers": {"usual": {"read": 1.0}, "ultra": {"read": 0.85}},
    "packings": {"k-quants": {"unpack": 1.0}},
    "backends": {
        name: {
            "layer_us": 50.0,
            "experts_us": 60.0,
            "step_us": 300.0,
            "states_us": 20.0,
            "row_us": 3.0,
            "unpack": _UNPACK[name],
            "attention": 0.2,
            "scores": 0.6,
            "experts_pace": 0.8,
            "experts_rows": _HALF_TILES[name],
            "activations": 100.0,
            "vector": _VECTORS[name],
            "scans": 60.0,
            "narrow": 300.0,
            "read": {16: 1.0, 8: 0.95, 4: 0.85},
            "matrix": {16: 1.0, 8: 0.95, 4: 0.95},
        }
        for name in ("metal", "cuda", "vulkan", "cpu")
    },
}
_SPREADS = {
    "read": 0.15,
    "matrix": 0.35,
    "older": 0.2,
    "layer": 0.2,
    "look_back": 0.6,
    "decode": 0.06,
    "overhead": 0.15,
    "prefill": 0.2,
    "prompt_ms": 0.5,
    "narrow": 0.5,
    "experts_pace": 0.3,
    "experts_rows": 0.3,
    "16": 0.05,
    "8": 0.1,
    "4": 0.15,
}
_CHUNKS = {
    "mlx-lm": 2048,
    "exo": 2048,
    "Rapid-MLX": 2048,
    "oMLX": 2048,
    "vllm-mlx": 2048,
    "mlx-swift": 512,
    "ds4": 4096,
    "ds4-tensors": 4096,
    "vLLM": 8192,
    "SGLang": 8192,
    "mlx-serve": 2048,
    "mlxcel": 2048,
    "LM Studio": 2048,
}
"""Tokens that engines compute at once, by their documentation; llama.cpp's micro-batches have 512."""
_FREE = 0.7
"""How far other numbers may be off."""
_OF_UNPACKING = 0.3
"""The same for unpacking by generations, which run the kernels of their backend."""
_OF_TIERS = 0.12
"""The same for a tier: two dies read little faster or slower than their sum."""
_OF_PROMPTS = {
    *(
        "matrix",
        "older",
        "prefill",
        "prompt_ms",
        "narrow",
        "attention",
        "scores",
        "experts_pace",
        "experts_rows",
    ),
    *("activations", "scans"),
}
_LOOSE, _TIGHT = 1.6, 0.5
"""Factors of these distances for numbers of decode steps, and of prompts and attention: rows of prompts scatter more."""
_FAMILIES = (
    ("mlx-lm", "exo", "Rapid-MLX", "oMLX", "vllm-mlx", "mlx-swift", "mlx-serve", "mlxcel", "LM Studio"),
    ("ds4", "ds4-tensors"),
    ("vLLM", "SGLang", "TensorRT-LLM", "pegainfer"),
)
"""Engines that compute with the same products."""
_MEASURED = {("generations", "hopper", "matrix")}
"""Generations' numbers that start from what was measured of products alone."""
_SEEN = 0.05
"""Part of a number's change that a prediction must follow for its row to show the number."""
_OF_ENGINES = ("decode", "overhead", "prefill", "attention", "prompt_ms")
_FIXED = {
    ("tiers", "usual", "read"),
    *(("engines", "llama.cpp", name) for name in _OF_ENGINES),
}
_KEPT = {"chunk", "narrow"}
"""Numbers that stay as they start: without fitting them, cross-validation is no worse."""
_LOOKING_BACK = {"llama.cpp-2024": 4.0}
"""Factors of the operations of attention while decoding, at first: without flash attention, each query head reads the KV."""
_WITH_OWN_ATTENTION = {"llama.cpp-2024", "ds4", "ds4-tensors"}
"""Engines whose overhead and attention are fitted. Without fitting those of others, cross-validation is no worse."""


def leaves(tree: Mapping[Any, Any], path: Key = ()) -> Iterator[Key]:
    """Yield the paths of all numbers."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(cast("dict[Any, Any]", value), (*path, str(name)))
        else:
            yield (*path, str(name))


def get(tree: Any, key: Key) -> float:
    """Return the number at a path."""
    for name in key:
        tree = tree[int(name)] if name.isdigit() else tree[name]
    return float(tree)


def put(tree: Any, key: Key, value: float) -> None:
    """Set the number at a path."""
    for name in key[:-1]:
        tree = tree[int(name)] if name.isdigit() else tree[name]
    last = key[-1]
    tree[int(last) if last.isdigit() else last] = value


def is_free(key: Key) -> bool:
    """Return True if a number is fitted."""
    if key[0] == "engines" and key[-1] in ("overhead", "attention") and key[1] not in _WITH_OWN_ATTENTION:
        return False
    return key not in _FIXED and key[-1] not in _KEPT


def spread_of(key: Key) -> float:
    """Return the logarithm by which a number is usually off from its start."""
    if key[0] == "tiers":
        return _OF_TIERS
    if key[0] == "generations" and key[-1] == "unpack":
        return _OF_UNPACKING
    is_of_prompts = not _OF_PROMPTS.isdisjoint(key[2:])
    return _SPREADS.get(key[-1], _FREE) * (_TIGHT if is_of_prompts else _LOOSE)


def touches(row: Row, key: Key) -> bool:
    """Return True if a number can change the prediction of a row."""
    kind, name = key[0], key[1]
    if kind == "engines":
        return engine_of(row) == name
    machine = row["machine"]
    if kind == "tiers":
        return ("ultra" in machine) == (name == "ultra")
    if kind == "packings":
        return packing_of(row) == name
    if kind == "generations":
        known = {"dgx-spark": "spark", "strix-halo": "strix", "rtx-3090": "ampere", "rtx-4090": "ada"}
        known |= {"rtx-5090": "blackwell", "h100": "hopper", "h200": "hopper"}
        return any(
            part.startswith(name) or known.get(part, "-") == name or known.get(part[:4]) == name
            for part in machine.split("+")
        )
    backend = "vulkan" if machine == "strix-halo" else row["backend"]
    return backend == name


class Fit:
    """Damped least squares (Levenberg and Marquardt) over the numbers' logarithms."""

    def __init__(self, rows: Sequence[Row], start: dict[str, Any]) -> None:
        self._rows = rows
        self.numbers = copy.deepcopy(start)
        self._keys = [key for key in leaves(start) if is_free(key) and any(touches(row, key) for row in rows)]
        self._origin = np.array([math.log(get(start, key)) for key in self._keys])
        self._spreads = np.array([spread_of(key) for key in self._keys])
        # Measurements by one publisher on one machine have much of their error in common.
        alike = Counter(_kind(row) for row in rows)
        self._weights = np.array([alike[_kind(row)] ** -0.5 for row in rows])
        self.seen: set[Key] = set()
        """Numbers that rows show."""

    def run(self) -> None:
        """Fit the numbers."""
        values, damping = self._origin.copy(), 1e-3
        errors = self._errors(values)
        for turn in range(_ROUNDS):
            left, right = self._equations(values, errors)
            before, step = self._cost(values, errors), np.zeros(len(values))
            for _ in range(_TRIES):
                step = np.linalg.solve(left + damping * np.diag(np.diag(left)), right).clip(-0.7, 0.7)
                found = self._errors(values + step)
                if self._cost(values + step, found) <= before:
                    values, errors, damping = values + step, found, damping / 5
                    break
                damping = max(1e-2, damping * 8)
            print(f"round {turn}: mean factor {math.exp(np.abs(errors).mean()):.3f}", flush=True)
            if np.abs(step).max() < _ENOUGH:
                break
        self._set(values)

    def _set(self, values: Numbers) -> None:
        for key, value in zip(self._keys, values.tolist(), strict=True):
            put(self.numbers, key, math.exp(value))

    def _errors(self, values: Numbers) -> Numbers:
        self._set(values)
        return np.array([_error(row, self.numbers) for row in self._rows])

    def _equations(self, values: Numbers, errors: Numbers) -> tuple[Numbers, Numbers]:
        self._set(values)
        slopes = np.zeros((len(self._rows), len(self._keys)))
        for column, key in enumerate(self._keys):
            put(self.numbers, key, math.exp(values[column] + _STEP))
            for place, row in enumerate(self._rows):
                if touches(row, key):
                    slopes[place, column] = (_error(row, self.numbers) - errors[place]) / _STEP
            put(self.numbers, key, math.exp(values[column]))
        bent = np.minimum(1.0, _BEND / np.maximum(np.abs(errors) / _NOISE, 1e-9))
        most = np.abs(slopes).max(axis=0, initial=0.0)
        self.seen = {key for key, slope in zip(self._keys, most.tolist(), strict=True) if slope > _SEEN}
        each = self._weights * bent / _NOISE**2
        left = slopes.T @ (each[:, None] * slopes) + np.diag(self._spreads**-2)
        return left, -slopes.T @ (each * errors) - (values - self._origin) / self._spreads**2

    def _cost(self, values: Numbers, errors: Numbers) -> float:
        sizes = np.abs(errors) / _NOISE
        bent = np.where(sizes <= _BEND, sizes**2 / 2, _BEND * (sizes - _BEND / 2))
        moved = ((values - self._origin) / self._spreads) ** 2
        return float((self._weights * bent).sum() + moved.sum() / 2)


def _kind(row: Row) -> tuple[str, ...]:
    return row["publisher"], row["machine"], str(row["measure"] == "prefill")


def _error(row: Row, numbers: dict[str, Any]) -> float:
    error = math.log((predict(row, numbers) or math.inf) / float(row["value"]))
    return -error if row["measure"] == "first_token" else error


def with_means(fit: Fit, numbers: Mapping[str, Any], *, of_all: bool) -> dict[str, Any]:
    """Return numbers in which generations and engines have the mean of those of their kind that rows show.

    Args:
        fit: a fit that has run.
        numbers: those to change.
        of_all: True for each of them; False for those that no row shows.
    """
    found = copy.deepcopy(dict(numbers))
    backends: dict[str, set[str]] = {}
    for chip in chips().values():
        backends.setdefault(chip.backend, set()).add(chip.generation)
    kinds = [("generations", names, ("read", "matrix")) for names in backends.values()]
    kinds += [("engines", set(names), _OF_ENGINES) for names in _FAMILIES]
    for kind, names, wanted in kinds:
        for number in wanted:
            keys = [(kind, name, number) for name in sorted(names) if name in numbers[kind]]
            shown = [math.log(get(fit.numbers, key)) for key in keys if key in fit.seen - _MEASURED]
            for key in keys if shown else ():
                if key not in _MEASURED and (of_all or key not in fit.seen):
                    put(found, key, math.exp(sum(shown) / len(shown)))
    return found


def fit(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers that fit rows best, rounded."""
    start = copy.deepcopy(_START)
    names = sorted({engine_of(row) for row in rows_of("golden_speeds.tsv")} - {"-"})
    start["engines"] = {
        name: {
            "decode": 1.0,
            "overhead": 1.0,
            "prefill": 1.0,
            "attention": 1.0,
            "prompt_ms": 3.0,
            "chunk": _CHUNKS.get(name, 512),
            **({"look_back": _LOOKING_BACK[name]} if name in _LOOKING_BACK else {}),
        }
        for name in names
    }
    first = Fit(rows, start)
    first.run()
    second = Fit(rows, with_means(first, start, of_all=True))
    second.run()
    return rounded(with_means(second, second.numbers, of_all=False))


def rounded(tree: Any) -> Any:
    """Return the numbers with three digits."""
    if isinstance(tree, dict):
        return {name: rounded(value) for name, value in cast("dict[Any, Any]", tree).items()}
    return tree if isinstance(tree, int) else float(f"{tree:.3g}")


def cross_validate(rows: Sequence[Row], parts: int) -> None:
    """Print the factors by which rows of each publisher's machine are off when it is left out of the fit."""
    sources = Counter((row["publisher"], row["machine"]) for row in rows)
    dealt: list[list[tuple[str, str]]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for source, count in sorted(
        sources.items(), key=lambda item: (-item[1], zlib.crc32(repr(item[0]).encode()))
    ):
        place = sizes.index(min(sizes))
        dealt[place].append(source)
        sizes[place] += count
    errors: dict[str, list[float]] = {}
    for part in dealt:
        others = [row for row in rows if (row["publisher"], row["machine"]) not in part]
        numbers = fit(others)
        for row in rows:
            if (row["publisher"], row["machine"]) in part:
                for group in row["groups"].split("+"):
                    errors.setdefault(group, []).append(abs(_error(row, numbers)))
    for group, found in errors.items():
        print(f"{group}: {len(found)} rows, mean factor {math.exp(sum(found) / len(found)):.3f}", end=", ")
        print(f"worst {math.exp(max(found)):.2f}")


def main() -> None:
    """Fit, print, and write with `--write`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the numbers into the catalogue")
    parser.add_argument(
        "--cross-validate", type=int, metavar="PARTS", help="only predict each part by the others"
    )
    arguments = parser.parse_args()
    rows = [
        row
        for row in rows_of("golden_speeds.tsv")
        if is_fitted(row) and predict_able(row) and not row["note"].startswith(_FAULT)
    ]
    # Clusters are not fitted: their machines, engines and links together show whether the model holds.
    alone = [row for row in rows if row["nodes"] == "1"]
    if arguments.cross_validate:
        cross_validate(alone, arguments.cross_validate)
        return
    numbers = fit(alone)
    text = yaml.safe_dump({"fitted": numbers}, sort_keys=False, default_flow_style=None, width=200)
    if arguments.write:
        before, mark, _ = CATALOGUE.read_text("utf-8").partition(_MARK)
        CATALOGUE.write_text(before + mark + text, "utf-8")
    print(text)
    for row in rows:
        found = predict(row, numbers) or 0
        print(
            f"{found / float(row['value']):5.2f} {row['groups']:14} {row['machine']:12} {row['model']} {row['format']} "
            f"{row['engine']} x{row['nodes']} {row['split']} {row['link']} c{row['context']} p{row['prompt']} "
            f"s{row['streams']} {row['measure']} {row['value']} {found:.1f}"
        )


def predict_able(row: Row) -> bool:
    """Return True if the planner knows the row's model and machine."""
    return golden_nodes(row) is not None and predict(row) is not None


if __name__ == "__main__":
    main()
