from mlx_ring.rpc.protos import hello_pb2 as _hello_pb2
from mlx_ring.rpc.protos import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ManifestRequest(_message.Message):
    __slots__ = ("hello", "model")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    model: str
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class ManifestPart(_message.Message):
    __slots__ = ("failure", "data")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    data: bytes
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class HaveRequest(_message.Message):
    __slots__ = ("hello", "model")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    model: str
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class HaveReply(_message.Message):
    __slots__ = ("failure", "pieces")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    pieces: bytes
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., pieces: _Optional[bytes] = ...) -> None: ...

class ByteRange(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("hello", "model", "file", "ranges")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    model: str
    file: str
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., model: _Optional[str] = ..., file: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ...) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("failure", "offset", "data")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    offset: int
    data: bytes
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("hello", "content", "digests")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    content: str
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., content: _Optional[str] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("failure", "blocks")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    blocks: _containers.RepeatedCompositeFieldContainer[BlockFiles]
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockFiles, _Mapping]]] = ...) -> None: ...

class BlockFiles(_message.Message):
    __slots__ = ("digest", "names", "sizes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    names: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[bytes] = ..., names: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadBlockRequest(_message.Message):
    __slots__ = ("hello", "content", "digest", "file", "ranges")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    content: str
    digest: bytes
    file: str
    ranges: _containers.RepeatedCompositeFieldContainer[ByteRange]
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., content: _Optional[str] = ..., digest: _Optional[bytes] = ..., file: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[ByteRange, _Mapping]]] = ...) -> None: ...
