"""Protocols that the API requires of the models it serves. The head implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_ring.api.ops.status import ClusterParts, ProposalStatus
from mlx_ring.core.engine_stats import EngineStats, Meter, Policy, StepTotals
from mlx_ring.core.errors import RingError
from mlx_ring.core.generation import GenerateRequest, OpenRequest, RequestStream
from mlx_ring.core.types import Sampling
from mlx_ring.core.worker_status import InstanceInfo
from mlx_ring.models.model_folder import PullProgress, Report
from mlx_ring.models.model_source import LocalModel
from mlx_ring.models.pooling import Pooling
from mlx_ring.planner.place import RunningCluster
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile


class AddedToken(Protocol):
    """Token that was added to a vocabulary by name."""

    @property
    def special(self) -> bool: ...
    @property
    def content(self) -> str: ...


class Tokenizer(Protocol):
    """Part of mlx-lm's `TokenizerWrapper` that makes prompts, decodes tokens and knows the format of answers."""

    has_chat_template: bool

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    @property
    def think_start(self) -> str | None:
        """Mark before reasoning; None if the model has no reasoning."""
        ...

    @property
    def think_end(self) -> str | None: ...
    @property
    def tool_call_start(self) -> str | None:
        """Mark before tool calls; None if their format is unknown."""
        ...

    @property
    def tool_call_end(self) -> str | None: ...
    @property
    def tool_parser(self) -> Callable[[str, list[dict[str, object]]], object] | None:
        """Parser of the text between these marks."""
        ...

    @property
    def structural_markers(self) -> Sequence[str]:
        """Marks around answers that carry no content."""
        ...

    @property
    def response_transitions(self) -> Mapping[str, Iterable[tuple[str, str]]]:
        """Marks that end each state, with the state that follows, for answers of several messages."""
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
    """Engine, or several engines behind a router."""

    def submit_all(self, *requests: GenerateRequest) -> list[RequestStream]:
        """Submit requests together.

        Raises:
            RequestError: the model cannot accept a value.
            ServingError: the model cannot answer.
        """
        ...


class ServingEngine(Answering, Protocol):
    """Engine of one instance."""

    def stats(self) -> EngineStats: ...

    def totals(self) -> StepTotals:
        """Return the totals of all steps since the engine started."""
        ...

    def requests(self) -> Sequence[OpenRequest]:
        """Return the running and waiting requests, the oldest first."""
        ...

    @property
    def policy(self) -> Policy:
        """Configuration of the scheduler."""
        ...


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """Measurement of one direction between two nodes."""

    source: str
    target: str
    round_trip_s: float
    bytes_per_s: float
    unix_time_s: float
    """Time of the measurement."""
    problem: str = ""
    """Reason why nothing passes. The figures are then 0."""


class ServedInstance(Protocol):
    """Instance of a model."""

    @property
    def info(self) -> InstanceInfo: ...
    @property
    def error(self) -> RingError | None:
        """Reason why it cannot answer now; None if it can."""
        ...

    @property
    def engine(self) -> ServingEngine:
        """Engine, used only while `error` is None."""
        ...

    @property
    def meter(self) -> Meter:
        """Meter of its replica, one of the model's `meters`."""
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """Move of an instance to other machines."""

    model: str
    way: Literal["beside", "ranges", "after"]
    """`beside`: another instance was loaded beside it, and its answers did not pause. `ranges`: its workers stayed, and
    loaded only the layers that they gained. `after`: answers paused while the model was loaded again."""
    requests: int
    """Requests that were running or waiting."""
    seconds: float
    why: str = ""
    """Reason why they paused."""
    pause_s: float = 0.0
    """Seconds for which they paused, until the next plan served."""
    loaded_bytes: int | None = None
    """With `ranges`, bytes of weights that workers loaded."""


State = Literal["loading", "ready", "unavailable", "unloaded"]
"""State of a model. An unloaded model is loaded on the next request for it."""


class ModelService(Protocol):
    """Served model. Only `state`, `error`, `engine` and `instances` change."""

    @property
    def model_id(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]:
        """Further names that requests may use."""
        ...

    @property
    def start_name(self) -> str:
        """Name, or absolute path on the head's machine, with which another start finds the model."""
        ...

    @property
    def created(self) -> int:
        """Unix seconds when the service started."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and answer together."""
        ...

    @property
    def kept_context_length(self) -> int:
        """Part of the context that stays available whichever other models are loaded."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int:
        """Length of a hidden state, and of an embedding."""
        ...

    @property
    def default_sampling(self) -> Sampling: ...
    @property
    def pooling(self) -> Pooling:
        """Method that makes embeddings of hidden states."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """Architecture, quantization and parameters, as plain JSON for `/model/info`."""
        ...

    @property
    def state(self) -> State: ...
    @property
    def engine(self) -> Answering:
        """Engine, used only while `error` is None and the model is loaded, or while it keeps requests."""
        ...

    @property
    def error(self) -> RingError | None:
        """Reason why the model cannot answer now; None if it can, or will once it is loaded on request."""
        ...

    @property
    def held_requests(self) -> Sequence[OpenRequest]:
        """Requests that wait for the model to be loaded again, the oldest first."""
        ...

    @property
    def keeps_requests(self) -> bool:
        """True while the model cannot answer, but keeps requests until it is loaded again."""
        ...

    @property
    def meters(self) -> Sequence[Meter]:
        """Meters of the replicas by number, including ended ones."""
        ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """Numbers of refused requests, by the error's name."""
        ...

    @property
    def instances(self) -> Sequence[ServedInstance]:
        """Replicas; none while the model is not loaded."""
        ...


