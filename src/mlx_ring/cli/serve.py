"""`mlx-ring serve`: settings from flags, progress while loading, and how to talk to what serves."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from mlx_ring.core.config import Settings, allowed_values, flag_name, load_settings, quieten_grpc
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.fitting_models import largest_fitting
from mlx_ring.core.logs import configure_logging
from mlx_ring.core.machine import listen, node_name
from mlx_ring.core.process_limits import usable_memory
from mlx_ring.rpc.protos import agent_pb2

if TYPE_CHECKING:
    from mlx_ring.node.head import Running

_DEFAULT_URL = "http://127.0.0.1:8100"
SAMPLE_QUESTION = "What is the capital of France?"
_VLLM_NAMES = {
    "stages": ("--pipeline-parallel-size", "-pp"),
    "prefill_chunk": ("--max-num-batched-tokens",),
}
_CHOICES = ("dtype", "log_level", "blas", "prefix_cache", "kv_bits")
_METAVARS = dict.fromkeys(("log_dir", "run_dir", "state_dir"), "DIR") | {
    "host": "ADDRESS",
    "dtype": "TYPE",
    "served_model_name": "NAME,...",
    "allowed_hosts": "NAME,...",
    "allowed_origins": "URL,...",
    "log_level": "LEVEL",
    "blas": "MODE",
    "prefix_cache": "MODE",
    "kv_cache_memory": "SIZE",
    "kv_bits": "BITS",
    "request_timeout_s": "SECONDS",
    "model_load_timeout": "SECONDS",
}
_CONFIG = typer.Option(
    metavar="FILE", help="YAML or JSON file of settings; its keys are the names of these flags."
)

_PREFIX_CACHING = typer.Option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    " /--no-prefix-cache",
    help="The same as --prefix-cache on or off.",
    show_default=False,
)


def setting(name: str) -> Any:
    """The flag of a field of `Settings`. The model checks its value, so that every source gives the same sentence."""
    field = Settings.model_fields[name]
    choices = f" ({allowed_values(field)})" if name in _CHOICES else ""
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    return typer.Option(
        flag_name(name),
        *_VLLM_NAMES.get(name, ()),
        help=f"{field.description}{choices}{default}".replace("[", "\\["),
        metavar=_METAVARS.get(name, "N"),
        show_default=False,
    )


def serve(
    model: Annotated[str | None, typer.Argument(help=Settings.model_fields["model"].description)] = None,
    *,
    config: Annotated[Path | None, _CONFIG] = None,
    stages: Annotated[str | None, setting("stages")] = None,
    host: Annotated[str | None, setting("host")] = None,
    port: Annotated[str | None, setting("port")] = None,
    dtype: Annotated[str | None, setting("dtype")] = None,
    served_model_name: Annotated[str | None, setting("served_model_name")] = None,
    max_model_len: Annotated[str | None, setting("max_model_len")] = None,
    default_max_tokens: Annotated[str | None, setting("default_max_tokens")] = None,
    max_num_seqs: Annotated[str | None, setting("max_num_seqs")] = None,
    max_waiting: Annotated[str | None, setting("max_waiting")] = None,
    prefill_chunk: Annotated[str | None, setting("prefill_chunk")] = None,
    max_itl_ratio: Annotated[str | None, setting("max_itl_ratio")] = None,
    draft_tokens: Annotated[str | None, setting("draft_tokens")] = None,
    prefix_cache: Annotated[str | None, setting("prefix_cache")] = None,
    prefix_caching: Annotated[bool | None, _PREFIX_CACHING] = None,
    kv_cache_memory: Annotated[str | None, setting("kv_cache_memory")] = None,
    kv_bits: Annotated[str | None, setting("kv_bits")] = None,
    request_timeout_s: Annotated[str | None, setting("request_timeout_s")] = None,
    max_request_mb: Annotated[str | None, setting("max_request_mb")] = None,
    allowed_hosts: Annotated[str | None, setting("allowed_hosts")] = None,
    allowed_origins: Annotated[str | None, setting("allowed_origins")] = None,
    log_level: Annotated[str | None, setting("log_level")] = None,
    log_dir: Annotated[str | None, setting("log_dir")] = None,
    run_dir: Annotated[str | None, setting("run_dir")] = None,
    state_dir: Annotated[str | None, setting("state_dir")] = None,
    blas: Annotated[str | None, setting("blas")] = None,
    blas_threads: Annotated[str | None, setting("blas_threads")] = None,
    model_load_timeout: Annotated[str | None, setting("model_load_timeout")] = None,
    file_descriptor_limit: Annotated[str | None, setting("file_descriptor_limit")] = None,
) -> None:
    """Serve a model on this machine. Without arguments: the built-in demo, on port 8100.

    Every flag may also be given as MLX_RING_<NAME> in the environment or in .env, or in the file of --config;
    a flag wins over the environment, that over .env, and that over the file.
    """
    flags = {name: value for name, value in locals().items() if name not in ("config", "prefix_caching")}
    if prefix_caching is not None:
        flags["prefix_cache"] = _one_switch(prefix_cache, "on" if prefix_caching else "off")
    settings = load_settings(flags, config=config)
    listener = listen(settings.host, settings.port)
    configure_logging(
        process="head", node=node_name(), rank=None, level=settings.log_level, log_dir=settings.log_dir
    )
    quieten_grpc()
    from mlx_ring.engine.served_model import prepare_model  # noqa: PLC0415 - needs none of what follows

    served = prepare_model(settings)
    # The API's libraries take a second to come in: what is wrong above is told before.
    from mlx_ring.node.head import Head  # noqa: PLC0415

    async def run() -> None:
        with LoadingBars(settings.stages) as bars:

            def announce(running: Running) -> None:
                bars.stop()
                print(ready_text(running), flush=True)

            await Head(settings, served, listener).run(bars.report, announce)

    asyncio.run(run())


def _one_switch(given: str | None, switch: str) -> str:
    """The prefix cache's value, given in one way or in both alike."""
    if given not in (None, switch):
        raise ConfigError(
            f"--prefix-cache is {given}, and another flag switches the prefix cache {switch}; give one of them."
        )
    return switch


