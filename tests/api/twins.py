"""A served model without weights: a real engine, ranks in this process, one token per byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tests.default_settings import make_policy
from tests.engine.twin import TwinExecutor

from mlx_ring.api.chat.model_format import ParseCalls
from mlx_ring.api.ops.status import ClusterParts, ProposalStatus
from mlx_ring.api.service import LinkInfo, ModelService, Moved, State
from mlx_ring.core.engine_stats import Meter, Policy
from mlx_ring.core.errors import Conflict, ExceedsMemory, ModelNotFound, NotReady, RequestError, RingError
from mlx_ring.core.generation import OpenRequest
from mlx_ring.core.types import DEFAULT_SAMPLING, LayerRange
from mlx_ring.core.worker_status import InstanceInfo, WorkerInfo
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.engine.sequence import Limits
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.engine.takeover import HeldRequests
from mlx_ring.models.model_folder import PullProgress, Report
from mlx_ring.models.model_source import LocalModel, find_model
from mlx_ring.models.pooling import Pooling
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.known_models import find_known_model
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import LoadedStages, RunningCluster
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest

BOS, EOS, ANSWER = 256, 257, 258
VOCAB_SIZE = 320
"""Size beyond the tokenizer's own vocabulary, because models pad theirs."""
CONTEXT = 4096
SPECIAL = {BOS: "<bos>", EOS: "<eos>", ANSWER: "<answer>"}
JOIN_TOKEN = "mlxring1abcdefgh"  # noqa: S105 - no real one
ANSWER_TEXT = "Grüße: 日本, and 🙂 to you."
"""Text of the twin's answer to every chat."""


def printable(byte: int) -> str:
    """Return GPT-2's name of a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))


@dataclass(frozen=True)
class _Added:
    content: str
    special: bool = True


class ByteTokenizer:
    """Tokenizer of bytes and three special tokens, whose chat template records its arguments."""

    has_chat_template = True
    bos_token = "<bos>"  # noqa: S105 - a token of text
    bos_token_id = BOS
    eos_token_id = EOS
    special: Mapping[int, str] = SPECIAL
    chat_template: str | None = None
    think_start: str | None = None
    think_end: str | None = None
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    tool_parser: ParseCalls | None = None
    structural_markers: Sequence[str] = ()
    response_transitions: Mapping[str, Sequence[tuple[str, str]]] = {}
    response_initial_state: str | None = None

    def __init__(self) -> None:
        self.conversation: list[dict[str, object]] = []
        self.template_kwargs: dict[str, object] = {}

    def __len__(self) -> int:
        return BOS + len(self.special)

    @property
    def added_tokens_decoder(self) -> Mapping[int, _Added]:
        return {token: _Added(name) for token, name in self.special.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        data = b""
        for token in token_ids:
            if token < BOS:
                data += bytes([token])
            elif not skip_special_tokens:
                data += self.special.get(token, "").encode()
        return data.decode(errors="replace")

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        return printable(ids) if ids < BOS else self.special.get(ids)

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: object,
    ) -> list[int]:
        assert tokenize
        if kwargs.get("refuse"):
            raise ValueError("roles must alternate")
        self.conversation, self.template_kwargs = conversation, kwargs
        text = "".join(f"{message['role']}: {message['content']}\n" for message in conversation)
        tokens = self.encode(text, add_special_tokens=True)
        if kwargs.get("continue_final_message"):
            assert not add_generation_prompt
            return [
                *self.encode("", add_special_tokens=True),
                ANSWER,
                *self.encode(text.removesuffix("\n"), add_special_tokens=False),
            ]
        return [*tokens, ANSWER, *self.generation_prefix(kwargs)] if add_generation_prompt else tokens

    def generation_prefix(self, template_kwargs: Mapping[str, object]) -> list[int]:
        """Return the tokens that the template puts before the answer."""
        del template_kwargs
        return []


def parse_json_call(text: str, tools: object) -> object:
    """Parse calls like mlx-lm's `json_tools`, under whose name it runs."""
    del tools
    return json.loads(text)


parse_json_call.__module__ = "json_tools"


