# SPDX-License-Identifier: Apache-2.0
"""Who is linked with this end, who is being linked, who was, and why not any more.

One cluster id stands for one process at a time, which has an incarnation: random bytes, new with each start. Two
processes may claim one id, if the first was stopped, or cut off, and another was started in its place. The later one
takes the link over. When the first comes back, it must not take the link over in turn, or the two would go on like that
for ever: whoever was replaced before is turned away for as long as the link of its successor is up. If that one is gone
in its turn, the first is as good as any.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable

from ..errors import AlreadyLinked, ClosedError, LinkBusy, LinkFailed, LLMException, NotYetLinked, PeerLost
from ..types import LLMStatusCode
from .link import Link
from .state import LinkState

#: Clusters without a link of which something is remembered; the latest. Ids may never come again.
MAX_REMEMBERED = 1024
#: Incarnations of one cluster.
MAX_INCARNATIONS = 8


class LinkTable:
    """Thread-safe. Links are in it from the moment they are up until they are down.

    Args:
        on_replaced: told of a link before another one takes its place. Must not call the table, nor wait.
    """

    def __init__(self, on_replaced: Callable[[Link], None] = lambda link: None) -> None:
        self._on_replaced = on_replaced
        #: Replaced, and not taken out yet: each of them is lost, whether or not it was up still.
        self._lost: set[Link] = set()
        self.lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._dialling: set[int] = set()
        self._failures: OrderedDict[int, LLMException] = OrderedDict()
        #: Of each cluster, in the order in which they were linked; the latest is last.
        self._incarnations: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._closed = False

    def get(self, cluster_id: int, link_id: int | None = None) -> Link:
        """The link that is up. Raises NotYetLinked with what is known of why not, LinkBusy while it is unlinked,
        ClosedError once this end is being finalized, and PeerLost if it is not the link with that id."""
        with self.lock:
            self._check_open()
            link = self._links.get(cluster_id)
            reason = self._failures.get(cluster_id)
        if link is not None and link.state in (LinkState.UNLINKING, LinkState.UNLINKING_PEER):
            raise LinkBusy(f"the link to cluster {cluster_id} is being unlinked")
        if link is None or not link.is_up:
            last = f" (last: {reason})" if reason else ""
            raise NotYetLinked(f"no link to cluster {cluster_id}{last}; link_clusters first")
        if link_id not in (None, link.link_id):
            raise PeerLost(f"link_id={link_id} is not the link to cluster {cluster_id}, which is {link.link_id} now")
        return link

    def peek(self, cluster_id: int) -> Link | None:
        """The link, in whatever state; None if there is none."""
        return self._links.get(cluster_id)

    def all(self) -> list[Link]:
        """Also those that have just ended."""
        with self.lock:
            return list(self._links.values())

    def by_link_id(self, link_id: int) -> Link | None:
        with self.lock:
            return next((x for x in self._links.values() if x.link_id == link_id), None)

    def close(self) -> None:
        """From now on nothing is looked up or entered."""
        with self.lock:
            self._closed = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check_open(self) -> None:
        """Raises ClosedError."""
        with self.lock:
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("finalize was called")

    # -- dialling

    def begin_dialling(self, cluster_id: int) -> None:
        """Until `end_dialling`. Raises AlreadyLinked, LinkFailed (LLM_PROCESSING_LINK), ClosedError.

        A link over which nothing comes any more is no reason not to dial: that process may have been replaced.
        """
        with self.lock:
            self._check_open()
            link = self._links.get(cluster_id)
            if link is not None and link.is_up and not link.pulse.is_late:
                raise AlreadyLinked(f"cluster {cluster_id} is linked already")
            if cluster_id in self._dialling:
                raise LinkFailed(f"cluster {cluster_id} is being linked already", LLMStatusCode.LLM_PROCESSING_LINK)
            self._dialling.add(cluster_id)

    def end_dialling(self, cluster_id: int) -> None:
        with self.lock:
            self._dialling.discard(cluster_id)

    def is_dialling(self, cluster_id: int) -> bool:
        with self.lock:
            return cluster_id in self._dialling

    # -- coming and going

    def enter(self, link: Link) -> Link | None:
        """Put a link in, in place of an older one from the same cluster, which is returned.

        Raises:
            AlreadyLinked: that very process has linked to us while we dialled it: it may be using its link already.
            LinkFailed: another process of that cluster is linked, which has replaced this one before.
            PeerLost: the link has ended already, so that nobody would take it out again.
            ClosedError: this end is being finalized.
        """
        cluster_id = link.peer.cluster_id
        with self.lock:
            self._check_open()
            if link.state is LinkState.DOWN:
                raise PeerLost(f"the connection to cluster {cluster_id} ended while the link was being made")
            previous = self._links.get(cluster_id)
            if previous is not None and previous.is_up:
                self._check_may_replace(link, previous)
            if previous is not None:
                self._on_replaced(previous)
                self._lost.add(previous)
            self._links[cluster_id] = link
            self._failures.pop(cluster_id, None)
            self._remember_incarnation(cluster_id, link.peer.incarnation)
        return previous

    def check_may_link(self, cluster_id: int, incarnation: bytes) -> None:
        """Raises LinkFailed if another process of that cluster is linked, which has replaced this one before."""
        with self.lock:
            previous = self._links.get(cluster_id)
            if previous is not None and previous.is_up:
                self._check_not_replaced(cluster_id, incarnation, previous)

    def _check_may_replace(self, link: Link, previous: Link) -> None:
        cluster_id, incarnation = link.peer.cluster_id, link.peer.incarnation
        is_same = incarnation == previous.peer.incarnation
        if is_same and link.dialling and not previous.pulse.is_late:
            raise AlreadyLinked(f"cluster {cluster_id} has linked to this end meanwhile")
        self._check_not_replaced(cluster_id, incarnation, previous)

    def _check_not_replaced(self, cluster_id: int, incarnation: bytes, previous: Link) -> None:
        if incarnation == previous.peer.incarnation or previous.pulse.is_late:
            return
        if incarnation in self._incarnations.get(cluster_id, ()):
            raise LinkFailed(
                f"another process has taken the place of this one as cluster {cluster_id}, and is linked; end one of "
                "the two, or give each a cluster_id of its own"
            )

    def _remember_incarnation(self, cluster_id: int, incarnation: bytes) -> None:
        earlier = tuple(one for one in self._incarnations.pop(cluster_id, ()) if one != incarnation)
        self._incarnations[cluster_id] = (*earlier, incarnation)[-MAX_INCARNATIONS:]
        while len(self._incarnations) > MAX_REMEMBERED + len(self._links):
            self._incarnations.popitem(last=False)

    def forget(self, link: Link) -> bool:
        """It was ended in order. False if it is not, or not any more, the link of its cluster."""
        with self.lock:
            if self._links.get(link.peer.cluster_id) is not link:
                return False
            del self._links[link.peer.cluster_id]
            self._failures.pop(link.peer.cluster_id, None)
            return True

    def lose(self, link: Link, error: LLMException) -> bool:
        """The same, but `failure` says why. A link whose place another has taken counts."""
        with self.lock:
            if link in self._lost:
                self._lost.remove(link)
                return True
            if self._links.get(link.peer.cluster_id) is not link:
                return False
            del self._links[link.peer.cluster_id]
            self._remember_failure(link.peer.cluster_id, error)
            return True

    # -- failures

    def failure(self, cluster_id: int) -> LLMException | None:
        """Why the last attempt to link to that cluster failed, or why its link broke."""
        with self.lock:
            return self._failures.get(cluster_id)

    def note_failure(self, cluster_id: int, error: LLMException) -> None:
        """Have `failure` say this until that cluster is linked."""
        with self.lock:
            link = self._links.get(cluster_id)
            if link is None or not link.is_up:
                self._remember_failure(cluster_id, error)

    def _remember_failure(self, cluster_id: int, error: LLMException) -> None:
        """A copy: the error itself has a traceback, and with it keeps everything alive that was in use there."""
        self._failures.pop(cluster_id, None)
        self._failures[cluster_id] = copy.copy(error)
        while len(self._failures) > MAX_REMEMBERED:
            self._failures.popitem(last=False)