class LoadingBars:
    """A bar for each stage while weights load, on a terminal; nothing elsewhere."""

    def __init__(self, stages: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks = [self._progress.add_task(f"stage {stage}", total=None) for stage in range(stages)]

    def __enter__(self) -> Self:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def report(self, started: agent_pb2.StartProgress) -> None:
        """Move a stage's bar."""
        progress = started.progress
        task: TaskID = self._tasks[started.stage]
        if progress.bytes_total:
            self._progress.update(task, completed=progress.bytes_loaded, total=progress.bytes_total)
        if progress.ready:
            self._progress.update(task, description=f"stage {started.stage} ready")

    def stop(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def ready_text(running: Running) -> str:
    """What a person needs to talk to the model now being served."""
    instance = running.instance
    lines = [
        "",
        f"Serving {running.served.names[0]} at {running.url} (loaded in {running.load_s:.1f} s)",
    ]
    lines += [
        f"  stage {worker.stage}: layers {worker.layers}, worker {worker.pid}, {worker.dtype} on {worker.device}, "
        f"{_megabytes(worker.weight_bytes)} of weights, {_megabytes(worker.rss_bytes)} of memory"
        for worker in instance.workers
    ]
    body = json.dumps({"messages": [{"role": "user", "content": SAMPLE_QUESTION}]})
    lines += [
        "",
        "Ask it:",
        f"  curl {running.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "Or talk to it from another terminal:",
        f"  {program()} chat" + ("" if running.url == _DEFAULT_URL else f" --url {running.url}"),
    ]
    fitting = largest_fitting(usable_memory().available_bytes)
    if running.served.local.kind == "built-in" and fitting is not None:
        lines += [
            "The built-in models are small and know little. A real one that fits this machine's free memory:",
            f"  {program()} serve {fitting.hub_id}    # fetches {fitting.weight_bytes / 1e9:.1f} GB",
        ]
    return "\n".join([*lines, "Ctrl-C ends it.", ""])


def program() -> str:
    """How this program was called, for commands that a person can paste."""
    called = Path(sys.argv[0])
    return "mlx-ring" if shutil.which("mlx-ring") or called.name != "mlx-ring" else str(called)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
