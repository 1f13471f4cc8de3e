# SPDX-License-Identifier: Apache-2.0
"""How two ends become linked: who they are, which backends work between them, then both enter the link.

`state.py` shows the messages in their order. Either end may end it with a Refuse, whose text is for the user at the
other end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import LinkFailed, LLMException, ProtocolError, TimedOut
from ..security import Security
from ..transfer.engine import TransferEngine
from ..types import Deadline, LLMRole, LLMStatusCode
from ..wire import messages as m
from ..wire.codec import MAX_MESSAGE_BYTES
from .authentication import Authentication, OtherCluster, check_ids
from .link import Link, wait_for
from .probe import BeaconMemory, ProbeResult, probe_backends
from .process import this_process

logger = logging.getLogger(__name__)

MAX_REFUSAL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What this end says of itself in a handshake."""

    cluster_id: int
    incarnation: bytes
    v2: bool
    software: str
    beacon: m.Beacon
    memory: BeaconMemory
    role: Callable[[], LLMRole]
    heartbeat_s: float


class Handshake:
    """The handshake of both ends. Thread-safe: it keeps nothing of its own.

    Args:
        enter: puts an agreed link into the table (link, backend names best first, our own probe); may refuse.
        is_dialling: whether we are dialling that cluster ourselves right now.
        check_may_link: raises LinkFailed for a process (cluster id, incarnation) whose place another one has taken.
        security: whether a shared secret comes first.
    """

    def __init__(
        self,
        local: LocalEnd,
        engine: TransferEngine,
        enter: Callable[[Link, Sequence[str], ProbeResult], None],
        is_dialling: Callable[[int], bool],
        check_may_link: Callable[[int, bytes], None],
        security: Security,
    ) -> None:
        self._local = local
        self._engine = engine
        self._enter = enter
        self._is_dialling = is_dialling
        self._check_may_link = check_may_link
        self.authentication = Authentication(security, local.cluster_id, self.refuse)

    # -- the dialling end

    def greet(self, link: Link, cluster_id: int, link_token: bytes, deadline: Deadline) -> None:
        """From Hello to Established. Raises what went wrong, or what the other end refused."""
        if self.authentication.is_on:
            self.authentication.prove_to(link, cluster_id, lambda kind: self._answer_of(link, kind, deadline))
        link.send(self._hello(cluster_id, link_token))
        welcome = self._answer_of(link, m.Welcome, deadline)
        if not isinstance(welcome, m.Welcome) or welcome.cluster_id != cluster_id:
            raise ProtocolError(f"the other end does not say it is cluster {cluster_id}")
        _learn(link, welcome)
        result = self._probe(link, link_token, deadline)
        if not result.usable:  # the other end may still wait a good while for our connections
            raise _nothing_works(result)
        theirs = self._probed_by(link, result, deadline)
        if deadline.expired:  # whoever asked for the link may have been told that it failed
            raise TimedOut("the other end was not ready in time")
        self._agree(link, result, theirs)
        self._answer_of(link, m.Established, deadline)
        link.forget_handshake()

    def _probed_by(self, link: Link, mine: ProbeResult, deadline: Deadline) -> m.Probed:
        """What the other end found. It may wait for connections of ours that do not get through: the reason is here."""
        try:
            theirs = self._answer_of(link, m.Probed, deadline)
        except TimedOut as error:
            raise TimedOut(f"{error}; what does not work from this end: {mine.rejected or 'nothing'}") from error
        if not isinstance(theirs, m.Probed):
            raise ProtocolError(f"{type(theirs).__name__} came in place of Probed")
        return theirs

    def _agree(self, link: Link, mine: ProbeResult, theirs: m.Probed) -> None:
        common = [name for name in mine.usable if name in theirs.usable]
        for name, reason in theirs.rejected.items():
            mine.rejected.setdefault(name, f"from the other end: {reason}")
        if not common:
            raise _nothing_works(mine)
        # In the table before the peer can send anything on it.
        self._enter(link, common, mine)
        link.send(m.Ready(common))
        link.established.set()

    def _answer_of(self, link: Link, kind: type, deadline: Deadline) -> m.AnyMessage:
        """The next handshake message; a Refuse instead becomes the error it carries."""
        expected, refused = link.expect(kind), link.expect(m.Refuse)
        done = threading.Event()
        for future in (expected, refused):
            future.add_done_callback(lambda _: done.set())
        if not done.wait(deadline.timeout()):
            raise TimedOut(f"no {kind.__name__} from {link.channel.peer_address} in time")
        _check_not_refused(link)
        return wait_for(expected, deadline, f"no {kind.__name__} in time")

    # -- the listening end

    def answer(self, link: Link, hello: m.Hello, deadline: Deadline) -> None:
        """From Welcome to Established. Raises what the dialling end is to be told with `refuse`."""
        self.authentication.check_hello(link, hello)
        self._check_hello(hello)
        self._check_may_link(hello.cluster_id, hello.incarnation)
        _learn(link, hello)
        link.send(self._welcome())
        result = self._probe(link, hello.link_token, deadline)
        link.send(m.Probed(result.usable, result.rejected))
        ready = wait_for(link.expect(m.Ready), deadline, "the dialling end did not finish the handshake")
        if isinstance(ready, m.Ready):
            self._enter(link, ready.backends, result)
            link.send(m.Established())
            link.established.set()
            link.forget_handshake()

    def refuse(self, link: Link, error: LLMException) -> None:
        try:
            who = error.cluster_id if isinstance(error, OtherCluster) else None
            link.send(m.Refuse(int(error.status_code), str(error), who))
        except LLMException:
            logger.debug("the refusal could not be sent")
        link.close(error)

    def _check_hello(self, hello: m.Hello) -> None:
        mine = self._local.cluster_id
        if hello.protocol_version != m.PROTOCOL_VERSION:
            raise LinkFailed(f"protocol version {hello.protocol_version} there, {m.PROTOCOL_VERSION} here")
        check_ids(mine, hello.cluster_id, hello.expected_cluster_id)
        if hello.v2 != self._local.v2:
            raise LinkFailed(f"enable_cache_manager (V2) is {hello.v2} there and {self._local.v2} here; set both alike")
        # Both ends dial each other at once: the smaller id's dial counts, the other one's is turned away.
        if mine < hello.cluster_id and self._is_dialling(hello.cluster_id):
            raise LinkFailed("this end is dialling you already", LLMStatusCode.LLM_PROCESSING_LINK)

    # -- both

    def _probe(self, link: Link, link_token: bytes, deadline: Deadline) -> ProbeResult:
        if link.peer.beacon is None:
            raise ProtocolError("the peer has no beacon")
        return probe_backends(
            self._engine,
            self._local.memory,
            link.link_id,
            link.peer.offers,
            link.peer.beacon,
            initiator=link.dialling,
            link_token=link_token if link.session is None else link.session.token(link_token),
            deadline=deadline,
            check_wanted=partial(_check_wanted, link),
        )

    def _hello(self, expected_cluster_id: int, link_token: bytes) -> m.Hello:
        end = self._local
        return m.Hello(
            m.PROTOCOL_VERSION,
            end.software,
            end.cluster_id,
            expected_cluster_id,
            end.incarnation,
            int(end.role()),
            end.v2,
            link_token,
            self._offers(),
            end.beacon,
            end.heartbeat_s,
            this_process(),
        )

    def _welcome(self) -> m.Welcome:
        end = self._local
        return m.Welcome(
            m.PROTOCOL_VERSION,
            end.software,
            end.cluster_id,
            end.incarnation,
            int(end.role()),
            end.v2,
            self._offers(),
            end.beacon,
            end.heartbeat_s,
            this_process(),
        )

    def _offers(self) -> list[m.BackendOffer]:
        return [m.BackendOffer(name, backend.identity()) for name, backend in self._engine.backends.items()]


