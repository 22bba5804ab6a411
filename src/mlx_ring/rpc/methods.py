"""Methods of gRPC, each with its types in one line, for clients and servers, sync and asyncio.

Message classes serialize themselves. Frames (`rpc/frames.py`) carry an array's
bytes behind a small header, so that activations are copied once on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import grpc
from google.protobuf.message import Message

from mlx_ring.rpc.frames import Frame, encode_frame, receive_frame
from mlx_ring.rpc.protos import agent_pb2, cluster_pb2, enrol_pb2, hello_pb2, weights_pb2, worker_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Arity = Literal["unary_unary", "unary_stream", "stream_stream"]

CLUSTER_SERVICE = "mlx_ring.Cluster"
WORKER_SERVICE = "mlx_ring.Worker"
AGENT_SERVICE = "mlx_ring.Agent"
ENROLMENT_SERVICE = "mlx_ring.Enrolment"
RENEWAL_SERVICE = "mlx_ring.Renewal"
GREETING_SERVICE = "mlx_ring.Greeting"
WEIGHTS_SERVICE = "mlx_ring.Weights"


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """One method: its path, its arity, and the serialization of both directions."""

    service: str
    name: str
    arity: Arity
    encode_request: Callable[[Request], bytes]
    decode_request: Callable[[bytes], Request]
    encode_response: Callable[[Response], bytes]
    decode_response: Callable[[bytes], Response]

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def handler(self, behaviour: Callable[..., object]) -> grpc.RpcMethodHandler[Request, Response]:
        """Bind a server's function: `behaviour(request or iterator, context)`."""
        make = getattr(grpc, f"{self.arity}_rpc_method_handler")
        return make(
            behaviour, request_deserializer=self.decode_request, response_serializer=self.encode_response
        )

    def unary_stream(self, channel: grpc.Channel) -> grpc.UnaryStreamMultiCallable[Request, Response]:
        return channel.unary_stream(self.path, self.encode_request, self.decode_response)

    def unary_unary(self, channel: grpc.Channel) -> grpc.UnaryUnaryMultiCallable[Request, Response]:
        return channel.unary_unary(self.path, self.encode_request, self.decode_response)

    def stream_stream(self, channel: grpc.Channel) -> grpc.StreamStreamMultiCallable[Request, Response]:
        return channel.stream_stream(self.path, self.encode_request, self.decode_response)

    def aio_unary_stream(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.UnaryStreamMultiCallable[Request, Response]:
        return channel.unary_stream(self.path, self.encode_request, self.decode_response)

    def aio_unary_unary(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.UnaryUnaryMultiCallable[Request, Response]:
        return channel.unary_unary(self.path, self.encode_request, self.decode_response)

    def aio_stream_stream(
        self, channel: grpc.aio.Channel
    ) -> grpc.aio.StreamStreamMultiCallable[Request, Response]:
        return channel.stream_stream(self.path, self.encode_request, self.decode_response)


Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


def _method(
    service: str, name: str, arity: Arity, request: type[Sent], response: type[Received]
) -> Method[Sent, Received]:
    return Method(
        service,
        name,
        arity,
        request.SerializeToString,
        request.FromString,
        response.SerializeToString,
        response.FromString,
    )


LOAD = _method(WORKER_SERVICE, "Load", "unary_stream", worker_pb2.LoadRequest, worker_pb2.LoadProgress)
STATUS = _method(WORKER_SERVICE, "Status", "unary_unary", worker_pb2.StatusRequest, worker_pb2.WorkerStatus)
RELINK = _method(WORKER_SERVICE, "Relink", "unary_unary", worker_pb2.RelinkRequest, worker_pb2.RelinkReply)
STEPS = _method(WORKER_SERVICE, "Steps", "stream_stream", worker_pb2.StepsRequest, worker_pb2.StepsReply)
STEPS_RAW: Method[bytes, worker_pb2.StepsReply] = Method(
    STEPS.service, STEPS.name, STEPS.arity, bytes, bytes, STEPS.encode_response, STEPS.decode_response
)
"""`STEPS` for a client that sends the same serialized `StepsRequest` to several ranks."""
LINK: Method[Frame, worker_pb2.FrameAccepted] = Method(
    WORKER_SERVICE,
    "Link",
    "stream_stream",
    encode_frame,
    receive_frame,
    worker_pb2.FrameAccepted.SerializeToString,
    worker_pb2.FrameAccepted.FromString,
)
READ_KV: Method[worker_pb2.ReadKvRequest, Frame] = Method(
    WORKER_SERVICE,
    "ReadKv",
    "unary_stream",
    worker_pb2.ReadKvRequest.SerializeToString,
    worker_pb2.ReadKvRequest.FromString,
    encode_frame,
    receive_frame,
)

ATTEND = _method(
    CLUSTER_SERVICE, "Attend", "stream_stream", cluster_pb2.AttendRequest, cluster_pb2.AttendReply
)
START = _method(AGENT_SERVICE, "Start", "unary_unary", agent_pb2.StartRequest, agent_pb2.StartReply)
LOAD_STAGES = _method(
    AGENT_SERVICE, "LoadStages", "unary_stream", agent_pb2.LoadStagesRequest, agent_pb2.StageProgress
)
WATCH = _method(AGENT_SERVICE, "Watch", "unary_stream", agent_pb2.WatchRequest, agent_pb2.AgentEvent)
RELINK_WORKERS = _method(
    AGENT_SERVICE, "Relink", "unary_unary", agent_pb2.RelinkWorkersRequest, agent_pb2.RelinkWorkersReply
)
STOP = _method(AGENT_SERVICE, "Stop", "unary_unary", agent_pb2.StopRequest, agent_pb2.StopReply)
MEASURE_LINK = _method(
    AGENT_SERVICE, "MeasureLink", "unary_unary", agent_pb2.MeasureLinkRequest, agent_pb2.MeasureLinkReply
)

ENROL = _method(ENROLMENT_SERVICE, "Enrol", "unary_unary", enrol_pb2.EnrolRequest, enrol_pb2.EnrolReply)
RENEW = _method(RENEWAL_SERVICE, "Renew", "unary_unary", enrol_pb2.RenewRequest, enrol_pb2.EnrolReply)
GREET = _method(GREETING_SERVICE, "Greet", "unary_unary", hello_pb2.Hello, hello_pb2.Greeting)

MANIFEST = _method(
    WEIGHTS_SERVICE, "Manifest", "unary_stream", weights_pb2.ManifestRequest, weights_pb2.ManifestPart
)
HAVE = _method(WEIGHTS_SERVICE, "Have", "unary_unary", weights_pb2.HaveRequest, weights_pb2.HaveReply)
FETCH = _method(WEIGHTS_SERVICE, "Fetch", "unary_stream", weights_pb2.FetchRequest, weights_pb2.FetchPart)
LIST_BLOCKS = _method(
    WEIGHTS_SERVICE, "ListBlocks", "unary_unary", weights_pb2.ListBlocksRequest, weights_pb2.ListBlocksReply
)
READ_BLOCK = _method(
    WEIGHTS_SERVICE, "ReadBlock", "unary_stream", weights_pb2.ReadBlockRequest, weights_pb2.FetchPart
)


def service_handler(
    service: str, behaviours: Iterable[tuple[Method[Any, Any], Callable[..., object]]]
) -> grpc.GenericRpcHandler:
    """Return the handler of a whole service, for `server.add_generic_rpc_handlers`."""
    return grpc.method_handlers_generic_handler(
        service, {method.name: method.handler(behaviour) for method, behaviour in behaviours}
    )
