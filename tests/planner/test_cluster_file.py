"""Cluster files: machines, links, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripts.published import rows_of
from tests.planner.clusters import known_cluster

from mlx_ring.core.errors import ConfigError
from mlx_ring.planner.catalogue import chip_of_bin, chips, known_machines, known_profile, named_links
from mlx_ring.planner.cluster_file import (
    MOST_ADDED,
    Upkeep,
    read_cluster,
    read_upkeep,
    remarks_on_described,
    with_machines,
)

PAIR = "machines: [{name: a, machine: m4-mac-mini-16}, {name: b, machine: m4-mac-mini-16}]"
CLUSTER = """
machines:
  - {name: studio, machine: m2-max-mac-studio-64}
  - m4-mac-mini-16
  - {name: box, memory_gb: 24, bandwidth_gb_s: 936, tflops: 71, reserve: 0.2}
links:
  - {between: [studio, box], round_trip_ms: 0.3, gbit_s: 10}
usual_link: {round_trip_ms: 0.6, gbit_s: 1}
"""


def test_machines_are_known_by_name_or_described_by_fields() -> None:
    cluster = read_cluster(CLUSTER, "cluster.yaml")
    studio, mini, box = cluster.nodes
    assert studio.name == "studio"
    assert 0.6 * 400e9 < studio.bandwidth < 400e9
    assert (mini.name, round(mini.memory_bytes / 2**30, 2)) == ("m4-mac-mini-16", 9.53)
    assert box.usable_bytes == int(24 * 2**30 * 0.8)
    assert cluster.link("box", "studio").seconds(1.25e9) == pytest.approx(1.00015)
    assert cluster.link("box", "m4-mac-mini-16").round_trip_s == pytest.approx(0.6e-3)
    assert cluster.link("box", "box").bandwidth > 1e9


def test_a_machine_sets_its_memory_share_or_its_reserve() -> None:
    text = """
    machines:
      - {name: a, machine: m4-mac-mini-16, gpu_memory_utilization: 0.5}
      - {name: b, machine: m4-mac-mini-16, reserve: 0.2}
      - {name: c, memory_gb: 10, bandwidth_gb_s: 1, tflops: 1, memory_utilization: 0.7}
      - {name: d, memory_gb: 10, bandwidth_gb_s: 1, tflops: 1}
    """
    nodes = read_cluster(text, "cluster.yaml").nodes
    assert [round(node.usable_bytes / node.memory_bytes, 3) for node in nodes] == [0.5, 0.8, 0.7, 0.9]


def test_a_chip_that_is_described_by_its_numbers_has_its_own_profile() -> None:
    """Expect the efficiencies of the chip, and the memory that its system leaves."""
    for chip in chips().values():
        numbers = (
            f"memory_gb: 64, bandwidth_gb_s: {chip.gb_s}, tflops: {chip.tflops}, backend: {chip.backend}"
        )
        (node,) = read_cluster(f"machines: [{{name: a, {numbers}}}]", "cluster.yaml").nodes
        near = chips()[node.nearest_chip]
        # Some chips have the same numbers.
        assert (near.gb_s, near.tflops, near.backend) == (chip.gb_s, chip.tflops, chip.backend)
        assert replace(node, nearest_chip="") == known_profile(f"{near.name}-64", "a")


def test_a_described_machine_has_the_efficiencies_of_the_nearest_chip() -> None:
    text = """
    machines:
      - {name: fast, memory_gb: 64, bandwidth_gb_s: 600, tflops: 19}
      - {name: slow, memory_gb: 64, bandwidth_gb_s: 280, tflops: 8.8}
      - {name: gpu, memory_gb: 64, bandwidth_gb_s: 600, tflops: 19, backend: cuda}
      - {name: cpu, memory_gb: 64, bandwidth_gb_s: 600, tflops: 19, backend: cpu}
    """
    nodes = read_cluster(text, "cluster.yaml").nodes
    nearest = {node.name: node.nearest_chip for node in nodes}
    assert nearest == {
        "fast": "m4-max-40",
        "slow": "m4-pro-20",
        "gpu": "dgx-spark",
        "cpu": "cpu-server",
    }
    fast, _, gpu, cpu = nodes
    known = known_profile("m4-max-40-64")
    assert fast.bandwidth / known.bandwidth == pytest.approx(600 / 546)
    assert fast.flops / known.flops == pytest.approx(19 / 17.2)
    assert fast.costs.layer_s == known.costs.layer_s
    assert fast.memory_bytes == known.memory_bytes < gpu.memory_bytes == 64 * 2**30
    assert cpu.widens


def test_machines_that_are_described_alike_share_a_remark() -> None:
    def remarks(count: int) -> tuple[str, ...]:
        numbers = "memory_gb: 64, bandwidth_gb_s: 600, tflops: 19"
        listed = ", ".join(f"{{name: m{place}, {numbers}}}" for place in range(count))
        return remarks_on_described(read_cluster(f"machines: [{listed}]", "c.yaml").nodes)

    assert remarks_on_described(known_cluster("m4-16").nodes) == ()
    for count, begin in (
        (1, "m0 is"),
        (2, "m0 and m1 are"),
        (4, "m0, m1, m2 and m3 are"),
        (1900, "1,900 machines are"),
    ):
        (remark,) = remarks(count)
        assert remark.startswith(
            f"{begin} described by numbers, and predicted like the nearest chip, m4-max-40 (metal)."
        )


def test_every_known_machine_has_a_profile_for_every_memory_size() -> None:
    for machine in known_machines().values():
        for gigabytes in machine.gb:
            assert (
                0.5 * gigabytes
                < known_profile(f"{machine.name}-{gigabytes}").memory_bytes / 2**30
                <= gigabytes
            )


def test_a_mac_is_the_same_by_its_name_its_chip_and_its_cores() -> None:
    """Expect 819 GB/s of an M3 Ultra with 80 cores by each door, not 12 GB/s a core."""
    devices = """
    {"devices": [{"hostname": "a", "capabilities": {"memory_gb": 512, "gpu_cores": 80}},
                 {"hostname": "b", "capabilities": {"memory_gb": 512, "chip": "m3-ultra-80"}}]}
    """
    nodes = (*read_cluster(devices, "devices.json").nodes, known_profile("m3-ultra-80-512"))
    named = known_profile("m3-ultra-mac-studio-512")
    assert all(replace(node, name=named.name) == named for node in nodes)


def test_cores_and_memory_give_the_bin() -> None:
    assert known_profile("m4-max-mac-studio-36").bandwidth < 410e9
    assert chip_of_bin(96, 30) == chips()["m3-max-30"]
    assert chip_of_bin(128, 40) == chips()["m3-max-40"], "the slowest of those that are sold with it"
    assert chip_of_bin(64, 41) is None
    text = '{"devices": [{"hostname": "a", "capabilities": {"memory_gb": 64, "gpu_cores": 41}}]}'
    with pytest.raises(ConfigError, match=r"a needs `capabilities` with chip, one of m1-7, .* 41 GPU cores"):
        read_cluster(text, "devices.json")


def test_a_wired_limit_states_the_memory() -> None:
    text = "machines: [{name: a, machine: m1-ultra-mac-studio-128, wired_limit_gb: 112}, m1-ultra-mac-studio-128]"
    limited, usual = read_cluster(text, "cluster.yaml").nodes
    assert limited.usable_bytes == pytest.approx(0.8 * 112 * 2**30, rel=1e-6), "a fifth of it stays free"
    assert usual.usable_bytes == pytest.approx(0.8 * 96 * 2**30, rel=1e-6)


@pytest.mark.parametrize("name", ["tb5", "tb5-rdma", "tb4", "10gbe", "2.5gbe", "1gbe", "wifi"])
def test_links_are_known_by_name(name: str) -> None:
    text = f"machines: [{{name: a, machine: m4-mac-mini-16}}, {{name: b, machine: m4-mac-mini-16}}]\nusual_link: {name}"
    link = read_cluster(text, "cluster.yaml").link("a", "b")
    assert 0 < link.seconds(8192) < 0.02
    assert link.is_mesh is name.endswith("-rdma")


def test_the_guide_names_every_link() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    assert {name for name in named_links() if f"`{name}`" not in guide} == set()


def test_every_published_machine_is_in_the_catalogue() -> None:
    for row in rows_of("published_machines.tsv"):
        chip = chips()[f"{row['chip'].lower().replace(' ', '-')}-{row['gpu_cores']}"]
        assert chip.gb_s == float(row["gb_s"])
        if row["tflops_accelerated"] != "-":
            assert (chip.plain_tflops, chip.tflops) == (
                float(row["tflops"]),
                float(row["tflops_accelerated"]),
            )


@pytest.mark.parametrize(
    "links",
    ["usual_link: tb5-rdma", "links: [{between: [a, b], link: tb5-rdma}]", "usual_link: {link: tb5-rdma}"],
)
def test_named_links_for_collectives_are_trusted_unless_the_file_says_otherwise(links: str) -> None:
    machines = "machines: [{name: a, machine: m4-mac-mini-16}, {name: b, machine: m4-mac-mini-16}]\n"
    assert read_cluster(machines + links, "cluster.yaml").link("a", "b").trusted
    if " link: " in links or "{link: " in links:
        untrusted = links.replace("tb5-rdma", "tb5-rdma, trusted: false")
        assert not read_cluster(machines + untrusted, "cluster.yaml").link("a", "b").trusted


@pytest.mark.parametrize(("one", "other"), [("1", "2"), ("1.5", "x"), ("yes", "no")])
def test_the_ends_of_a_link_are_names_that_look_like_numbers(one: str, other: str) -> None:
    """YAML reads such names as numbers or truth values."""
    machines = ", ".join(f"{{name: {name}, machine: m4-mac-mini-16}}" for name in (one, other))
    cluster = read_cluster(
        f"machines: [{machines}]\nlinks: [{{between: [{one}, {other}], link: tb5}}]", "c.yaml"
    )
    assert cluster.link(*(node.name for node in cluster.nodes)) == named_links()["tb5"]


def test_a_file_sets_trusted_links_and_interfaces() -> None:
    machine = "{name: %s, memory_gb: 8, bandwidth_gb_s: 100, tflops: 4%s}"
    interface, numbers = ", trusted_interface: en5", "round_trip_ms: 1, gbit_s: 1"
    cluster = read_cluster(
        f"machines: [{machine % ('a', interface)}, {machine % ('b', interface)}, {machine % ('c', '')}]\n"
        f"links: [{{between: [b, c], {numbers}, trusted: true}}, {{between: [a, c], {numbers}}}]",
        "cluster.yaml",
    )
    a, b, c = cluster.nodes
    assert (cluster.trusts(a, b), cluster.trusts(b, c), cluster.trusts(a, c)) == (True, True, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("machines: [", "neither YAML nor JSON"),
        ("machines: []", "a list `machines`"),
        ("- a", "host 0 is 'a'; it must have fields"),
        ("machines: [m9-mac-mini-16]", "m9-mac-mini-16 is unknown"),
        ("machines: [m4-mac-mini-²]", "m4-mac-mini-² is unknown"),
        ("machines: [{machine: m4-mac-mini-16, wired_limit_gb: 24}]", "is 24, but it has 16 GB"),
        (
            "devices: [{hostname: a, role: coordinator, capabilities: {memory_gb: 64, chip: m9-max}}]",
            "because m9-max is none of them",
        ),
        ("machines: [m4-mac-mini-17]", "m4-mac-mini-17 is unknown; it is known with 16, 24, 32 GB"),
        ("machines: [3]", "a machine is 3"),
        ("machines: [{name: a, memory: 3}]", "no field memory;"),
        ("machines: [{memory_gb: 3}]", "no `name`"),
        (
            "machines: [{machine: m4-mac-mini-16, memory_gb: 3}]",
            "memory_gb beside `machine`, which sets it too",
        ),
        ("machines: [{machine: m4-mac-mini-16, reserve: 1}]", "reserve of m4-mac-mini-16 is 1; it must be"),
        ("machines: [{machine: m4-mac-mini-16, reserve: x}]", "reserve of m4-mac-mini-16 is 'x'; it must be"),
        ("machines: [{machine: m4-mac-mini-16, memory_utilization: 2}]", "memory_utilization of m4-mac-mini"),
        (
            "machines: [{machine: m4-mac-mini-16, memory_utilization: 0.5, reserve: 0.5}]",
            "has both a reserve and a usable share",
        ),
        ("machines: [{name: a, memory_gb: -3, bandwidth_gb_s: 1, tflops: 1}]", "memory_gb is -3"),
        (
            "machines: [{name: a, memory_gb: 8, bandwidth_gb_s: 1, tflops: 1, backend: rocm}]",
            "backend of a is 'rocm'; it must be one of metal, cuda, vulkan, cpu.",
        ),
        (
            "machines: [{machine: m4-mac-mini-16, backend: cuda}]",
            "backend beside `machine`, which sets it too",
        ),
        ("machines: [{name: a, memory_gb: many, bandwidth_gb_s: 1, tflops: 1}]", "memory_gb is 'many'"),
        ("machines: [m4-mac-mini-16, m4-mac-mini-16]", "the machine m4-mac-mini-16 twice"),
        ("machines: [m4-mac-mini-16]\nlinks: [{between: [a, b]}]", "must be `between` two of m4-mac-mini-16"),
        (
            "machines: [m4-mac-mini-16]\nusual-link: tb5",
            "has no field usual-link; fields are machines, links, usual_link.",
        ),
        ("machines: [m4-mac-mini-16]\n0: tb5", "has no field 0; fields are"),
        ("machines: [m4-mac-mini-16]\nlinks: 5", "links is 5; it must be a list of links"),
        ("machines: [m4-mac-mini-16]\nlinks: tb5", "links is 'tb5'; it must be a list of links"),
        ("machines: [m4-mac-mini-16]\nlinks: 0", "links is 0; it must be a list of links"),
        ("machines: [m4-mac-mini-16]\nlinks: {link: tb5}", "it must be a list of links"),
        (
            f"{PAIR}\nlinks: [{{between: [a, b], link: tb5, gbit_s: 0.001, round_trip_ms: 500}}]",
            "a link has round_trip_ms beside `link: tb5`, which sets it too: give one of them.",
        ),
        (f"{PAIR}\nusual_link: {{link: tb5, gbit_s: 1}}", "gbit_s beside `link: tb5`"),
        (f"{PAIR}\nusual_link: {{between: [a, b], link: tb5}}", "it must have round_trip_ms and gbit_s"),
        (
            f"{PAIR}\nlinks: [{{between: [a, b], link: tb5}}, {{between: [b, a], link: wifi}}]",
            "has two links between b and a; give one of them.",
        ),
        (f"{PAIR}\nlinks: [{{between: [a, [b]], link: tb5}}]", "must be `between` two of a, b"),
        (f"{PAIR}\nlinks: [{{between: [a, null], link: tb5}}]", "must be `between` two of a, b"),
        ("machines: [m4-mac-mini-16]\nusual_link: {gbit_s: 1}", "round_trip_ms is None"),
        ("machines: [m4-mac-mini-16]\nusual_link: fast", "a link is 'fast'; it must be one of tb5, tb5-rdma"),
        (
            "machines: [{machine: m4-mac-mini-16, trusted_interface: true}]",
            "is True; it must be an interface's name",
        ),
        (
            "machines: [m4-mac-mini-16]\nusual_link: {round_trip_ms: 1, gbit_s: 1, trusted: 'yes'}",
            "trusted of a link is 'yes'; it must be true or false",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster(text, "cluster.yaml")
    assert sentence in str(caught.value)


def test_power_and_prices_are_read_by_machine() -> None:
    text = (
        "machines: [m4-max-128, {name: a, machine: m4-mac-mini-16, watts: 40, idle_watts: 4, price: 700}, "
        "{name: b, machine: m4-mac-mini-16}]"
    )
    assert read_upkeep(text, "file") == {"a": Upkeep(40.0, 4.0, 700.0)}
    assert len(read_cluster(text, "file").nodes) == 3


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ("watts: -1", "watts is -1; it must be a number above 0"),
        ("watts: 5, idle_watts: 9", "idle_watts of a is 9; give it `watts`, which must be as much or more"),
        ("idle_watts: 9", "give it `watts`"),
        ("price: free", "price is 'free'; it must be a number above 0"),
    ],
)
def test_a_wrong_power_or_price_is_refused(fields: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_cluster(f"machines: [{{name: a, machine: m4-mac-mini-16, {fields}}}]", "file")


def test_power_grows_with_use() -> None:
    assert [Upkeep(100.0, 20.0).power_watts(busy) for busy in (0.0, 0.5, 1.0)] == [20.0, 60.0, 100.0]
    assert Upkeep(100.0).power_watts(0.1) == 100.0
    assert Upkeep(price=5.0).power_watts(0.5) is None


def test_numbers_may_have_exponents_without_a_point() -> None:
    with_exponents, plain = (
        read_cluster(f"machines: [{{name: a, memory_gb: 8, {numbers}}}]", "c.yaml").nodes
        for numbers in ("bandwidth_gb_s: 1e2, tflops: 4E0", "bandwidth_gb_s: 100, tflops: 4")
    )
    assert with_exponents == plain


@pytest.mark.parametrize("value", ["'24'", "1e", "nan", ".inf", "1e999"])
def test_texts_and_numbers_without_bound_are_no_sizes(value: str) -> None:
    text = f"machines: [{{name: a, memory_gb: {value}, bandwidth_gb_s: 100, tflops: 4}}]"
    with pytest.raises(ConfigError, match=r"memory_gb is .*; it must be a number above 0"):
        read_cluster(text, "c.yaml")


def test_added_machines_have_names_of_their_own_and_the_link_to_all() -> None:
    machines = with_machines(known_cluster("m4-16"), ["m4-16", "m4-16"], "tb5-rdma")
    assert [node.name for node in machines.nodes] == ["m4-16", "m4-16#2", "m4-16#3"]
    assert len(machines.links) == 3
    assert all(link.is_mesh and link.trusted for link in machines.links.values())
    with pytest.raises(ConfigError, match=f"add {MOST_ADDED} at most"):
        with_machines(known_cluster("m4-16"), ["m4-16"] * (MOST_ADDED + 1), None)
