"""Check of the caller at every call: server interceptors, for threads and for an event loop.

TLS itself refuses strangers. The guard also refuses removed machines, nodes that call methods of the head alone,
and others that call methods of this machine alone. Over a Unix socket it checks nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from mlx_ring.core.errors import PeerRefused
from mlx_ring.rpc.tls.peers import CallContext, Peer, Refusal, address_of_call, is_local, peer_of_call

log = logging.getLogger(__name__)

_LAST_WRITE_S = 5.0
"""Time for a refused caller to read the message that is being sent to it, before its call is cut off."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
AioContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class _Caller:
    """Caller of a call, read once when the call comes: reading it after the call has ended may crash the process."""

    address: str
    peer: Peer | None = None
    """None for this machine, or a stranger."""
    problem: str = ""
    """Problem of a stranger."""

    @classmethod
    def of(cls, context: CallContext) -> _Caller:
        address = address_of_call(context)
        if is_local(context):
            return cls(address)
        try:
            return cls(address, peer_of_call(context))
        except PeerRefused as error:
            return cls(address, problem=str(error))


class _Rules:
    """Rules of both interceptors."""

    def __init__(
        self, refusal: Refusal, head_only: Collection[str] = (), local_only: Collection[str] = ()
    ) -> None:
        """Set the rules.

        Args:
            refusal: called for each call, such as `Revoked().refusal`.
            head_only: paths of methods, or services as `/mlx_ring.Agent/`, that nodes may not call.
            local_only: methods that no other machine may call, not even the head.
        """
        self._refusal = refusal
        self._head_only = tuple(head_only)
        self._local_only = tuple(local_only)

    def objection(self, method: str, caller: _Caller) -> str:
        """Return the reason for refusing this call, and log it; empty if it is admitted."""
        reason, peer = caller.problem, caller.peer
        if peer is not None:
            reason = self._refusal(peer)
            if not reason and method.startswith(self._head_only) and not peer.is_head:
                reason = f"{peer} called {method}, which only the head may."
            if not reason and method.startswith(self._local_only):
                reason = f"{peer} called {method}, which only this machine's agent may."
        if reason:
            log.warning("Refused a call of %s from %s: %s", method, caller.address, reason)
        return reason


class PeerGuard(_Rules, grpc.ServerInterceptor):
    """Interceptor for `make_server`."""

    def __init__(
        self, refusal: Refusal, head_only: Collection[str] = (), local_only: Collection[str] = ()
    ) -> None:
        """Set the rules."""
        super().__init__(refusal, head_only, local_only)
        self._running: dict[grpc.ServicerContext, tuple[str, _Caller]] = {}
        """Methods and callers of running calls from other machines."""
        self._lock = threading.Lock()

    def end_refused(self) -> int:
        """End the running calls of peers that are refused by now, such as a removed node's streams.

        Return their number.
        """
        with self._lock:
            running = list(self._running.items())
        refused = [context for context, call in running if self.objection(*call)]
        for context in refused:
            self._forget(context)
            context.cancel()
        return len(refused)

    def _remember(self, method: str, caller: _Caller, context: grpc.ServicerContext) -> None:
        """Record the call while it runs."""
        with self._lock:
            self._running[context] = method, caller
        if not context.add_callback(lambda: self._forget(context)):
            self._forget(context)

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._running.pop(context, None)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method

        def guard(behaviour: Behaviour) -> Behaviour:
            def ask(request: Any, context: grpc.ServicerContext) -> Any:
                caller = _Caller.of(context)
                if reason := self.objection(method, caller):
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
                if caller.peer is not None:
                    self._remember(method, caller, context)
                return behaviour(request, context)

            return ask

        return _rewrap(continuation(handler_call_details), guard)


@dataclass(slots=True)
class _Running:
    """Running call."""

    method: str
    caller: _Caller
    ended_for: str = ""
    is_writing: bool = False
    """A message is on its way to the caller, so that gRPC's code runs in the task, not ours."""


class AioPeerGuard(_Rules, grpc.aio.ServerInterceptor):
    """Interceptor for `make_aio_server`. The server's functions are coroutines or async generators."""

    def __init__(
        self, refusal: Refusal, head_only: Collection[str] = (), local_only: Collection[str] = ()
    ) -> None:
        """Set the rules, like `PeerGuard`."""
        super().__init__(refusal, head_only, local_only)
        self._running: dict[asyncio.Task[Any], _Running] = {}

    def end_refused(self) -> int:
        """End the running calls of peers that are refused by now, such as a removed node's streams.

        Return their number.

        Call it in the server's event loop.
        """
        ended = 0
        for task, call in self._running.items():
            if not call.ended_for and (reason := self.objection(call.method, call.caller)):
                call.ended_for = reason
                # Cancelled in the middle of a write, gRPC sends no status, and the client waits for ever.
                if call.is_writing:
                    task.get_loop().call_later(_LAST_WRITE_S, task.cancel)
                else:
                    task.cancel()
                ended += 1
        return ended

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method

        def guard(behaviour: Behaviour) -> Behaviour:
            async def answer(request: Any, context: AioContext) -> Any:
                async with self._admitted(method, context):
                    return await behaviour(request, context)

            async def stream(request: Any, context: AioContext) -> AsyncIterator[Any]:
                async with (
                    self._admitted(method, context) as call,
                    aclosing(behaviour(request, context)) as answers,
                ):
                    async for item in answers:
                        call.is_writing = True
                        yield item
                        call.is_writing = False
                        if call.ended_for:
                            await context.abort(grpc.StatusCode.PERMISSION_DENIED, call.ended_for)

            return stream if inspect.isasyncgenfunction(behaviour) else answer

        return _rewrap(await continuation(handler_call_details), guard)

    @asynccontextmanager
    async def _admitted(self, method: str, context: AioContext) -> AsyncGenerator[_Running]:
        """Refuse the call, or record it for `end_refused` while it runs in its own task."""
        caller = _Caller.of(context)
        if reason := self.objection(method, caller):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
        task, call = asyncio.current_task(), _Running(method, caller)
        if task is None:
            raise RuntimeError("A guarded call runs in no task.")
        self._running[task] = call
        try:
            yield call
        except asyncio.CancelledError:
            if call.ended_for:
                # If only the task is cancelled, gRPC sends nothing to the client.
                task.uncancel()
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, call.ended_for)
            raise
        finally:
            del self._running[task]


def _rewrap(handler: Handler | None, guard: Callable[[Behaviour], Behaviour]) -> Handler | None:
    """Return the handler with its function guarded. None, which gRPC answers itself, stays None."""
    if handler is None:
        return None
    arity = f"{_side(handler.request_streaming)}_{_side(handler.response_streaming)}"
    make = getattr(grpc, f"{arity}_rpc_method_handler")
    return make(
        guard(getattr(handler, arity)),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _side(streaming: bool) -> str:  # noqa: FBT001 - a field of gRPC's handlers
    return "stream" if streaming else "unary"
