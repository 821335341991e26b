from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("unix_time_s", "software_version", "mlx_version", "device", "certificate_expires_s", "revocation_number")
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    unix_time_s: float
    software_version: str
    mlx_version: str
    device: str
    certificate_expires_s: int
    revocation_number: int
    def __init__(self, unix_time_s: _Optional[float] = ..., software_version: _Optional[str] = ..., mlx_version: _Optional[str] = ..., device: _Optional[str] = ..., certificate_expires_s: _Optional[int] = ..., revocation_number: _Optional[int] = ...) -> None: ...

class SyncRevocationsRequest(_message.Message):
    __slots__ = ("list_pem",)
    LIST_PEM_FIELD_NUMBER: _ClassVar[int]
    list_pem: bytes
    def __init__(self, list_pem: _Optional[bytes] = ...) -> None: ...

class SyncRevocationsReply(_message.Message):
    __slots__ = ("number", "list_pem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIST_PEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    list_pem: bytes
    def __init__(self, number: _Optional[int] = ..., list_pem: _Optional[bytes] = ...) -> None: ...

class NewKeyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NewKeyReply(_message.Message):
    __slots__ = ("request_pem",)
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    request_pem: bytes
    def __init__(self, request_pem: _Optional[bytes] = ...) -> None: ...

class InstallCertificateRequest(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

class InstallCertificateReply(_message.Message):
    __slots__ = ("expires_s",)
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    expires_s: int
    def __init__(self, expires_s: _Optional[int] = ...) -> None: ...

class EnrolChallenge(_message.Message):
    __slots__ = ("version", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class EnrolProof(_message.Message):
    __slots__ = ("nonce", "mac")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    mac: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("mac", "request_pem", "name", "refusal")
    MAC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    request_pem: bytes
    name: str
    refusal: str
    def __init__(self, mac: _Optional[bytes] = ..., request_pem: _Optional[bytes] = ..., name: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class EnrolGrant(_message.Message):
    __slots__ = ("mac", "ca_pem", "certificate_pem", "revocations_pem", "refusal")
    MAC_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_PEM_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    ca_pem: bytes
    certificate_pem: bytes
    revocations_pem: bytes
    refusal: str
    def __init__(self, mac: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., certificate_pem: _Optional[bytes] = ..., revocations_pem: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class EnrolDone(_message.Message):
    __slots__ = ("mac", "refusal")
    MAC_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    refusal: str
    def __init__(self, mac: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...