class MarkingTokenizer(ByteTokenizer):
    """Tokenizer of a model with reasoning and tool calls, like Qwen's: all its marks are special tokens."""

    special: Mapping[int, str] = SPECIAL | {
        259: "<think>",
        260: "</think>",
        261: "<tool_call>",
        262: "</tool_call>",
    }
    chat_template = "{% if tools %}{{ tools }}{% endif %}{{ enable_thinking }}"
    think_start, think_end = "<think>", "</think>"
    tool_call_start, tool_call_end = "<tool_call>", "</tool_call>"
    tool_parser = staticmethod(parse_json_call)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = [BOS] * add_special_tokens
        ids = {name: token for token, name in self.special.items()}
        marks = "|".join(re.escape(name) for name, token in ids.items() if token > ANSWER)
        for piece in re.split(f"({marks})", text):
            tokens += [ids[piece]] if piece in ids else piece.encode()
        return tokens

    def generation_prefix(self, template_kwargs: Mapping[str, object]) -> list[int]:
        return (
            self.encode("<think>\n", add_special_tokens=False)
            if template_kwargs.get("enable_thinking")
            else []
        )


def next_token_of(tokens: Sequence[int]) -> Callable[[Sequence[int]], int]:
    """Return a model that answers a chat with these tokens and EOS, and other prompts with the alphabet."""

    def next_token(history: Sequence[int]) -> int:
        if ANSWER not in history:
            return ord("a") + len(history) % 26
        generated = len(history) - 1 - max(place for place, token in enumerate(history) if token == ANSWER)
        return tokens[generated] if generated < len(tokens) else EOS

    return next_token


class TwinService:
    """Twin of `ModelService` and `ServedInstance`. With `automatic=False` the ranks answer no step by themselves."""

    created = 1_700_000_000
    context_length = kept_context_length = CONTEXT
    vocab_size = VOCAB_SIZE
    hidden_size = 3

    def __init__(
        self,
        *,
        automatic: bool = True,
        stages: int = 2,
        context: int = CONTEXT,
        policy: Policy = make_policy(),  # noqa: B008 - frozen
        kv: RankKv | None = None,
        names: Sequence[str] = ("org/twin", "twin"),
        tokenizer: ByteTokenizer | None = None,
        says: str = ANSWER_TEXT,
        held: HeldRequests | None = None,
    ) -> None:
        self.model_id, *self.aliases = names
        self.start_name = self.model_id
        self.is_loaded = True
        self.context_length = context
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.default_sampling = DEFAULT_SAMPLING
        self.pooling = Pooling(why="a test sets it")
        self.metadata: dict[str, object] = {"architecture": "twin"}
        self.error: RingError | None = None
        self.keeps_requests = False
        self.held_requests: Sequence[OpenRequest] = ()
        self.stages = stages
        self.meters = [Meter()]
        self.rejected: dict[str, int] = {}
        answer = self.tokenizer.encode(says, add_special_tokens=False)
        self.executor = TwinExecutor([1] * stages, next_token=next_token_of(answer), automatic=automatic)
        self.engine = Engine(
            self.executor,
            Vocabulary.of(self.tokenizer),
            Limits(context, VOCAB_SIZE, frozenset({EOS})),
            instance="twin",
            epoch=1,
            policy=policy,
            kv=None if kv is None else dict.fromkeys(self.executor.ranks, kv),
            hold=None if held is None else held.hold,
            meter=self.meters[0],
        )
        self._counting = ExitStack()
        self._counting.enter_context(
            self.meters[0].attached(self.engine, dict.fromkeys(self.executor.ranks, "here"))
        )

    @property
    def instances(self) -> list[TwinService]:
        """The twin itself, or no instance while the model is not loaded."""
        return [] if self.state == "unloaded" else [self]

    @property
    def meter(self) -> Meter:
        return self.meters[-1]

    @property
    def info(self) -> InstanceInfo:
        workers = tuple(self._worker(stage) for stage in range(self.stages))
        return InstanceInfo(name="twin-1", epoch=1, layers=4 * self.stages, workers=workers)

    @property
    def state(self) -> State:
        if not self.is_loaded:
            return "unloaded"
        return "ready" if self.error is None else "unavailable"

    def _worker(self, stage: int) -> WorkerInfo:
        return WorkerInfo(
            stage=stage,
            rank=0,
            layers=LayerRange(4 * stage, 4 * stage + 4),
            node="here",
            pid=1000 + stage,
            device="cpu",
            dtype="float32",
            alive=True,
            phase="ready",
            memory={
                "weight_bytes": 10,
                "device_memory_bytes": 1_000_000_000,
                "peak_memory_bytes": 30,
                "rss_bytes": 40,
                "kv_bytes": 50,
            },
        )

    @property
    def sequences_held(self) -> int:
        return max(len(held) for held in self.executor.held().values())


