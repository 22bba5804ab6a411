"""Real ranks, each with its part of a model, compared with the whole model in logits, tokens and memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
from tests.once import once
from tests.worker.tensor.models import FAMILIES, write_family
from tests.worker.tensor.ring import run_ranks

from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.tensor_shares import TensorShare, read_tensor_sizes, share_out

STEPS = (((3, 1, 4, 1, 5, 9, 2), (6, 5, 3)), ((5,), (8,)), ((9,), (7,)), ((9,), (3,)))
"""Two prompts of different lengths, then three tokens of each."""
UNEQUAL = {
    family: (3, 1) if "num_key_value_heads" in entries else (5, 3) for family, entries in FAMILIES.items()
}
"""Proportions of the families: 5:3 of eight KV heads, 3:1 of four."""


@dataclass(frozen=True)
class Case:
    """Case for a group of ranks."""

    family: str = ""
    proportions: tuple[float, ...] = ()
    bits: int | None = None
    cuts: tuple[int, ...] = ()
    kind: str = "split"
    entries: tuple[tuple[str, Any], ...] = ()
    kv_bits: int | None = None
    mode: str = "affine"
    """Mode of quantization."""

    @property
    def model(self) -> str:
        """Name of its model's folder."""
        return "-".join(map(str, (self.family, self.bits, self.mode, *(value for _, value in self.entries))))

    @property
    def name(self) -> str:
        split = "-".join(map(str, (*self.proportions, "cut", *self.cuts, self.kv_bits)))
        return f"{self.kind}-{self.model}-{split}"


UNEQUAL_CASES = [Case(family, UNEQUAL[family], bits) for family in FAMILIES for bits in (None, 8, 4)]
EQUAL_CASES = [Case(family, (1, 1)) for family in FAMILIES if family != "phi3"]
UNTIED = (("tie_word_embeddings", False),)
MORE_CASES = [
    Case("phi3", (1, 1), entries=UNTIED),
    Case("llama", (3, 5), 4, entries=UNTIED),
    Case("qwen3", (5, 3), 4, mode="mxfp4"),
    Case("qwen3_moe", (3, 1), 8, mode="mxfp8"),
    Case("qwen3", (5, 3), cuts=(1,)),
    Case("phi3", (5, 3), cuts=(1,)),
    Case("qwen3_moe", (3, 1), 4, cuts=(1,), kv_bits=8),
]
_ROOMY = (("hidden_size", 768), ("intermediate_size", 1536), ("head_dim", 64), ("vocab_size", 3072))
LOADED = [
    Case("qwen3", (5, 3), 4, kind="load", entries=_ROOMY),
    Case("phi3", (5, 3), 8, kind="load", entries=_ROOMY),
    Case("qwen3_moe", (3, 1), 8, kind="load", entries=(*_ROOMY, ("moe_intermediate_size", 512))),
]
"""Quantized models, whose parts are so large that MLX's rounding of memory does not matter."""
SHARDED = [Case(case.family, case.proportions, kind="shard") for case in EQUAL_CASES]
FOUR_CASES = [
    Case("llama", (3, 2, 2, 1)),
    Case("qwen3_moe", (1, 1, 1, 1), 4),
    Case("phi3", (1, 1, 1, 1), 8),
]
NATIVE = [
    Case(family, UNEQUAL[family], 4, kind=kind)
    for family in ("llama", "qwen3")
    for kind in ("native", "mixed", "layer by layer")
]
GROUP = Case(kind="group")


@dataclass
class RankResults:
    """Folder with the results of groups of ranks."""

    folder: Path

    def run(self, cases: list[Case], size: int) -> None:
        """Have `size` ranks run the cases."""
        for case in cases:
            if case.family and not self.model(case).exists():
                write_family(self.model(case), case.family, case.bits, case.mode, **dict(case.entries))
        described = [
            {
                "name": case.name,
                "kind": case.kind,
                "folder": str(self.model(case)),
                "proportions": case.proportions,
                "cuts": case.cuts,
                "kv_bits": case.kv_bits,
                "steps": STEPS,
            }
            for case in cases
        ]
        ranks = self.folder / str(size)
        ranks.mkdir(exist_ok=True)
        run_ranks(described, size, ranks)

    def model(self, case: Case) -> Path:
        return self.folder / case.model

    def arrays(self, case: Case, size: int) -> dict[str, mx.array]:
        path = self.folder / str(size) / f"{case.name}.safetensors"
        return cast("dict[str, mx.array]", mx.load(str(path)))

    def has(self, case: Case, size: int) -> bool:
        """Report whether the ranks could run the case."""
        return (self.folder / str(size) / f"{case.name}.safetensors").exists()

    def reports(self, case: Case, size: int, entry: str) -> list[Any]:
        """Return what each rank reported: `bytes` of memory that its part of the weights took, `prepared` layers, or draws."""
        ranks = self.folder / str(size)
        return [json.loads((ranks / f"{case.name}.{rank}.json").read_text())[entry] for rank in range(size)]


