from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "mlx_ring", "mlx", "mlx_lm", "model_digest", "plan_digest", "instance", "epoch", "last_step", "fencing_id", "stage", "rank", "node")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MLX_RING_FIELD_NUMBER: _ClassVar[int]
    MLX_FIELD_NUMBER: _ClassVar[int]
    MLX_LM_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    FENCING_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    mlx_ring: str
    mlx: str
    mlx_lm: str
    model_digest: str
    plan_digest: str
    instance: str
    epoch: int
    last_step: int
    fencing_id: int
    stage: int
    rank: int
    node: str
    def __init__(self, protocol: _Optional[int] = ..., mlx_ring: _Optional[str] = ..., mlx: _Optional[str] = ..., mlx_lm: _Optional[str] = ..., model_digest: _Optional[str] = ..., plan_digest: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., last_step: _Optional[int] = ..., fencing_id: _Optional[int] = ..., stage: _Optional[int] = ..., rank: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("hello", "unix_time_s")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    unix_time_s: float
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., unix_time_s: _Optional[float] = ...) -> None: ...
