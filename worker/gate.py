"""Who may call what on a worker, asked before every call: role and revocation. Knows neither sessions nor experts.

TLS has let in every member of the cluster. Only a coordinator may command; an operator may look, and bring a list of
revoked certificates, which the authority has signed; another worker may do nothing here. gRPC knows no such list, so
that is asked here too, and calls that are under way when a certificate is revoked are ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import grpc

from titan.common.errors import TitanError
from titan.common.log_limit import LimitedLog
from titan.common.metrics import Tally
from titan.common.security.identity import Role, require_role
from titan.common.security.revocation import Revocations, require_not_revoked
from titan.common.security.tls import peer_identity

ERROR_CODE_KEY = "titan-error"  # trailing metadata: TitanError.code
FOR_OPERATORS = frozenset({"/titan.v1.Worker/Status", "/titan.v1.Trust/SyncRevocations"})  # to look, to bring a list
MAX_REMEMBERED = 1024


class Gate(grpc.ServerInterceptor):
    """Stands before every handler of a server.

    Args:
        refusals: counts what is refused, as "gate" and the error's code.
        strangers: told of it.

    Attributes:
        connections: how many have made a call, and so have shown a certificate of the cluster.
    """

    def __init__(self, revocations: Revocations, refusals: Tally, strangers: LimitedLog) -> None:
        self.connections = 0
        self._revocations, self._refusals, self._strangers = revocations, refusals, strangers
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._calls: dict[grpc.ServicerContext, int] = {}
        self._names: OrderedDict[int, str] = OrderedDict()  # serial -> name, of peers let in
        self._lock = threading.Lock()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        shared = handler_call_details.method in FOR_OPERATORS
        roles = (Role.COORDINATOR, Role.OPERATOR) if shared else (Role.COORDINATOR,)
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._answer(handler.unary_unary, roles), **codec)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, roles), **codec)
        return None  # no such call exists; what nobody has looked at stays shut

    def end_calls(self, serials: Collection[int]) -> set[str]:
        """End the calls of peers with these certificates; the names of those that were ever let in."""
        with self._lock:
            calls = [context for context, serial in self._calls.items() if serial in serials]
            names = {name for serial, name in self._names.items() if serial in serials}
        for context in calls:
            context.cancel()
        return names

    def _answer(self, behaviour: Callable[..., Any], roles: tuple[Role, ...]) -> Callable[..., Any]:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            self._admit(context, roles)
            try:
                return behaviour(request, context)
            finally:
                self._leave(context)

        return guarded

    def _stream(self, behaviour: Callable[..., Any], roles: tuple[Role, ...]) -> Callable[..., Iterator[Any]]:
        def guarded(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            self._admit(context, roles)
            try:
                yield from behaviour(requests, context)
            finally:
                self._leave(context)

        return guarded

    def _admit(self, context: grpc.ServicerContext, roles: tuple[Role, ...]) -> None:
        try:
            self._meet(context.peer())
            identity = peer_identity(context.auth_context())
            require_role(identity, *roles)
            with self._lock:  # with the list: whoever is let in before it changes is found when it does
                self._calls[context] = identity.serial
                self._names[identity.serial] = identity.name
                self._names.move_to_end(identity.serial)
                if len(self._names) > MAX_REMEMBERED:
                    self._names.popitem(last=False)
            try:
                require_not_revoked(identity, self._revocations.current)
            except TitanError:
                self._leave(context)
                raise
        except TitanError as error:
            self._refusals.add("gate", error.code)
            self._strangers.warning("call refused", str(error), peer=context.peer())
            context.set_trailing_metadata(((ERROR_CODE_KEY, error.code),))
            context.abort(grpc.StatusCode[error.grpc_status], str(error))

    def _meet(self, peer: str) -> None:
        """Count each connection once; `peer` has its address and port."""
        with self._lock:
            if peer not in self._peers:
                self.connections += 1
            self._peers[peer] = None
            self._peers.move_to_end(peer)
            if len(self._peers) > MAX_REMEMBERED:
                self._peers.popitem(last=False)

    def _leave(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._calls.pop(context, None)
