"""Flags made from settings."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from mlx_ring.cli.flags import ALL_SETTINGS, given_settings, setting_option, with_settings
from mlx_ring.cli.serve import serve
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings
from mlx_ring.settings.fields import flag_name, flag_of
from mlx_ring.settings.settings_sources import allowed_values


def values(*arguments: str) -> dict[str, object]:
    """Return the settings that a command with all flags is called with."""
    seen: list[dict[str, object]] = []

    @with_settings(ALL_SETTINGS)
    def command(*, own: Annotated[str, typer.Option()] = "", flags: dict[str, object]) -> None:
        del own
        seen.append({name: value for name, value in flags.items() if value is not None})

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_every_setting_has_a_flag_that_reaches_the_command(name: str) -> None:
    assert values(flag_name(name), "7") == {name: "7"}


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_only_a_number_has_n_for_its_value(name: str) -> None:
    field = Settings.model_fields[name]
    assert flag_of(field).metavar != "N" or allowed_values(field).startswith(("a whole number", "a number"))


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ({}, "[default: auto]"),
        ({"default": "the file's"}, "custom, tensor or hybrid) [default: the file's]"),
        ({"help_text": "Name."}, "Name."),
    ],
)
def test_a_command_says_its_own_default_of_a_setting(texts: dict[str, str], ends: str) -> None:
    option = setting_option("strategy", **texts)  # pyright: ignore[reportArgumentType] - only texts
    assert option.help.replace("\\[", "[").endswith(ends)
    assert option.metavar == "NAME"


@pytest.mark.parametrize(
    ("alias", "name"),
    [(alias, name) for name, field in Settings.model_fields.items() for alias in flag_of(field).aliases],
)
def test_a_vllm_flag_sets_the_same_setting(alias: str, name: str) -> None:
    assert values(alias, "7") == {name: "7"}


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("--aim", "optimize_for"),
        ("--draft-tokens", "num_speculative_tokens"),
        ("--max-waiting", "max_queued_requests"),
    ],
)
def test_an_old_flag_still_works_and_logs_one_line(
    old: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert values(old, "7") == {name: "7"}
    assert [record.message for record in caplog.records] == [
        f"{old} is now called {flag_name(name)}; the old name still works."
    ]


def test_an_old_flag_that_contradicts_the_new_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-waiting is 2: give one of them"):
        values("--max-queued-requests", "1", "--max-waiting", "2")


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("--open-schemas", {"additional_properties": "on"}),
        ("--enable-prefix-caching", {"prefix_cache": "on"}),
        ("--no-enable-prefix-caching", {"prefix_cache": "off"}),
        ("--no-prefix-cache", {"prefix_cache": "off"}),
        ("--disable-uvicorn-access-log", {"access_log": "off"}),
    ],
)
def test_a_switch_sets_a_value(switch: str, value: dict[str, object]) -> None:
    assert values(switch) == value


def test_a_switch_that_contradicts_the_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="another flag switches it off"):
        values("--prefix-cache", "on", "--no-prefix-cache")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--api-key a --api-key b,c", {"api_key": "a,b,c"}),
        ("--allowed-origins http://a --allowed-origins http://b", {"allowed_origins": "http://a,http://b"}),
        ("--tp-shares 3 --tp-shares 1", {"tp_shares": "3,1"}),
        ("--stages 2 --stages 3", {"stages": "3"}),
        ("--api-key=", {"api_key": ""}),
    ],
)
def test_a_flag_that_is_repeated_adds_values_only_to_a_setting_with_several(
    arguments: str, expected: dict[str, str]
) -> None:
    assert values(*arguments.split()) == expected


def test_a_service_s_command_has_the_settings_that_are_typed_and_no_others() -> None:
    holder = typer.Typer()
    holder.command("serve")(serve)
    context = get_command(holder).make_context("serve", ["a", "b", "--api-key", "x", "--api-key", "y"])
    given = given_settings(context.params)
    assert {name: value for name, value in given.items() if value is not None} == {"api_key": "x,y"}
