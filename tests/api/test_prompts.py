from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_ring.api.prompts import _renderer  # pyright: ignore[reportPrivateUsage] - which renderer is the point


def wrapper(**attributes: Any) -> Any:
    """As mlx-lm's: it would say that thinking is wanted."""

    def apply(_messages: Any, **_options: Any) -> str:
        return "thinking"

    return SimpleNamespace(apply_chat_template=apply, **attributes)


def test_a_templates_own_default_decides_whether_the_model_thinks() -> None:
    given: dict[str, Any] = {}

    def apply(_messages: Any, **options: Any) -> list[int]:
        given.update(options)
        return [1]

    beneath = SimpleNamespace(chat_template="{{ messages }}", apply_chat_template=apply)
    assert _renderer(wrapper(_tokenizer=beneath, _chat_template=None))([], tokenize=True) == [1]
    assert given == {"tokenize": True, "return_dict": False}


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"_tokenizer": SimpleNamespace(chat_template=None), "_chat_template": None},
        {"_tokenizer": SimpleNamespace(chat_template="x"), "_chat_template": object()},
    ],
    ids=["no wrapper", "no template", "mlx-lm's own renderer"],
)
def test_other_renderers_are_the_wrappers(attributes: dict[str, Any]) -> None:
    assert _renderer(wrapper(**attributes))([]) == "thinking"
