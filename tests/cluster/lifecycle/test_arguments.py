"""With what `serve` and `join` are run."""

from __future__ import annotations

import pytest

from mlx_ring.cluster.lifecycle.arguments import agent_arguments, head_arguments
from mlx_ring.cluster.planner.devices_file import Device, DevicesFile
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.errors import ConfigError

HEAD = Device("studio", "studio", is_coordinator=True, address="192.168.5.2", memory_gb=48)
MINI = Device("mini", "mini", address="fd77::1", memory_gb=16)
IDS = {"studio": "studio-1b2c", "mini": "mini-7f3a"}


def test_the_coordinator_serves_on_the_interface_for_tensors_with_shares_by_node() -> None:
    file = DevicesFile((MINI, HEAD), strategy="custom", proportions=(0.3, 0.7), serve={"max-model-len": 4096})
    assert head_arguments(file, "demo", "/s", IDS) == [
        *("serve", "demo", "--nodes", "2", "--cluster-port", "50051", "--no-join-lines"),
        *("--strategy", "custom"),
        *("--cluster-host", "192.168.5.2", "--proportions", "mini-7f3a=0.3,studio-1b2c=0.7"),
        *("--memory-limit", "48GiB", "--state-dir", "/s", "--log-dir", "/s/logs", "--max-model-len", "4096"),
    ]


def test_another_machine_joins_it_and_listens_on_its_own() -> None:
    assert agent_arguments(MINI, HeadAddress("192.168.5.2"), "/s") == [
        *("join", "192.168.5.2:50051", "--listen", "[fd77::1]", "--memory-limit", "16GiB"),
        *("--state-dir", "/s", "--log-dir", "/s/logs"),
    ]


def test_one_machine_alone_has_no_cluster() -> None:
    file = DevicesFile(
        (Device("a", "a", is_coordinator=True),),
        strategy="uniform",
        serve={"api-key-file": "/keys", "prefix-cache": True},
    )
    assert head_arguments(file, "demo", "/s", {}) == [
        *("serve", "demo", "--state-dir", "/s", "--log-dir", "/s/logs", "--api-key-file", "/keys"),
        *("--prefix-cache", "on"),
    ]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("nodes", "the number of `devices` says"),
        ("cluster-port", "the coordinator's `port` says"),
        ("api-key", "give api-key-file"),
        ("speed", "which is no setting"),
        ("log-dir", "with its folder `logs`, says"),
        ("api-key-file", "whole path on the coordinator"),
    ],
)
def test_settings_that_do_not_stand_under_serve_are_refused(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        head_arguments(DevicesFile((HEAD,), serve={key: 1}), "demo", "/s", IDS)
