"""vLLM's names for settings, beside our own: flags of the command line, and keys of files. Pure."""

from __future__ import annotations

VLLM_FLAGS = {
    "stages": ("--pipeline-parallel-size", "-pp"),
    "tp": ("--tensor-parallel-size", "-tp"),
    "memory_utilization": ("--gpu-memory-utilization",),
    "replicas": ("--data-parallel-size", "-dp"),
    "prefill_chunk": ("--max-num-batched-tokens",),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "http_timeout_keep_alive": ("--timeout-keep-alive",),
}
"""By field of `Settings`."""
PREFIX_CACHING_FLAG = "--enable-prefix-caching"
"""A switch of its own on the command line; in a file, on or off as `prefix-cache` is."""

ACCESS_LOG_FLAG = "--disable-uvicorn-access-log"
"""Ours is not uvicorn's; who switches that off wants none."""


def field_of_key(key: str) -> str:
    """The field of `Settings` that a file's key means, with dashes or underscores; an unknown key is itself."""
    name = key.replace("-", "_")
    return _FIELDS.get(name, name)


_FIELDS = {
    flag.removeprefix("--").replace("-", "_"): field
    for field, flags in {**VLLM_FLAGS, "prefix_cache": (PREFIX_CACHING_FLAG,)}.items()
    for flag in flags
    if flag.startswith("--")
}
