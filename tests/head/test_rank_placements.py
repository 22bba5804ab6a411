"""Placement of ranks on machines, trusted links between them, and the hostfile's RDMA devices of each group."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from tests.cluster.test_membership import after, member

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site, WorkerPlace
from mlx_ring.cluster.layer_split import Cut, even_split
from mlx_ring.cluster.membership import Joined
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.head import nodes as subject_of_sites
from mlx_ring.head.placing import cut_layers
from mlx_ring.head.rank_placements import kv_places, place_ranks, set_rdma, share_stages, with_trust
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import BUILTIN_FOLDER
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment
from mlx_ring.settings.config import Settings
from mlx_ring.settings.hostfile import Hostfile, read_hostfile
from mlx_ring.settings.strategies import Strategy

ROWS = [[None, "rdma_en2", "rdma_en3"], ["rdma_en2", None, "rdma_en4"], ["rdma_en3", "rdma_en4", None]]


def hostfile(*ssh: str) -> Hostfile:
    hosts = [
        {"ssh": name, "ips": [f"10.0.8.{place}"], "rdma": row}
        for place, (name, row) in enumerate(zip(ssh, ROWS, strict=True))
    ]
    return read_hostfile({"backend": "jaccl-ring", "hosts": hosts}, "x")


def site(address: str, *, is_local: bool = False) -> Site:
    trusted = (TrustedInterface("en5", address, "10.0.8.0/24"),) if address else ()
    return Site(address, cast("AgentLink", None), is_local, {"": "192.168.1.9"}, Source(), trusted=trusted)


def ranks_with_rdma(sites: list[Site], hosts: Hostfile) -> list[StageAssignment]:
    ranks = [StageAssignment(tp_size=len(sites), stages=1, rank=rank) for rank in range(len(sites))]
    set_rdma(ranks, place_ranks(sites, [(1.0,) * len(sites)]), hosts)
    return ranks


def test_group_of_some_machines_gets_its_rows_of_the_matrix_in_rank_order() -> None:
    for rank in ranks_with_rdma([site("10.0.8.2"), site("", is_local=True)], hostfile("localhost", "b", "c")):
        assert json.loads(rank.rdma) == [[None, "rdma_en3"], ["rdma_en3", None]]
        assert dict(rank.group_environment) == {"MLX_JACCL_RING": "1"}


@pytest.mark.parametrize("others", [["10.0.8.9"], ["10.0.8.1"]])
def test_group_with_a_machine_missing_or_twice_in_the_hostfile_gets_no_rdma(
    others: list[str],
) -> None:
    for rank in ranks_with_rdma([site("10.0.8.1"), *map(site, others)], hostfile("a", "b", "c")):
        assert rank.rdma == ""


@pytest.mark.parametrize(("places", "expected"), [((0, 1), True), ((0, 2), False)])
def test_two_machines_of_a_ring_get_rdma_only_as_neighbours(
    places: tuple[int, int],
    expected: bool,  # noqa: FBT001 - as pytest gives it
) -> None:
    rows: list[list[str | None]] = [
        ["rdma_en2" if (one - other) % 4 in {1, 3} else None for other in range(4)] for one in range(4)
    ]
    hosts = [{"ssh": f"m{place}", "ips": [f"10.0.8.{place}"], "rdma": row} for place, row in enumerate(rows)]
    file = read_hostfile({"backend": "jaccl-ring", "hosts": hosts}, "x")
    for rank in ranks_with_rdma([site(f"10.0.8.{place}") for place in places], file):
        assert bool(rank.rdma) == expected


LAYERS = 28


def trusting_site(node: str, *, trusts: bool = True) -> Site:
    trusted = (TrustedInterface("thunder0", f"10.0.8.{ord(node)}", "10.0.8.0/24"),) if trusts else ()
    return Site(
        node, cast("AgentLink", None), is_local=False, hosts={}, source=Source("model"), trusted=trusted
    )


def cut(stages: int, *shares: float) -> Cut:
    return Cut.alike(even_split(LAYERS, stages), shares)


def nodes_of(stages: tuple[tuple[Site, ...], ...]) -> list[str]:
    return ["".join(site.node for site in stage) for stage in stages]


@pytest.mark.parametrize(
    ("machines", "stages", "ranks", "expected"),
    [
        ("ab", 1, 2, ["ab"]),
        ("ab", 1, 4, ["aabb"]),
        ("abcd", 2, 2, ["ab", "cd"]),
        ("ab", 2, 2, ["aa", "bb"]),
        ("abc", 2, 2, ["aa", "bb"]),
        ("a", 2, 2, ["aa", "aa"]),
    ],
)
def test_neighbouring_ranks_go_to_neighbouring_machines_in_equal_numbers(
    machines: str, stages: int, ranks: int, expected: list[str]
) -> None:
    options = share_stages(cut(stages, *[1.0] * ranks), "grpc", [trusting_site(node) for node in machines], 1)
    assert nodes_of(options[0]) == expected
    assert nodes_of(options[-1]) == ["a" * ranks] * stages, "as a last resort, one machine has all"


def test_machine_without_a_trusted_interface_is_skipped_if_others_have_one() -> None:
    sites = [trusting_site("a"), trusting_site("b", trusts=False), trusting_site("c")]
    assert nodes_of(share_stages(cut(1, 1, 1), "grpc", sites, 1)[0]) == ["ac"]


def test_too_few_machines_with_trusted_interfaces_are_an_error_that_names_the_other() -> None:
    with pytest.raises(PlanError, match="b names none"):
        share_stages(cut(1, 1, 1), "grpc", [trusting_site("a"), trusting_site("b", trusts=False)], 2)


def test_link_is_trusted_if_both_ends_trust_an_interface_of_one_network() -> None:
    apart = replace(trusting_site("c"), trusted=(TrustedInterface("en5", "10.0.9.1", "10.0.9.0/24"),))
    broken = {frozenset("ad"): UNREACHABLE}
    sites = [
        trusting_site("a"),
        trusting_site("b"),
        apart,
        trusting_site("d"),
        trusting_site("e", trusts=False),
    ]
    links = with_trust(broken, sites)
    assert {"".join(sorted(pair)) for pair, link in links.items() if link.trusted} == {"ab", "bd"}


def test_collectives_use_measurements_between_trusted_interfaces() -> None:
    wireless, cable = LinkProfile(5e-3, 2e7), LinkProfile(50e-6, 4e9)
    pairs = [frozenset("ab"), frozenset("bc"), frozenset("ac")]
    measured = {pairs[0]: cable, pairs[1]: UNREACHABLE}
    links = with_trust(dict.fromkeys(pairs, wireless), [trusting_site(node) for node in "abc"], measured)
    seconds = [(links[pair].seconds(1e6), links[pair].collective_seconds(1e6)) for pair in pairs]
    slow = wireless.collective_seconds(1e6)
    assert seconds == [
        (wireless.seconds(1e6), collective) for collective in (cable.collective_seconds(1e6), slow, slow)
    ]


@pytest.mark.parametrize(("strategy", "layers"), [("auto", [5, 3]), ("uniform", [4, 4])])
def test_stages_of_one_machine_have_as_many_layers_with_the_strategy_uniform(
    strategy: Strategy, layers: list[int]
) -> None:
    folder = read_model_folder(BUILTIN_FOLDER / "demo")
    assert [len(cut) for cut in cut_layers(folder, Settings(stages=2, strategy=strategy))] == layers


def test_kv_of_ranks_is_reached_from_machines_that_join_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the addresses from a machine that has just joined: it is why layers move, and its workers read their KV."""

    def no_channel(*_: object, **__: object) -> None:
        """Open nothing, because nothing is sent to the agents."""

    monkeypatch.setattr(subject_of_sites, "open_aio_channel", no_channel)
    own = replace(member("head", 1), host="127.0.0.1")
    on_cable = replace(member("a", 2), host="fe80::a%en3", head_host="fe80::1%en0")
    later = replace(member("later", 3), host="10.0.0.9", head_host="fe80::1%en5")
    membership = after(Joined(own), Joined(on_cable))
    control = SimpleNamespace(node="head", credentials=None, membership=membership)
    sites = subject_of_sites.cluster_sites(cast("Control", control), membership, 50051)
    loaded = [WorkerPlace(stage, 0, "", "", "unix:/worker", 7000) for stage in range(2)]
    places, _ = kv_places([LayerRange(0, 2), LayerRange(2, 4)], place_ranks(sites, [(1.0,), (1.0,)]), loaded)

    assert [place.address_from("later")[0] for place in places] == ["", "[fe80::a%en3]:7000"]
    control.membership = membership.apply(Joined(later))
    assert [place.address_from("later") for place in places] == [
        ("[fe80::1%en5]:7000", "head"),
        ("[fe80::a%en5]:7000", "a"),
    ]
    moved = replace(on_cable, host="10.0.0.2", head_host="10.0.0.1")
    control.membership = after(Joined(own), Joined(moved))
    assert sites[0].host_for("a") == "10.0.0.1", "it has joined again, over another interface"
    control.membership = after(Joined(own))
    assert [place.address_from("a")[0] for place in places] == ["[fe80::1%en0]:7000", "unix:/worker"]
