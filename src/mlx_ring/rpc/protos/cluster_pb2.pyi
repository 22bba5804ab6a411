from mlx_ring.rpc.protos import agent_pb2 as _agent_pb2
from mlx_ring.rpc.protos import hello_pb2 as _hello_pb2
from mlx_ring.rpc.protos import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttendRequest(_message.Message):
    __slots__ = ("hello", "machine", "port", "head_host", "profile", "memory_utilization", "memory_free_bytes", "links_port", "agent_bytes", "trusted", "trusted_problem", "leaves", "energy", "yielding", "wants_to_leave", "leave_request", "process")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HEAD_HOST_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINKS_PORT_FIELD_NUMBER: _ClassVar[int]
    AGENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    TRUSTED_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    ENERGY_FIELD_NUMBER: _ClassVar[int]
    YIELDING_FIELD_NUMBER: _ClassVar[int]
    WANTS_TO_LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    machine: str
    port: int
    head_host: str
    profile: str
    memory_utilization: float
    memory_free_bytes: int
    links_port: int
    agent_bytes: int
    trusted: _containers.RepeatedCompositeFieldContainer[TrustedInterface]
    trusted_problem: str
    leaves: bool
    energy: _containers.RepeatedCompositeFieldContainer[PartEnergy]
    yielding: _agent_pb2.Yielding
    wants_to_leave: bool
    leave_request: int
    process: str
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., machine: _Optional[str] = ..., port: _Optional[int] = ..., head_host: _Optional[str] = ..., profile: _Optional[str] = ..., memory_utilization: _Optional[float] = ..., memory_free_bytes: _Optional[int] = ..., links_port: _Optional[int] = ..., agent_bytes: _Optional[int] = ..., trusted: _Optional[_Iterable[_Union[TrustedInterface, _Mapping]]] = ..., trusted_problem: _Optional[str] = ..., leaves: _Optional[bool] = ..., energy: _Optional[_Iterable[_Union[PartEnergy, _Mapping]]] = ..., yielding: _Optional[_Union[_agent_pb2.Yielding, _Mapping]] = ..., wants_to_leave: _Optional[bool] = ..., leave_request: _Optional[int] = ..., process: _Optional[str] = ...) -> None: ...

class PartEnergy(_message.Message):
    __slots__ = ("part", "joules", "watts")
    PART_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    part: str
    joules: float
    watts: float
    def __init__(self, part: _Optional[str] = ..., joules: _Optional[float] = ..., watts: _Optional[float] = ...) -> None: ...

class TrustedInterface(_message.Message):
    __slots__ = ("name", "address", "network")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    network: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., network: _Optional[str] = ...) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ("hello", "failure", "revoked", "may_leave", "stay_reason", "leave_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    MAY_LEAVE_FIELD_NUMBER: _ClassVar[int]
    STAY_REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    failure: _step_pb2.Failure
    revoked: _containers.RepeatedScalarFieldContainer[str]
    may_leave: bool
    stay_reason: str
    leave_request: int
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., revoked: _Optional[_Iterable[str]] = ..., may_leave: _Optional[bool] = ..., stay_reason: _Optional[str] = ..., leave_request: _Optional[int] = ...) -> None: ...
