from mlx_ring.rpc.protos import hello_pb2 as _hello_pb2
from mlx_ring.rpc.protos import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadRequest(_message.Message):
    __slots__ = ("hello", "model_path", "fetched", "assignment", "gain")
    class Gain(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[LoadRequest.Gain]
        ANNOUNCED: _ClassVar[LoadRequest.Gain]
        BESIDE: _ClassVar[LoadRequest.Gain]
        AFTER: _ClassVar[LoadRequest.Gain]
    NONE: LoadRequest.Gain
    ANNOUNCED: LoadRequest.Gain
    BESIDE: LoadRequest.Gain
    AFTER: LoadRequest.Gain
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    model_path: str
    fetched: bool
    assignment: StageAssignment
    gain: LoadRequest.Gain
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., model_path: _Optional[str] = ..., fetched: _Optional[bool] = ..., assignment: _Optional[_Union[StageAssignment, _Mapping]] = ..., gain: _Optional[_Union[LoadRequest.Gain, str]] = ...) -> None: ...

class StageAssignment(_message.Message):
    __slots__ = ("instance", "epoch", "stage", "stages", "rank", "tp_size", "first_layer", "end_layer", "dtype", "next_address", "first_address", "plan_digest", "model_digest", "kv_bits", "max_model_len", "next_node", "first_node", "link_compression", "next_bytes_per_s", "previous_node", "shares", "group", "next_ranks", "first_ranks", "link", "group_host", "group_from", "cpu_weights", "backend", "backend_why", "group_environment", "rdma")
    class GroupEnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_BITS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_NODE_FIELD_NUMBER: _ClassVar[int]
    LINK_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_NODE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NEXT_RANKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANKS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    GROUP_HOST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FROM_FIELD_NUMBER: _ClassVar[int]
    CPU_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_WHY_FIELD_NUMBER: _ClassVar[int]
    GROUP_ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    stage: int
    stages: int
    rank: int
    tp_size: int
    first_layer: int
    end_layer: int
    dtype: str
    next_address: str
    first_address: str
    plan_digest: str
    model_digest: str
    kv_bits: int
    max_model_len: int
    next_node: str
    first_node: str
    link_compression: str
    next_bytes_per_s: float
    previous_node: str
    shares: _containers.RepeatedScalarFieldContainer[float]
    group: _containers.RepeatedScalarFieldContainer[str]
    next_ranks: _containers.RepeatedCompositeFieldContainer[RankEnd]
    first_ranks: _containers.RepeatedCompositeFieldContainer[RankEnd]
    link: str
    group_host: str
    group_from: str
    cpu_weights: str
    backend: str
    backend_why: str
    group_environment: _containers.ScalarMap[str, str]
    rdma: str
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., dtype: _Optional[str] = ..., next_address: _Optional[str] = ..., first_address: _Optional[str] = ..., plan_digest: _Optional[str] = ..., model_digest: _Optional[str] = ..., kv_bits: _Optional[int] = ..., max_model_len: _Optional[int] = ..., next_node: _Optional[str] = ..., first_node: _Optional[str] = ..., link_compression: _Optional[str] = ..., next_bytes_per_s: _Optional[float] = ..., previous_node: _Optional[str] = ..., shares: _Optional[_Iterable[float]] = ..., group: _Optional[_Iterable[str]] = ..., next_ranks: _Optional[_Iterable[_Union[RankEnd, _Mapping]]] = ..., first_ranks: _Optional[_Iterable[_Union[RankEnd, _Mapping]]] = ..., link: _Optional[str] = ..., group_host: _Optional[str] = ..., group_from: _Optional[str] = ..., cpu_weights: _Optional[str] = ..., backend: _Optional[str] = ..., backend_why: _Optional[str] = ..., group_environment: _Optional[_Mapping[str, str]] = ..., rdma: _Optional[str] = ...) -> None: ...

class GroupMeans(_message.Message):
    __slots__ = ("backends", "gpu", "rdma_devices")
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    RDMA_DEVICES_FIELD_NUMBER: _ClassVar[int]
    backends: _containers.RepeatedScalarFieldContainer[str]
    gpu: str
    rdma_devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, backends: _Optional[_Iterable[str]] = ..., gpu: _Optional[str] = ..., rdma_devices: _Optional[_Iterable[str]] = ...) -> None: ...

