"""Compare every family of mlx-lm, whole and split, with the published table."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import asdict
from pathlib import Path

import mlx_lm.models as model_modules  # pytest asks each name for attributes: `mlx_lm` would load all of itself
import pytest
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING
from tests.conformance.families import CONDITIONS, quantizable_configuration, with_entries
from tests.conformance.outcome import CLOSE, examine, examine_apart, quantized_differs
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.models import architectures
from mlx_ring.models.architectures import TABLE, Architecture, known_architectures, quantizes_kv
from mlx_ring.models.model_folder import read_model_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architectures.md"
SAMPLE = [
    *("qwen3", "qwen2", "llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4"),
    *("llama4_text", "mamba", "qwen3_next", "olmo_hybrid", "bailing_moe_linear", "talkie", "gemma4_text"),
]
"""Families with dense, tied, expert, sliding, latent, chunked, recurrent and hybrid layers, and three special ones.

Of these, one makes masks from another stage's caches. The layers of another take the activations as the second argument.
The layers of the third return more than activations."""


def every_family() -> list[str]:
    """Return the modules of `mlx_lm.models` that define a model."""
    folder = Path(model_modules.__path__[0])
    return sorted(
        module.name
        for module in pkgutil.iter_modules(model_modules.__path__)
        if "class ModelArgs" in (folder / f"{module.name}.py").read_text(encoding="utf-8")
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_matches_the_table(family: str) -> None:
    found = examine(family)
    assert found.exact
    assert found == known_architectures()[family]


def test_the_page_and_the_data_agree() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(known_architectures())


@pytest.mark.conformance
@pytest.mark.timeout(1500)
def test_every_family_matches_the_table(request: pytest.FixtureRequest) -> None:
    found = examine_apart(every_family())
    if request.config.getoption("--write-table"):
        _write(found)
    assert found == known_architectures()


QUANTIZED_SAMPLE = ["qwen3", "minicpm3", "falcon_h1", "gemma4_text", "gemma2", "phixtral", "deepseek_v3"]
"""Families that can have a quantized KV cache, and some that cannot: by their attention, shared layers or latent KV."""


@pytest.mark.slow
@pytest.mark.parametrize("family", QUANTIZED_SAMPLE)
def test_kv_bits_is_refused_where_mlx_lm_cannot_compute_with_quantized_kv(
    family: str, tmp_path: Path
) -> None:
    check_quantized_kv(family, tmp_path)


@pytest.mark.conformance
@pytest.mark.parametrize("family", [name for name, found in known_architectures().items() if found.whole])
def test_kv_bits_of_every_family_is_refused_where_mlx_lm_cannot_compute_with_quantized_kv(
    family: str, tmp_path: Path
) -> None:
    check_quantized_kv(family, tmp_path)


def check_quantized_kv(family: str, folder: Path) -> None:
    """Check that a family computes over quantized KV as with mlx-lm's own caches, or is refused."""
    for entries in ({}, CONDITIONS.get(family, {})):
        config = with_entries(quantizable_configuration(family), entries)
        (write_random_model(folder / "model", QWEN3) / "config.json").write_text(json.dumps(config))
        if quantizes_kv(read_model_folder(folder / "model")):
            # Rounding may put a number on the neighbouring level. That depends on the number of bits; another formula
            # differs with each.
            assert any(quantized_differs(config, bits) <= CLOSE for bits in (8, 4, 6))
            continue
        with pytest.raises((AttributeError, TypeError, ValueError)):
            quantized_differs(config, 8)


def _write(found: dict[str, Architecture]) -> None:
    classes = {f"{kind}:{name}": module for (kind, name), module in MODEL_ARCHITECTURE_REMAPPING.items()}
    content = {
        "aliases": dict(sorted((MODEL_REMAPPING | classes).items())),
        "architectures": {name: asdict(outcome) for name, outcome in found.items()},
    }
    path = Path(architectures.__file__).with_name(TABLE)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    known_architectures.cache_clear()
    PAGE.write_text(page(known_architectures()), encoding="utf-8")


def page(known: dict[str, Architecture]) -> str:
    """Return the text of docs/architectures.md."""
    exact = sum(outcome.exact for outcome in known.values())
    lines = [
        "# Architectures",
        "",
        f"Of mlx-lm's {len(known)} model families, {exact} can be split into stages exactly. Two, three and four stages with",
        "uneven splits give the same logits as the whole model: in float32 the difference is 0.0. The test reads a prompt in",
        "three chunks and generates three more tokens. In workers, with mlx-ring's KV cache and in batches, logits differ by",
        "less than 1e-4 of the largest one. Other families are rejected by name before anything is loaded.",
        "",
        "`make conformance` generates this page. To add a family, give it a small configuration in",
        "`tests/conformance/families.py` and run it.",
        "",
        "- *cut*: exact with several stages, in some families only with the given configuration values.",
        "- *one stage*: exact as a whole.",
        "- *batches*: rows of different lengths share a forward pass; rows of other families run one by one.",
        "- *KV on disk*: after a restart with other stages, [saved KV](serving.md#kv-on-disk) gives the same logits: in float32",
        "  the difference is 0.0. If not, the table and the worker's log name the caches whose content is not saved.",
        "- *sliding*, *recurrent*: the family has layers with a sliding window, or with a state instead of tokens.",
        "- *experts*: it has, or can have, a mixture of experts. *tied*: its embedding can serve as its output head.",
        "",
        "| family | cut | one stage | batches | KV on disk | sliding | recurrent | experts | tied | why not |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in known.items():
        condition = ", ".join(f"`{entry}: {json.dumps(value)}`" for entry, value in outcome.only_if.items())
        exact = f"only with {condition}" if condition else _yes(outcome.exact)
        kinds = ", ".join(f"`{kind}`" for kind in outcome.caches)
        restores = f"no: {kinds}" if outcome.whole and not outcome.restores else _yes(outcome.restores)
        flags = (
            outcome.sliding,
            outcome.recurrent,
            outcome.experts,
            outcome.tied,
        )
        reason = outcome.reason.replace("|", "\\|")
        runs = f"{_yes(outcome.whole)} | {_yes(outcome.batches)} | {restores}"
        lines.append(f"| {name} | {exact} | {runs} | {' | '.join(map(_yes, flags))} | {reason} |")
    return "\n".join(lines) + "\n"


def _yes(flag: bool) -> str:  # noqa: FBT001 - a cell of the table
    return "yes" if flag else "no"
