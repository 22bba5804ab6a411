"""Setting names of earlier prototypes."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings
from mlx_ring.settings.old_names import COUNTERPARTS, WITHOUT_COUNTERPART, is_old, of_today
from mlx_ring.settings.strategies import current_strategy

KNOWN = [
    "MODEL_REPO",
    "MODEL_CACHE_DIR",
    "API_HOST",
    "API_PORT",
    "WORKER_HOSTS",
    "WORKER_SSH",
    "SOCKET_PATH",
    "NUM_DEVICES",
    "DISTRIBUTED_BACKEND",
    "KV_CACHE_MAX_SIZE",
    "KV_CACHE_RESERVED_MEMORY_MB",
    "MAX_SEQUENCE_LENGTH",
    "MAX_PROMPT_LEN_BYTES",
    "REQUEST_TIMEOUT_SECONDS",
    "DEFAULT_MAX_TOKENS",
    "FILE_DESCRIPTOR_SOFT_LIMIT",
    "FILE_DESCRIPTOR_HARD_LIMIT",
    "MODEL_LOAD_WAIT_SECONDS",
    "LOG_LEVEL",
    "POLL_INTERVAL_SECONDS",
    "MODEL_NAME",
    "DISTRIBUTED",
    "MASTER_ADDR",
    "RANK",
    "WORLD_SIZE",
]


def translated(**old: str) -> dict[str, tuple[str, str]]:
    return {name: (new.setting, new.value) for name, new in of_today(old, ".env").items()}


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_name_is_translated_or_refused(name: str) -> None:
    assert is_old(name)
    assert (name in COUNTERPARTS) != (name in WITHOUT_COUNTERPART)


def test_old_names_set_today_s_settings() -> None:
    settings = translated(
        MODEL_REPO="mlx-community/Qwen3-14B-4bit",
        API_PORT="8200",
        NUM_DEVICES="2",
        KV_CACHE_RESERVED_MEMORY_MB="2048",
        MAX_SEQUENCE_LENGTH="4096",
        LOG_LEVEL="WARN",
    )
    assert settings == {
        "MODEL_REPO": ("model", "mlx-community/Qwen3-14B-4bit"),
        "API_PORT": ("port", "8200"),
        "NUM_DEVICES": ("nodes", "2"),
        "KV_CACHE_RESERVED_MEMORY_MB": ("kv_cache_memory", "2048MiB"),
        "MAX_SEQUENCE_LENGTH": ("max_model_len", "4096"),
        "LOG_LEVEL": ("log_level", "warning"),
    }
    assert {setting for setting, _ in settings.values()} <= Settings.model_fields.keys()


def test_a_kv_cache_size_is_in_tokens_or_bytes_or_unlimited() -> None:
    assert translated(KV_CACHE_MAX_SIZE="4096") == {"KV_CACHE_MAX_SIZE": ("max_model_len", "4096")}
    assert translated(KV_CACHE_MAX_SIZE="2GB") == {"KV_CACHE_MAX_SIZE": ("kv_cache_memory", "2GB")}
    assert translated(KV_CACHE_MAX_SIZE="None") == {}


def test_a_model_name_beside_a_repository_is_the_served_name() -> None:
    assert translated(MODEL_NAME="demo") == {"MODEL_NAME": ("model", "demo")}
    assert translated(MODEL_REPO="demo", MODEL_NAME="ours")["MODEL_NAME"] == ("served_model_name", "ours")


def test_distributed_settings_become_a_number_of_nodes() -> None:
    assert translated(DISTRIBUTED="false") == {"DISTRIBUTED": ("nodes", "1")}
    assert translated(DISTRIBUTED="true", WORLD_SIZE="2") == {"WORLD_SIZE": ("nodes", "2")}


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (
            {"POLL_INTERVAL_SECONDS": "1"},
            "POLL_INTERVAL_SECONDS in .env is 1, which has no counterpart here: nothing is polled",
        ),
        ({"WORKER_HOSTS": "a,b"}, "mlx-ring cluster start -c FILE"),
        ({"MODEL_CACHE_DIR": "/models"}, "HF_HUB_CACHE in the environment"),
        (
            {"NUM_DEVICES": "2", "WORLD_SIZE": "3"},
            "NUM_DEVICES in .env is 2 and WORLD_SIZE is 3, but both are MLX_RING_NODES",
        ),
        (
            {"DISTRIBUTED": "false", "NUM_DEVICES": "2"},
            "DISTRIBUTED in .env is false and NUM_DEVICES is 2, but both are MLX_RING_NODES",
        ),
        ({"RANK": "0", "SOCKET_PATH": "/s"}, "SOCKET_PATH in .env is /s, which has no counterpart here"),
        ({"DISTRIBUTED": "maybe"}, "DISTRIBUTED in .env is maybe; it must be true or false."),
    ],
)
def test_names_without_a_counterpart_are_refused_with_the_reason(old: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of_today(old, ".env")
    assert sentence in str(caught.value)


def test_old_names_of_strategies_are_translated() -> None:
    assert [
        current_strategy(name) for name in ("memory_proportional", "compute_proportional", "balanced", "x")
    ] == [
        "memory",
        "compute",
        "balanced",
        "x",
    ]