class GroupUse(_message.Message):
    __slots__ = ("backend", "why")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    backend: str
    why: str
    def __init__(self, backend: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class RankEnd(_message.Message):
    __slots__ = ("address", "node")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    address: str
    node: str
    def __init__(self, address: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("bytes_loaded", "bytes_total", "ready", "failure", "phase")
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    bytes_loaded: int
    bytes_total: int
    ready: bool
    failure: _step_pb2.Failure
    phase: str
    def __init__(self, bytes_loaded: _Optional[int] = ..., bytes_total: _Optional[int] = ..., ready: _Optional[bool] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., phase: _Optional[str] = ...) -> None: ...

class RelinkRequest(_message.Message):
    __slots__ = ("hello", "assignment", "commit", "kept", "halt", "until_step")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    assignment: StageAssignment
    commit: bool
    kept: KeptKv
    halt: bool
    until_step: int
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., assignment: _Optional[_Union[StageAssignment, _Mapping]] = ..., commit: _Optional[bool] = ..., kept: _Optional[_Union[KeptKv, _Mapping]] = ..., halt: _Optional[bool] = ..., until_step: _Optional[int] = ...) -> None: ...

class KeptKv(_message.Message):
    __slots__ = ("first_stage", "sequences")
    FIRST_STAGE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    first_stage: int
    sequences: _containers.RepeatedCompositeFieldContainer[KeptSequence]
    def __init__(self, first_stage: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[KeptSequence, _Mapping]]] = ...) -> None: ...

