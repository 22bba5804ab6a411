from mlx_ring.rpc.protos import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Step(_message.Message):
    __slots__ = ("instance", "epoch", "step", "operations", "rows", "deadline_s", "feed_back_tokens", "end_stage")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    FEED_BACK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_STAGE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    step: int
    operations: _containers.RepeatedCompositeFieldContainer[CacheOperation]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    deadline_s: float
    feed_back_tokens: bool
    end_stage: int
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[CacheOperation, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., deadline_s: _Optional[float] = ..., feed_back_tokens: _Optional[bool] = ..., end_stage: _Optional[int] = ...) -> None: ...

class CacheOperation(_message.Message):
    __slots__ = ("open", "fork", "trim", "free", "reset", "retain", "save", "adopt", "first_stage", "end_stage")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    TRIM_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_STAGE_FIELD_NUMBER: _ClassVar[int]
    END_STAGE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    fork: Fork
    trim: Trim
    free: Free
    reset: Reset
    retain: Retain
    save: Save
    adopt: Adopt
    first_stage: int
    end_stage: int
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., trim: _Optional[_Union[Trim, _Mapping]] = ..., free: _Optional[_Union[Free, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., retain: _Optional[_Union[Retain, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., first_stage: _Optional[int] = ..., end_stage: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("sequence", "sampling", "seed", "eos", "tokens", "prompt_length", "max_length", "grammar", "traceparent", "fill_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EOS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sampling: Sampling
    seed: int
    eos: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    max_length: int
    grammar: int
    traceparent: str
    fill_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., eos: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., max_length: _Optional[int] = ..., grammar: _Optional[int] = ..., traceparent: _Optional[str] = ..., fill_tokens: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("source", "destination", "length", "take")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    source: int
    destination: int
    length: int
    take: bool
    def __init__(self, source: _Optional[int] = ..., destination: _Optional[int] = ..., length: _Optional[int] = ..., take: _Optional[bool] = ...) -> None: ...

class Trim(_message.Message):
    __slots__ = ("sequence", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    length: int
    def __init__(self, sequence: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Free(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Retain(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("sequence", "blocks", "first", "most", "may_wait", "end", "listed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    MAY_WAIT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    blocks: KvBlocks
    first: int
    most: int
    may_wait: bool
    end: bool
    listed: _containers.RepeatedCompositeFieldContainer[ListedBlock]
    def __init__(self, sequence: _Optional[int] = ..., blocks: _Optional[_Union[KvBlocks, _Mapping]] = ..., first: _Optional[int] = ..., most: _Optional[int] = ..., may_wait: _Optional[bool] = ..., end: _Optional[bool] = ..., listed: _Optional[_Iterable[_Union[ListedBlock, _Mapping]]] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("sequence", "fetch", "length", "moved", "start", "tokens", "part", "parts")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    fetch: int
    length: int
    moved: bool
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    part: int
    parts: int
    def __init__(self, sequence: _Optional[int] = ..., fetch: _Optional[int] = ..., length: _Optional[int] = ..., moved: _Optional[bool] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("block_tokens", "digests", "last_tokens")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    last_tokens: int
    def __init__(self, block_tokens: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ..., last_tokens: _Optional[int] = ...) -> None: ...

class ListedBlock(_message.Message):
    __slots__ = ("place", "digest", "tokens")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    place: bytes
    digest: bytes
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, place: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: bool
    top_logprobs: int
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("sequence", "start", "tokens", "embeddings", "token", "previous", "draft", "wants")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    tokens: Tokens
    embeddings: _tensor_pb2.Tensor
    token: int
    previous: bool
    draft: _containers.RepeatedScalarFieldContainer[int]
    wants: _containers.RepeatedCompositeFieldContainer[Want]
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., embeddings: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., token: _Optional[int] = ..., previous: _Optional[bool] = ..., draft: _Optional[_Iterable[int]] = ..., wants: _Optional[_Iterable[_Union[Want, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("where", "what", "listed", "targets", "top_logprobs")
    class Where(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LAST: _ClassVar[Want.Where]
        LISTED: _ClassVar[Want.Where]
        ALL: _ClassVar[Want.Where]
    LAST: Want.Where
    LISTED: Want.Where
    ALL: Want.Where
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOKEN: _ClassVar[Want.What]
        LOGPROBS: _ClassVar[Want.What]
        LOGITS: _ClassVar[Want.What]
        HIDDEN: _ClassVar[Want.What]
        HIDDEN_SUM: _ClassVar[Want.What]
    TOKEN: Want.What
    LOGPROBS: Want.What
    LOGITS: Want.What
    HIDDEN: Want.What
    HIDDEN_SUM: Want.What
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    where: Want.Where
    what: Want.What
    listed: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    def __init__(self, where: _Optional[_Union[Want.Where, str]] = ..., what: _Optional[_Union[Want.What, str]] = ..., listed: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("instance", "epoch", "step", "stage", "rank", "failure", "timings", "kv_bytes", "results", "spans")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    step: int
    stage: int
    rank: int
    failure: Failure
    timings: Timings
    kv_bytes: int
    results: _containers.RepeatedCompositeFieldContainer[RowResult]
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., stage: _Optional[int] = ..., rank: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., results: _Optional[_Iterable[_Union[RowResult, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("traceparent", "is_decode", "started_unix_us", "finished_unix_us", "steps", "tokens", "queue_us", "link_wait_us", "compute_us", "link_send_us")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    IS_DECODE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_US_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    LINK_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    LINK_SEND_US_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    is_decode: bool
    started_unix_us: int
    finished_unix_us: int
    steps: int
    tokens: int
    queue_us: int
    link_wait_us: int
    compute_us: int
    link_send_us: int
    def __init__(self, traceparent: _Optional[str] = ..., is_decode: _Optional[bool] = ..., started_unix_us: _Optional[int] = ..., finished_unix_us: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., queue_us: _Optional[int] = ..., link_wait_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., link_send_us: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message", "sequences", "ends")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    sequences: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., sequences: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("started_us", "finished_us", "queue_us", "link_wait_us", "compute_us", "link_send_us")
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    FINISHED_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    LINK_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    LINK_SEND_US_FIELD_NUMBER: _ClassVar[int]
    started_us: int
    finished_us: int
    queue_us: int
    link_wait_us: int
    compute_us: int
    link_send_us: int
    def __init__(self, started_us: _Optional[int] = ..., finished_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., link_wait_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., link_send_us: _Optional[int] = ...) -> None: ...

class RowResult(_message.Message):
    __slots__ = ("sequence", "tokens", "logprobs", "logits", "hidden")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    logits: _tensor_pb2.Tensor
    hidden: _tensor_pb2.Tensor
    def __init__(self, sequence: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., logits: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., hidden: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token", "logprob", "top_tokens", "top_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
