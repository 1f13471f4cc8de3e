# SPDX-License-Identifier: Apache-2.0
"""Control connections: one asyncio loop in one thread carries all of an LLMDataDist's links.

Control traffic is small and rare; the number of threads does not grow with the number of links. Handlers run in
the loop's thread and must not block: what takes time goes to an executor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ..checks import HostPort
from ..errors import ClosedError, LLMException, ParamInvalid, PeerLost, ProtocolError, TimedOut
from ..types import Deadline
from .codec import PREAMBLE, FrameDecoder, encode
from .messages import AnyMessage

logger = logging.getLogger(__name__)

#: A peer that stops reading must not make us buffer without bound.
MAX_UNSENT_BYTES = 64 << 20
#: A stranger may hold an accepted connection this long without a complete hello.
HELLO_TIMEOUT_S = 10.0

T = TypeVar("T")


class Channel(asyncio.Protocol):
    """One connection. `on_message` and `on_closed` are called in the loop's thread, `on_closed` exactly once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._close_reason: LLMException | None = None
        self.on_message: Callable[[AnyMessage], None] = lambda message: None
        self.on_closed: Callable[[LLMException], None] = lambda error: None
        self.peer_address = "?"
        self.last_received_s = loop.time()

    # -- any thread

    def send(self, message: AnyMessage) -> None:
        """Queue a message; order is kept per caller. Raises ProtocolError if it is too large."""
        frame = encode(message)
        self._in_loop(self._write, frame)

    def close(self, reason: LLMException | None = None) -> None:
        """Send what is queued, then close. `reason` is what `on_closed` will say. Twice is a no-op."""
        with suppress(ClosedError):
            self._in_loop(self._close, reason)

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:  # the loop has stopped: finalize came first
            raise ClosedError("the control loop has stopped") from error

    # -- loop thread

    def allow_large(self) -> None:
        self._decoder.allow_large()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a control channel needs a stream transport")
        self._transport = transport
        self.peer_address = _address_text(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        self.last_received_s = self._loop.time()
        try:
            for message in self._decoder.feed(data):
                self.on_message(message)
        except ProtocolError as error:
            logger.warning("closing the control connection with %s: %s", self.peer_address, error)
            self._close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._close_reason
        if reason is None:
            reason = PeerLost(f"{self.peer_address} closed the control connection{f': {exc}' if exc else ''}")
            reason.__cause__ = exc
        self.on_closed(reason)

    def _write(self, frame: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            self._close(PeerLost(f"{self.peer_address} does not read its control connection"))
            return
        self._transport.write(frame)

    def _close(self, reason: LLMException | None) -> None:
        self._close_reason = self._close_reason or reason or ClosedError("the link was closed here")
        if self._transport is None:
            return
        self._transport.close()
        # close() waits for the peer to take what is buffered; a dead peer never does.
        self._loop.call_later(1.0, self._transport.abort)


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound address that accepts connections, with the real port also when 0 was asked for."""

    address: HostPort
    server: asyncio.Server


class ControlLoop:
    """The loop's thread, listeners and dialling."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"datadist-control-{name}", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        """Run in the loop, from another thread. Raises TimedOut (the coroutine is cancelled then) or ClosedError."""
        future = self._start(coroutine)
        try:
            return future.result(deadline.timeout())
        except FutureTimeout as error:
            future.cancel()
            raise TimedOut("the control loop did not finish in time") from error
        except CancelledError as error:
            raise ClosedError("the control loop was stopped meanwhile") from error
        finally:
            with self._lock:
                self._running.discard(future)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise ClosedError("the control loop has stopped")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._running.add(future)
            return future

    def dial(self, address: HostPort, local_host: str | None, deadline: Deadline) -> Channel:
        """Connect. Raises PeerLost with the system's reason, or TimedOut naming the address."""
        return self.run(self._dial(address, local_host, deadline), Deadline.after(deadline.remaining_s() + 1))

    def listen(self, address: HostPort, accept: Callable[[Channel], None]) -> Listener:
        """Bind and accept, beside other listeners. Raises ParamInvalid naming the address if it cannot be bound."""
        return self.run(self._listen(address, accept), Deadline.after(10))

    def close_listener(self, listener: Listener) -> None:
        """Accept no more there; the port is free on return. What was accepted stays. Twice is a no-op."""
        self.run(self._close_listener(listener), Deadline.after(5))

    def close(self) -> None:
        """Stop the loop and its thread; connections still open are closed. Idempotent."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)

    async def _dial(self, address: HostPort, local_host: str | None, deadline: Deadline) -> Channel:
        local_addr = (local_host, 0) if local_host else None
        connecting = self.loop.create_connection(
            lambda: Channel(self.loop), address.host, address.port, local_addr=local_addr
        )
        try:
            _, channel = await asyncio.wait_for(connecting, deadline.timeout())
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise TimedOut(f"no connection to {address} in time") from error
        except OSError as error:
            raise PeerLost(f"cannot connect to {address}: {error}") from error
        return channel

    async def _listen(self, address: HostPort, accept: Callable[[Channel], None]) -> Listener:
        def make_channel() -> Channel:
            channel = Channel(self.loop)
            accept(channel)
            return channel

        host = None if address.host in ("", "*") else address.host
        try:
            server = await self._create_server(make_channel, host, address.port)
        except OSError as error:
            raise ParamInvalid(
                f"cannot listen on {address}: {error.strerror or error}; choose another address, or port 0"
            ) from error
        listener = Listener(HostPort(address.host, server.sockets[0].getsockname()[1]), server)
        self._listeners.append(listener)
        return listener

    async def _create_server(self, make_channel: Callable[[], Channel], host: str | None, port: int) -> asyncio.Server:
        """One port on all addresses of `host`. For port 0 the system would pick another one for each address."""
        server = await self.loop.create_server(make_channel, host, port, backlog=1024)
        if port == 0 and len(server.sockets) > 1:
            picked = server.sockets[0].getsockname()[1]
            server.close()
            await server.wait_closed()
            server = await self.loop.create_server(make_channel, host, picked, backlog=1024)
        return server

    async def _close_listener(self, listener: Listener) -> None:
        listener.server.close()
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            for listener in self._listeners:
                listener.server.close()
            self._end_running()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _end_running(self) -> None:
        """Nobody may go on waiting for a loop that runs no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for future in running:
            future.cancel()
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _address_text(peername: Any) -> str:
    return str(HostPort(str(peername[0]), int(peername[1]))) if peername else "?"
