"""Choice of a group's backend, and the ranks that it joins."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from mlx_ring.core.errors import ConfigError, ProtocolError
from mlx_ring.rpc.backends import (
    BACKENDS,
    DIRECT_LINKS,
    LINKS,
    Backend,
    DirectLink,
    Link,
    LinkKind,
    RankCapabilities,
    backend_of,
    choose_backend,
    direct_link,
    has_collective_link,
    joined_ranks,
)
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment

RING = frozenset({"ring"})
MAC = frozenset({"ring", "jaccl"})
CUDA = frozenset({"ring", "nccl"})
MATRIX = [[None, "rdma_en2"], ["rdma_en3", None]]
MACS = (
    RankCapabilities("mini", MAC, rdma_devices=frozenset({"rdma_en2"})),
    RankCapabilities("studio", MAC, rdma_devices=frozenset({"rdma_en3"})),
)
GPUS = (RankCapabilities("box", CUDA, "0"), RankCapabilities("box", CUDA, "1"))


def test_tables_describe_every_link_and_backend() -> None:
    assert set(BACKENDS) == set(get_args(Backend))
    assert set(DIRECT_LINKS) == set(get_args(DirectLink))
    assert set(LINKS) == set(get_args(Link))


def test_every_backend_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text(encoding="utf-8")
    assert [backend for backend in BACKENDS if f"| `{backend}` |" not in page] == []


def test_every_link_is_documented_with_its_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("| value | transport | limits |\n")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert {row[0].strip("`"): row[2] for row in rows} == {name: limits(info) for name, info in LINKS.items()}


def limits(link: LinkKind) -> str:
    is_local = link.backend is not None and not BACKENDS[link.backend].joins_machines
    return ", ".join(["two stages"] * bool(link.why_two_stages) + ["one machine"] * is_local)


def test_only_direct_links_may_be_encrypted() -> None:
    """MLX encrypts nothing."""
    assert not any(info.is_encrypted for info in LINKS.values() if info.backend is not None)


@pytest.mark.parametrize("link", ["", *LINKS])
def test_a_worker_opens_its_direct_link_and_grpc_beside_collectives(link: str) -> None:
    opened = direct_link(StageAssignment(stages=2, tp_size=1, link=link))
    assert opened == (link if link in DIRECT_LINKS else "grpc")


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=f"the MLX backend 'gloo'; known ones are {', '.join(BACKENDS)}"):
        choose_backend("gloo", MACS, option="--link gloo")


def test_rdma_is_chosen_if_every_machine_has_it_and_a_hostfile_lists_the_devices() -> None:
    assert choose_backend("auto", MACS, option="", rdma=MATRIX).backend == "jaccl"
    without = choose_backend("auto", MACS, option="")
    assert (without.backend, without.why.split("; ")[0]) == ("ring", "it works everywhere")
    assert "not jaccl: nothing says which machines the RDMA devices connect" in without.why
    one = choose_backend("auto", (MACS[0], RankCapabilities("studio", MAC)), option="", rdma=MATRIX)
    assert one.backend == "ring"
    assert "studio has no RDMA device" in one.why


def test_nccl_is_chosen_if_every_rank_has_its_own_gpu_on_one_machine() -> None:
    assert choose_backend("auto", GPUS, option="").backend == "nccl"
    shared = choose_backend("auto", (GPUS[0], GPUS[0]), option="")
    assert (shared.backend, "there are 1" in shared.why) == ("ring", True)
    apart = choose_backend("auto", (GPUS[0], RankCapabilities("other", CUDA, "0")), option="")
    assert (apart.backend, "listens on every network" in apart.why) == ("ring", True)


def test_mpi_is_chosen_only_on_request() -> None:
    both = (RankCapabilities("vm", frozenset({"ring", "mpi"})),) * 2
    assert choose_backend("auto", both, option="").backend == "ring"
    assert choose_backend("mpi", both, option="").backend == "mpi"


@pytest.mark.parametrize(
    ("requested", "ranks", "message"),
    [
        (
            "jaccl",
            (RankCapabilities("vm", RING),) * 2,
            r"--x: MLX's backend jaccl is not available on vm: .*rdma_ctl enable",
        ),
        ("jaccl", (MACS[0], MACS[0]), "several of these workers are on one"),
        ("jaccl", MACS, "give a hostfile with `rdma`"),
        (
            "nccl",
            (RankCapabilities("vm", RING),) * 2,
            r"nccl is not available on vm: .*CUDA.*\. ring would be available\.$",
        ),
        (
            "nccl",
            (GPUS[0], RankCapabilities("box", CUDA)),
            "NCCL needs a GPU for each of the 2 workers, but there are 1",
        ),
        ("nccl", (GPUS[0], RankCapabilities("other", CUDA, "0")), "NCCL listens on every network: use ring"),
        (
            "mpi",
            (RankCapabilities("a", frozenset({"mpi"})), RankCapabilities("b", frozenset({"mpi"}))),
            "one machine only",
        ),
        ("ring", (RankCapabilities("a", frozenset()),) * 2, "ring is not available on a"),
    ],
)
def test_an_unavailable_backend_is_refused_with_a_remedy(
    requested: str, ranks: tuple[RankCapabilities, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(requested, ranks, option="--x")


def test_an_rdma_matrix_with_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="names rdma_en9 on mini, which has rdma_en2"):
        choose_backend("jaccl", MACS, option="--x", rdma=[[None, "rdma_en9"], ["rdma_en3", None]])


@pytest.mark.parametrize("link", ["", "grpc"])
def test_stages_linked_by_grpc_join_no_group(link: str) -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=1, link=link)
    assert not has_collective_link(assignment)
    assert joined_ranks(assignment) == []


@pytest.mark.parametrize(
    ("link", "backend"), [("ring", "ring"), ("allreduce", "ring"), ("mpi", "mpi"), ("jaccl", "jaccl")]
)
def test_a_collective_link_joins_all_stages_in_order(link: str, backend: str) -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=1, link=link)
    assert joined_ranks(assignment) == [(0, 0), (1, 0), (2, 0)]
    assert backend_of(assignment) == backend


def test_ranks_of_a_split_stage_form_a_group() -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=2, rank=1)
    assert joined_ranks(assignment) == [(1, 0), (1, 1)]
    assert backend_of(assignment) == "ring"


def test_an_unknown_link_or_backend_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=f"the link 'carrier pigeon'; known ones are {', '.join(LINKS)}"):
        joined_ranks(StageAssignment(stages=2, tp_size=1, link="carrier pigeon"))
    with pytest.raises(ProtocolError, match="the MLX backend 'gloo'; known ones are ring"):
        backend_of(StageAssignment(tp_size=2, backend="gloo"))