class TwinCatalog:
    """Twin of `ModelCatalog` that loads a model at once."""

    def __init__(self, *models: TwinService) -> None:
        self.models = models
        self.only = models[0] if len(models) == 1 else None
        self.links: Sequence[LinkInfo] = ()
        self.deleted: list[str] = []
        """Models that were deleted."""
        self.refusal: RingError | None = None
        """Reason why no model can be loaded."""
        self.proposal: ProposalStatus | None = None
        """Best split of any model; None if the loaded one is the best."""
        self.parts = ClusterParts()
        self.is_measured = True
        self.can_measure = False
        self.measures_later: NotReady | None = None
        """Reason why its machine is not measured now."""
        self.request = PlanRequest(Demand(8192, 1))
        self.loaded: tuple[LoadedStages, ...] = ()
        """Stages of which what-if questions know."""
        self.count: int | None = None
        """Number of replicas that it is set up for."""

    def cluster(self) -> ClusterParts:
        return self.parts

    def running(self, model: ModelService | None) -> RunningCluster:
        nodes = (known_profile("m4-mac-mini-16"),) if self.is_measured else ()
        loaded = self.loaded if model is not None else ()
        return RunningCluster(ClusterProfile(nodes), self.request, loaded, self.count)

    async def measure(self) -> None:
        if self.measures_later is not None and not self.is_measured:
            raise self.measures_later
        self.is_measured = self.is_measured or self.can_measure

    def join_commands(self, life_s: float) -> Sequence[str]:
        del life_s
        return [f"mlx-ring join {head}:50051 --token {JOIN_TOKEN}" for head in ("10.0.0.7", "[fd00::7]")]

    @property
    def moves(self) -> TwinCatalog:
        return self

    async def drain(self, node: str, *, force: bool) -> Sequence[Moved]:
        if node != "studio":
            raise RequestError(f"No machine is called {node}: connected are studio.", param="node")
        if self.refusal is not None and not force:
            raise self.refusal
        return [Moved(self.models[0].model_id, "beside", 2, 1.25)]

    async def readmit(self, node: str) -> None:
        await self.drain(node, force=True)

    @property
    def replanning(self) -> TwinCatalog:
        return self

    async def propose(self, model: ModelService) -> ProposalStatus | None:
        return None if self.proposal is None else self.proposal.model_copy(update={"model": model.model_id})

    async def replan(
        self, model: ModelService, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        proposal = await self.propose(model)
        if proposal is None:
            return None, None
        if proposal.needs_pause and not may_pause:
            raise Conflict("Answers would pause.")
        moved = Moved(model.model_id, proposal.way, 2, 1.25, proposal.why or "")
        return proposal, replace(moved, loaded_bytes=proposal.gained_bytes)

    def sizes(self, model: ModelService, machines: ClusterProfile) -> ModelProfile:
        return sizes_of(find_known_model("8b-4bit").folder, model.model_id, machines)

    async def ready(self, model: ModelService) -> None:
        if self.refusal is not None:
            raise self.refusal
        for own in self.models:
            own.is_loaded = own.is_loaded or own is model

    async def load(self, name: str) -> ModelService:
        for model in self.models:
            if name == model.model_id:
                await self.ready(model)
                return model
        raise ModelNotFound(f"There is no model {name!r}.")

    async def cancel_pull(self, name: str) -> str:
        if name not in self.pulls:
            raise Conflict(f"No download of {name} is in progress.")
        return name

    async def pull(self, name: str, *, force: bool, report: Report, lasts: bool = True) -> str:
        del lasts
        if name.startswith("nobody/"):
            raise ModelNotFound(f"There is no model {name!r}.")
        if name == "org/large" and not force:
            raise ExceedsMemory("It needs more memory than the machines here have.")
        for done in (0, 50, 100):
            report(PullProgress("downloading", done, 100))
            await asyncio.sleep(0)
        report(PullProgress("verifying", 100, 100))
        return name

    @property
    def pulls(self) -> Mapping[str, PullProgress]:
        return {"org/other": PullProgress("downloading", 1, 2)}

    async def delete(self, name: str) -> tuple[str, int]:
        if any(name == model.model_id and model.is_loaded for model in self.models):
            raise Conflict(f"{name} is served by this server: unload it first.")
        if name.startswith("nobody/"):
            raise ModelNotFound(f"{name} is not on this machine.")
        self.deleted.append(name)
        return name, 100

    def local_models(self) -> Sequence[LocalModel]:
        return [find_model("demo")]

    def interrupted_pulls(self) -> Mapping[str, int]:
        return {"org/other": 1, "org/half": 5 * 10**9}

    async def unload(self, model: ModelService, *, force: bool) -> None:
        for own in self.models:
            if own is model:
                if own.engine.stats().scheduler.running and not force:
                    raise Conflict("It is busy.")
                own.is_loaded = False
