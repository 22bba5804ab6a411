"""Settings of models, and of the machines and workers that serve them. `Settings` inherits them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mlx_ring.settings.fields import (
    PORTS_TAKE,
    SIZE_TAKES,
    CheckedSettings,
    Names,
    NodeIds,
    Numbers,
    Ports,
    Shares,
    Size,
    Switch,
    Text,
    Tokens,
    read_strategy,
    setting,
)
from mlx_ring.settings.strategies import Strategy, strategy_help

_MODELS, _PLACEMENT, _CLUSTER = "Models", "Placement", "Cluster"


class PlacementSettings(CheckedSettings):
    """Fields of the groups "Models", "Placement" and "Cluster"."""

    model: Text = setting(
        "demo",
        "Name of a built-in model, a folder, a GGUF file, or a Hugging Face id such as Qwen/Qwen3-0.6B.",
        _MODELS,
        metavar="MODEL",
        basic=True,
    )
    served_model_name: Names = setting(
        (),
        "Model name in the API, then further names for it; the model's own name by default.",
        _MODELS,
        metavar="NAME,...",
        basic=True,
    )
    more_models: Names = setting(
        (), "Further models to serve beside the first one.", _MODELS, metavar="NAME,..."
    )
    model_memory: Size = setting(
        None,
        "Memory for the weights of all loaded models, such as 20GB. The least recently used idle model is "
        "unloaded beyond it.",
        _MODELS,
        metavar="SIZE",
        takes=SIZE_TAKES,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Type to compute in; auto is float32 on a CPU and the model's own on a GPU.",
        _MODELS,
        metavar="TYPE",
    )
    max_model_len: Annotated[int | None, Field(ge=1, le=1 << 30)] = setting(
        None,
        "Maximum tokens of prompt and answer together; the model's own limit by default.",
        _MODELS,
        basic=True,
    )
    pooling: Literal["auto", "last", "mean", "cls"] = setting(
        "auto",
        "Hidden states that form an embedding: the last token's, the mean of all, or the first's (cls). "
        "auto follows the model's folder.",
        _MODELS,
        metavar="KIND",
    )
    model_load_timeout: Annotated[float, Field(gt=0, le=86400)] = setting(
        600.0, "Maximum seconds to load a model.", _MODELS, metavar="SECONDS"
    )
    stages: Annotated[int, Field(ge=1, le=1024)] = setting(
        1,
        "Pipeline stages: worker processes to split the layers over.",
        _PLACEMENT,
        basic=True,
        aliases=("--pipeline-parallel-size", "-pp"),
    )
    tp: Annotated[int, Field(ge=1, le=64)] = setting(
        1,
        "Tensor parallelism: worker processes that share each layer of a stage.",
        _PLACEMENT,
        basic=True,
        aliases=("--tensor-parallel-size", "-tp"),
    )
    tp_shares: Numbers = setting(
        (),
        "Share of each layer by worker of a stage, such as 3,1; equal shares by default.",
        _PLACEMENT,
        metavar="A,B",
        takes="numbers above 0 separated by commas, such as 3,1",
    )
    replicas: Annotated[int | None, Field(ge=1, le=8)] = setting(
        None,
        "Instances of each model. The default is one; with --optimize-for throughput, the planner chooses.",
        _PLACEMENT,
        aliases=("--data-parallel-size", "-dp"),
    )
    strategy: Annotated[Strategy, BeforeValidator(read_strategy)] = setting(
        "auto",
        f"How to split layers over machines. {strategy_help()}.",
        _PLACEMENT,
        metavar="NAME",
        basic=True,
    )
    optimize_for: Literal["latency", "throughput", "first-token", "memory"] = setting(
        "latency",
        "Objective of the planner: the time of a request, the total speed of many, the time to the first token, "
        "or room on the fullest machine.",
        _PLACEMENT,
        metavar="NAME",
        basic=True,
        old=("aim",),
    )
    expected_prompt: Tokens = setting(
        1024,
        "Length of a usual prompt, for which the planner minimizes the time.",
        _PLACEMENT,
        aliases=("--prompt",),
    )
    expected_answer: Tokens = setting(256, "Length of a usual answer.", _PLACEMENT, aliases=("--answer",))
    expected_users: Tokens = setting(1, "Usual number of requests at once.", _PLACEMENT, aliases=("--users",))
    proportions: Shares = setting(
        (),
        "With --strategy custom: shares of the layers by machine, this one first, or by node as in "
        "mini-7f3a=0.7,studio-1b2c=0.3.",
        _PLACEMENT,
        metavar="A,B",
        takes="shares separated by commas, such as 0.7,0.3",
    )
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = setting(
        0.9,
        "Share of this machine's memory that plans may use.",
        _PLACEMENT,
        metavar="SHARE",
        basic=True,
        aliases=("--gpu-memory-utilization",),
    )
    memory_limit: Size = setting(
        None,
        "Memory of this machine that plans may use, such as 16GiB; the measured memory by default.",
        _PLACEMENT,
        metavar="SIZE",
        takes=SIZE_TAKES,
    )
    learn_speeds: Switch = setting("on", "Correct predictions by measured steps.", _PLACEMENT, metavar="MODE")
    replan: Literal["auto", "ask", "off"] = setting(
        "ask",
        "Propose another split of the layers when machines or their speeds change, or `auto` to move to it where answers pause for 5 s at most.",
        _PLACEMENT,
        metavar="MODE",
    )
    nodes: Annotated[int, Field(ge=1, le=8)] = setting(
        1,
        "Machines to serve with, including this one. With more than one, wait for `mlx-ring join`.",
        _CLUSTER,
        basic=True,
    )
    node_ids: NodeIds = setting(
        (),
        "Ids of the other machines that --nodes counts, such as mini-7f3a,studio-1b2c; by default, any that join.",
        _CLUSTER,
        metavar="ID,...",
        takes="ids of machines separated by commas, such as mini-7f3a,studio-1b2c",
    )
    cluster_host: Text = setting(
        "[::]", "Address to listen on for other machines of the cluster.", _CLUSTER, metavar="ADDRESS"
    )
    cluster_port: Annotated[int, Field(ge=1, le=65534)] = setting(
        50051, "Port for members of the cluster; the next port is for machines that join.", _CLUSTER
    )
    node_ports: Ports = setting(
        (),
        "Ports on which this machine's agent and workers listen for the other machines, such as 9000-9015; free ones by default.",
        _CLUSTER,
        metavar="FIRST-LAST",
        takes=PORTS_TAKE,
    )
    trusted_interface: Names = setting(
        (),
        "Interfaces of this machine, or networks such as 10.0.8.0/24, on which MLX's unencrypted collectives "
        "may reach other machines.",
        _CLUSTER,
        metavar="NAME,...",
        takes="names of interfaces or networks separated by commas, such as thunderbolt0 or 10.0.8.0/24",
    )
    weights_limit: Size = setting(
        None,
        "Disk space for models fetched from other machines, such as 100GB; all free space by default.",
        _CLUSTER,
        metavar="SIZE",
        takes=SIZE_TAKES,
    )
