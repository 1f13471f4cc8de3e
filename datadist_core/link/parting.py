# SPDX-License-Identifier: Apache-2.0
"""The end of links: unlinking at either end's wish, by force, and all of them when this end is finalized.

In order, this goes: no new transfers; running ones end; the peer is told (Unlink), lets its own transfers on the link
end, cleans up and confirms (Unlinked); the connection closes. What does not end in time is ended by closing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import ClosedError, LLMException, PeerLost
from ..types import Deadline, LLMStatusCode
from ..wire import messages as m
from .fanout import run_all
from .fences import Fences
from .link import FINALIZING, Link, wait_for
from .state import LinkState
from .table import LinkTable

logger = logging.getLogger(__name__)

#: When the peer unlinks, our own running transfers get this long to end.
UNLINK_WAIT_S = 3.0
#: When this end is finalized: its transfers, and then its peers'.
FINALIZE_WAIT_S = UNLINK_WAIT_S
#: Calls look at their deadline themselves; this is for one that is stuck somewhere else.
LATE_S = 2.0
_PARTED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED)


class Partings:
    """Thread-safe.

    Args:
        disconnect: takes a link out of the backends.
    """

    def __init__(self, table: LinkTable, fences: Fences, disconnect: Callable[[Link], None]) -> None:
        self._table = table
        self._fences = fences
        self._disconnect = disconnect
        self._lock = threading.Lock()
        #: Peers that asked to part and have no answer yet; see `finish_answers`.
        self._answering: set[Link] = set()
        self._answered = threading.Condition(self._lock)

    # -- at our wish

    def unlink(self, cluster_ids: Sequence[int], deadline: Deadline, force: bool) -> list[LLMStatusCode]:
        """End links, all at once; one status each, in order. Not forced: transfers end first, and the peer is told.

        A cluster that is named again gets LLM_PARAM_INVALID there.
        """
        again = repeated(cluster_ids)
        calls = [
            partial(refuse_repeated, c) if i in again else partial(self._unlink_one, c, deadline, force)
            for i, c in enumerate(cluster_ids)
        ]
        return run_all("unlink", calls, late(deadline), LLMStatusCode.LLM_TIMEOUT)

    def end(self, links: Sequence[Link], deadline: Deadline) -> None:
        """End these links, all at once: as `unlink` does, but by force what has not ended by the deadline."""
        run_all("unlink", [partial(self._end_one, link, deadline) for link in links], late(deadline), None)

    def _unlink_one(self, cluster_id: int, deadline: Deadline, force: bool) -> LLMStatusCode:
        link = self._table.peek(cluster_id)
        if link is None:
            return LLMStatusCode.LLM_NOT_YET_LINK
        if link.state is LinkState.DOWN:  # noticed already, and on its way out of the table
            status = LLMStatusCode.LLM_NOT_YET_LINK
        else:
            status = LLMStatusCode.LLM_SUCCESS if force else self._part(link, deadline)
        if force or link.state is LinkState.DOWN or status in _PARTED:
            self._release(link)
        return status

    def _end_one(self, link: Link, deadline: Deadline) -> None:
        if self._part(link, deadline) is LLMStatusCode.LLM_NOT_YET_LINK:
            link.wait_idle(deadline)
        self._release(link)

    def _release(self, link: Link) -> None:
        # Closed first: transfers that this breaks are to say why.
        link.close(ClosedError(f"the link to cluster {link.peer.cluster_id} was unlinked here"))
        self._forget(link)

    def _forget(self, link: Link) -> None:
        """Out of the table and out of the backends; the connection stays."""
        self._fences.link_ends(link)  # first: it must not be in neither of the two
        self._table.forget(link)
        self._disconnect(link)

    def _part(self, link: Link, deadline: Deadline) -> LLMStatusCode:
        """Take leave of the peer. LLM_NOT_YET_LINK if the link is not up any more, or another thread is ending it."""
        if not self._begin(link):
            return LLMStatusCode.LLM_NOT_YET_LINK
        if not link.wait_idle(deadline):
            link.parting = False
            logger.warning("unlinking cluster %d while a transfer is running", link.peer.cluster_id)
            return LLMStatusCode.LLM_UNLINK_FAILED
        try:
            link.send(m.Unlink())
            wait_for(link.expect(m.Unlinked), deadline, "the peer did not confirm the unlink in time")
        except LLMException as error:
            logger.warning("cluster %d did not clean up its end: %s", link.peer.cluster_id, error)
            return LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        return LLMStatusCode.LLM_SUCCESS

    def _begin(self, link: Link) -> bool:
        with self._lock:
            if link.parting or not link.is_up:
                return False
            link.parting = True
            return True

    # -- at the peer's wish

    def on_unlink(self, link: Link) -> None:
        """The peer asked to part (executor): our transfers end first, then our end is cleaned."""
        with self._lock:
            self._answering.add(link)
        try:
            self._answer_unlink(link)
        finally:
            with self._lock:
                self._answering.discard(link)
                self._answered.notify_all()

    def _answer_unlink(self, link: Link) -> None:
        link.wait_idle(Deadline.after(UNLINK_WAIT_S))
        cluster_id = link.peer.cluster_id
        reason: LLMException = ClosedError(f"cluster {cluster_id} unlinked")
        if link.peer_is_finalizing:
            # Nobody asked for that at this end: it is told, as of any other end of a peer.
            reason = PeerLost(f"cluster {cluster_id} was finalized")
            self._disconnect(link)
        else:
            self._forget(link)
        link.will_close(reason)  # the peer may close its end before we have closed ours
        try:
            link.send(m.Unlinked())
        except LLMException as error:
            logger.debug("the unlink could not be confirmed: %s", error)
        link.close(reason)

    # -- when this end is finalized

    def finish_answers(self) -> None:
        """Who sees that its peer has unlinked may finalize at once; the peer is still to hear that all is well."""
        with self._answered:
            self._answered.wait_for(lambda: not self._is_answering(), UNLINK_WAIT_S)

    def take_leave(self, links: Sequence[Link]) -> None:
        """Part from all, as far as that is possible within `FINALIZE_WAIT_S`. The links are still to be closed.

        Needs no thread, however many they are. Peers of which nothing comes any more are not waited for.
        """
        deadline = Deadline.after(FINALIZE_WAIT_S)
        for link in links:
            link.will_close(ClosedError("finalize was called"))
        leaving = [link for link in links if self._begin(link)]
        told = [link for link in leaving if link.wait_idle(Deadline.after(0)) and _tell(link)]
        told += [link for link in leaving if link not in told and link.wait_idle(deadline) and _tell(link)]
        for link in told:
            if link.pulse.is_late:
                continue
            try:
                wait_for(link.expect(m.Unlinked), deadline, "the peer did not confirm the unlink in time")
            except LLMException as error:
                logger.info("cluster %d did not take leave: %s", link.peer.cluster_id, error)

    def _is_answering(self) -> bool:
        """Whether a peer waits for us to confirm its unlink. With the lock held."""
        asked = any(link.state is LinkState.UNLINKING_PEER for link in self._table.all())
        return asked or bool(self._answering)


def _tell(link: Link) -> bool:
    try:
        link.send(m.Unlink(FINALIZING))
    except LLMException as error:
        logger.debug("cluster %d was not told that this end is finalized: %s", link.peer.cluster_id, error)
        return False
    return True


def refuse_repeated(cluster_id: int) -> LLMStatusCode:
    logger.warning("cluster %d is named twice in one call; only its first place counts", cluster_id)
    return LLMStatusCode.LLM_PARAM_INVALID


def repeated(cluster_ids: Sequence[int]) -> set[int]:
    """Places of ids that stand further in front already."""
    seen: set[int] = set()
    again = set()
    for i, cluster_id in enumerate(cluster_ids):
        if cluster_id in seen:
            again.add(i)
        seen.add(cluster_id)
    return again


def late(deadline: Deadline) -> Deadline:
    return Deadline(deadline.at_s + LATE_S)
