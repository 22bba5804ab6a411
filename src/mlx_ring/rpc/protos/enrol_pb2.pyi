from mlx_ring.rpc.protos import hello_pb2 as _hello_pb2
from mlx_ring.rpc.protos import step_pb2 as _step_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("hello", "token_id", "secret", "node", "signing_request", "nonce")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    token_id: bytes
    secret: bytes
    node: str
    signing_request: bytes
    nonce: bytes
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., token_id: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., node: _Optional[str] = ..., signing_request: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("hello", "signing_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: _hello_pb2.Hello
    signing_request: bytes
    def __init__(self, hello: _Optional[_Union[_hello_pb2.Hello, _Mapping]] = ..., signing_request: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("failure", "certificate", "authority")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    failure: _step_pb2.Failure
    certificate: bytes
    authority: bytes
    def __init__(self, failure: _Optional[_Union[_step_pb2.Failure, _Mapping]] = ..., certificate: _Optional[bytes] = ..., authority: _Optional[bytes] = ...) -> None: ...