@pytest.fixture(scope="module")
def results(shared: Path) -> RankResults:
    """Run all cases of two ranks and of four; return their results."""
    results = RankResults(shared / "tensor")

    def run() -> None:
        results.run([*UNEQUAL_CASES, *EQUAL_CASES, *MORE_CASES, *LOADED, *SHARDED, *NATIVE, GROUP], 2)
        results.run([*FOUR_CASES, GROUP], 4)

    once(results.folder, run)
    return results


@pytest.fixture(scope="module")
def whole(results: RankResults) -> Callable[[Case], list[list[mx.array]]]:
    """Return a function that gives mlx-lm's logits of the whole model by step and row: (tokens, vocabulary)."""

    @cache
    def logits(model: str) -> list[list[mx.array]]:
        whole = cast("Any", load_model(results.folder / model)[0])
        found = [list[mx.array]() for _ in STEPS]
        for row in range(len(STEPS[0])):
            caches = make_prompt_cache(whole)
            for number, rows in enumerate(STEPS):
                found[number].append(whole(mx.array([rows[row]]), cache=caches)[0])
        mx.eval(found)
        return found

    return lambda case: logits(case.model)


def relative_difference(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference, relative to the largest logit."""
    return cast("float", (mx.abs(found - expected).max() / mx.abs(expected).max()).item())


def assert_logits(
    found: dict[str, mx.array], expected: list[list[mx.array]], tolerance: float = 1e-4
) -> None:
    for number, rows in enumerate(expected):
        for row, logits in enumerate(rows):
            ours = found[f"logits{number}"][row, : logits.shape[0]]
            assert relative_difference(ours, logits) <= tolerance


def case_id(case: Case) -> str:
    return case.name.removeprefix("split-")


@pytest.mark.parametrize("case", [*UNEQUAL_CASES, *EQUAL_CASES, *MORE_CASES[:-1]], ids=case_id)
def test_two_ranks_give_the_logits_of_the_whole_model(
    results: RankResults, whole: Callable[[Case], list[list[mx.array]]], case: Case
) -> None:
    assert_logits(results.arrays(case, 2), whole(case))


@pytest.mark.parametrize("case", FOUR_CASES, ids=case_id)
def test_four_ranks_give_the_logits_of_the_whole_model(
    results: RankResults, whole: Callable[[Case], list[list[mx.array]]], case: Case
) -> None:
    assert_logits(results.arrays(case, 4), whole(case))


def test_ranks_with_a_quantized_cache_give_the_logits_of_the_whole_model(
    results: RankResults, whole: Callable[[Case], list[list[mx.array]]]
) -> None:
    assert_logits(results.arrays(MORE_CASES[-1], 2), whole(MORE_CASES[-1]), tolerance=0.05)


@pytest.mark.parametrize("case", SHARDED, ids=case_id)
def test_equal_shares_give_the_logits_of_mlx_lms_own_split(results: RankResults, case: Case) -> None:
    theirs = results.arrays(case, 2)
    ours = results.arrays(Case(case.family, case.proportions), 2)
    for number, rows in enumerate(STEPS):
        for row, tokens in enumerate(rows):
            expected = theirs[f"logits{number}.{row}"]
            assert relative_difference(ours[f"logits{number}"][row, : len(tokens)], expected) <= 1e-4


@pytest.mark.parametrize("case", [*UNEQUAL_CASES, *EQUAL_CASES, *MORE_CASES], ids=case_id)
def test_best_token_of_two_ranks_is_the_best_of_all_logits(results: RankResults, case: Case) -> None:
    found = results.arrays(case, 2)
    for number in range(len(STEPS)):
        assert mx.array_equal(found[f"best{number}"], mx.argmax(found[f"logits{number}"], axis=-1))


@pytest.mark.parametrize("size", [2, 4])
def test_lowest_of_equally_good_tokens_wins_on_any_rank(results: RankResults, size: int) -> None:
    found = results.arrays(GROUP, size)
    expected = mx.argmax(found["logits"], axis=-1)
    assert mx.array_equal(found["best"], expected)
    assert mx.array_equal(found["best of half"], expected)
    assert expected[0, 0].item() == 1
    assert expected[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [2, 4])
def test_arrays_of_unequal_widths_are_gathered_in_rank_order(results: RankResults, size: int) -> None:
    row = [rank for rank in range(size) for _ in range(rank + 1)]
    assert results.arrays(GROUP, size)["gathered"].tolist() == [row, row]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_array_of_the_first(results: RankResults, size: int) -> None:
    found = {name: array for name, array in results.arrays(GROUP, size).items() if name.startswith("first ")}
    assert len(found) == 5
    assert all(array.tolist() == [1] for array in found.values())


@pytest.mark.parametrize("size", [2, 4])
def test_drawing_from_parts_of_the_logits_gives_the_tokens_of_all_logits(
    results: RankResults, size: int
) -> None:
    found = results.arrays(GROUP, size)
    alone = cast("list[int]", found["drawn alone"].tolist())
    assert found["drawn"].tolist() == alone
    assert (alone[2], alone[5]) == (299, 3)
    assert alone[4] != 299


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_draws_again_where_the_first_does_and_takes_its_tokens(
    results: RankResults, size: int
) -> None:
    drawn, alone = (results.reports(GROUP, size, entry) for entry in ("drawn", "drawn alone"))
    assert drawn == [alone[0]] * size
    assert all(other != alone[0] for other in alone[1:]), "the ranks draw other tokens by themselves"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prepared_layers_take_their_sums_themselves(
    results: RankResults, whole: Callable[[Case], list[list[mx.array]]], family: str
) -> None:
    native, mixed, separate = (case for case in NATIVE if case.family == family)
    if not results.has(native, 2):
        pytest.skip("the native kernels are not built")
    prepared = [results.reports(case, 2, "prepared") for case in (native, mixed, separate)]
    assert prepared == [[2, 2], [2, 0], [0, 0]]
    expected = results.arrays(separate, 2)
    for case in (native, mixed):
        found = results.arrays(case, 2)
        assert_logits(found, whole(case))
        for number in range(len(STEPS)):
            assert relative_difference(found[f"logits{number}"], expected[f"logits{number}"]) <= 1e-5


@pytest.mark.parametrize("size", [2, 4])
def test_unused_results_of_a_step_are_not_computed_by_the_next(results: RankResults, size: int) -> None:
    assert cast("int", results.arrays(GROUP, size)["bytes of the next step"].item()) < 1 << 20


def expected_bytes(folder: ModelFolder, share: TensorShare, *, tied: bool) -> float:
    """Return the bytes of a model's tensors that a rank must hold."""
    sizes = read_tensor_sizes(folder)
    parts = {
        "self_attn.": len(share.kv_heads) / sizes.kv_heads,
        "mlp.switch_mlp": len(share.experts) / max(1, sizes.experts),
        "mlp.": len(share.intermediate) / sizes.intermediate,
        "lm_head": 1.0 if tied else len(share.vocabulary) / sizes.vocabulary,
    }

    def part_of(name: str) -> float:
        is_whole = "norm" in name or "mlp.gate." in name
        return 1.0 if is_whole else next((part for word, part in parts.items() if word in name), 1.0)

    return sum(entry.nbytes * part_of(entry.name) for entry in folder.tensors)


PLAIN = [case for case in (*UNEQUAL_CASES, *EQUAL_CASES) if case.bits is None]


@pytest.mark.parametrize("case", [*PLAIN, *LOADED], ids=case_id)
def test_rank_holds_its_share_and_undivided_tensors(results: RankResults, case: Case) -> None:
    folder = read_model_folder(results.model(case))
    shares = share_out(read_tensor_sizes(folder), case.proportions)
    tied = bool(folder.config["tie_word_embeddings"])
    for measured, share in zip(results.reports(case, 2, "bytes"), shares, strict=True):
        assert measured == pytest.approx(expected_bytes(folder, share, tied=tied), rel=0.05)
