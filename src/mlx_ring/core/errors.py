"""The one exception tree.

    RingError
    ├── ConfigError                a setting, a flag or a file that the user must correct
    │   └── AddressInUse
    ├── ModelError                 a model folder or hub id
    │   ├── ModelNotFound
    │   ├── ModelCorrupt           files missing, truncated or contradicting each other
    │   ├── ModelUnsafe            needs code from its folder
    │   └── ModelUnsupported       the architecture cannot be cut, or not that way
    ├── PlanError                  the model cannot be placed as requested
    │   ├── ExceedsMemory          its weights are too large for all machines together
    │   └── ContextKept            another model keeps the memory for its required context
    ├── HostFailed                 a machine of a cluster file cannot be reached, or fails at an operation
    ├── TrustError                 machines that must not, or cannot, connect to each other
    │   ├── TokenRefused           a join token is mistyped, unknown, expired, used up, revoked, or of another cluster
    │   └── PeerRefused            either side refused a certificate or a node
    ├── RequestError               a client's request; `param` names the field
    │   ├── ContextExceeded
    │   ├── UnknownModel
    │   ├── UnknownAnswer          the journal keeps no such answer of this client
    │   ├── AnswerCancelled
    │   ├── Refused                foreign Host or Origin
    │   ├── Unauthenticated        no API key, or a wrong one
    │   ├── BodyTooLarge
    │   ├── BodyTooSlow            the client stalls while it sends
    │   ├── Conflict               conflicts with an operation in progress
    │   └── Overloaded             `retry_after_s` says when to try again
    └── ServingError               a failure of the service itself
        ├── WorkerLost             a worker died or its channel broke
        │   ├── NodeLost           its whole machine is lost, and may return
        │   └── LinkLost           the link between two workers broke
        ├── WorkerStuck            no progress before the deadline
        │   └── GroupStuck         ranks of an MLX group wait for each other, although all of them answer
        ├── RepeatedLoss           a request was in progress each time when workers were lost
        ├── StepFailed             a step raised in a worker
        ├── StaleMessage           of an older epoch or another instance
        ├── VersionMismatch        peers of different versions, models or plans
        ├── DeadlineExceeded       the request took longer than --request-timeout-s allows
        ├── ProtocolError          a peer violated the protocol
        ├── WeightsMissing         no peer gives the tensors that a stage needs
        └── NotReady               no instance can answer now
            ├── Draining           the server ends, and accepts nothing new
            ├── Suspended          the server ends, and the journal keeps the answer
            └── BodiesFull         requests hold all the memory that their bodies may take

Each message says what happened, with which value, and what to do. Errors cross
gRPC in `rpc/failures.py` and HTTP in `api/errors.py`, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Self


class RingError(Exception):
    """Base of every error that mlx-ring raises on purpose. `str(error)` is one clear sentence."""

    node: str = ""
    """Node of a cluster at which the error arose; empty if unknown."""
    is_workers_own: bool = False
    """True if a worker itself died or hung, so that a request may be the cause."""

    def of_worker(self) -> Self:
        """Record that a worker itself died or hung, and return the error."""
        self.is_workers_own = True
        return self

    def blamed_on(self, node: str) -> Self:
        """Set the node of the error, unless it has one, and return the error."""
        self.node = self.node or node
        return self


class ConfigError(RingError):
    """A setting is missing, malformed or out of range."""


class AddressInUse(ConfigError):
    """Another process holds the address to listen on."""


class ModelError(RingError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, built-in name or hub id, or the hub is out of reach."""


class ModelCorrupt(ModelError):
    """Files are missing, truncated, or contradict each other."""


class ModelUnsafe(ModelError):
    """The folder needs its own code to be run, which is never done."""


class ModelUnsupported(ModelError):
    """The architecture is not known to be cut exactly, or lacks a requested feature."""


class PlanError(RingError):
    """The model cannot be placed as requested."""


class ExceedsMemory(PlanError):
    """The weights need more memory than all machines have. Only a download can insist."""


class ContextKept(PlanError):
    """Loaded models keep the memory for the context that --max-model-len promises."""


class HostFailed(RingError):
    """A machine of a cluster file cannot be reached, or an operation on it fails."""


class HostUnreached(HostFailed):
    """The machine cannot be reached now, or did not answer in time. Its processes may still run."""


class TrustError(RingError):
    """Two machines do not trust each other."""


class TokenRefused(TrustError):
    """A join token is not accepted here."""


class PeerRefused(TrustError):
    """A peer is not the expected one, or may not make this call."""


class HandshakeFailed(PeerRefused):
    """A connection is not trusted. Anyone at the peer's address can cause this, so it says nothing about the peer."""


