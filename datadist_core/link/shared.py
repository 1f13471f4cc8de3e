# SPDX-License-Identifier: Apache-2.0
"""Links that several communicators share: counted, and ended once."""

from __future__ import annotations

from ..errors import NotYetLinked
from .link import Link


class SharedLinks:
    """Which communicators use which links. Not thread-safe; its owner locks.

    A link is made by communicators, or was there before and then stays when they end.
    """

    def __init__(self) -> None:
        self._users: dict[Link, set[int]] = {}
        self._made: set[Link] = set()
        self._ending: set[Link] = set()

    def add(self, link: Link, comm_id: int, made: bool) -> None:
        """That communicator uses the link. NotYetLinked if the link is being ended, because nobody used it."""
        if link in self._ending:
            raise NotYetLinked(f"the link to cluster {link.peer.cluster_id} is being ended")
        self._users.setdefault(link, set()).add(comm_id)
        if made:
            self._made.add(link)

    def is_made(self, link: Link) -> bool:
        return link in self._made

    def release(self, comm_id: int) -> list[Link]:
        """That communicator uses nothing any more. Returns the links to be ended."""
        unused = []
        for link, users in list(self._users.items()):
            users.discard(comm_id)
            if not users:
                del self._users[link]
                if link in self._made:
                    unused.append(link)
        self._made.difference_update(unused)
        self._ending.update(unused)
        return unused

    def drop(self, link: Link) -> None:
        """The link has ended."""
        self._users.pop(link, None)
        self._made.discard(link)
        self._ending.discard(link)
