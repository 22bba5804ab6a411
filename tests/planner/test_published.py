"""Published figures, which predictions are held against: each has its source, and stands in one half."""

from __future__ import annotations

from collections import Counter

import pytest
from scripts.published import (
    figures,
    golden_model,
    is_fitted,
    orders,
    packing_of,
    predict,
    profile_of,
    repeats,
    rows_of,
)

from mlx_ring.planner.catalogue import accuracy, chip_profile, chips

_NOT_IN_THE_NAME = (
    *("DeepSeek-V3.2-8bit", "GLM-5-8bit-MXFP8", "GLM-5.1-DQ4plus-q8", "Kimi-K2.6-mlx-DQ3", "DeepSeek-V4-Pro"),
    *("Qwen3-Coder-Next", "Qwen3-Next-80B", "gpt-oss-120b"),
)
"""Conversions whose mix of formats is not in their names."""
_WITH_PICTURES = ("Qwen3.5", "Qwen3.6", "gemma-4")
"""Models whose published bytes have an encoder of pictures, which is not planned for."""


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


@pytest.mark.slow
def test_planned_bytes_are_those_of_the_files() -> None:
    """Expect 1 % at most, without any file, for each conversion whose format is known."""
    ratios: dict[str, float] = {}
    for row in rows_of("published_model_bytes.tsv"):
        name = row["model"].rpartition("/")[2]
        planned = profile_of(row["model"], f"{name} {row['form']}")
        if planned is not None and not name.startswith((*_NOT_IN_THE_NAME, *_WITH_PICTURES)):
            ratios[row["model"]] = planned.weight_bytes / float(row["bytes"])
    assert len(ratios) >= 35
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 0.01} == {}


@pytest.mark.parametrize(
    ("name", "form", "published"),
    [
        ("Qwen3.6-27B", "8-bit", 29_500_938_720),
        ("Qwen3.6-27B", "BF16", 54_713_457_120),
        ("Qwen3.6-35B-A3B", "4-bit", 20_401_929_952),
        ("Qwen3.5-122B-A10B", "8-bit", 130_648_036_320),
    ],
)
def test_the_rest_of_published_bytes_is_the_encoder_of_pictures(name: str, form: str, published: int) -> None:
    """Expect about 27 layers of 1,152 numbers and their way into the model, in half precision: 0.9 GB."""
    planned = profile_of(name, form)
    assert planned is not None
    assert (published - planned.weight_bytes) / 1e9 == pytest.approx(0.91, abs=0.03)


@pytest.mark.parametrize(
    ("form", "engine", "packing"),
    [
        ("Q4_K_M", "llama.cpp", "k-quants"),
        ("UD-Q4_K_XL", "llama.cpp", "k-quants"),
        ("IQ4_XS", "llama.cpp", "k-quants"),
        ("IQ4_NL", "llama.cpp", None),
        ("UD-Q8_K_XL", "llama.cpp", None),
        ("Q8_0", "llama.cpp", None),
        ("q2", "ds4", "k-quants"),
        ("MXFP4 experts, Q8 rest", "ds4", None),
        ("4-bit", "mlx-lm", None),
    ],
)
def test_scales_have_scales_in_blocks_of_256_weights_only(
    form: str, engine: str, packing: str | None
) -> None:
    assert packing_of({"format": form, "engine": engine}) == packing


def test_short_names_of_ds4_mean_its_files() -> None:
    """Expect the published 86.72 GB of its DeepSeek-V4-Flash within 10 %: a few matrices are in half precision."""
    row = {"model": "DeepSeek-V4-Flash", "engine": "ds4", "model_gb": "-"}
    planned = [
        golden_model({**row, "format": form}) for form in ("q2", "IQ2_XXS and Q2_K experts, Q8 rest", "q4")
    ]
    sizes = [model.weight_bytes / 1e9 for model in planned if model is not None]
    assert sizes[0] == sizes[1] == pytest.approx(86.72, rel=0.1)
    assert sizes[2] > 1.5 * sizes[0]


# ---- predicted speeds beside published ones; `python -m scripts.published` prints each row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "mean", "worst"),
    [("decode", 1.15, 1.65), ("prefill", 1.23, 3.52), ("moe-streams", 1.17, 1.43), ("depth", 1.16, 1.61)],
)
def test_predictions_of_the_held_out_half_are_as_near_as_they_were_when_the_fit_was_frozen(
    group: str, mean: float, worst: float
) -> None:
    found = figures(group, fitted=False)
    assert found.is_proved
    assert found.mean <= mean
    assert found.worst <= worst


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_plans_state_how_far_they_are_off(kind: str) -> None:
    assert accuracy(kind) == pytest.approx(figures(kind, fitted=False).mean, abs=0.01)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_two_publishers_of_one_case_differ_less_than_predictions_do(kind: str) -> None:
    """Expect some room between the scatter of published speeds and the predictions."""
    pairs = repeats(kind)
    assert len(pairs) >= 5
    assert pairs[len(pairs) // 2] < figures(kind, fitted=False).mean


def test_prompts_without_a_length_and_machines_slowed_by_heat_are_not_predicted() -> None:
    rows = rows_of("golden_speeds.tsv")
    named = [row for row in rows if row["measure"] == "prefill" and row["prompt"] == "-"]
    hot = [row for row in rows if row["note"].startswith("slowed by heat")]
    assert named
    assert hot
    assert all(predict(row) is None for row in (*named, *hot))


def test_an_engine_without_the_newest_instructions_is_slower_on_a_prompt() -> None:
    """Expect M5 without its accelerators, and Hopper without its own instructions; and 8 bits to be faster in FP8."""
    m5 = {
        engine: chip_profile(chips()["m5-max-40"], 128, "m5", engine=engine)
        for engine in ("ds4", "ds4-tensors")
    }
    assert m5["ds4"].rate("4-bit").flops < m5["ds4-tensors"].rate("4-bit").flops / 2
    h100 = {
        engine: chip_profile(chips()["h100-sxm"], 80, "h100", engine=engine)
        for engine in ("llama.cpp", "vLLM")
    }
    assert h100["llama.cpp"].rate("bfloat16").flops < h100["vLLM"].rate("bfloat16").flops / 2
    assert h100["vLLM"].rate("8-bit").flops > 1.3 * h100["vLLM"].rate("bfloat16").flops


def test_the_order_of_nodes_is_right_in_nine_of_ten_held_out_series() -> None:
    found = orders(fitted=False)
    assert len(found) >= 10
    assert sum(found.values()) >= 0.9 * len(found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "mean", "worst"),
    [("decode", 1.09, 2.38), ("prefill", 1.16, 3.29), ("moe-streams", 1.20, 1.72), ("depth", 1.14, 2.86)],
)
def test_predictions_of_the_fitted_half_are_as_near_as_the_fit(group: str, mean: float, worst: float) -> None:
    found = figures(group, fitted=True)
    assert found.mean <= mean
    assert found.worst <= worst


def test_more_nodes_are_faster_where_they_are_published_to_be() -> None:
    """Expect the order of all series but prefill by ds4, where two and four DGX Sparks are slower than one."""
    wrong = {series for series, is_right in orders(fitted=True).items() if not is_right}
    assert wrong <= {"spark-ds4-4096-prefill", "spark-ds4-8192-prefill"}
