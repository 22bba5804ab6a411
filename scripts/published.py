"""Published speeds and sizes of models, as the planner's own profiles: for the fit of its catalogue and for tests.

The data are in `tests/planner`: `golden_speeds.tsv`, whose header has the rule that splits it into a fitted half and a
held-out one, and `published_model_bytes.tsv`. Configurations are those of `models/known_models.yaml`.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import Fitted, chip_profile, chips, named_links
from mlx_ring.planner.known_models import MXFP4, Q8, beside_experts, configs, folder_of, with_format
from mlx_ring.planner.layer_parts import WeightFormat, WeightFormats, read_formats
from mlx_ring.planner.model_sizes import profile_config, profile_folder
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import Demand
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, alone, given_group
from mlx_ring.rpc.link_profile import ETHERNET

DATA = Path(__file__).parents[1] / "tests" / "planner"
Row = Mapping[str, str]


@cache
def rows_of(name: str) -> Sequence[Row]:
    """Return the rows of a table by its columns' names."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if not line.startswith("#")]
    return list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


def is_fitted(row: Row) -> bool:
    """Return True if a row is in the half to which predictions may be fitted, by the rule in the file's header."""
    return zlib.crc32(f"44 {row['publisher']}/{row['machine']}".encode()) % 2 == 0


def config_of(model: str) -> dict[str, Any] | None:
    """Return the configuration of a model or of a conversion of it; None if it is not among them."""
    name = model.rpartition("/")[2].lower()
    named = (known for known in configs() if re.search(rf"{re.escape(known.lower())}(?![\w.])", name))
    found = max(named, key=len, default=None)
    return None if found is None else dict(configs()[found])


@cache
def profile_of(model: str, form: str) -> ModelProfile | None:
    """Return the planner's profile of a model in a format; None if its configuration is not known."""
    config = config_of(model)
    return None if config is None else profile_folder(folder_of(with_format(config, form)), model)


def resized(model: ModelProfile, nbytes: float) -> ModelProfile:
    """Return the model with weights that have this many bytes in all, in proportion."""
    ratio = nbytes / model.weight_bytes
    return replace(
        model,
        layers=tuple(
            replace(
                layer,
                weight_bytes=int(layer.weight_bytes * ratio),
                read_bytes=int(layer.read_bytes * ratio),
                attention_bytes=int(layer.attention_bytes * ratio),
                whole_bytes=int(layer.whole_bytes * ratio),
            )
            for layer in model.layers
        ),
        embedding_bytes=int(model.embedding_bytes * ratio),
        head_bytes=int(model.head_bytes * ratio),
        widened=None,
        with_scales=None,
        dequantized=None,
    )


# ---- predictions of rows of golden_speeds.tsv

_BITS = (
    ("iq4_nl", 4.5, 4),
    ("iq4_xs", 4.3, 4),
    ("iq2", 2.4, 2),
    ("iq1", 1.8, 2),
    ("q2", 2.6, 2),
    ("q3", 3.9, 3),
    ("q4_0", 4.5, 4),
    ("q4_1", 5.0, 4),
    ("q4", 4.85, 4),
    ("q5_0", 5.5, 5),
    ("q5", 5.7, 5),
    ("q6", 6.6, 6),
    ("q8", 8.5, 8),
    ("fp8", 8.0, 8),
    ("int4", 4.16, 4),
    ("awq", 4.16, 4),
    ("gptq", 4.16, 4),
)
"""Kinds of GGUF and others by a part of their name: bits of a weight with its scales, and bits of the numbers alone."""
_K_QUANTS = re.compile(r"(?<!ud-)q[2-6]_k|iq[123]|iq4_xs|ud-i?q[1-6]")
"""Formats of llama.cpp with blocks of 256 weights, whose scales are packed too.

`UD-Q8_K_XL` has matrices of `Q8_0` and half precision; `IQ4_NL` has a scale for each 32 weights.
"""
_OF_DS4 = {
    "q2": "iq2_xxs and q2_k experts, q8 rest",
    "iq2 for the most part": "iq2_xxs and q2_k experts, q8 rest",
    "q4": "q4_k experts, q8 rest",
}
"""Formats that ds4 names in short: it reads its own files only (antirez/ds4, docs/MODELS.md)."""
_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "mxfp4": MXFP4,
    "q4_k": {"group_size": 64, "bits": 4},
    "iq2_xxs": {"group_size": 128, "bits": 2},
}
"""Formats of experts by a part of their name: 4.5 bits, and 2.25 of which two matrices have 2.06 and one 2.63."""
_OTHER_MODEL = 0.4
"""Part by which published bytes differ from the planned ones at most, unless they are of another model."""
_GROUP = 64
_Q4 = {"group_size": _GROUP, "bits": 4}
_LEAST_ROWS, _LEAST_PUBLISHERS = 6, 3
_AS_FAST = 1.03
_SHORT_CONTEXT = 2500
_FLASH_ATTENTION = "2024-10"
"""Until then, measurements with llama.cpp were made without flash attention, which slows it behind a context."""
_SHORT_PROMPT, _SHORT_ANSWER = 256, 128
_PROMPTS_ALONE = ("llama.cpp", "llama.cpp-2024", "llama.cpp-rocm", "ds4", "ds4-tensors", "ollama")
"""Engines that time a prompt without drawing a token. Others measure until the first token."""
_HOT = "slowed by heat"
_MICRO_BATCH = re.compile(r"micro-batches of (\d+)")
"""Tokens of a prompt that an engine computed at once, where a row's note says so."""
_CORES = {
    "m1-max": 32,
    "m1-ultra": 64,
    "m2-ultra": 76,
    "m2-max": 38,
    "m2-pro": 19,
    "m3-max": 40,
    "m3-pro": 18,
    "m3-ultra": 80,
    "m4": 10,
    "m4-pro": 20,
    "m4-max": 40,
    "m5-pro": 20,
    "m5-max": 40,
}
"""GPU cores where a row has none: those of the larger bin."""


