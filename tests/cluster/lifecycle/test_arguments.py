"""Arguments of `serve` and `join` on each machine, and the machine of a file that is the local one."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from mlx_ring.cli.join import join
from mlx_ring.cli.serve import serve
from mlx_ring.cluster.lifecycle.arguments import (
    FOR_AGENTS,
    Machine,
    SshTarget,
    agent_arguments,
    head_arguments,
    head_host,
    machine_of,
    own_addresses,
    resolve,
    target_of,
    unlisted_nodes,
)
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.settings.config import Settings
from mlx_ring.settings.devices_file import Device, DevicesFile

HEAD = Device("studio", "studio", is_coordinator=True, address="192.168.5.2", memory_gb=48)
MINI = Device("mini", "mini", address="fd77::1", memory_gb=16)
IDS = {"studio": "studio-1b2c", "mini": "mini-7f3a"}


def test_the_coordinator_serves_on_the_interface_for_tensors_with_shares_by_node() -> None:
    file = DevicesFile((MINI, HEAD), strategy="custom", proportions=(0.3, 0.7), serve={"max-model-len": 4096})
    assert head_arguments(file, "demo", "/s", IDS) == [
        *(
            "serve",
            "demo",
            "--nodes",
            "2",
            "--node-ids",
            "mini-7f3a",
            "--cluster-port",
            "50051",
            "--no-join-lines",
        ),
        *("--strategy", "custom"),
        *("--cluster-host", "192.168.5.2", "--proportions", "mini-7f3a=0.3,studio-1b2c=0.7"),
        *("--memory-limit", "48GiB", "--state-dir", "/s", "--log-dir", "/s/logs", "--max-model-len", "4096"),
    ]


def test_another_machine_joins_and_listens_on_its_own_address() -> None:
    assert agent_arguments(DevicesFile((HEAD, MINI)), MINI, HeadAddress("192.168.5.2"), "/s") == [
        *("join", "192.168.5.2:50051", "--listen", "[fd77::1]", "--memory-limit", "16GiB"),
        *("--state-dir", "/s", "--log-dir", "/s/logs"),
    ]


def test_each_machine_gets_its_own_share_of_memory() -> None:
    head, mini = replace(HEAD, memory_utilization=0.8), replace(MINI, memory_utilization=1.0)
    file = DevicesFile((head, mini))
    assert memory_share_in(head_arguments(file, "demo", "/s", IDS)) == "0.8"
    assert memory_share_in(agent_arguments(file, mini, HeadAddress("192.168.5.2"), "/s")) == "1.0"
    assert "--memory-utilization" not in agent_arguments(file, MINI, HeadAddress("192.168.5.2"), "/s")


def test_a_device_s_trusted_interface_overrides_the_shared_one() -> None:
    mini = replace(MINI, trusted_interface="thunderbolt0")
    file = DevicesFile((HEAD, mini), serve={"trusted-interface": ["en5", "10.0.8.0/24"]})
    head, other = head_arguments(file, "demo", "/s", IDS), agent_arguments(file, mini, HeadAddress("h"), "/s")
    assert head[head.index("--trusted-interface") + 1] == "en5,10.0.8.0/24"
    assert other[other.index("--trusted-interface") + 1] == "thunderbolt0"
    assert other.count("--trusted-interface") == 1


def memory_share_in(words: list[str]) -> str:
    return words[words.index("--memory-utilization") + 1]


def test_shared_settings_reach_the_agents_and_others_only_the_head() -> None:
    shared = {"log-level": "debug", "blas": False, "blas_threads": 2, "weights-limit": "9GB", "run-dir": "/r"}
    shared |= {"model-load-timeout": 90, "file-descriptor-limit": 512}
    file = DevicesFile((HEAD, MINI), serve={**shared, "port": 8200, "kv-bits": 8})
    words = agent_arguments(file, MINI, HeadAddress("192.168.5.2"), "/s")
    flags = [
        *("--log-level", "debug", "--blas", "off", "--blas-threads", "2", "--weights-limit", "9GB"),
        *("--run-dir", "/r", "--model-load-timeout", "90", "--file-descriptor-limit", "512"),
    ]
    assert words[-len(flags) :] == flags
    assert head_arguments(file, "demo", "/s", IDS)[-len(flags) - 4 :] == [
        *flags,
        *("--port", "8200", "--kv-bits", "8"),
    ]


def test_every_setting_that_serve_and_join_share_reaches_the_agents_from_the_file() -> None:
    taken = [set(inspect.signature(command).parameters) for command in (serve, join)]
    both = set(Settings.model_fields).intersection(*taken)
    of_each_device = {"memory_limit", "memory_utilization", "state_dir", "log_dir"}
    assert both == {*FOR_AGENTS, *of_each_device}


def test_a_single_machine_has_no_cluster() -> None:
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
        ("nodes", "the number of `devices` sets"),
        ("node-ids", "the list of `devices` sets"),
        ("cluster-port", "the coordinator's `port` sets"),
        ("api-key", "use api-key-file"),
        ("speed", "which is no setting"),
        ("log-dir", "with its folder `logs`, sets"),
        ("api-key-file", "absolute path on the coordinator"),
        ("stages", "which the planner sets if there are several devices"),
        ("log-level", "log-level under `serve` is 1; it must be debug, info, warning or error"),
    ],
)
def test_settings_not_allowed_under_serve_are_refused(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        head_arguments(DevicesFile((HEAD, MINI), serve={key: 1}), "demo", "/s", IDS)


def test_stages_are_passed_on_for_a_single_machine() -> None:
    words = head_arguments(DevicesFile((HEAD,), serve={"stages": 2}), "demo", "/s", IDS)
    assert words[-2:] == ["--stages", "2"]


def test_a_duplicate_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key log_level twice, under two spellings"):
        head_arguments(
            DevicesFile((HEAD,), serve={"log-level": "info", "log_level": "info"}), "demo", "/s", IDS
        )


def test_a_setting_may_have_its_command_line_alias() -> None:
    serve = {"enable-prefix-caching": False, "max_num_batched_tokens": 64, "pipeline-parallel-size": 2}
    words = head_arguments(DevicesFile((HEAD,), serve=serve), "demo", "/s", IDS)
    assert words[-6:] == ["--prefix-cache", "off", "--prefill-chunk", "64", "--stages", "2"]
    with pytest.raises(ConfigError, match="pipeline-parallel-size, which the planner sets"):
        head_arguments(DevicesFile((HEAD, MINI), serve=serve), "demo", "/s", IDS)
    with pytest.raises(ConfigError, match="the key pipeline-parallel-size twice"):
        head_arguments(DevicesFile((HEAD,), serve={"stages": 2, **serve}), "demo", "/s", IDS)


OWN = frozenset({"192.168.5.2", "fd77::2", "127.0.0.1"})
NAMES = {"studio.local": {"192.168.5.2"}, "mini.local": {"192.168.5.1"}, "odd": {"127.0.1.1"}}


def names(name: str) -> set[str]:
    return NAMES.get(name, {name} if name[0].isdigit() or ":" in name else set())


@pytest.mark.parametrize(
    ("host", "address", "where"),
    [
        ("studio.local", "", "here"),
        ("mini.local", "", "elsewhere"),
        ("192.168.5.2", "", "here"),
        ("fd77::2", "", "here"),
        ("127.0.0.1", "", "here"),
        ("localhost", "", "here"),
        ("LOCALHOST", "", "here"),
        ("odd", "", "here"),
        ("unknown-alias", "", "elsewhere"),
        ("unknown-alias", "192.168.5.2", "here"),
    ],
)
def test_the_local_machine_is_recognized_by_its_addresses(host: str, address: str, where: str) -> None:
    assert machine_of(Device("a", host, address=address), SshTarget(host), OWN, names).is_here == (
        where == "here"
    )


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("port 22", "here"),
        ("proxyjump none", "here"),
        ("port 2222", "elsewhere"),
        ("proxyjump me@gate", "elsewhere"),
        ("proxycommand nc %h %p", "elsewhere"),
    ],
)
def test_loopback_behind_another_port_or_a_jump_host_is_not_local(line: str, where: str) -> None:
    target = target_of(f"host box\nhostname 127.0.0.1\n{line}\n")
    assert target.host == "127.0.0.1"
    assert machine_of(Device("box", "box"), target, OWN, names).is_here == (where == "here")


def test_own_addresses_contain_loopback() -> None:
    assert "127.0.0.1" in own_addresses()
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("no-such-name.invalid") == frozenset()


def test_others_reach_the_coordinator_by_its_tensor_address_or_name() -> None:
    other = Machine(Device("b", "b"), "127.0.0.1", is_here=False)
    assert head_host(Machine(Device("a", "a", address="10.0.0.1"), "a", is_here=True), other) == "10.0.0.1"
    assert head_host(Machine(Device("a", "me@a"), "a", is_here=False), other) == "a"


@pytest.mark.parametrize("address", ["fe80::1%en0", "[fe80::1%25en0]", "fe80::1"])
def test_a_link_local_address_in_the_file_is_refused_with_the_reason(address: str) -> None:
    file = DevicesFile((HEAD, replace(MINI, address=address)))
    with pytest.raises(ConfigError) as caught:
        head_arguments(file, "demo", "/s", IDS)
    assert str(caught.value) == (
        f"The `address` of mini is {address}, a link-local one, to which each machine names an interface of its own: "
        "give another address, or remove `address`."
    )
    assert head_arguments(DevicesFile((replace(HEAD, address=address),)), "demo", "/s", IDS)


def test_a_coordinator_that_is_only_known_by_a_link_local_address_is_refused_with_the_reason() -> None:
    there = Machine(Device("studio", "fe80::1%en0"), "fe80::1%en0", is_here=False)
    with pytest.raises(ConfigError) as caught:
        head_host(there, Machine(MINI, "mini", is_here=False))
    assert str(caught.value) == (
        "mini would reach studio at fe80::1%en0, a link-local address, for which it needs an interface of its own. Give studio "
        "another `address` in the file, or let the machines join by hand."
    )


def test_this_machine_is_reached_by_its_address_on_the_route() -> None:
    here = Machine(Device("a", "localhost"), "localhost", is_here=True)
    assert head_host(here, Machine(Device("b", "b"), "127.0.0.1", is_here=False)) == "127.0.0.1"


def test_a_connected_machine_that_the_file_does_not_list_is_named_with_what_to_do() -> None:
    def node(name: str, state: str = "attending", *stages: str, is_head: bool = False) -> dict[str, Any]:
        host = {"id": name, "name": f"{name}.local", "address": "10.0.0.3"}
        return host | {"state": state, "stages": list(stages), "is_head": is_head}

    ids, listed = set(IDS.values()), [node("studio-1b2c", is_head=True), node("mini-7f3a")]
    assert unlisted_nodes(listed, ids, "studio") == {}
    alone = node("this-machine", is_head=True)
    assert unlisted_nodes([alone], ids, "studio") == {}, "a head that serves alone has no id of a cluster"
    assert unlisted_nodes([*listed, node("old-3c4d", "gone")], ids, "studio") == {}
    named = unlisted_nodes(
        [*listed, node("old-3c4d", "attending", "demo/1"), node("new-5e6f")], ids, "studio"
    )
    assert named == {
        "old-3c4d": "old-3c4d (old-3c4d.local at 10.0.0.3) belongs to the cluster, but the file does not list it. "
        "It has layers. Remove it by `mlx-ring node remove old-3c4d` on studio, or add it to the file.",
        "new-5e6f": "new-5e6f (new-5e6f.local at 10.0.0.3) belongs to the cluster, but the file does not list it. "
        "It may get layers. Remove it by `mlx-ring node remove new-5e6f` on studio, or add it to the file.",
    }
