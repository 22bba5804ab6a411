"""Sources of settings, their precedence, and errors that name the source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.running import Running
from mlx_ring.settings import settings_sources
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import (
    check_values,
    key_to_send,
    load_settings,
    names_in_dotenv,
    names_in_environment,
)


@pytest.fixture(autouse=True)
def clear_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MLX_RING_{name.upper()}", raising=False)
    monkeypatch.delenv("MLX_RING_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def message(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    return str(caught.value)


def test_without_any_source_the_defaults_apply() -> None:
    settings = load_settings({})
    assert (settings.model, settings.host, settings.port, settings.stages) == ("demo", "127.0.0.1", 8100, 1)


def test_flags_precede_the_environment_then_dotenv_then_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("port: 1\nstages: 1\nhost: file\nmodel: file\n")
    (tmp_path / ".env").write_text("MLX_RING_PORT=2\nMLX_RING_STAGES=2\nMLX_RING_HOST=dotenv\n")
    monkeypatch.setenv("MLX_RING_PORT", "3")
    monkeypatch.setenv("MLX_RING_STAGES", "3")
    settings = load_settings({"port": "4", "host": None}, config=file)
    assert (settings.port, settings.stages, settings.host, settings.model) == (4, 3, "dotenv", "file")


@pytest.mark.parametrize("source", ["flag", "environment", "dotenv", "yaml", "json"])
def test_each_source_alone_is_read(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags: dict[str, object] = {}
    config: Path | None = None
    match source:
        case "flag":
            flags["max_num_seqs"] = "7"
        case "environment":
            monkeypatch.setenv("MLX_RING_MAX_NUM_SEQS", "7")
        case "dotenv":
            (tmp_path / ".env").write_text("OTHER=1\nMLX_RING_MAX_NUM_SEQS='7'\n")
        case "yaml":
            config = tmp_path / "ring.yml"
            config.write_text("max-num-seqs: 7\n")
        case _:
            config = tmp_path / "ring.json"
            config.write_text(json.dumps({"max_num_seqs": 7}))
    assert load_settings(flags, config=config).max_num_seqs == 7


@pytest.mark.parametrize("source", ["environment", "dotenv", "yaml"])
def test_a_former_name_is_read_and_logs_one_line(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: Path | None = None
    match source:
        case "environment":
            monkeypatch.setenv("MLX_RING_MAX_WAITING", "7")
        case "dotenv":
            (tmp_path / ".env").write_text("MLX_RING_MAX_WAITING=7\n")
        case _:
            config = tmp_path / "ring.yml"
            config.write_text("max-waiting: 7\n")
    assert load_settings({}, config=config).max_queued_requests == 7
    (record,) = caplog.records
    assert "is now called" in record.message
    assert record.message.endswith("; the old name still works.")
    assert "max" in record.message.lower()


def test_the_current_name_precedes_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RING_AIM", "throughput")
    monkeypatch.setenv("MLX_RING_OPTIMIZE_FOR", "latency")
    assert load_settings({}).optimize_for == "latency"


def test_the_environment_can_name_the_settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ring.yaml").write_text("port: 9\n")
    monkeypatch.setenv("MLX_RING_CONFIG", "ring.yaml")
    assert load_settings({}).port == 9


def test_a_file_can_use_the_aliases_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("pipeline-parallel-size: 2\nenable_prefix_caching: off\n")
    settings = load_settings({}, config=path)
    assert (settings.stages, settings.prefix_cache) == (2, "off")
    path.write_text("stages: 2\npipeline-parallel-size: 3\n")
    with pytest.raises(ConfigError, match="'stages' twice, under two spellings"):
        load_settings({}, config=path)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RING_PORT", "")
    assert load_settings({}).port == 8100


def test_an_error_names_the_source_of_the_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_RING_PORT", "x")
    assert message().startswith("MLX_RING_PORT is x;")
    monkeypatch.delenv("MLX_RING_PORT")
    (tmp_path / ".env").write_text("MLX_RING_PORT=y\n")
    assert message().startswith(f"MLX_RING_PORT in {tmp_path / '.env'} is y;")
    (tmp_path / ".env").unlink()
    (tmp_path / "ring.yaml").write_text("port: [1]\n")
    monkeypatch.setenv("MLX_RING_CONFIG", "ring.yaml")
    assert message().startswith("'port' in ring.yaml is [1];")


def test_several_invalid_values_are_reported_together() -> None:
    assert message(port="a", stages="b").count("it must be") == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prot: 1\n", "the key 'prot', which is no setting; did you mean port?"),
        ("devices: []\n", "the key 'devices', which is no setting"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "twice"),
        ("- 1\n", "must hold names and values, not list"),
        ("a: [\n", "is neither YAML nor JSON"),
        ("port: 1\nmodel: demo\nport: 2\n", "gives 'port' twice, in lines 1 and 3."),
        ("api-key: 12345\n", 'must be one key or several, separated by commas. Write it in quotes: "12345".'),
        (
            "port: on\n",
            "is true (as YAML reads yes, no, on and off without quotes); it must be a whole number",
        ),
    ],
)
def test_an_invalid_settings_file_is_refused_by_name(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_settings({}, config=file)
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist"):
        load_settings({}, config=tmp_path / "none.yaml")


def test_a_misspelt_variable_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RING_PROT", "1")
    assert message() == "MLX_RING_PROT is no setting; did you mean MLX_RING_PORT?"


def test_a_variable_of_mlx_itself_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RING_VERBOSE", "1")
    assert load_settings({}).port == 8100


def test_names_in_dotenv_are_listed_without_their_values(tmp_path: Path) -> None:
    assert names_in_dotenv(tmp_path) == ()
    (tmp_path / ".env").write_text("MLX_RING_PORT=1\nMODEL_REPO=demo\nEDITOR=vi\n")
    assert names_in_dotenv(tmp_path) == ("MLX_RING_PORT", "MODEL_REPO")


def test_names_in_the_environment_are_listed_without_a_check_of_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_RING_PORT", "none")
    assert "MLX_RING_PORT" in names_in_environment()


def test_values_for_another_machine_are_checked_without_local_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_RING_PORT", "none")
    check_values({"blas": "off", "weights_limit": "2GB"}, " there")
    with pytest.raises(ConfigError, match=r"^log-level there is loud; it must be debug, info, warning or"):
        check_values({"log_level": "loud"}, " there")


def test_a_prototype_s_env_file_is_read_and_logs_each_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".env").write_text(
        "MODEL_REPO=demo-moe\nAPI_PORT=8200\nKV_CACHE_MAX_SIZE=none\nLOG_LEVEL=DEBUG\nMLX_RING_LOG_LEVEL=error\n"
    )
    settings = load_settings({})
    assert (settings.model, settings.port, settings.log_level) == ("demo-moe", 8200, "error")
    assert [record.message for record in caplog.records] == [
        f"MODEL_REPO in {tmp_path / '.env'} is read as MLX_RING_MODEL=demo-moe.",
        f"API_PORT in {tmp_path / '.env'} is read as MLX_RING_PORT=8200.",
        f"KV_CACHE_MAX_SIZE=none in {tmp_path / '.env'} has no effect.",
    ]


def test_an_invalid_value_of_an_old_name_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("API_PORT=x\n")
    assert message().startswith(f"API_PORT in {tmp_path / '.env'} is x; it must be a whole number")


def test_old_names_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_PORT", "8200")
    monkeypatch.setenv("RANK", "1")
    assert load_settings({}).port == 8100


@pytest.mark.parametrize("text", ["", ",", " "])
def test_a_key_that_is_empty_does_not_mean_no_authentication(text: str, tmp_path: Path) -> None:
    said = "must be one key or several, separated by commas."
    assert message(api_key=text).endswith(said)
    file = tmp_path / "ring.yaml"
    file.write_text(json.dumps({"api-key": text}))
    with pytest.raises(ConfigError, match=said):
        load_settings({}, config=file)
    assert load_settings({"api_key": "a"}).api_key == ("a",)


def test_folders_of_a_file_may_begin_with_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "ring.yaml"
    names = ("journal_dir", "kv_disk_dir", "state_dir", "log_dir", "api_key_file", "ssl_certfile")
    file.write_text(json.dumps({name: f"~/{name}" for name in names}))
    settings = load_settings({}, config=file)
    assert [getattr(settings, name) for name in names] == [tmp_path / name for name in names]


OWN, ELSEWHERE = "http://127.0.0.1:8100", "http://10.0.0.9:8100"


def sent_to(url: str, **flags: str) -> str | None:
    return key_to_send(url, load_settings(flags), flags.get("api_key"))


def test_a_key_in_a_file_is_sent_only_to_the_server_that_the_file_sets_up(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("MLX_RING_API_KEY=k\n")
    assert sent_to(OWN) == sent_to("http://localhost:8100/v1") == sent_to("http://[::1]:8100") == "k"
    others = [
        ELSEWHERE,
        "http://127.0.0.1:8101",
        "http://127.0.0.1",
        "https://127.0.0.1:8100",
        "http://127.0.0.1.evil.example:8100",
        "http://127.0.0.1:8100@evil.example",
        "http://127.0.0.1:no",
        "127.0.0.1:8100",
    ]
    assert [sent_to(url) for url in others] == [None] * len(others)
    dotenv.write_text("MLX_RING_API_KEY=k\nMLX_RING_HOST=10.0.0.9\nMLX_RING_SSL_CERTFILE=cert.pem\n")
    assert sent_to("https://10.0.0.9:8100") == "k"
    assert sent_to(ELSEWHERE) is sent_to(OWN) is None


def test_a_key_in_a_file_is_sent_to_a_head_that_runs_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def running_here(state: Path) -> list[Running]:
        assert state == tmp_path / "state"
        own = Running("head", 4711, 0.0, "", "http://127.0.0.1:4711")
        return [own, replace(own, kind="agent", url="http://127.0.0.1:4712")]

    monkeypatch.setattr(settings_sources, "running_here", running_here)
    (tmp_path / ".env").write_text(f"MLX_RING_API_KEY=k\nMLX_RING_STATE_DIR={tmp_path / 'state'}\n")
    assert sent_to("http://127.0.0.1:4711") == "k"
    assert sent_to("http://127.0.0.1:4712") is sent_to("https://127.0.0.1:4711") is None


def test_a_key_of_a_flag_or_of_the_environment_is_sent_to_any_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("MLX_RING_API_KEY=k\n")
    assert sent_to(ELSEWHERE, api_key="flag") == "flag"
    monkeypatch.setenv("MLX_RING_API_KEY", "variable,second")
    assert sent_to(ELSEWHERE) == "variable"
