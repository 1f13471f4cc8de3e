# SPDX-License-Identifier: Apache-2.0
"""One asyncio loop in one thread carries all control connections of an LLMDataDist.

Control traffic is small and rare; the number of threads does not grow with the number of links.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from ..checks import HostPort
from ..errors import ClosedError, PeerLost, TimedOut
from ..security import Security
from ..types import Deadline
from .accepting import Acceptor, Listener
from .channel import Channel
from .codec import MAX_HELLO_BYTES, MAX_PROOF_BYTES

T = TypeVar("T")

#: Of the loop, until a connection that was aborted is gone; with TLS it takes more than one.
_TURNS_TO_END = 10

#: asyncio's text for any of them is "Connect call failed".
_OF_CONNECT = (ConnectionRefusedError, TimeoutError)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class ControlLoop:
    """The loop's thread, listeners and dialling."""

    def __init__(self, name: str, security: Security | None = None) -> None:
        security = security or Security()
        self._tls = security.client_context()
        self._max_bytes = MAX_HELLO_BYTES if security.secret is None else MAX_PROOF_BYTES
        self.loop = asyncio.new_event_loop()
        #: Open connections, of both kinds. In the loop's thread only.
        self._channels: set[Channel] = set()
        self._acceptor = Acceptor(self.loop, security, self._channels)
        self._lock = threading.Lock()
        #: What is awaited, and what runs in the loop for it.
        self._running: dict[Future[Any], Future[None]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"datadist-control-{name}", daemon=True)
        self._thread.start()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        deadline: Deadline,
        undo: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Run in the loop, from another thread. Raises TimedOut (the coroutine is cancelled then) or ClosedError.

        A result that comes too late all the same is for `undo`, in the loop's thread.
        """
        answer = self._start(coroutine, undo)
        try:
            return answer.result(deadline.timeout())
        except FutureTimeout as error:
            if not answer.cancel():  # it has come at the last moment
                return answer.result()
            self._cancel(answer)
            raise TimedOut("the control loop did not finish in time") from error
        except CancelledError as error:
            raise ClosedError("the control loop was stopped meanwhile") from error
        finally:
            with self._lock:
                self._running.pop(answer, None)

    def _start(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], None]) -> Future[T]:
        answer: Future[T] = Future()
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise ClosedError("the control loop has stopped")
            self._running[answer] = asyncio.run_coroutine_threadsafe(_answer(coroutine, answer, undo), self.loop)
            return answer

    def _cancel(self, answer: Future[Any]) -> None:
        with self._lock:
            running = self._running.get(answer)
        if running is not None:
            running.cancel()

    def dial(self, address: HostPort, local_host: str | None, deadline: Deadline) -> Channel:
        """Connect. Raises PeerLost with the system's reason, or TimedOut naming the address."""
        dialling = self._dial(address, local_host, deadline)
        return self.run(dialling, Deadline.after(deadline.remaining_s() + 1), _nobody_waits)

    def listen(self, address: HostPort, accept: Callable[[Channel], None]) -> Listener:
        """Bind and accept, beside other listeners. Raises ParamInvalid naming the address if it cannot be bound."""
        return self.run(self._acceptor.listen(address, accept), Deadline.after(10), self._acceptor.close_listener)

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
        connecting = self.loop.create_connection(
            lambda: Channel(self.loop, self._channels, self._max_bytes),
            address.host,
            address.port,
            local_addr=(local_host, 0) if local_host else None,
            ssl=self._tls,
            server_hostname=None if self._tls is None else "",  # see `Security`: names are not checked
        )
        try:
            _, channel = await asyncio.wait_for(connecting, deadline.timeout())
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise TimedOut(f"no connection to {address} in time{self._hint(error)}") from error
        except OSError as error:
            raise PeerLost(f"cannot connect to {address}: {_reason(error)}{self._hint(error)}") from error
        except ValueError as error:  # of the resolver: a name that cannot be one (UnicodeError among them)
            raise PeerLost(f"cannot connect to {str(address)!r}: no such host name: {error}") from error
        return channel

    def _hint(self, error: Exception) -> str:
        """What else to look at where TLS is on at this end and the other did not play along."""
        no_tls = isinstance(error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, asyncio.TimeoutError))
        if self._tls is None or not no_tls:
            return ""
        if isinstance(error, ssl.SSLCertVerificationError):
            return "; its certificate must be signed by the authority in llm.Security"
        return "; TLS is on at this end: it must be on at both ends, or at neither (llm.Security)"

    async def _close_listener(self, listener: Listener) -> None:
        self._acceptor.close_listener(listener)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._acceptor.close()
            self._end_running()
            self._end_channels()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def _end_running(self) -> None:
        """Nobody may go on waiting for a loop that runs no more."""
        with self._lock:
            self._stopped = True
            running = dict(self._running)
        for answer, future in running.items():
            answer.cancel()
            future.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))  # some may not have become tasks yet
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _end_channels(self) -> None:
        """Those that nobody closed, or that still had something to send. Their owners are told."""
        for channel in list(self._channels):
            channel.abort(ClosedError("the control loop has stopped"))
        for _ in range(_TURNS_TO_END):
            if self._channels:
                self.loop.run_until_complete(asyncio.sleep(0))


async def _answer(coroutine: Coroutine[Any, Any, T], answer: Future[T], undo: Callable[[T], None]) -> None:
    try:
        result = await coroutine
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as error:
        if answer.set_running_or_notify_cancel():
            answer.set_exception(error)
    else:
        if answer.set_running_or_notify_cancel():
            answer.set_result(result)
        else:
            undo(result)


def _nobody_waits(channel: Channel) -> None:
    channel.abort(TimedOut("nobody waits for this connection any more"))


def _reason(error: OSError) -> str:
    """What the system says. The address, which is in asyncio's own text, is in ours."""
    if error.errno is not None and (isinstance(error, _OF_CONNECT) or error.errno in _UNREACHABLE):
        return f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return str(error)
