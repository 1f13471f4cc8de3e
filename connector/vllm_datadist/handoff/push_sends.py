# SPDX-License-Identifier: Apache-2.0
"""P's sends that are under way, and the leases that they pin.

For `pushes`.
"""

from __future__ import annotations

from ..messages import RequestKey
from .lease import Leases
from .push import PushMachine


class Sends:
    """Each by its push, of which it is the only one. Not thread-safe."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        #: From the blocks of which request.
        self._keys: dict[PushMachine, RequestKey] = {}
        self._pinned: set[PushMachine] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def is_from(self, key: RequestKey) -> bool:
        """Whether one from this request's blocks is under way."""
        return key in self._keys.values()

    def is_pinning(self, key: RequestKey) -> bool:
        """Whether vLLM gets this request's blocks back only after a send."""
        return any(self._keys[push] == key for push in self._pinned)

    def begin(self, push: PushMachine) -> bool:
        """Of what it is to send. False, and nothing has begun, if the blocks should be under a lease that is over."""
        send = push.send
        if send is None:
            raise RuntimeError("a send of nothing")
        if push.source.is_held:
            if not self._leases.pin(send.key):
                return False
            self._pinned.add(push)
        self._keys[push] = send.key
        return True

    def pin(self, key: RequestKey) -> None:
        """The request's blocks are held under a lease from now on."""
        for push in [push for push, source in self._keys.items() if source == key]:
            self._leases.pin_under_way(key)
            self._pinned.add(push)

    def end(self, push: PushMachine) -> None:
        """If it has one under way."""
        key = self._keys.pop(push, None)
        if key is not None and push in self._pinned:
            self._pinned.discard(push)
            self._leases.unpin(key)
