"""Description of a model's embeddings in its folder."""

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


def test_a_plain_causal_model_gives_its_last_token_s_state_of_length_one(tmp_path: Path) -> None:
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
def test_the_folder_s_own_pooling_is_taken(tmp_path: Path, config: dict[str, object], kind: str) -> None:
    write(tmp_path, "Transformer", "Pooling", "Normalize", **config)
    pooling = read_pooling(tmp_path)
    assert (pooling.kind, pooling.normalize) == (kind, True)
    assert "1_Pooling/config.json" in pooling.why


def test_vectors_keep_their_length_where_no_module_normalises_them(tmp_path: Path) -> None:
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
def test_what_is_not_computed_here_is_refused_unless_another_pooling_is_asked_for(
    tmp_path: Path, modules: list[str], config: dict[str, object], named: str
) -> None:
    write(tmp_path, *modules, **config)
    assert named in read_pooling(tmp_path).refusal
    asked = read_pooling(tmp_path, "mean")
    assert (asked.kind, asked.refusal) == ("mean", "")


def test_a_tokenizer_that_should_add_eos_is_believed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    assert read_pooling(tmp_path).ends_with_eos


def test_files_that_cannot_be_read_keep_nobody_from_serving(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('["Pooling"]')
    assert "cannot be read" in read_pooling(tmp_path).refusal
