"""MLX's hostfiles in each of their forms, their errors, and the workers that `serve --hostfile` starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import as_json, load_hostfile, part_of, read_hostfile
from mlx_ring.settings.rank_settings import named_addresses, named_machines, with_named_group

PAIR: list[dict[str, object]] = [
    {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
    {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["rdma_en3", None]},
]


def test_a_hostfile_with_fields_gives_backend_variables_and_rdma_matrix() -> None:
    file = read_hostfile({"backend": "jaccl", "envs": ["A=1=2"], "hosts": PAIR}, "x")
    assert [(host.ssh, host.ips) for host in file.hosts] == [("a", ("10.0.0.1",)), ("b", ("10.0.0.2",))]
    assert (file.backend, file.variables) == ("jaccl", {"A": "1=2"})
    assert file.rdma is not None
    assert as_json(file.rdma) == [[None, "rdma_en2"], ["rdma_en3", None]]


def test_a_jaccl_ring_sets_a_variable_and_needs_cables_to_neighbours_only() -> None:
    rows: list[list[object]] = [
        [None, "rdma_en2", None, "rdma_en3"],
        ["rdma_en2", None, "rdma_en3", None],
        [None, "rdma_en2", None, "rdma_en3"],
        ["rdma_en2", None, "rdma_en3", None],
    ]
    hosts = [{"ssh": f"m{place}", "ips": ["10.0.0.1"], "rdma": row} for place, row in enumerate(rows)]
    file = read_hostfile({"backend": "jaccl-ring", "hosts": hosts}, "x")
    assert (file.backend, file.variables) == ("jaccl", {"MLX_JACCL_RING": "1"})
    assert file.rdma is not None
    assert as_json(part_of(file.rdma, (0, 1))) == [[None, "rdma_en2"], ["rdma_en2", None]]


def test_several_cables_between_two_hosts_are_a_list_of_devices() -> None:
    rows = [[None, ["rdma_en2", "rdma_en4"]], [["rdma_en3", "rdma_en5"], None]]
    file = read_hostfile([{"ssh": f"m{place}", "rdma": row} for place, row in enumerate(rows)], "x")
    assert file.rdma is not None
    assert as_json(file.rdma) == rows


INVALID: list[tuple[object, str]] = [
    ([], "x is a hostfile without hosts"),
    (
        [["127.0.0.1"]],
        "'127.0.0.1' is no address to listen on, of which MLX's ring takes IPv4 alone; give one such as 127.0.0.1:32323",
    ),
    ([["::1:80"]], "'::1:80' is no address to listen on"),
    (
        [["[fe80::1%en0]:80"]],
        r"'\[fe80::1%en0\]:80' is no address to listen on, of which MLX's ring takes IPv4 alone",
    ),
    ([["127.0.0.1:70000"]], "'127.0.0.1:70000' is no address to listen on"),
    ([[]], "a rank has no address"),
    ([{"ips": []}], "host 0 has no `ssh`"),
    ([{"ssh": "a", "port": 2}], "a host has the field port, which does not exist; fields are ips, rdma, ssh"),
    ([{"ssh": "a"}, ["b:1"]], "host 1 is .*; it must have fields"),
    ({"hosts": []}, r"hosts is \[\]; it must be a list with one or more hosts"),
    (
        {"hosts": PAIR, "backend": "gloo"},
        "backend is 'gloo'; it must be one of ring, mpi, nccl, jaccl, jaccl-ring",
    ),
    ({"hosts": PAIR, "envs": ["A"]}, "envs has 'A'; it must be a list of texts such as NAME=value"),
    (
        {"hosts": PAIR, "tcp": 1},
        "the hostfile has the field tcp, which does not exist; fields are backend, envs, hosts",
    ),
    ([PAIR[0], {"ssh": "b"}], "rdma of b is None; it must be a list of 2 with null at place 1"),
    ([{"ssh": "a", "rdma": ["rdma_en1"]}], "a list of 1 with null at place 0, its own"),
    (
        [PAIR[0], {"ssh": "b", "rdma": ["en3", None]}],
        "rdma of b names 'en3', which is no RDMA device; these have names such as rdma_en2",
    ),
    (
        [PAIR[0], {"ssh": "b", "rdma": [None, None]}],
        "rdma connects b to a by none, and a to b by rdma_en2; `mlx.distributed_config",
    ),
    (
        [{"ssh": "a", "rdma": [None, None]}, {"ssh": "b", "rdma": [None, None]}],
        "rdma lists no device from a to b; every two hosts must be connected",
    ),
]


@pytest.mark.parametrize(("content", "sentence"), INVALID)
def test_an_invalid_hostfile_is_refused_with_the_reason(content: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_hostfile(content, "x")


def test_an_unreadable_file_and_another_format_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    with pytest.raises(ConfigError, match=r"hosts\.json cannot be read"):
        load_hostfile(file)
    file.write_text('{"devices": []}')
    with pytest.raises(ConfigError, match="is no hostfile"):
        load_hostfile(file)


# ---- the group of workers that `serve --hostfile` starts


def settings(tmp_path: Path, content: object, **options: object) -> Settings:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(content))
    return Settings(hostfile=file, **options)  # pyright: ignore[reportArgumentType] - values as they come


LOCAL_HOSTS = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "localhost"}]
RING = [["127.0.0.1:5001", "127.0.0.1:5002"], ["127.0.0.1:5003"]]


def test_a_hostfile_sets_the_number_of_ranks_and_their_addresses(tmp_path: Path) -> None:
    grouped = with_named_group(settings(tmp_path, RING))
    assert (grouped.tp, grouped.backend) == (2, "auto")
    assert named_addresses(grouped) == ("127.0.0.1:5001,127.0.0.1:5002", "127.0.0.1:5003")
    assert with_named_group(settings(tmp_path, RING, link="ring")).stages == 2
    without_ports = with_named_group(settings(tmp_path, {"backend": "mpi", "hosts": LOCAL_HOSTS}))
    assert (without_ports.tp, without_ports.backend, named_addresses(without_ports)) == (2, "mpi", ())


def test_a_cluster_reads_rdma_devices_and_the_backend_but_no_ranks(tmp_path: Path) -> None:
    given = settings(tmp_path, {"backend": "jaccl", "hosts": PAIR}, nodes=2, tp=2)
    grouped = with_named_group(given)
    assert (grouped.tp, grouped.backend, named_addresses(grouped)) == (2, "jaccl", ())
    machines = named_machines(grouped)
    assert machines is not None
    assert machines.rdma == (((), ("rdma_en2",)), (("rdma_en3",), ()))
    assert with_named_group(given.model_copy(update={"tp": 1})).backend == "auto", "nothing is joined"
    planned = given.model_copy(update={"tp": 1, "strategy": "tensor"})
    assert with_named_group(planned).backend == "jaccl", "the plan joins them"
    assert named_machines(settings(tmp_path, RING)) is None


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (PAIR, {"model": "m"}, r"names a, b, and `serve`.*mlx-ring cluster start -c .*hosts\.json --model m"),
        ([*LOCAL_HOSTS, {"ssh": "127.0.0.1", "ips": ["192.0.2.7"]}], {}, "names 127.0.0.1, and"),
        (
            {"backend": "jaccl", "hosts": [{"ssh": "127.0.0.1", "rdma": [None]}]},
            {},
            "rdma connects machines",
        ),
        (LOCAL_HOSTS, {"tp": 3}, "names 2 ranks, but 3 were requested"),
        (RING, {"nodes": 2}, "names workers of this machine, but --nodes is 2"),
        (LOCAL_HOSTS, {"nodes": 2}, "has neither `rdma` nor `backend`"),
        (
            {"hosts": PAIR, "envs": ["A=1"]},
            {"nodes": 2},
            "has A under `envs`, which reaches no other machine",
        ),
        (RING, {"more_models": "b"}, "names ports for one group of workers, but there would be 2"),
        (RING, {"stages": 2, "tp": 2}, "names ports for one group of workers, but there would be 2"),
    ],
)
def test_hosts_that_contradict_the_settings_are_refused(
    content: object, options: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        with_named_group(settings(tmp_path, content, **options))


def test_fast_synchronization_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    content = {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1", "A=1"], "hosts": PAIR}
    assert read_hostfile(content, "x").variables == {"A": "1"}
    assert "MLX_METAL_FAST_SYNCH under `envs` is left out" in caplog.text
