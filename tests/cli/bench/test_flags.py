"""Values of flags: each error is one sentence that names the flag."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_ring.cli.bench import command as flags
from mlx_ring.cli.bench.workload import Range
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.settings_sources import key_to_send, load_settings


def test_valid_values_are_accepted(tmp_path: Path) -> None:
    assert flags.whole("--x", "12", 1, 12) == 12
    assert flags.decimal("--x", "0.5", 0, 1) == 0.5
    assert flags.token_range("--x", "128") == Range(128, 128)
    assert flags.token_range("--x", "64-256") == Range(64, 256)
    assert key_to_send("http://10.0.0.9", load_settings({"api_key": "sk-1"}), "sk-1") == "sk-1"
    assert key_to_send("http://127.0.0.1:8100", load_settings({"api_key": None})) is None
    assert flags.address("--x", "https://here:1/api/v1/") == "https://here:1/api/v1/"
    assert flags.output_file("--x", tmp_path / "a.SVG", (".svg", ".png")) == tmp_path / "a.SVG"
    assert flags.output_file("--x", None) is None


@pytest.mark.parametrize("text", ["", "x", "0", "13", "1.5", "-1"])
def test_an_invalid_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--x is {text}; it must be a whole number from 1 to 12\.$"):
        flags.whole("--x", text, 1, 12)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "-0.1", "1e9"])
def test_an_invalid_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--x is {text}; it must be a number from 0 to 2\.5\.$"):
        flags.decimal("--x", text, 0, 2.5)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-5", "5-", "5-3", "5--7", "1-2-3", "0-3", "1.5", "99999999999", "٣"]
)
def test_an_invalid_range_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--x is .*; it must be a whole number from 1, or a range like 64-256"
    ):
        flags.token_range("--x", text)


@pytest.mark.parametrize(
    "text",
    ["", "here:8100", "ftp://here", "http://", "http://:80", "http://[x", "http://a:99999", "http://a b"],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--x is '.*'; give one like http://127\.0\.0\.1:8100\.$"):
        flags.address("--x", text)


@pytest.mark.parametrize("text", ["", " ", "schlüssel", "a\nb"])
def test_an_invalid_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--api-key (is '? ?'?; it )?must be"):
        key_to_send("http://127.0.0.1:8100", load_settings({"api_key": text}), text)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--x is c; it must be a or b\.$"):
        flags.one_of("--x", "c", ("a", "b"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.pdf", "must end in .svg or .png"),
        ("none/a.svg", "there is no folder"),
        ("folder.svg", "that is a folder"),
        ("taken.svg", "this user may not write it"),
    ],
)
def test_an_unusable_output_file_is_refused(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "taken.svg").touch()
    may: Callable[[Path, int], bool] = os.access
    # Root may write anything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "taken.svg" and may(path, mode))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(ConfigError, match=f"^--x is .*{said}"):
        flags.output_file("--x", tmp_path / name, (".svg", ".png"))