def golden_model(row: Row) -> ModelProfile | None:
    """Return the model of a row, with its published bytes where they are; None if its sizes are not known."""
    return _golden_model(row["model"], format_of(row), row["engine"], row["model_gb"])


@cache
def _golden_model(name: str, form: str, engine: str, size: str) -> ModelProfile | None:
    config = config_of(name)
    if config is None or form == "-":
        return None
    served = _as_served(config, form, engine)
    kind = None if served is not None else _kind(form)
    folder = folder_of(config if served is None else served)
    if size != "-":
        formats = read_formats(folder) if kind is None else WeightFormats(kind)
        model = profile_config(folder, name, formats)
        if abs(float(size) * 1e9 / model.weight_bytes - 1) <= _OTHER_MODEL:
            return resized(model, float(size) * 1e9)
    return profile_folder(folder, name, kind)


def _as_served(config: Mapping[str, Any], form: str, engine: str) -> dict[str, Any] | None:
    """Return the configuration with MLX's formats, or with experts apart; None for a format of all weights."""
    if "mxfp4" in form and config["model_type"] == "gpt_oss":
        rest = _Q4 if "4-bit rest" in form else False if "f16" in form or engine == "vLLM" else Q8
        return {**config, "quantization": {**MXFP4, **beside_experts(config, value=rest)}}
    if "experts" in form:
        experts = next(kind for name, kind in _EXPERTS.items() if name in form)
        return {**config, "quantization": {**experts, **beside_experts(config, value=Q8)}}
    if form.startswith(("3-bit", "4-bit", "6-bit", "8-bit", "mxfp8", "bf16", "f16", "dq4")):
        return with_format(config, "4-bit" if form.startswith("dq4") else form)
    return None


def _kind(form: str) -> WeightFormat | None:
    for part, bits, numbers in _BITS:
        if part in form:
            # Scales so large that a weight has the bits of the kind.
            return WeightFormat(numbers, _GROUP, scale_bits=round(_GROUP * (bits - numbers)))
    return None


def golden_nodes(row: Row, fitted: Fitted | None = None) -> list[NodeProfile] | None:
    """Return the machines of a row, with its engine's factors; None if one is not in the catalogue."""
    engine = engine_of(row)
    found: list[NodeProfile] = []
    for machine in row["machine"].split("+"):
        cores = row["gpu_cores"] if row["gpu_cores"] != "-" else str(_CORES.get(machine, ""))
        names = (machine, f"{machine}-{cores}", f"{machine}-sxm")
        chip = next((chips()[name] for name in names if name in chips()), None)
        if chip is None:
            return None
        if row["backend"] in ("cuda", "metal", "vulkan", "rocm", "cpu") and chip.generation == "strix":
            chip = replace(chip, backend="vulkan")
        node = chip_profile(
            chip, 128, f"{machine}-{len(found)}", engine=engine, packing=packing_of(row), fitted=fitted
        )
        chunk = _MICRO_BATCH.search(row["note"])
        found.append(replace(node, chunk_tokens=int(chunk[1])) if chunk else node)
    count = int(row["nodes"])
    return [replace(found[place % len(found)], name=f"node-{place}") for place in range(count)]