class MovingService(Protocol):
    """Moves of layers between machines, while they serve."""

    async def drain(self, node: str, *, force: bool) -> Sequence[Moved]:
        """Move all layers away from a machine, given by id or name, which gets none until it leaves or is readmitted.

        Args:
            node: the machine.
            force: True to take its layers even if no other machine has room. Answers then wait until one has.

        Raises:
            RequestError: there is no such machine.
            PlanError: the others have no room, and the layers stay there.
            Conflict: there are no other machines.
        """
        ...

    async def readmit(self, node: str) -> None:
        """Let plans use a drained machine again. Raises `RequestError` if there is no such machine."""
        ...


class ReplanningService(Protocol):
    """Comparison of loaded splits with better ones, and moves to them."""

    async def propose(self, model: ModelService) -> ProposalStatus | None:
        """Return the best split for the machines as they are now; None if it is loaded.

        Raises:
            Conflict: there is nothing to choose.
        """
        ...

    async def replan(
        self, model: ModelService, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        """Move a model to the best split; return it, and the move. None: it is loaded, so that nothing moved.

        Args:
            model: the model.
            may_pause: True to load the model again if both splits do not fit together. Answers pause meanwhile.

        Raises:
            Conflict: there is nothing to choose, or answers would pause.
            RingError: it cannot be loaded.
        """
        ...


class ModelCatalog(Protocol):
    """All served models."""

    @property
    def models(self) -> Sequence[ModelService]:
        """Served models, at least one. The first is the default."""
        ...

    @property
    def links(self) -> Sequence[LinkInfo]:
        """Measured links between the cluster's nodes."""
        ...

    def cluster(self) -> ClusterParts:
        """Return every node, and every instance with its stages."""
        ...

    def running(self, model: ModelService | None) -> RunningCluster:
        """Return the connected machines, how the head plans for them, and the loaded stages of a model.

        Memory of other models counts as free, unless the model is loaded beside them. None stands for another model.
        """
        ...

    async def measure(self) -> None:
        """Measure the head's machine, unless it was or cannot be, in seconds. Raises `NotReady` while it computes answers."""
        ...

    def join_commands(self, life_s: float) -> Sequence[str]:
        """Make a token with which one machine can join within this time, and return the commands for it.

        Raises:
            Conflict: the head serves from its own machine alone.
        """
        ...

    @property
    def moves(self) -> MovingService: ...
    @property
    def replanning(self) -> ReplanningService: ...
    @property
    def only(self) -> ModelService | None: ...  # that the server was started with; None if there were several

    def sizes(self, model: ModelService, machines: ClusterProfile) -> ModelProfile:
        """Return a model's profile, for planning on these machines."""
        ...

    async def ready(self, model: ModelService) -> None:
        """Ensure that a model can answer. An unloaded model is loaded, which takes a while.

        A model that is starting or recovering is not awaited.

        Raises:
            RingError: the model cannot answer.
        """
        ...

    async def load(self, name: str) -> ModelService:
        """Load a model by its name, and serve it from now on.

        Raises:
            RingError: the model cannot be loaded.
        """
        ...

    async def pull(self, name: str, *, force: bool, report: Report, lasts: bool = True) -> str:
        """Fetch a model to this machine if it is not here, and list it as unloaded.

        Args:
            name: short name, or id of the hub.
            force: True to fetch also a model whose weights exceed the memory of all machines.
            report: receives the progress.
            lasts: False to end the fetch with the last request that waits for it, unless one of them had True.

        Returns:
            Its name.

        Raises:
            RingError: it cannot be fetched, or not be served.
        """
        ...

    async def cancel_pull(self, name: str) -> str:
        """End a fetch, whoever waits for it, and return the model's name.

        Raises:
            Conflict: none is in progress.
        """
        ...

    @property
    def pulls(self) -> Mapping[str, PullProgress]:
        """Last progress of each fetch, by the hub's id."""
        ...

    def local_models(self) -> Sequence[LocalModel]:
        """Return the models that can be loaded without a fetch. Reads the disk."""
        ...

    def interrupted_pulls(self) -> Mapping[str, int]:
        """Return the bytes of models whose fetch is not complete, by the hub's id. Reads the disk."""
        ...

    async def delete(self, name: str) -> tuple[str, int]:
        """Remove a model of the hub from the disk, and from the list.

        Returns:
            Its name, and the bytes that are free now.

        Raises:
            Conflict: it is loaded, or another process serves it.
            RingError: it is not here, or not this program's.
        """
        ...

    async def unload(self, model: ModelService, *, force: bool) -> None:
        """Free a loaded model's memory. The model stays in the list, and the next request loads it.

        Args:
            model: Model to unload.
            force: Unload it even while it answers requests, which then end with an error.

        Raises:
            RequestError: the model answers requests, and `force` is False.
        """
        ...
