"""Settings: the values that each accepts, and the errors for the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_ring
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import state_folder
from mlx_ring.rpc.backends import LINKS, LinkKind
from mlx_ring.settings import rank_settings
from mlx_ring.settings.config import Settings
from mlx_ring.settings.fields import flag_name
from mlx_ring.settings.rank_settings import check_link, check_ranks, crowding_remark
from mlx_ring.settings.settings_sources import allowed_values, api_keys, bodies_mb, load_settings


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


def test_a_list_is_written_with_commas_or_as_a_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("allowed-hosts: [a.local, b.local]\n")
    monkeypatch.setenv("MLX_RING_SERVED_MODEL_NAME", "one, two")
    settings = load_settings({}, config=file)
    assert settings.allowed_hosts == ("a.local", "b.local")
    assert settings.served_model_name == ("one", "two")


def test_an_unquoted_off_in_yaml_means_off(tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("blas: off\n")
    assert load_settings({}, config=file).blas == "off"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("port", "70000", "a whole number from 0 to 65535"),
        ("port", "abc", "a whole number from 0 to 65535"),
        ("port", "-1", "a whole number from 0 to 65535"),
        ("stages", "0", "a whole number from 1 to 1024"),
        ("stages", "1.5", "a whole number from 1 to 1024"),
        ("dtype", "int4", "auto, float32, bfloat16 or float16"),
        ("log_level", "loud", "debug, info, warning or error"),
        ("model_load_timeout", "0", "a number above 0, at most 86400"),
        ("model_load_timeout", "nan", "a number above 0, at most 86400"),
        ("max_model_len", "99999999999999999999", "a whole number from 1 to 1073741824"),
        ("model", "", "a non-empty text"),
    ],
)
def test_an_invalid_value_is_reported_with_name_value_and_range(name: str, value: str, allowed: str) -> None:
    assert message(**{name: value}) == f"{flag_name(name)} is {value or repr(value)}; it must be {allowed}."


def test_a_boolean_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "ring.yaml"
    file.write_text("port: yes\n")
    with pytest.raises(ConfigError, match=r"'port' in .* is true .*; it must be a whole number"):
        load_settings({}, config=file)


def test_relative_folders_become_absolute(tmp_path: Path) -> None:
    assert load_settings({"log_dir": "mine"}).log_dir == tmp_path / "mine"
    assert load_settings({"log_dir": "~/mine"}).log_dir == Path.home() / "mine"


def test_the_state_folder_is_the_given_one_or_in_the_user_s_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert state_folder(load_settings({"state_dir": "mine"}).state_dir) == tmp_path / "mine"
    monkeypatch.setattr("sys.platform", "darwin")
    assert (
        state_folder(load_settings({}).state_dir)
        == Path.home() / "Library" / "Application Support" / "mlx-ring"
    )
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert state_folder(load_settings({}).state_dir) == tmp_path / "mlx-ring"
    for no_folder in ("", "relative"):
        monkeypatch.setenv("XDG_DATA_HOME", no_folder)
        assert state_folder(load_settings({}).state_dir) == Path.home() / ".local" / "share" / "mlx-ring"


def test_logs_are_in_the_state_folder_or_where_they_are_wanted(tmp_path: Path) -> None:
    assert load_settings({"state_dir": "mine"}).log_dir == tmp_path / "mine" / "logs"
    assert load_settings({}).log_dir == state_folder(None) / "logs"
    assert load_settings({"log_dir": "here", "state_dir": "mine"}).log_dir == tmp_path / "here"
    assert not (tmp_path / "mine").exists()


def test_a_folder_too_long_for_a_socket_is_refused() -> None:
    assert load_settings({"run_dir": "/run/" + 58 * "x"}).run_dir == Path("/run/" + 58 * "x")
    assert message(run_dir="/run/" + 59 * "x").endswith("it must be a path of at most 63 bytes.")


@given(st.integers(-(10**6), 10**6))
def test_a_port_is_accepted_exactly_if_it_is_valid(port: int) -> None:
    if 0 <= port <= 65535:
        assert load_settings({"port": str(port)}).port == port
    else:
        with pytest.raises(ConfigError):
            load_settings({"port": str(port)})


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_has_a_description_and_allowed_values(name: str) -> None:
    field = Settings.model_fields[name]
    assert field.description
    assert field.description.endswith(".")
    assert allowed_values(field)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2GiB", 2 << 30),
        ("500 MB", 500_000_000),
        ("1.5gib", 3 << 29),
        ("1048576", 1 << 20),
        (4 << 20, 4 << 20),
    ],
)
def test_sizes_accept_units(given: object, expected: int) -> None:
    assert load_settings({"kv_cache_memory": given}).kv_cache_memory == expected


@pytest.mark.parametrize("given", ["much", "2 gigs", "-1GiB", "100kB", 7])
def test_an_invalid_size_is_refused_in_one_sentence(given: object) -> None:
    with pytest.raises(
        ConfigError, match=rf"--kv-cache-memory is {given}; it must be a size of 1MiB or more"
    ):
        load_settings({"kv_cache_memory": given})


def test_switches_and_bits_need_no_quotes_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("prefix-cache: off\nkv-bits: 8\n")
    settings = load_settings({}, config=file)
    assert (settings.prefix_cache, settings.kv_bits) == ("off", "8")
    file.write_text("prefix-cache: on\nkv-bits: off\n")
    settings = load_settings({}, config=file)
    assert (settings.prefix_cache, settings.kv_bits) == ("on", "off")


def test_keys_come_from_the_environment_and_a_file_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RING_API_KEY", "alpha-key,beta-key")
    file = tmp_path / "keys"
    file.write_text("gamma-key\n\n  delta-key \n")
    settings = load_settings({"api_key_file": str(file)})
    assert api_keys(settings) == ("alpha-key", "beta-key", "gamma-key", "delta-key")
    assert "alpha-key" not in repr(settings)


def test_the_path_of_a_key_file_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({"api_key_file": "keys"}).api_key_file == tmp_path / "keys"


@pytest.mark.parametrize(("text", "sentence"), [("\n \n", "holds no key"), (None, "cannot be read")])
def test_a_key_file_without_keys_is_an_error(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        api_keys(load_settings({"api_key_file": str(file)}))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"strategy": "custom"}, "The strategy custom needs --proportions, as 0.7,0.3."),
        ({"proportions": "0.7,0.3"}, "--proportions requires --strategy custom, but the strategy is auto."),
        (
            {"strategy": "custom", "proportions": "0.7,a"},
            "--proportions is 0.7,a; it must be shares separated by commas, such as 0.7,0.3.",
        ),
    ],
)
def test_proportions_need_the_strategy_custom(flags: dict[str, object], sentence: str) -> None:
    assert message(**flags) == sentence


def test_sharing_layers_needs_several_machines() -> None:
    assert message(strategy="tensor").startswith(
        "--strategy tensor shares layers among machines, but --nodes is 1. "
    )
    assert load_settings({"strategy": "hybrid", "nodes": 3}).strategy == "hybrid"


def test_ports_of_a_machine_are_a_range() -> None:
    assert load_settings({"node_ports": "9000-9015"}).node_ports == (9000, 9015)
    assert load_settings({"node_ports": "65533-65535"}).node_ports == (65533, 65535)


@pytest.mark.parametrize(
    "text", ["9000", "9000-9001", "9015-9000", "80-90", "65530-65536", "9000-9015,9020", "a-b"]
)
def test_a_range_that_is_too_small_or_none_is_refused(text: str) -> None:
    assert message(node_ports=text) == (
        f"--node-ports is {text}; it must be a range of 3 ports or more, from 1024 to 65535, such as 9000-9015."
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"nodes": 3, "node_ids": "mini-7f3a,mini-7f3a"},
            "--node-ids is mini-7f3a,mini-7f3a, with which --nodes 3 is never reached: give the ids of 2 other machines, or --nodes 2.",
        ),
        (
            {"nodes": 2, "node_ids": "Mini.local"},
            "--node-ids is Mini.local; it must be ids of machines separated by commas, such as mini-7f3a,studio-1b2c.",
        ),
    ],
)
def test_ids_that_never_reach_the_number_of_machines_are_refused(
    flags: dict[str, object], sentence: str
) -> None:
    assert message(**flags) == sentence


def test_strategies_and_proportions_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ring.yaml").write_text("strategy: custom\nproportions: [0.7, 0.3]\nmemory-limit: 16GiB\n")
    settings = load_settings({}, config=tmp_path / "ring.yaml")
    assert (settings.proportions, settings.memory_limit) == (("0.7", "0.3"), 16 << 30)
    assert load_settings({"strategy": "memory_proportional"}).strategy == "memory"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"link": "ring"}, "--link ring sends activations between stages, but there is one"),
        ({"link": "ring", "nodes": "2"}, "neither encrypted nor authenticated.*--trusted-interface"),
        ({"link": "mpi", "nodes": "2"}, "--link mpi joins stages on one machine only"),
        (
            {"link": "allreduce", "nodes": "3", "trusted_interface": "eth0"},
            "joins two stages, but 3 were requested",
        ),
        ({"link": "ring", "stages": "2", "tp": "2"}, "--tp 2 needs it for the ranks"),
        ({"link": "allreduce", "stages": "3"}, "so it joins two stages, but 3 were requested"),
        ({"link": "nccl", "stages": "3"}, "so it joins two stages"),
        ({"link": "mpi", "stages": "3"}, "so it joins two stages"),
        ({"backend": "ring"}, "--backend ring joins workers that share layers"),
        (
            {"backend": "mpi", "link": "ring", "stages": "2"},
            "--link ring uses MLX's backend ring, but --backend is mpi",
        ),
        ({"backend": "jaccl", "link": "allreduce", "stages": "2"}, "use --link jaccl"),
        ({"backend": "mpi", "link": "allreduce", "nodes": "2"}, "--backend mpi joins workers of one machine"),
        (
            {"backend": "nccl", "strategy": "tensor", "nodes": "2"},
            "--backend nccl joins workers of one machine",
        ),
        ({"backend": "ring", "nodes": "2"}, "--backend ring joins workers that share layers"),
        (
            {"backend": "ring", "strategy": "memory", "nodes": "2", "trusted_interface": "en5"},
            "--backend ring joins workers that share layers",
        ),
    ],
)
def test_a_link_that_cannot_join_the_requested_stages_is_refused(
    flags: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_link(load_settings(flags))


def test_an_unencrypted_link_without_a_group_needs_a_trusted_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_settings, "LINKS", {**LINKS, "grpc": LinkKind(None)})
    check_link(load_settings({"link": "grpc", "stages": "2"}))
    check_link(load_settings({"link": "grpc", "nodes": "2", "trusted_interface": "eth0"}))
    with pytest.raises(ConfigError, match=r"--link grpc with --nodes 2 .*--trusted-interface"):
        check_link(load_settings({"link": "grpc", "nodes": "2"}))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"link": "allreduce", "stages": "2"},
        {"link": "ring", "stages": "3"},
        {"link": "ring", "nodes": "3", "trusted_interface": "thunderbolt0,10.0.8.0/24"},
        {"backend": "jaccl", "strategy": "hybrid", "nodes": "3"},
        {"backend": "ring", "nodes": "2", "trusted_interface": "en5"},
    ],
)
def test_a_link_that_joins_the_stages_is_accepted(flags: dict[str, str]) -> None:
    check_link(load_settings(flags))


def test_machines_share_every_layer_only_over_a_trusted_interface() -> None:
    flags = {"strategy": "tensor", "nodes": "2"}
    with pytest.raises(ConfigError, match=r"shares layers between machines\. .* with --trusted-interface"):
        check_ranks(load_settings(flags))
    check_ranks(load_settings(flags | {"trusted_interface": "en5"}))
    check_ranks(load_settings(flags | {"strategy": "hybrid"}))


def test_memory_for_request_bodies_holds_two_of_the_longest() -> None:
    assert bodies_mb(load_settings({"max_request_mb": 20})) == 320
    assert bodies_mb(load_settings({"max_request_mb": 20, "max_bodies_mb": 40})) == 40
    with pytest.raises(
        ConfigError, match=r"--max-bodies-mb is 39.*--max-request-mb is 20: set at least 40\."
    ):
        load_settings({"max_request_mb": 20, "max_bodies_mb": 39})


def test_every_setting_is_read_by_some_code() -> None:
    package = Path(mlx_ring.__file__).parent
    # The API has settings of its own, which the head fills in from these.
    sources = [path for path in package.rglob("*.py") if "api" not in path.relative_to(package).parts]
    code = "\n".join(
        path.read_text("utf-8") for path in sources if path.name not in ("config.py", "fields.py")
    )
    assert set(Settings.model_fields) - set(re.findall(r"(?:settings|policy)\.(\w+)", code)) == set()


@pytest.mark.parametrize(
    ("options", "cores", "remark"),
    [
        ({"tp": 4}, 4, ""),
        ({"stages": 4}, 2, ""),
        ({"tp": 4}, 2, "--tp 4 makes 4 workers for 2 cores. On a CPU, "),
        ({"tp_shares": (3, 1), "stages": 2}, 3, "--tp 2 makes 4 workers for 3 cores. On a CPU, "),
    ],
)
def test_more_ranks_than_cores_are_remarked_upon(options: dict[str, Any], cores: int, remark: str) -> None:
    found = crowding_remark(Settings(**options), cores)
    assert found.startswith(remark) if remark else not found
