"""Devices files, MLX's hostfiles as such, and shares of memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.cluster_file import estimated_cluster, read_cluster
from mlx_ring.settings.devices_file import DevicesFile, load_content, read_devices, read_share

PROTOTYPE = """
{"devices":[
  {"device_id":"studio","hostname":"studio.local","port":50051,"role":"coordinator","capabilities":{"memory_gb":48,"gpu_cores":30}},
  {"device_id":"mini","hostname":"mini.local","port":50052,"role":"worker","capabilities":{"memory_gb":16,"gpu_cores":10}}],
 "model":{"name":"Qwen3-1.7B-8bit","provider":"mlx-community"},
 "sharding":{"strategy":"custom","custom_proportions":[0.7,0.3]}}
"""
HOSTFILE = """
[{"ssh":"127.0.0.1","ips":["192.168.5.2"],"rdma":[null,"rdma_en3"]},
 {"ssh":"mini1@192.168.5.1","ips":["192.168.5.1"],"rdma":["rdma_en3",null]}]
"""
NO_FIELDS: Mapping[str, object] = {}


def read(text: str) -> DevicesFile:
    return read_devices(load_content(text, "cluster.json"), "cluster.json")


def test_a_prototype_s_file_is_read_completely() -> None:
    file = read(PROTOTYPE)
    assert [(device.name, device.ssh, device.memory_gb) for device in file.devices] == [
        ("studio", "studio.local", 48),
        ("mini", "mini.local", 16),
    ]
    assert file.coordinator.name == "studio"
    assert (file.model, file.strategy, file.proportions) == (
        "mlx-community/Qwen3-1.7B-8bit",
        "custom",
        (0.7, 0.3),
    )
    assert file.notes == ("mini: port 50052 has no effect, because nodes use any free port.",)


def test_yaml_is_read_like_json() -> None:
    text = """
    devices:
      - {hostname: studio.local}
      - {device_id: mini, hostname: mini.local, role: coordinator, address: 10.0.0.2, program: /opt/mlx-ring}
    model: demo
    sharding: {strategy: memory_proportional}
    serve: {port: 8200}
    """
    file = read(text)
    assert [device.is_coordinator for device in file.devices] == [False, True]
    assert (file.devices[0].name, file.model, file.strategy) == ("studio.local", "demo", "memory")
    assert file.serve == {"port": 8200}


def test_a_hostfile_gives_ssh_targets_and_addresses() -> None:
    file = read(HOSTFILE)
    assert [(device.ssh, device.address, device.is_coordinator) for device in file.devices] == [
        ("127.0.0.1", "192.168.5.2", True),
        ("mini1@192.168.5.1", "192.168.5.1", False),
    ]
    assert file.notes == ("rdma has no effect here: `serve` reads it from --hostfile.",)


def test_a_cluster_is_estimated_from_memory_and_cores() -> None:
    cluster = estimated_cluster(read(PROTOTYPE), "cluster.json")
    assert cluster == read_cluster(PROTOTYPE, "cluster.json")
    studio, mini = cluster.nodes
    assert studio.memory_bytes / 2**30 == pytest.approx(32.0)
    assert mini.memory_bytes / 2**30 == pytest.approx(10.72 * 8 / 9)
    assert replace(mini, name="") == replace(known_profile("m2-mac-mini-16"), name=""), (
        "the slowest with 10 cores"
    )


def test_a_memory_share_is_a_field_of_the_device_or_of_its_capabilities() -> None:
    own = with_device(gpu_memory_utilization=0.5)
    in_capabilities = with_device(capabilities={"memory_gb": 16, "gpu_cores": 10, "memory_utilization": 0.5})
    for text in (own, in_capabilities):
        assert [device.memory_utilization for device in read(text).devices] == [None, 0.5]
        studio, mini = read_cluster(text, "cluster.json").nodes
        assert mini.usable_bytes == pytest.approx(0.5 * mini.memory_bytes, abs=1)
        assert studio.usable_bytes == pytest.approx(0.9 * studio.memory_bytes, abs=1), "the default"


def test_a_memory_share_under_serve_is_the_default_of_every_device() -> None:
    text = with_device(memory_utilization=1)
    file = read(json.dumps({**json.loads(text), "serve": {"memory-utilization": 0.6, "port": 8200}}))
    assert [device.memory_utilization for device in file.devices] == [0.6, 1.0]
    assert file.serve == {"port": 8200}


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(PROTOTYPE), **changes})


def with_device(**changes: Any) -> str:
    first, second = json.loads(PROTOTYPE)["devices"]
    return changed(devices=[first, {**second, **changes}])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "a hostfile without hosts"),
        ("[{ips: [a]}]", "host 0 has no `ssh`"),
        ("[{ssh: a, ips: b}]", "ips of a is 'b'"),
        ("[{ssh: a, port: 2}]", "a host has the field port, which does not exist; fields are ips, rdma, ssh"),
        ("[{ssh: a, rdma: [x]}]", "a list of 1 with null at place 0, its own"),
        ("[a]", "host 0 is 'a'; it must have fields"),
        ("devices: []", "`devices` must be a list"),
        ("devices: [{device_id: a}]", "the device a has no `hostname`"),
        (changed(extra=1), "the file has the field extra"),
        (with_device(role="chief"), "the role of mini is 'chief'"),
        (with_device(role="coordinator"), "2 coordinators, studio and mini"),
        (with_device(device_id="studio"), "names the device studio twice"),
        (with_device(port=0), "the port of mini is 0"),
        (with_device(port="x"), "the port of mini is 'x'"),
        (with_device(hostname=["a"]), "hostname is ['a']; it must be a text"),
        (with_device(capabilities={"memory_gb": -1}), "memory_gb is -1"),
        (
            with_device(gpu_memory_utilization=1.5),
            "gpu_memory_utilization of mini is 1.5; it must be a number",
        ),
        (with_device(capabilities={"memory_utilization": 0}), "memory_utilization of mini is 0; it must be"),
        (
            with_device(memory_utilization=0.5, capabilities={"memory_utilization": 0.5}),
            "the share of memory of mini is given twice",
        ),
        (changed(serve={"gpu-memory-utilization": 90}), "gpu-memory-utilization of `serve` is 90; it must"),
        (with_device(capabilities={"cores": 1}), "capabilities of mini has the field cores"),
        (changed(model={}), "`model` has no `name`"),
        (changed(model={"provider": "a", "name": "b/c"}), "provider is a, but its name b/c already has one"),
        (changed(sharding={"strategy": "best"}), "the strategy is best; it must be one of auto,"),
        (changed(sharding={"strategy": "custom"}), "for each of the 2 devices; 0 are there"),
        (
            changed(sharding={"strategy": "custom", "custom_proportions": [1, "a"]}),
            "must be a list of numbers above 0",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("cluster.json")


def test_planning_needs_memory_and_cores() -> None:
    with pytest.raises(ConfigError, match="mini needs `capabilities` with memory_gb and gpu_cores"):
        read_cluster(with_device(capabilities={}), "cluster.json")


def test_unused_proportions_are_noted() -> None:
    file = read(changed(sharding={"strategy": "uniform", "custom_proportions": [0.7, 0.3]}))
    assert file.proportions == ()
    assert file.notes[-1] == "custom_proportions has no effect with the strategy uniform."


def test_unused_fields_of_a_single_device_are_noted() -> None:
    single = json.loads(changed(sharding={"strategy": "uniform"}))
    single["devices"] = [{"hostname": "a", "port": 50061, "address": "10.0.0.1"}]
    assert read(json.dumps(single)).notes == (
        "a is the only device: port and address and `sharding` do nothing.",
    )
    single["devices"], single["sharding"] = [{"hostname": "a"}], {}
    assert read(json.dumps(single)).notes == ()


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"gpu_memory_utilization": None}, None),
        ({"memory_utilization": 0.7}, 0.7),
        ({"gpu_memory_utilization": 1}, 1.0),
        ({"gpu-memory-utilization": 0.5}, 0.5),
    ],
)
def test_a_share_is_read_under_each_name_and_in_each_place(
    fields: Mapping[str, object], share: float | None
) -> None:
    assert read_share("mini", "cluster.json", fields, NO_FIELDS) == share
    assert read_share("mini", "cluster.json", NO_FIELDS, fields) == share


@pytest.mark.parametrize("value", [0, -0.1, 1.01, 90, "0.9", True, float("nan"), [0.9]])
def test_an_invalid_share_is_refused_with_file_machine_and_value(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_share("mini", "cluster.json", {"gpu_memory_utilization": value})
    sentence = (
        f"cluster.json: gpu_memory_utilization of mini is {value!r}; it must be a number above 0, at most 1."
    )
    assert str(caught.value) == sentence


def test_a_share_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="of mini is given twice, as memory_utilization and gpu_"):
        read_share("mini", "cluster.json", {"memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5})


def test_content_that_is_no_yaml_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^c\.yaml is neither YAML nor JSON: .* in line 1, column 15\.$"):
        load_content("machines: [a, ", "c.yaml")