class RequestError(RingError):
    """A client's request is wrong. `param` is the path of the wrong field, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(RequestError):
    """Prompt and answer do not fit the context: both numbers are given, in tokens."""

    def __init__(self, message: str, *, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(message, param="messages")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class UnknownModel(RequestError):
    """The request names a model that is not served here."""


class UnknownAnswer(RequestError):
    """The journal keeps no answer of that id, or another API key sent its request."""


class AnswerCancelled(RequestError):
    """A client cancelled the answer."""


class Refused(RequestError):
    """The request comes from a Host or Origin that is not allowed."""


class Unauthenticated(RequestError):
    """The request has no API key, or an unknown one."""


class Conflict(RequestError):
    """The request conflicts with an operation in progress."""


class BodyTooLarge(RequestError):
    """The request's body is longer than the server reads."""


class BodyTooSlow(RequestError):
    """The request's body does not come in time."""


class Overloaded(RequestError):
    """The queue is full; try again in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServingError(RingError):
    """The service itself failed; the request was valid."""


class WorkerLost(ServingError):
    """A worker died or its channel broke."""


class NodeLost(WorkerLost):
    """A machine is cut off, off, or has left; it may return."""


class NodeDrained(WorkerLost):
    """Other machines get the layers, because a machine is wanted back, or another split is faster. All workers are in order."""


class LinkLost(WorkerLost):
    """The link between two workers broke. Its nodes are not to blame, because both may be in order."""

    ends: tuple[str, ...] = ()
    """Nodes at its ends: the sender's and the receiver's."""
    place: tuple[int, int] | None = None
    """Stage and rank of the worker in whose step it broke; None if no step failed."""

    def reported_by(self, stage: int, rank: int) -> Self:
        """Set the worker in whose step it broke, and return the error."""
        self.place = stage, rank
        return self

    def between(self, *nodes: str) -> Self:
        """Set the nodes at the ends of the link, and return the error."""
        self.ends = nodes
        return self

    def blamed_on(self, node: str) -> Self:
        """Return the error without blame on the node that reports it."""
        del node
        return self


class WorkerStuck(ServingError):
    """A worker made no progress before its deadline."""


class GroupStuck(WorkerStuck):
    """Ranks of an MLX group wait for each other, although all of them answer. No node is to blame."""

    backend: str = ""
    """MLX's name of the group's backend; empty if it is unknown."""
    nodes: tuple[str, ...] = ()
    """Node of each rank."""
    place: tuple[int, int] | None = None
    """Stage and rank of the worker that reported it; None if it is unknown."""

    def reported_by(self, stage: int, rank: int) -> Self:
        """Set the worker that waits for its group, and return the error."""
        self.place = stage, rank
        return self

    def of_group(self, backend: str, nodes: Iterable[str]) -> Self:
        """Set the group, and return the error."""
        self.backend, self.nodes = backend, tuple(nodes)
        return self

    def blamed_on(self, node: str) -> Self:
        """Return the error as it is."""
        del node
        return self


class RepeatedLoss(ServingError):
    """Workers were lost several times in a row while they computed the request."""


class DeadlineExceeded(ServingError):
    """A request took longer than the operator allows."""


class StepFailed(ServingError):
    """A step raised inside a worker."""


class StaleMessage(ServingError):
    """The message belongs to an older epoch or to another instance."""


class VersionMismatch(ServingError):
    """Peers disagree on protocol, versions, model or plan."""


class ProtocolError(ServingError):
    """A peer violated the protocol."""


class WeightsMissing(ServingError):
    """No peer gives the tensors that a stage needs, or they are wrong."""


class NotReady(ServingError):
    """No instance can answer now."""

    retry_after_s: float = 5.0
    """Time until asking again may succeed; the instance's other failures take no longer to pass."""


class BodiesFull(NotReady):
    """There is no room for a request's body: others use it, or this client's share is used up."""

    retry_after_s = 2.0


class Draining(NotReady):
    """The server is about to end: it finishes its requests, and accepts nothing new."""

    retry_after_s = 10.0


class Suspended(NotReady):
    """The server ends before the answer does. The journal keeps the answer, which continues later."""


def reason_of(error: OSError | UnicodeError) -> str:
    """Return why a file cannot be read or written, without the error's number and the file's name."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not text in UTF-8"


def in_sentence(name: str) -> str:
    """Return a name as it stands within a sentence: `the head` for `The head`. A machine's, as `The Beast`, stays."""
    return f"t{name[1:]}" if name.startswith("The ") and name[4:5].islower() else name


def without_number(text: str) -> str:
    """Return an error's text without the numbers of the system's errors, such as [Errno 111]."""
    return re.sub(r"\[Errno -?\d+\] ", "", text)


_LONGEST_SHOWN = 60


def shown_text(text: str) -> str:
    """Return a text of unknown origin for a message: short, in one line, and without control of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST_SHOWN]).strip()
