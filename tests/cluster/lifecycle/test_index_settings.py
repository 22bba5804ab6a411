"""pip's settings, for uv."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_ring.cluster.lifecycle import wheels as index_settings
from mlx_ring.cluster.lifecycle.wheels import has_uv_settings, pip_settings, variables_of

TOLD = """
:env:.find-links='/nowhere /etc'
global.index-url='https://mine.example/simple'
global.extra-index-url='https://more.example/simple\\nfile:///nowhere/simple'
global.find-links='/usr'
install.index-url='https://install.example/simple'
list.format='columns'
WARNING: something else
"""


def test_settings_of_pip_reach_uv_without_missing_folders() -> None:
    assert variables_of(pip_settings(TOLD), {}) == {
        "UV_DEFAULT_INDEX": "https://install.example/simple",
        "UV_INDEX": "https://more.example/simple",
        "UV_FIND_LINKS": "/etc",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert variables_of(pip_settings(""), {}) == {}


def test_a_file_may_have_spaces_in_its_name(tmp_path: Path) -> None:
    cert = tmp_path / "ours and theirs.pem"
    cert.touch()
    assert variables_of({"cert": str(cert), "trusted-host": "a.example b.example"}, {}) == {
        "SSL_CERT_FILE": str(cert),
        "UV_INSECURE_HOST": "a.example b.example",
    }


def test_variables_of_the_environment_are_kept() -> None:
    settings = {"cert": "/etc", "index-url": "https://mine.example/simple"}
    assert variables_of(settings, {"SSL_CERT_FILE": "/own"}) == {
        "UV_DEFAULT_INDEX": "https://mine.example/simple"
    }


@pytest.fixture
def no_settings_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its variables nor a file for everybody."""
    monkeypatch.setattr(index_settings, "_SYSTEM", tmp_path / "etc")
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_INDEX",
        "UV_INDEX_URL",
        "UV_EXTRA_INDEX_URL",
        "UV_FIND_LINKS",
        "UV_CONFIG_FILE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_settings_of_uv")
def test_settings_of_uv_are_its_variables_or_its_file(tmp_path: Path) -> None:
    nothing = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert not has_uv_settings(nothing)
    assert has_uv_settings({**nothing, "UV_DEFAULT_INDEX": "https://mine.example/simple"})
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").touch()
    assert has_uv_settings(nothing)


@pytest.mark.usefixtures("no_settings_of_uv")
def test_extra_indexes_of_pip_are_used_only_if_the_main_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(index_settings, "_pip_config", lambda: TOLD)
    first, second = index_settings.index_environments()
    assert first["UV_DEFAULT_INDEX"] == second["UV_DEFAULT_INDEX"] == "https://install.example/simple"
    assert "UV_INDEX" not in first
    assert second["UV_INDEX"] == "https://more.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert [one["UV_DEFAULT_INDEX"] for one in index_settings.index_environments()] == [
        "https://own.example/simple"
    ]