class KeptSequence(_message.Message):
    __slots__ = ("sequence", "kept_as", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_AS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kept_as: int
    length: int
    def __init__(self, sequence: _Optional[int] = ..., kept_as: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class RelinkReply(_message.Message):
    __slots__ = ("failure", "begun_step")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_STEP_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    begun_step: int
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., begun_step: _Optional[int] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("hello", "step", "kv_limit", "prepare", "drop_grammar", "fetch", "export", "keep_left")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KV_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    DROP_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEFT_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    step: _step_pb2.Step
    kv_limit: int
    prepare: PrepareGrammar
    drop_grammar: int
    fetch: FetchKv
    export: ExportKv
    keep_left: KeepLeft
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., kv_limit: _Optional[int] = ..., prepare: _Optional[_Union[PrepareGrammar, _Mapping]] = ..., drop_grammar: _Optional[int] = ..., fetch: _Optional[_Union[FetchKv, _Mapping]] = ..., export: _Optional[_Union[ExportKv, _Mapping]] = ..., keep_left: _Optional[_Union[KeepLeft, _Mapping]] = ...) -> None: ...

class StepsReply(_message.Message):
    __slots__ = ("hello", "done", "failure", "prepared", "fetched")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    done: _step_pb2.StepDone
    failure: _step_pb2.Failure
    prepared: GrammarPrepared
    fetched: KvFetched
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., done: _Optional[_Union[_step_pb2.StepDone, _Mapping]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., prepared: _Optional[_Union[GrammarPrepared, _Mapping]] = ..., fetched: _Optional[_Union[KvFetched, _Mapping]] = ...) -> None: ...

class FetchKv(_message.Message):
    __slots__ = ("id", "blocks", "only_looks", "owners", "sources", "start", "end", "within_s", "next", "for_save", "asks_peers", "peers")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ONLY_LOOKS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    FOR_SAVE_FIELD_NUMBER: _ClassVar[int]
    ASKS_PEERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    blocks: _step_pb2.KvBlocks
    only_looks: bool
    owners: _containers.RepeatedScalarFieldContainer[bytes]
    sources: _containers.RepeatedCompositeFieldContainer[KvSource]
    start: int
    end: int
    within_s: float
    next: _step_pb2.ListedBlock
    for_save: bool
    asks_peers: bool
    peers: _containers.RepeatedCompositeFieldContainer[KvPeer]
    def __init__(self, id: _Optional[int] = ..., blocks: _Optional[_Union[_step_pb2.KvBlocks, _Mapping]] = ..., only_looks: _Optional[bool] = ..., owners: _Optional[_Iterable[bytes]] = ..., sources: _Optional[_Iterable[_Union[KvSource, _Mapping]]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., within_s: _Optional[float] = ..., next: _Optional[_Union[_step_pb2.ListedBlock, _Mapping]] = ..., for_save: _Optional[bool] = ..., asks_peers: _Optional[bool] = ..., peers: _Optional[_Iterable[_Union[KvPeer, _Mapping]]] = ...) -> None: ...

class KvPeer(_message.Message):
    __slots__ = ("reader", "address", "node", "bytes_per_s")
    READER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    reader: str
    address: str
    node: str
    bytes_per_s: float
    def __init__(self, reader: _Optional[str] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("stage", "rank", "address", "node", "first_layer", "end_layer", "key")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    stage: int
    rank: int
    address: str
    node: str
    first_layer: int
    end_layer: int
    key: str
    def __init__(self, stage: _Optional[int] = ..., rank: _Optional[int] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., key: _Optional[str] = ...) -> None: ...

class KvFetched(_message.Message):
    __slots__ = ("id", "blocks", "ends", "problem", "next_tokens", "read_s", "from_peers")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    FROM_PEERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    blocks: int
    ends: _containers.RepeatedScalarFieldContainer[int]
    problem: str
    next_tokens: int
    read_s: float
    from_peers: PeerBlocks
    def __init__(self, id: _Optional[int] = ..., blocks: _Optional[int] = ..., ends: _Optional[_Iterable[int]] = ..., problem: _Optional[str] = ..., next_tokens: _Optional[int] = ..., read_s: _Optional[float] = ..., from_peers: _Optional[_Union[PeerBlocks, _Mapping]] = ...) -> None: ...

class PeerBlocks(_message.Message):
    __slots__ = ("blocks", "ends", "parts")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    ends: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[PeerPart]
    def __init__(self, blocks: _Optional[int] = ..., ends: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[PeerPart, _Mapping]]] = ...) -> None: ...

class PeerPart(_message.Message):
    __slots__ = ("node", "bytes", "seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    bytes: int
    seconds: float
    def __init__(self, node: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ExportKv(_message.Message):
    __slots__ = ("key", "sequence", "length", "within_s", "nodes", "left")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    key: str
    sequence: int
    length: int
    within_s: float
    nodes: _containers.RepeatedScalarFieldContainer[str]
    left: bool
    def __init__(self, key: _Optional[str] = ..., sequence: _Optional[int] = ..., length: _Optional[int] = ..., within_s: _Optional[float] = ..., nodes: _Optional[_Iterable[str]] = ..., left: _Optional[bool] = ...) -> None: ...

class KeepLeft(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("key", "model_digest", "first_layer", "end_layer", "start", "end")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    key: str
    model_digest: str
    first_layer: int
    end_layer: int
    start: int
    end: int
    def __init__(self, key: _Optional[str] = ..., model_digest: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("start", "end", "arrays", "checksum", "failure")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    arrays: _containers.RepeatedCompositeFieldContainer[KvArray]
    checksum: int
    failure: _step_pb2.Failure
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., arrays: _Optional[_Iterable[_Union[KvArray, _Mapping]]] = ..., checksum: _Optional[int] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ...) -> None: ...

class KvArray(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareGrammar(_message.Message):
    __slots__ = ("id", "grammar")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    id: int
    grammar: _step_pb2.Grammar
    def __init__(self, id: _Optional[int] = ..., grammar: _Optional[_Union[_step_pb2.Grammar, _Mapping]] = ...) -> None: ...

class GrammarPrepared(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    failure: _step_pb2.Failure
    def __init__(self, id: _Optional[int] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("hello", "activation", "tombstone", "kv")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    activation: Activation
    tombstone: Tombstone
    kv: KvPart
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., activation: _Optional[_Union[Activation, _Mapping]] = ..., tombstone: _Optional[_Union[Tombstone, _Mapping]] = ..., kv: _Optional[_Union[KvPart, _Mapping]] = ...) -> None: ...

class Activation(_message.Message):
    __slots__ = ("instance", "epoch", "step", "dtype", "shape", "purpose", "tokens", "failure", "packed_bytes")
    class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HIDDEN: _ClassVar[Activation.Purpose]
        SAMPLED: _ClassVar[Activation.Purpose]
    HIDDEN: Activation.Purpose
    SAMPLED: Activation.Purpose
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    step: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    purpose: Activation.Purpose
    tokens: _containers.RepeatedScalarFieldContainer[int]
    failure: _step_pb2.Failure
    packed_bytes: int
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., purpose: _Optional[_Union[Activation.Purpose, str]] = ..., tokens: _Optional[_Iterable[int]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., packed_bytes: _Optional[int] = ...) -> None: ...

class Tombstone(_message.Message):
    __slots__ = ("instance", "epoch", "step", "failure", "purpose")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    step: int
    failure: _step_pb2.Failure
    purpose: Activation.Purpose
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., purpose: _Optional[_Union[Activation.Purpose, str]] = ...) -> None: ...

class FrameAccepted(_message.Message):
    __slots__ = ("hello", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    failure: _step_pb2.Failure
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ...) -> None: ...

class KvTraits(_message.Message):
    __slots__ = ("bytes_per_token", "bytes_per_sequence", "recurrent", "slack", "exact_length")
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_FIELD_NUMBER: _ClassVar[int]
    SLACK_FIELD_NUMBER: _ClassVar[int]
    EXACT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    bytes_per_token: int
    bytes_per_sequence: int
    recurrent: bool
    slack: int
    exact_length: int
    def __init__(self, bytes_per_token: _Optional[int] = ..., bytes_per_sequence: _Optional[int] = ..., recurrent: _Optional[bool] = ..., slack: _Optional[int] = ..., exact_length: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("revoked",)
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    revoked: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, revoked: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("hello", "phase", "rss_bytes", "weight_bytes", "kv_bytes", "device_memory_bytes", "peak_memory_bytes", "device", "dtype", "blas", "last_step", "sequences", "pid", "kv", "memory_left_bytes", "memory_bytes", "port", "sends", "group_port", "group_host", "kernels", "cpu_weights", "uses_cuda", "means", "group", "waits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLAS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SENDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_PORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_HOST_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CPU_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    USES_CUDA_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    phase: str
    rss_bytes: int
    weight_bytes: int
    kv_bytes: int
    device_memory_bytes: int
    peak_memory_bytes: int
    device: str
    dtype: str
    blas: str
    last_step: int
    sequences: int
    pid: int
    kv: KvTraits
    memory_left_bytes: int
    memory_bytes: int
    port: int
    sends: LinkUse
    group_port: int
    group_host: str
    kernels: str
    cpu_weights: str
    uses_cuda: bool
    means: GroupMeans
    group: GroupUse
    waits: Wait
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., phase: _Optional[str] = ..., rss_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., blas: _Optional[str] = ..., last_step: _Optional[int] = ..., sequences: _Optional[int] = ..., pid: _Optional[int] = ..., kv: _Optional[_Union[KvTraits, _Mapping]] = ..., memory_left_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., port: _Optional[int] = ..., sends: _Optional[_Union[LinkUse, _Mapping]] = ..., group_port: _Optional[int] = ..., group_host: _Optional[str] = ..., kernels: _Optional[str] = ..., cpu_weights: _Optional[str] = ..., uses_cuda: _Optional[bool] = ..., means: _Optional[_Union[GroupMeans, _Mapping]] = ..., group: _Optional[_Union[GroupUse, _Mapping]] = ..., waits: _Optional[_Union[Wait, _Mapping]] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("kind", "backend", "peer", "seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    backend: str
    peer: str
    seconds: float
    def __init__(self, kind: _Optional[str] = ..., backend: _Optional[str] = ..., peer: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("compresses", "why", "frames", "tensor_bytes", "sent_bytes")
    COMPRESSES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    compresses: bool
    why: str
    frames: int
    tensor_bytes: int
    sent_bytes: int
    def __init__(self, compresses: _Optional[bool] = ..., why: _Optional[str] = ..., frames: _Optional[int] = ..., tensor_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...