def engine_of(row: Row) -> str:
    """Return the engine under whose name its factors are fitted."""
    engine, _, build = row["engine"].partition(" (")
    if engine == "ds4" and "tensors" in build:
        return "ds4-tensors"
    if engine == "llama.cpp" and row["date"] < _FLASH_ATTENTION:
        return "llama.cpp-2024"
    if engine.startswith("llama.cpp") and row["backend"] == "rocm":
        return "llama.cpp-rocm"
    same = {
        "llama.cpp server": "llama.cpp",
        "mlx-lm server": "mlx-lm",
        "mlx": "mlx-lm",
        "mlx distributed": "mlx-lm",
    }
    return same.get(engine, "mlx-swift" if engine.startswith("mlx-swift") else engine)


def format_of(row: Row) -> str:
    """Return the format of a row's weights in small letters, written out."""
    form = row["format"].lower()
    return _OF_DS4.get(form, form) if row["engine"].startswith("ds4") else form


def packing_of(row: Row) -> str | None:
    """Return the way in which a row's weights are packed, if their scales have scales; None if they do not."""
    return "k-quants" if _K_QUANTS.search(format_of(row)) else None


def predict(row: Row, fitted: Fitted | None = None) -> float | None:
    """Return the predicted value of a row, in its unit; None if the header says that it is not predicted."""
    model, nodes = golden_model(row), golden_nodes(row, fitted)
    if (
        model is None
        or nodes is None
        or row["measure"] not in ("decode", "throughput", "prefill", "first_token")
        or (row["measure"] in ("prefill", "first_token") and row["prompt"] == "-")
        or row["note"].startswith(_HOT)
    ):
        return None
    prompt, answer = _number(row["prompt"], _SHORT_PROMPT), _number(row["answer"], _SHORT_ANSWER)
    if row["measure"] in ("prefill", "first_token"):
        context, streams = _number(row["context"], 0), 1
    else:
        context, streams = _number(row["context"], prompt) + answer // 2, int(row["streams"])
    demand = Demand(2 * max(context, 1), streams)
    pipeline = _pipeline(row, model, nodes, demand)
    stage = pipeline.stages[0]
    if row["measure"] == "prefill":
        if len(pipeline.stages) == 1:
            step_s = max(node.costs.step_s + node.prompt_s for node in nodes)
            if engine_of(row) not in _PROMPTS_ALONE:
                step_s = pipeline.lone_stream(prompt)[1] + nodes[0].prompt_s
            return prompt / (stage.prefill_seconds(prompt, context) + step_s)
        return prompt / pipeline.first_token_s(prompt)
    if row["measure"] == "first_token":
        return pipeline.first_token_s(prompt)
    return pipeline.tokens_per_s() if streams > 1 else 1 / pipeline.lone_stream(context)[1]


