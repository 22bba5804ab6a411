from mlx_ring.rpc.protos import hello_pb2 as _hello_pb2
from mlx_ring.rpc.protos import step_pb2 as _step_pb2
from mlx_ring.rpc.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartRequest(_message.Message):
    __slots__ = ("hello", "assignments")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    assignments: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StageAssignment]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., assignments: _Optional[_Iterable[_Union[_worker_pb2.StageAssignment, _Mapping]]] = ...) -> None: ...

class StartReply(_message.Message):
    __slots__ = ("workers", "failure")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[StartedWorker]
    failure: _step_pb2.Failure
    def __init__(self, workers: _Optional[_Iterable[_Union[StartedWorker, _Mapping]]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ...) -> None: ...

class StartedWorker(_message.Message):
    __slots__ = ("stage", "rank", "pid", "address", "port", "group_port", "group_host", "begun_step", "means")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_PORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_HOST_FIELD_NUMBER: _ClassVar[int]
    BEGUN_STEP_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    rank: int
    pid: int
    address: str
    port: int
    group_port: int
    group_host: str
    begun_step: int
    means: _worker_pb2.GroupMeans
    def __init__(self, stage: _Optional[int] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., group_port: _Optional[int] = ..., group_host: _Optional[str] = ..., begun_step: _Optional[int] = ..., means: _Optional[_Union[_worker_pb2.GroupMeans, _Mapping]] = ...) -> None: ...

class LoadStagesRequest(_message.Message):
    __slots__ = ("hello", "model_path", "assignments", "weights", "peers", "only_fetch", "gain", "pids")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ONLY_FETCH_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    model_path: str
    assignments: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StageAssignment]
    weights: str
    peers: _containers.RepeatedCompositeFieldContainer[WeightsPeer]
    only_fetch: bool
    gain: _worker_pb2.LoadRequest.Gain
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., model_path: _Optional[str] = ..., assignments: _Optional[_Iterable[_Union[_worker_pb2.StageAssignment, _Mapping]]] = ..., weights: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[WeightsPeer, _Mapping]]] = ..., only_fetch: _Optional[bool] = ..., gain: _Optional[_Union[_worker_pb2.LoadRequest.Gain, str]] = ..., pids: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightsPeer(_message.Message):
    __slots__ = ("address", "node")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    address: str
    node: str
    def __init__(self, address: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("stage", "rank", "progress")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    rank: int
    progress: _worker_pb2.LoadProgress
    def __init__(self, stage: _Optional[int] = ..., rank: _Optional[int] = ..., progress: _Optional[_Union[_worker_pb2.LoadProgress, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("hello", "heartbeat_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    heartbeat_s: float
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class AgentEvent(_message.Message):
    __slots__ = ("hello", "workers", "memory_bytes", "memory_free_bytes", "yielding")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    YIELDING_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    memory_bytes: int
    memory_free_bytes: int
    yielding: Yielding
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., yielding: _Optional[_Union[Yielding, _Mapping]] = ...) -> None: ...

class Yielding(_message.Message):
    __slots__ = ("reason", "speed_share", "memory_share", "priority")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SPEED_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHARE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    speed_share: float
    memory_share: float
    priority: str
    def __init__(self, reason: _Optional[str] = ..., speed_share: _Optional[float] = ..., memory_share: _Optional[float] = ..., priority: _Optional[str] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("instance", "stage", "rank", "pid", "address", "alive", "exit_reason", "status", "silent_s", "assignment")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    EXIT_REASON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    instance: str
    stage: int
    rank: int
    pid: int
    address: str
    alive: bool
    exit_reason: str
    status: _worker_pb2.WorkerStatus
    silent_s: float
    assignment: _worker_pb2.StageAssignment
    def __init__(self, instance: _Optional[str] = ..., stage: _Optional[int] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., alive: _Optional[bool] = ..., exit_reason: _Optional[str] = ..., status: _Optional[_Union[_worker_pb2.WorkerStatus, _Mapping]] = ..., silent_s: _Optional[float] = ..., assignment: _Optional[_Union[_worker_pb2.StageAssignment, _Mapping]] = ...) -> None: ...

class RelinkWorkersRequest(_message.Message):
    __slots__ = ("hello", "assignments", "commit", "kept", "pids", "leaves_others", "halt", "until_steps")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_OTHERS_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEPS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    assignments: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StageAssignment]
    commit: bool
    kept: _worker_pb2.KeptKv
    pids: _containers.RepeatedScalarFieldContainer[int]
    leaves_others: bool
    halt: bool
    until_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., assignments: _Optional[_Iterable[_Union[_worker_pb2.StageAssignment, _Mapping]]] = ..., commit: _Optional[bool] = ..., kept: _Optional[_Union[_worker_pb2.KeptKv, _Mapping]] = ..., pids: _Optional[_Iterable[int]] = ..., leaves_others: _Optional[bool] = ..., halt: _Optional[bool] = ..., until_steps: _Optional[_Iterable[int]] = ...) -> None: ...

class RelinkWorkersReply(_message.Message):
    __slots__ = ("workers", "failure")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[StartedWorker]
    failure: _step_pb2.Failure
    def __init__(self, workers: _Optional[_Iterable[_Union[StartedWorker, _Mapping]]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("hello", "instance", "end", "pids")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    instance: str
    end: bool
    pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., instance: _Optional[str] = ..., end: _Optional[bool] = ..., pids: _Optional[_Iterable[int]] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: int
    def __init__(self, stopped: _Optional[int] = ...) -> None: ...

class MeasureLinkRequest(_message.Message):
    __slots__ = ("hello", "node", "address", "max_age_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_S_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    node: str
    address: str
    max_age_s: float
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., node: _Optional[str] = ..., address: _Optional[str] = ..., max_age_s: _Optional[float] = ...) -> None: ...

class MeasureLinkReply(_message.Message):
    __slots__ = ("failure", "round_trip_s", "bytes_per_s", "age_s")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    round_trip_s: float
    bytes_per_s: float
    age_s: float
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., round_trip_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., age_s: _Optional[float] = ...) -> None: ...
