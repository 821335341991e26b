"""A worker's two listening sockets, gRPC and lanes, around one service; and how they end. Knows no command line."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from titan.common.config.address import join_address, split_address
from titan.common.errors import AddressInUse
from titan.common.log import get_logger
from titan.common.security.credentials import Credentials
from titan.common.wire.messages import MAX_MESSAGE_BYTES
from titan.proto.titan.v1 import worker_pb2_grpc as pb_grpc
from titan.worker.engine import MLXThread
from titan.worker.lane.listener import LaneListener
from titan.worker.service import WorkerService
from titan.worker.trust import WorkerTrust

log = get_logger("worker")

HANDLER_THREADS = 32  # streams hold one each: see MAX_SESSIONS and MAX_STREAMS_PER_SESSION
DRAIN_S = 10.0
LANES_DRAIN_S = 2.0  # for coordinators to see the announcement and close their lanes

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),  # a stranger who trickles bytes is cut
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", HANDLER_THREADS),
    ("grpc.max_metadata_size", 8192),
)


class WorkerServer:
    """Serves from the start on.

    Args:
        address: `host:port` for gRPC; port 0 takes a free one.
        lane_port: on the same host; 0 takes a free one.

    Raises:
        AddressInUse: one of them cannot be listened on.
    """

    def __init__(
        self, service: WorkerService, mlx_thread: MLXThread, credentials: Credentials, address: str, lane_port: int
    ) -> None:
        self._service, self._mlx = service, mlx_thread
        self.trust = WorkerTrust(credentials, self._expel, service.refusals)
        service.revocation_number = lambda: self.trust.revocations.current.number
        self._handlers = ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="titan-rpc")
        self._server = grpc.server(
            self._handlers,
            interceptors=[self.trust.gate],
            options=SERVER_OPTIONS,
        )
        pb_grpc.add_WorkerServicer_to_server(service, self._server)
        host, _ = split_address(address)
        try:
            bound = self.trust.serve_on(self._server, address)
        except RuntimeError as error:
            raise AddressInUse(
                f"{address} cannot be listened on ({_reason(error)})", "stop what uses it, or give another --listen"
            ) from error
        context = self.trust.lane_context
        execution = service.execution
        service.lanes = LaneListener(
            host,
            lane_port,
            context,
            service.tokens,
            execution.open_lane,
            execution.lane_counts,
            service.refusals,
            self.trust.strangers,
        )
        self.address = join_address(host, bound)
        self.lane_port = service.lanes.port
        self._server.start()

    def close(self) -> None:
        """Answer what is under way, refuse what comes, free the memory."""
        started = time.monotonic()
        log.info("draining", queued=self._mlx.queued)
        self._service.drain(LANES_DRAIN_S)
        finished = self._mlx.close(DRAIN_S)
        self._server.stop(grace=1.0).wait(DRAIN_S)
        self._handlers.shutdown(wait=False)
        self.trust.close()
        if not finished:
            log.warning("a request was still running at the end", waited_s=DRAIN_S)
        log.info("stopped", took_s=round(time.monotonic() - started, 3))

    def _expel(self, names: set[str]) -> None:
        """End the sessions of coordinators whose certificates were revoked."""
        for session in self._service.sessions.live():
            if session.coordinator in names:
                self._service.sessions.close(session)
        self._service.execution.end_lanes(lambda session: session.coordinator in names)


def _reason(error: RuntimeError) -> str:
    text = str(error)
    return "address already in use" if "in use" in text.lower() else "address in use, or not one of this machine"