def _pipeline(row: Row, model: ModelProfile, nodes: Sequence[NodeProfile], demand: Demand) -> Pipeline:
    name = row["link"].split(" ")[0]
    if name in ("-", "tcp", "rdma", "tb4-rdma"):
        name = {"tcp": "tb5", "rdma": "100gbe-rdma", "tb4-rdma": "tb5-rdma"}.get(
            name, "200gbe-rdma" if row["machine"] == "dgx-spark" else "2.5gbe"
        )
    link = named_links().get(name, ETHERNET)
    cluster = ClusterProfile(tuple(nodes), usual_link=link)
    shared, layers = SharedModel(model, demand, None), len(model.layers)
    if len(nodes) == 1 or row["split"] != "pipeline":
        group = (
            alone(shared, nodes[0])
            if len(nodes) == 1
            else given_group(shared, cluster, [(node, 1 / len(nodes)) for node in nodes])
        )
        return Pipeline(cluster, [GroupStage(group, LayerRange(0, layers))], demand)
    cuts = [layers * place // len(nodes) for place in range(len(nodes) + 1)]
    return Pipeline(
        cluster,
        [
            GroupStage(alone(shared, node), LayerRange(first, end))
            for node, first, end in zip(nodes, cuts, cuts[1:], strict=False)
        ],
        demand,
    )


def _number(text: str, unknown: int) -> int:
    return unknown if text == "-" else int(float(text))


# ---- figures


@dataclass(frozen=True, slots=True)
class Figures:
    """How far predictions of a group of rows are off, as factors of at least 1."""

    rows: int
    publishers: int
    mean: float
    """Mean of the factors' logarithms."""
    worst: float
    lines: tuple[str, ...]
    """Published, predicted, ratio and description of each row."""

    @property
    def is_proved(self) -> bool:
        """True if enough rows of enough publishers stand behind it."""
        return self.rows >= _LEAST_ROWS and self.publishers >= _LEAST_PUBLISHERS


@cache
def figures(group: str, *, fitted: bool) -> Figures:
    """Return the figures of a group's rows on one machine, in one of the halves."""
    rows = [
        row
        for row in rows_of("golden_speeds.tsv")
        if is_fitted(row) is fitted and group in row["groups"].split("+") and row["nodes"] == "1"
    ]
    found = [(row, predicted) for row in rows if (predicted := predict(row)) is not None]
    factors = [abs(math.log(predicted / float(row["value"]))) for row, predicted in found]
    return Figures(
        len(found),
        len({row["publisher"] for row, _ in found}),
        math.exp(sum(factors) / len(factors)),
        math.exp(max(factors)),
        tuple(_line(row, predicted) for row, predicted in found),
    )


def _line(row: Row, predicted: float) -> str:
    names = ("publisher", "machine", "model", "format", "engine", "nodes", "link", "measure")
    said = " ".join(row[name] for name in names)
    ratio = predicted / float(row["value"])
    where = f"c{row['context']} p{row['prompt']} s{row['streams']}"
    return f"{row['value']:>9} {predicted:9.1f} {ratio:5.2f}  {said} {where}"


def orders(*, fitted: bool) -> dict[str, bool]:
    """Return for each series on several numbers of nodes whether predictions have the published order.

    Of speeds that are published as equal to within 3 %, either may be predicted as the higher one.
    """
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows_of("golden_speeds.tsv"):
        if row["series"] != "-" and "nodes" in row["groups"].split("+") and is_fitted(row) is fitted:
            predicted = predict(row)
            if predicted is not None:
                series.setdefault(row["series"], []).append((float(row["value"]), predicted, row["nodes"]))
    return {
        name: all(
            predicted >= other
            for value, predicted, _ in found
            for less, other, _ in found
            if value > less * _AS_FAST
        )
        for name, found in series.items()
        if len({nodes for _, _, nodes in found}) > 1
    }


def repeats(measure: str) -> list[float]:
    """Return the factors by which two publishers differ, sorted: on one kind of machine, with one engine, model and format.

    No prediction can be nearer to both. Rows of both halves count, because nothing is predicted.

    Args:
        measure: "decode", for contexts below 2,500 tokens, or "prefill", for prompts and contexts of one length.
    """
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in rows_of("golden_speeds.tsv"):
        nodes = golden_nodes(row)
        if row["measure"] != measure or row["nodes"] != "1" or nodes is None or predict(row) is None:
            continue
        context = _number(row["context"], _number(row["prompt"], 0))
        if measure == "decode" and context >= _SHORT_CONTEXT:
            continue
        lengths = (row["context"], row["prompt"]) if measure == "prefill" else ()
        machine = row["machine"].removesuffix(f"-{row['gpu_cores']}"), str(nodes[0].flops)
        form = re.sub("bf16", "f16", row["format"].lower().removeprefix("ud-"))[:4]
        key = (*machine, row["model"], form, engine_of(row), *lengths)
        found.setdefault(key, {}).setdefault(row["publisher"], []).append(math.log(float(row["value"])))
    means = [[sum(values) / len(values) for values in each.values()] for each in found.values()]
    return sorted(math.exp(abs(one - other)) for each in means for one, other in combinations(each, 2))


def main() -> None:
    """Print published and predicted speeds of the fitted half, or of the held-out one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--held-out", action="store_true", help="print the half to which nothing was fitted")
    fitted = not parser.parse_args().held_out
    for group in ("decode", "prefill", "moe-streams", "depth"):
        found = figures(group, fitted=fitted)
        print(f"{group}: {found.rows} rows, mean factor {found.mean:.3f}, worst {found.worst:.2f}", end="")
        print("" if found.is_proved else ", unproved")
        print(*found.lines, sep="\n")
    for measure in ("decode", "prefill"):
        pairs = repeats(measure)
        mean = math.exp(sum(map(math.log, pairs)) / len(pairs))
        print(f"two publishers, {measure}: {len(pairs)} pairs, mean factor {mean:.3f}, worst {pairs[-1]:.2f}")
    for series, is_right in orders(fitted=fitted).items():
        print("right order" if is_right else "WRONG order", series, sep="  ")


if __name__ == "__main__":
    main()
