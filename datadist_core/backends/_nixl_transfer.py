# SPDX-License-Identifier: Apache-2.0
"""One batch on its way through NIXL, from its first piece to its completion.

A transfer is in the hands of one thread at a time: that of `submit`, then that of the runtime's watcher. Others only
leave a note that it shall end (`end`). It then posts no more pieces; those that are posted must end by themselves, or
be fenced together with their agent, before anybody is told. Only a few pieces are posted at a time, so that their end
is near: to be fenced is the last resort, because it can cost the peer its life (see `_nixl_agent`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import Cancelled, ClosedError, LLMException
from ..transfer.backend import Completion, DoneCallback
from ..transfer.plan import Op
from ._nixl_agent import Piece, Request

if TYPE_CHECKING:
    from ._nixl_mover import Mover

#: What was told to end gets this long before its agent is given up for it.
GRACE_S = 5.0
#: Pieces in progress at a time. Enough to keep a fast network busy while the watcher sleeps.
MAX_POSTED = 4


class Transfer:
    """Attributes:
    failure: what NIXL reported, if anything.
    unsure: parts of it may be in progress though NIXL gives no state of them any more.
    """

    __slots__ = (
        "_cut_short", "_done", "_end_at_s", "_end_error", "_left", "_op", "_requests",
        "batch_id", "failure", "finishing_in", "mover", "peer_id", "peer_name", "region_ids", "unsure",
    )  # fmt: skip

    def __init__(self, batch_id: int, peer_id: int, peer_name: str, region_ids: frozenset[int], done: DoneCallback):
        self.batch_id = batch_id
        self.peer_id = peer_id
        self.peer_name = peer_name
        self.region_ids = region_ids
        self.mover: Mover | None = None
        self.failure: LLMException | None = None
        self.unsure = False
        self.finishing_in: int | None = None
        self._done = done
        self._op = Op.READ
        self._left: deque[Piece] = deque()
        self._requests: list[Request] = []
        self._cut_short = False
        self._end_error: LLMException | None = None
        self._end_at_s = math.inf

    def end(self, error: LLMException, grace_s: float = GRACE_S) -> None:
        """Ask for an early end; it may as well be finished first."""
        if self._end_error is None:
            self._end_at_s = time.monotonic() + grace_s
            self._end_error = error

    def start(self, op: Op, pieces: Sequence[Piece]) -> None:
        """What to move. Nothing is moved before `advance`."""
        self._op = op
        self._left.extend(pieces)

    def advance(self) -> bool:
        """Post what there is room for. Whether nothing is left and nothing is in progress any more, for certain."""
        agent = self._mover.agent
        while True:
            if agent.destroyed:
                self.fenced()
            if self._requests:
                self._reap()
            if self.unsure:
                return False
            if self._end_error is not None or self.failure is not None:
                self._cut()
            if not self._left:
                return not self._requests
            if len(self._requests) >= MAX_POSTED:
                return False
            self._post(self._left.popleft())

    def wait_inline(self, seconds: float) -> bool:
        """`advance` for a short time, so that what is quick need not wait for another thread."""
        if self.advance():
            return True
        until_s = time.monotonic() + seconds
        while not self.unsure and time.monotonic() < until_s:
            if self.advance():
                return True
        return False

    def must_be_fenced(self, now_s: float) -> bool:
        return self.unsure or now_s > self._end_at_s

    def fenced(self) -> None:
        """Its agent is no more: whatever was in progress has ended, with an unknown result."""
        self._cut_short = self._cut_short or bool(self._requests) or self.unsure
        self._requests = []
        self.unsure = False
        self._cut()

    def complete(self) -> None:
        """Tell the owner. Called once, when `advance` was true."""
        self.finishing_in = threading.get_ident()
        self._done(self._completion())

    def _reap(self) -> None:
        try:
            self._requests = [request for request in self._requests if not request.is_done()]
        except LLMException as error:
            self._fail_unsure(error)

    def _post(self, piece: Piece) -> None:
        try:
            request = self._mover.agent.start(self._op, piece)
        except LLMException as error:
            self.failure = error  # that piece has touched nothing
            return
        if not request.done:
            self._requests.append(request)

    def _cut(self) -> None:
        if self._left:
            self._cut_short = True
            self._left.clear()

    def _fail_unsure(self, error: LLMException) -> None:
        if self._mover.agent.destroyed:
            self.fenced()
            return
        self.failure = self.failure or error
        self.unsure = True

    @property
    def _mover(self) -> Mover:
        if self.mover is None:
            raise LLMException("a transfer that was never begun")
        return self.mover

    def _completion(self) -> Completion:
        if self.failure is None and not self._cut_short:
            return Completion.ok(self.batch_id)
        error = self._end_error or self.failure or ClosedError("NIXL's agent was destroyed")
        if isinstance(error, Cancelled):
            return Completion.cancelled(self.batch_id, error)
        return Completion.failed(self.batch_id, error)
