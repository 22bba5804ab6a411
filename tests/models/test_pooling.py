"""Pooling of embeddings, as a model's folder describes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_ring.models.pooling import read_pooling

_PACKAGE = "sentence_transformers.models"


def write(folder: Path, *modules: str, **pooling: object) -> Path:
    listed = [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{name}" if place else "",
            "type": f"{_PACKAGE}.{name}",
        }
        for place, name in enumerate(modules)
    ]
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 64} | pooling)
        )
    return folder


def test_a_causal_model_uses_the_last_token_and_normalizes(tmp_path: Path) -> None:
    pooling = read_pooling(tmp_path)
    assert (pooling.kind, pooling.normalize, pooling.ends_with_eos, pooling.refusal) == (
        "last",
        True,
        False,
        "",
    )


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_the_folders_own_pooling_is_used(tmp_path: Path, config: dict[str, object], kind: str) -> None:
    write(tmp_path, "Transformer", "Pooling", "Normalize", **config)
    pooling = read_pooling(tmp_path)
    assert (pooling.kind, pooling.normalize) == (kind, True)
    assert "1_Pooling/config.json" in pooling.why


def test_vectors_keep_their_length_without_a_normalize_module(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    assert not read_pooling(tmp_path).normalize


@pytest.mark.parametrize(
    ("modules", "config", "named"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "cls_token",
        ),
    ],
)
def test_unsupported_pooling_is_refused_unless_another_is_requested(
    tmp_path: Path, modules: list[str], config: dict[str, object], named: str
) -> None:
    write(tmp_path, *modules, **config)
    assert named in read_pooling(tmp_path).refusal
    requested = read_pooling(tmp_path, "mean")
    assert (requested.kind, requested.refusal) == ("mean", "")


def test_a_tokenizer_that_adds_eos_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    assert read_pooling(tmp_path).ends_with_eos


def test_unreadable_files_refuse_embeddings_but_do_not_raise(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('["Pooling"]')
    assert "cannot be read" in read_pooling(tmp_path).refusal
