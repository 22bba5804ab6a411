"""What the API needs of the rest: the contract that the composition root fulfils."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_ring.api.ops.status import ClusterParts
from mlx_ring.core.engine_stats import EngineStats, Meter, OpenRequest, Policy, StepTotals
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import GenerateRequest, RequestStream
from mlx_ring.core.types import Sampling
from mlx_ring.core.worker_status import WorkerInfo
from mlx_ring.models.pooling import Pooling


class AddedToken(Protocol):
    """A token that was added to a vocabulary by name."""

    @property
    def special(self) -> bool: ...
    @property
    def content(self) -> str: ...


class Tokenizer(Protocol):
    """The part of mlx-lm's `TokenizerWrapper` that makes prompts, shows tokens and knows the format of answers."""

    has_chat_template: bool

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    @property
    def think_start(self) -> str | None:
        """What goes before a thought; None where the model has no thoughts."""
        ...

    @property
    def think_end(self) -> str | None: ...
    @property
    def tool_call_start(self) -> str | None:
        """What goes before calls of tools; None where the format of calls is not known."""
        ...

    @property
    def tool_call_end(self) -> str | None: ...
    @property
    def tool_parser(self) -> Callable[[str, list[dict[str, object]]], object] | None:
        """Reads what is between."""
        ...

    @property
    def structural_markers(self) -> Sequence[str]:
        """What goes around answers and says nothing."""
        ...

    @property
    def response_transitions(self) -> Mapping[str, Iterable[tuple[str, str]]]:
        """By state, which marks end it and what begins then, where an answer is of several messages."""
        ...

    @property
    def response_initial_state(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: object,
    ) -> list[int] | str: ...


class Answering(Protocol):
    """What answers requests: an engine, or several behind a router."""

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Raises `RequestError` for values that the model cannot take, `ServingError` when it cannot answer."""
        ...


class ServingEngine(Answering, Protocol):
    """One instance's engine."""

    def stats(self) -> EngineStats: ...

    def totals(self) -> StepTotals:
        """What its steps have done since it began."""
        ...

    def requests(self) -> Sequence[OpenRequest]:
        """That run or wait, the oldest first."""
        ...

    @property
    def policy(self) -> Policy:
        """How steps are made."""
        ...


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One way between two nodes, as it was measured."""

    source: str
    target: str
    round_trip_s: float
    bytes_per_s: float
    unix_time_s: float
    """When."""
    problem: str = ""
    """Why nothing gets through; the figures are then 0."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The plan in force and who runs it, in order of stage and rank."""

    name: str
    epoch: int
    layers: int
    """Of the whole model."""
    workers: tuple[WorkerInfo, ...]
    kv_bits: int = 0
    """In which keys and values are kept; 0: as they are computed."""

    @property
    def stages(self) -> int:
        return len({worker.stage for worker in self.workers})


class ServedInstance(Protocol):
    """One instance of a model."""

    @property
    def info(self) -> InstanceInfo: ...
    @property
    def error(self) -> RingError | None:
        """Why it cannot answer now; None when it can."""
        ...

    @property
    def engine(self) -> ServingEngine:
        """Used only while `error` is None."""
        ...


State = Literal["loading", "ready", "unavailable", "unloaded"]
"""Of a model: one that is unloaded is loaded when it is asked for."""


class ModelService(Protocol):
    """One served model. Everything but `state`, `error`, `engine` and `instances` holds from the start."""

    @property
    def model_id(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]:
        """Other names that requests may use."""
        ...

    @property
    def created(self) -> int:
        """When the service began, Unix seconds."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def kept_context_length(self) -> int:
        """What of that an instance has as long as it serves, whatever else is loaded."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state, and so in an embedding."""
        ...

    @property
    def default_sampling(self) -> Sampling: ...
    @property
    def pooling(self) -> Pooling:
        """How embeddings are made of hidden states."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """What `/model/info` tells of the model: architecture, quantization, parameters. Plain JSON."""
        ...

    @property
    def state(self) -> State: ...
    @property
    def engine(self) -> Answering:
        """Used only while `error` is None and the model is loaded."""
        ...

    @property
    def error(self) -> RingError | None:
        """Why the model cannot answer now; None when it can, or will when it is asked for."""
        ...

    @property
    def meters(self) -> Sequence[Meter]:
        """Of its replicas, in their order, those included that are not loaded now."""
        ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """By the name of an error, requests that were refused before they were taken."""
        ...

    @property
    def instances(self) -> Sequence[ServedInstance]:
        """Its replicas; none while it is not loaded."""
        ...


class ModelCatalog(Protocol):
    """Every model that is served."""

    @property
    def models(self) -> Sequence[ModelService]:
        """One at least. The first is the one that was to be served first."""
        ...

    @property
    def links(self) -> Sequence[LinkInfo]:
        """What is known of the links between the nodes of the cluster."""
        ...

    def cluster(self) -> ClusterParts:
        """Every node, and every instance with all that is known of its stages."""
        ...

    async def ready(self, model: ModelService) -> None:
        """Make sure that a model can answer: one that is unloaded is loaded, which takes a while.

        One that is being loaded again, after it was lost or at the start, is not waited for.

        Raises:
            RingError: why it cannot answer.
        """
        ...

    async def load(self, name: str) -> ModelService:
        """Load a model by its name, and serve it from now on where it was not served before.

        Raises:
            RingError: why it cannot be loaded.
        """
        ...

    async def unload(self, model: ModelService, *, force: bool) -> None:
        """Free what a loaded model holds. It stays in the list, and comes back when it is asked for.

        Args:
            model: which.
            force: also while it answers requests, which end with an error.

        Raises:
            RequestError: it answers requests, and force is not used.
        """
        ...
