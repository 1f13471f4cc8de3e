# SPDX-License-Identifier: Apache-2.0
"""One link: a control channel, the backends both ends can use, and what is under way on it.

Messages arrive in the control loop's thread, where nothing may block; what takes time (serving a call, waiting for
running transfers) goes to the executor. Every request has a future that ends: with the answer, at its deadline, or
with the link.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import (
    CacheNotExist,
    ClosedError,
    LinkBusy,
    LLMException,
    NotYetLinked,
    ParamInvalid,
    PeerLost,
    RemoteError,
    TimedOut,
)
from ..transfer.backend import Backend
from ..transfer.engine import TransferEngine
from ..types import Deadline, LLMStatusCode
from ..wire import messages as m
from ..wire.channel import Channel
from .answers import MAX_CHECKSUM_QUESTIONS, Answers, CacheService
from .authentication import Session
from .heartbeat import Pulse
from .peer_caches import PeerCaches
from .remote import RemoteCache
from .state import LinkMachine, LinkState
from .turns import Turns

logger = logging.getLogger(__name__)

#: The reason in the Unlink of an end that is finalized.
FINALIZING = "finalize"


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """What users may want to know of a link. (An extension.)

    Attributes:
        remote_cluster_id: the other end.
        peer_address: its address, "ip:port".
        backend: the best backend that works; transfers use it unless a region needs another one.
        backends: all that work, best first.
        rejected: the others, each with the reason.
        state: "up", or what it is on the way from or to.
    """

    remote_cluster_id: int
    peer_address: str
    backend: str
    backends: tuple[str, ...]
    rejected: dict[str, str]
    state: str


@dataclass(frozen=True, slots=True)
class LinkServices:
    """What the layers above do for a link.

    Attributes:
        caches: answers what peers ask of our caches.
        serve_call: (service, remote cluster id, body) -> reply body, or an LLMException.
        on_unlink: called in `ending` when the peer asks to unlink; cleans this end up and answers.
        on_down: called once, in `ending`, when the link is gone.
        executor: for what peers ask, which may block.
        ending: for the end of links. Not the same: what peers ask must not keep links from ending.
        revoking: for peers' caches that go.
        turns: for long work, one piece at a time per link.
    """

    engine: TransferEngine
    executor: Executor
    ending: Executor
    revoking: Executor
    caches: CacheService
    serve_call: Callable[[str, int, bytes], bytes]
    on_unlink: Callable[[Link], None]
    on_down: Callable[[Link, LLMException], None]
    turns: Turns


@dataclass(slots=True)
class Peer:
    """What the peer said of itself; filled in by the handshake."""

    cluster_id: int = 0
    incarnation: bytes = b""
    role: int = 0
    beacon: m.Beacon | None = None
    offers: list[m.BackendOffer] = field(default_factory=list)
    heartbeat_s: float = 0.0
    process: m.Process | None = None


class Link:
    """Thread-safe. `link_id` is local and never used again; backends know the peer by it."""

    def __init__(
        self, link_id: int, channel: Channel, services: LinkServices, *, dialling: bool, with_secret: bool = False
    ) -> None:
        self.link_id = link_id
        self.peer = Peer()
        #: Once both ends have proved that they know the shared secret.
        self.session: Session | None = None
        self.dialling = dialling
        self.backends: list[Backend] = []
        self.rejected: dict[str, str] = {}
        self.channel = channel
        self.pulse = Pulse()
        self.peer_caches = PeerCaches(self)
        self.answers = Answers(self, services)
        self._services = services
        #: Questions for checksums that may be under way at once, so that the peer does not refuse any.
        self.checksum_slots = threading.BoundedSemaphore(MAX_CHECKSUM_QUESTIONS)
        #: Also guards the uses of the peer's caches.
        self.lock = threading.Lock()
        self._machine = LinkMachine(dialling, with_secret)
        self._request_ids = itertools.count(1)
        self._pending: dict[int, Future[m.AnyMessage]] = {}
        self._steps: dict[type, Future[m.AnyMessage]] = {}
        self._idle = threading.Condition(self.lock)
        self._num_transfers = 0
        self._num_awaiting_idle = 0
        self._down_error: LLMException | None = None
        self._close_reason: LLMException | None = None
        #: Set once the link is usable at this end; what the peer asks for earlier waits for it.
        self.established = threading.Event()
        #: We have asked the peer to part: that its end closes is no loss.
        self.parting = False
        self.peer_is_finalizing = False
        channel.attach(self._on_message, self._on_closed)

    @property
    def state(self) -> LinkState:
        return self._machine.state

    @property
    def is_up(self) -> bool:
        return self._machine.state is LinkState.UP

    @property
    def is_ending(self) -> bool:
        """Whether it was up and is not any more, or will not be for long."""
        return self._machine.state is not LinkState.UP or self._close_reason is not None

    @property
    def is_idle(self) -> bool:
        """Whether no transfer of ours is running on it."""
        return self._num_transfers == 0

    def info(self) -> LinkInfo:
        names = tuple(b.name for b in self.backends)
        return LinkInfo(
            self.peer.cluster_id,
            self.channel.peer_address,
            names[0] if names else "",
            names,
            dict(self.rejected),
            self.state.value,
        )

    # -- sending

    def send(self, message: m.AnyMessage) -> None:
        """Send if the state allows it. Raises what ended the link, or ProtocolError."""
        with self.lock:
            self.check_not_down()
            self._machine.sending(message)
            self.channel.send(message)

    def check_not_down(self) -> None:
        """Raises what ended the link."""
        if self._down_error is not None:
            raise self._down_error

    def forget_handshake(self) -> None:
        """What was said in it is not needed any more, and not little. The link may be ending already: that is kept."""
        with self.lock:
            self._steps = {kind: future for kind, future in self._steps.items() if kind is m.Unlinked}
            self.peer.offers = []

    def expect(self, kind: type) -> Future[m.AnyMessage]:
        """A future for the next handshake message of `kind` (or the error that ends the link)."""
        with self.lock:
            return self._step(kind)

    def request(
        self,
        make: Callable[[int], m.AnyMessage],
        deadline: Deadline,
        meanwhile: Callable[[], None] | None = None,
    ) -> m.AnyMessage:
        """Send a request and wait for its answer. Raises RemoteError (or a finer class), PeerLost, TimedOut.

        `meanwhile` is called once the request is on its way.
        """
        request_id = next(self._request_ids)
        future: Future[m.AnyMessage] = Future()
        with self.lock:
            self._raise_if_not_up()
            self._pending[request_id] = future
        try:
            self.send(make(request_id))
            if meanwhile is not None:
                meanwhile()
            answer = wait_for(future, deadline, "the peer did not answer in time")
        finally:
            with self.lock:
                self._pending.pop(request_id, None)
        if isinstance(answer, m.Failure):
            raise _remote_failure(answer)
        return answer

    def call(self, service: str, body: bytes, deadline: Deadline) -> bytes:
        """Call a service of the peer. Raises as `request` does."""
        answer = self.request(lambda i: m.Call(i, service, body), deadline)
        return answer.body if isinstance(answer, m.Reply) else b""

    # -- transfers

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Around a transfer: unlinking waits for it. NotYetLinked unless it is up, LinkBusy while it is unlinked."""
        with self.lock:
            self._raise_if_not_up()
            if self.parting:
                if self._close_reason is not None:
                    raise ClosedError(str(self._close_reason))
                raise LinkBusy(f"the link to cluster {self.peer.cluster_id} is being unlinked")
            self._num_transfers += 1
        try:
            yield
        except (PeerLost, NotYetLinked) as error:
            self.data_path_failed(error)
            raise
        finally:
            with self.lock:
                self._end_transfer()

    def begin_transfer_with(self, remote: RemoteCache) -> bool:
        """`transferring` and `remote.hold` in one: until `end_transfer_with`. False where one of them raises."""
        with self.lock:
            if self._machine.state is not LinkState.UP or self.parting or not remote.begin_use_locked():
                return False
            self._num_transfers += 1
            return True

    def end_transfer_with(self, remote: RemoteCache) -> None:
        with self.lock:
            remote.end_use_locked()
            self._end_transfer()

    def _end_transfer(self) -> None:
        """With the lock held."""
        self._num_transfers -= 1
        if self._num_awaiting_idle:
            self._idle.notify_all()

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no transfer of ours is running on this link."""
        with self.lock:
            self._num_awaiting_idle += 1
            try:
                return self._idle.wait_for(lambda: self._num_transfers == 0, deadline.timeout())
            finally:
                self._num_awaiting_idle -= 1

    def will_close(self, reason: LLMException) -> None:
        """Why it will be closed here soon: for transfers that come too late or do not end in time.

        That is then the reason, also if the peer is quicker.
        """
        with self.lock:
            self._close_reason = self._close_reason or reason

    def close(self, reason: LLMException | None = None) -> None:
        """Drop the connection; what waits on this link ends with `reason`."""
        reason = reason or ClosedError("the link was closed at this end")
        with self.lock:
            self._close_reason = self._close_reason or reason
        self.channel.close(reason)

    def data_path_failed(self, error: PeerLost | NotYetLinked) -> None:
        """That has ended a transfer. Raise ClosedError if the reason is that this end closed the link.

        A backend that has lost its peer does not find it again. It says so on its own, but while a link is being made
        nobody hears it: so the link ends now, if it is up still.
        """
        reason = self._close_reason
        if isinstance(reason, ClosedError):
            raise ClosedError(str(reason)) from error
        if isinstance(error, PeerLost) and self.is_up:
            self.close(PeerLost(f"the data path to cluster {self.peer.cluster_id} broke: {error}"))

    # -- receiving (control loop's thread)

    def _on_message(self, message: m.AnyMessage) -> None:
        with self.lock:
            if self._machine.state is LinkState.DOWN:
                return  # both ends parted at once, and this was still under way
            self._machine.received(message)
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)
            return
        with self.lock:
            future = self._step(type(message))
        if not future.done():
            future.set_result(message)

    def _on_found(self, message: m.Found) -> None:
        self._learn(message, [message.cache])

    def _on_located(self, message: m.Located) -> None:
        self._learn(message, message.caches)

    def _learn(self, message: m.Found | m.Located, infos: Sequence[m.CacheInfo]) -> None:
        with self.lock:
            if message.request_id not in self._pending:
                return  # nobody asked, or nobody waits any more
        try:
            self.peer_caches.learn(infos)
        except LLMException as error:
            self._answer(message.request_id, m.Failure(message.request_id, int(error.status_code), str(error)))
        else:
            self._answer(message.request_id, message)

    def _on_answer(self, message: m.Reply | m.Checksums | m.Failure) -> None:
        self._answer(message.request_id, message)

    def _answer(self, request_id: int, message: m.AnyMessage) -> None:
        with self.lock:
            future = self._pending.get(request_id)
        if future is not None and not future.done():  # else it was too late; nobody waits any more
            future.set_result(message)

    def _on_ping(self, message: m.Ping) -> None:
        self.send(m.Pong(message.number))

    def _on_pong(self, message: m.Pong) -> None:
        """Having arrived is all that counts."""

    def _on_unlink(self, message: m.Unlink) -> None:
        self.peer_is_finalizing = message.reason == FINALIZING
        if self._machine.state is LinkState.UNLINKING:
            self.send(m.Unlinked())  # both ends asked at once; our own call does the cleaning
        else:
            self._services.ending.submit(self._services.on_unlink, self)

    # -- the end

    def _on_closed(self, error: LLMException) -> None:
        with self.lock:
            error = self._close_reason or error
            self._machine.broken()
            self._down_error = error
            waiting = [*self._pending.values(), *self._steps.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        try:
            self._services.ending.submit(self._services.on_down, self, error)
        except RuntimeError:
            self._services.on_down(self, error)

    def _step(self, kind: type) -> Future[m.AnyMessage]:
        """With the lock held."""
        future = self._steps.get(kind)
        if future is None:
            future = self._steps[kind] = Future()
            if self._down_error is not None:
                future.set_exception(self._down_error)
        return future

    def _raise_if_not_up(self) -> None:
        self.check_not_down()
        if self._machine.state is not LinkState.UP:
            raise NotYetLinked(f"the link to cluster {self.peer.cluster_id} is {self._machine.state.value}")


_HANDLERS: dict[type, Callable[[Link, m.AnyMessage], None]] = {
    m.Found: Link._on_found,  # type: ignore[dict-item]
    m.Located: Link._on_located,  # type: ignore[dict-item]
    m.Reply: Link._on_answer,  # type: ignore[dict-item]
    m.Checksums: Link._on_answer,  # type: ignore[dict-item]
    m.Failure: Link._on_answer,  # type: ignore[dict-item]
    m.Ping: Link._on_ping,  # type: ignore[dict-item]
    m.Pong: Link._on_pong,  # type: ignore[dict-item]
    m.Lookup: lambda link, message: link.answers.on_lookup(message),  # type: ignore[arg-type]
    m.Locate: lambda link, message: link.answers.on_locate(message),  # type: ignore[arg-type]
    m.Consume: lambda link, message: link.answers.on_consume(message),  # type: ignore[arg-type]
    m.AskChecksums: lambda link, message: link.answers.on_checksums(message),  # type: ignore[arg-type]
    m.Call: lambda link, message: link.answers.on_call(message),  # type: ignore[arg-type]
    m.Revoke: lambda link, message: link.answers.on_revoke(message),  # type: ignore[arg-type]
    m.Unlink: Link._on_unlink,  # type: ignore[dict-item]
}

_FAILURE_CLASSES: dict[int, type[LLMException]] = {
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotExist,
    LLMStatusCode.LLM_PARAM_INVALID: ParamInvalid,
    LLMStatusCode.LLM_TIMEOUT: TimedOut,
}


def _remote_failure(failure: m.Failure) -> LLMException:
    known = {int(code) for code in LLMStatusCode}
    code = LLMStatusCode(failure.status) if failure.status in known else LLMStatusCode.LLM_UNKNOWN_ERROR
    return _FAILURE_CLASSES.get(code, RemoteError)(f"the peer answered: {failure.message}", code)


def wait_for(future: Future[m.AnyMessage], deadline: Deadline, late: str) -> m.AnyMessage:
    """The future's result. Raises TimedOut with the text `late`, or what ended the link."""
    try:
        return future.result(deadline.timeout())
    except FutureTimeout as error:
        raise TimedOut(late) from error
    except PeerLost as error:
        raise PeerLost(str(error)) from error
