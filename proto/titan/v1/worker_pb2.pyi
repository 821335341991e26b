from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Session(_message.Message):
    __slots__ = ("id", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "software_version", "mlx_version", "instance_id", "model_shape", "compute_dtype", "reduced")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MLX_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    mlx_version: str
    instance_id: str
    model_shape: str
    compute_dtype: str
    reduced: bool
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., mlx_version: _Optional[str] = ..., instance_id: _Optional[str] = ..., model_shape: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., reduced: _Optional[bool] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "software_version", "session", "memory_budget_bytes", "has_checkpoint", "max_message_bytes", "worker_id", "device", "lane_port", "lane_token", "reduced", "cache_bytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LANE_PORT_FIELD_NUMBER: _ClassVar[int]
    LANE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    session: Session
    memory_budget_bytes: int
    has_checkpoint: bool
    max_message_bytes: int
    worker_id: str
    device: str
    lane_port: int
    lane_token: bytes
    reduced: bool
    cache_bytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., memory_budget_bytes: _Optional[int] = ..., has_checkpoint: _Optional[bool] = ..., max_message_bytes: _Optional[int] = ..., worker_id: _Optional[str] = ..., device: _Optional[str] = ..., lane_port: _Optional[int] = ..., lane_token: _Optional[bytes] = ..., reduced: _Optional[bool] = ..., cache_bytes: _Optional[int] = ...) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class OpenLaneReply(_message.Message):
    __slots__ = ("lane_port", "lane_token")
    LANE_PORT_FIELD_NUMBER: _ClassVar[int]
    LANE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lane_port: int
    lane_token: bytes
    def __init__(self, lane_port: _Optional[int] = ..., lane_token: _Optional[bytes] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("assignment", "part")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    part: ExpertPart
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., part: _Optional[_Union[ExpertPart, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("session", "residency", "caches")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    session: Session
    residency: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    caches: _containers.RepeatedCompositeFieldContainer[LayerCache]
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., residency: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., caches: _Optional[_Iterable[_Union[LayerCache, _Mapping]]] = ...) -> None: ...

class LayerCache(_message.Message):
    __slots__ = ("layer", "slots", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    slots: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., slots: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertPart(_message.Message):
    __slots__ = ("layer", "expert", "offset", "data")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    offset: int
    data: bytes
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AssignProgress(_message.Message):
    __slots__ = ("needed", "experts_done", "experts_total", "bytes_done", "bytes_total", "installed", "held", "serves")
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_DONE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    needed: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    experts_done: int
    experts_total: int
    bytes_done: int
    bytes_total: int
    installed: bool
    held: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    serves: _containers.RepeatedCompositeFieldContainer[LayerCache]
    def __init__(self, needed: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., experts_done: _Optional[int] = ..., experts_total: _Optional[int] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., installed: _Optional[bool] = ..., held: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ..., serves: _Optional[_Iterable[_Union[LayerCache, _Mapping]]] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("session", "request_id", "layer", "rows", "activations", "pair_rows", "pair_experts", "sort", "deadline_us", "scores")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    PAIR_ROWS_FIELD_NUMBER: _ClassVar[int]
    PAIR_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_US_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    session: Session
    request_id: int
    layer: int
    rows: int
    activations: bytes
    pair_rows: bytes
    pair_experts: bytes
    sort: bool
    deadline_us: int
    scores: bytes
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., request_id: _Optional[int] = ..., layer: _Optional[int] = ..., rows: _Optional[int] = ..., activations: _Optional[bytes] = ..., pair_rows: _Optional[bytes] = ..., pair_experts: _Optional[bytes] = ..., sort: _Optional[bool] = ..., deadline_us: _Optional[int] = ..., scores: _Optional[bytes] = ...) -> None: ...

class ExecuteReply(_message.Message):
    __slots__ = ("request_id", "outputs", "queue_us", "compute_us", "failure", "load_us", "reduced")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    REDUCED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    outputs: bytes
    queue_us: int
    compute_us: int
    failure: Failure
    load_us: int
    reduced: bool
    def __init__(self, request_id: _Optional[int] = ..., outputs: _Optional[bytes] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., load_us: _Optional[int] = ..., reduced: _Optional[bool] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "layer", "reads", "experts")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    session: Session
    layer: int
    reads: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., layer: _Optional[int] = ..., reads: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("session", "layer", "rows", "pairs_a_row", "repeats", "power")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_A_ROW_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    POWER_FIELD_NUMBER: _ClassVar[int]
    session: Session
    layer: int
    rows: int
    pairs_a_row: int
    repeats: int
    power: bool
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., layer: _Optional[int] = ..., rows: _Optional[int] = ..., pairs_a_row: _Optional[int] = ..., repeats: _Optional[int] = ..., power: _Optional[bool] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("compute_us", "power_w")
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    compute_us: _containers.RepeatedScalarFieldContainer[int]
    power_w: float
    def __init__(self, compute_us: _Optional[_Iterable[int]] = ..., power_w: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("worker_id", "software_version", "state", "memory_budget_bytes", "expert_bytes", "process_bytes", "fingerprint", "experts", "sessions", "requests", "pairs", "refused", "uptime_s", "lanes", "lanes_refused", "malformed_frames", "revocation_number", "cache")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LANES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    software_version: str
    state: str
    memory_budget_bytes: int
    expert_bytes: int
    process_bytes: int
    fingerprint: str
    experts: int
    sessions: int
    requests: int
    pairs: int
    refused: int
    uptime_s: float
    lanes: int
    lanes_refused: int
    malformed_frames: int
    revocation_number: int
    cache: CacheStatus
    def __init__(self, worker_id: _Optional[str] = ..., software_version: _Optional[str] = ..., state: _Optional[str] = ..., memory_budget_bytes: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., process_bytes: _Optional[int] = ..., fingerprint: _Optional[str] = ..., experts: _Optional[int] = ..., sessions: _Optional[int] = ..., requests: _Optional[int] = ..., pairs: _Optional[int] = ..., refused: _Optional[int] = ..., uptime_s: _Optional[float] = ..., lanes: _Optional[int] = ..., lanes_refused: _Optional[int] = ..., malformed_frames: _Optional[int] = ..., revocation_number: _Optional[int] = ..., cache: _Optional[_Union[CacheStatus, _Mapping]] = ...) -> None: ...

class CacheStatus(_message.Message):
    __slots__ = ("slots", "hits", "misses", "loads", "prefetched", "useful", "late", "stall_s", "bytes", "hints", "hints_unused")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    USEFUL_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    HINTS_UNUSED_FIELD_NUMBER: _ClassVar[int]
    slots: int
    hits: int
    misses: int
    loads: int
    prefetched: int
    useful: int
    late: int
    stall_s: float
    bytes: int
    hints: int
    hints_unused: int
    def __init__(self, slots: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., loads: _Optional[int] = ..., prefetched: _Optional[int] = ..., useful: _Optional[int] = ..., late: _Optional[int] = ..., stall_s: _Optional[float] = ..., bytes: _Optional[int] = ..., hints: _Optional[int] = ..., hints_unused: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    def __init__(self, finished: _Optional[int] = ...) -> None: ...
