"""Synthetic models and machines for plans, and known ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import strategies as st

from mlx_ring.models.tensor_shares import TensorSizes
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.cluster_file import cluster_of as catalogued
from mlx_ring.planner.known_models import find_known_model
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.profiles import ClusterProfile, LayerProfile, ModelProfile, NodeProfile
from mlx_ring.rpc.link_profile import LinkProfile

GB = 10**9


def model_of(
    layers: int = 28, *, layer_bytes: int = 100_000_000, kv_bytes: int = 4096, head_bytes: int = 0
) -> ModelProfile:
    layer = LayerProfile(layer_bytes, layer_bytes, layer_bytes, kv_bytes_per_token=kv_bytes)
    return ModelProfile(
        name="made-up",
        layers=(layer,) * layers,
        embedding_bytes=head_bytes,
        head_bytes=head_bytes,
        is_tied=True,
        hidden_size=1024,
        vocabulary=32_000,
        context_tokens=32_768,
    )


def shared_model(
    layers: int = 12, *, layer_bytes: int = 200_000_000, kv_heads: int = 8, hidden: int = 4096
) -> ModelProfile:
    """Return a model whose layers can be split: a fifth of each is attention."""
    layer = LayerProfile(
        layer_bytes,
        layer_bytes,
        2 * layer_bytes,
        kv_bytes_per_token=512 * kv_heads,
        query_width=hidden,
        attention_bytes=layer_bytes // 5,
        whole_bytes=4 * hidden,
    )
    return replace(
        model_of(layers, head_bytes=100_000_000),
        layers=(layer,) * layers,
        is_tied=False,
        hidden_size=hidden,
        shared=TensorSizes(kv_heads, 4 * kv_heads, 128, 16_384, 0, 32_000),
    )


def trusting(*nodes: NodeProfile, link: LinkProfile) -> ClusterProfile:
    """Return a cluster whose machines each have a trusted interface."""
    return cluster_of(*(replace(node, trusted=True) for node in nodes), link=link)


def with_experts(model: ModelProfile) -> ModelProfile:
    """Return a model of the same size with experts: longer chunks of a prompt are faster."""
    layer = model.layers[0]
    read = layer.weight_bytes * 3 // 10
    layer = replace(layer, read_bytes=read, flops_per_token=read // 8, expert_share=0.125)
    return replace(model, layers=(layer,) * len(model.layers))


def on_gpus(nodes: Iterable[NodeProfile]) -> list[NodeProfile]:
    """Return machines whose engine reads a prompt alone in long chunks."""
    return [replace(node, long_chunk_tokens=2048, reserve_share=0.1) for node in nodes]


def node_of(name: str, gigabytes: float = 16, *, gb_s: float = 100, tflops: float = 4) -> NodeProfile:
    return NodeProfile(name, int(gigabytes * GB), gb_s * GB, tflops * 1e12, reserve_share=0.0)


def cluster_of(*nodes: NodeProfile, link: LinkProfile | None = None) -> ClusterProfile:
    return ClusterProfile(nodes, usual_link=link or LinkProfile(0.5e-3, 1.1e8))


NODES = st.lists(
    st.tuples(st.floats(0.5, 8), st.floats(20, 800), st.floats(0.5, 30)), min_size=1, max_size=5
).map(
    lambda sizes: [
        node_of(f"node-{place}", gigabytes, gb_s=gb_s, tflops=tflops)
        for place, (gigabytes, gb_s, tflops) in enumerate(sizes)
    ]
)


def known_cluster(*names: str) -> ClusterProfile:
    """Return machines that the catalogue knows."""
    return catalogued(tuple(known_profile(name) for name in names))


def known_sizes(name: str, machines: ClusterProfile) -> ModelProfile:
    """Return a published model's sizes on these machines."""
    known = find_known_model(name)
    return sizes_of(known.folder, known.name, machines)


UNLIKE = (
    "m4-pro-48",
    "m4-max-128",
    "m3-ultra-96",
    "m4-16",
    "m3-ultra-512",
    "m2-ultra-192",
    "m4-24",
    "m1-max-64",
)
"""Machines of the catalogue that differ much."""