def _nothing_works(result: ProbeResult) -> LinkFailed:
    return LinkFailed(f"no transfer backend works between the two ends: {result.rejected}")


def _check_wanted(link: Link) -> None:
    """Raises what the other end refused, or what ended the link."""
    _check_not_refused(link)
    link.check_not_down()


def _check_not_refused(link: Link) -> None:
    refused = link.expect(m.Refuse)
    if refused.done() and refused.exception() is None:
        refusal = refused.result()
        if isinstance(refusal, m.Refuse):
            raise _refusal(refusal, link.channel.peer_address)


def _learn(link: Link, said: m.Hello | m.Welcome) -> None:
    link.peer.cluster_id, link.peer.incarnation = said.cluster_id, said.incarnation
    link.peer.role, link.peer.beacon, link.peer.offers = said.role, said.beacon, said.offers
    link.peer.heartbeat_s, link.peer.process = said.heartbeat_s, said.process
    link.channel.allow(MAX_MESSAGE_BYTES)


def _refusal(refusal: m.Refuse, peer_address: str) -> LLMException:
    known = {int(code) for code in LLMStatusCode}
    code = LLMStatusCode(refusal.status) if refusal.status in known else LLMStatusCode.LLM_LINK_FAILED
    text = f"{peer_address} refused the link: {_one_line(refusal.message)}"
    return LinkFailed(text, code) if refusal.cluster_id is None else OtherCluster(text, refusal.cluster_id)


def _one_line(text: str) -> str:
    """A stranger may have written it: no more lines in a log than one, and not a long one."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_REFUSAL_CHARS])
