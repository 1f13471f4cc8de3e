# SPDX-License-Identifier: Apache-2.0
"""Pushes that were asked for once more: by a client that gives up and comes again at once, or by the router later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from random import Random

from vllm_datadist.messages import RequestKey

from .blocks import Request


@dataclass(frozen=True)
class Taker:
    """A request of D that a transfer was for."""

    transfer_id: str
    key: RequestKey | None


class Retries:
    """Kept per transfer id, to tell at the end what P may have failed.

    Who asks again in the very step in which the first request is given up is served if nothing goes wrong: whatever
    overtakes whatever on the way to P. Unless P has just sent the first request all that it wanted, and so has let go.
    Who comes later may find that P has let go, or has not yet.

    Args:
        seed: of the schedule. The decisions are drawn apart, so that those of other things stay what they were.
    """

    def __init__(self, seed: int) -> None:
        self._rng = Random(f"retries of {seed}")
        self._share = self._rng.choice((0.0, 0.0, 0.5, 1.0))
        self._num_asked: Counter[str] = Counter()
        self._num_at_once: Counter[str] = Counter()
        self._num_aborted: Counter[str] = Counter()
        self._aborted: set[Taker] = set()

    def asked(self, request: Request, is_at_once: bool) -> None:
        """D gets a request: perhaps for a push that the router has named."""
        self._num_asked[request.transfer_id] += 1
        self._num_at_once[request.transfer_id] += is_at_once

    def comes_again(self, request: Request) -> bool:
        """Whether the client that gives up this request asks for the same at once."""
        params = request.kv_transfer_params or {}
        is_named = params.get("transfer_mode") == "push" and params.get("datadist") is None
        is_only_at_d = "do_remote_prefill" in params and "do_remote_decode" not in params
        return is_named and is_only_at_d and not request.is_finished and self._rng.random() < self._share

    def ended(self, request: Request) -> None:
        if request.status.name == "FINISHED_ABORTED":
            self._num_aborted[request.transfer_id] += 1
            self._aborted.add(Taker(request.transfer_id, request.load_key))

    def may_fail(self, transfer_id: str, served: Set[Taker]) -> bool:
        """A request was given up, and another came for the same: later; or at once, but the first one was served.

        Or the last one was given up too. `served`: whom some worker of P has sent all that it wanted.
        """
        num_at_once = self._num_at_once[transfer_id]
        num_later = self._num_asked[transfer_id] - num_at_once - 1
        num_aborted = self._num_aborted[transfer_id]
        if not (transfer_id and num_aborted):  # others have no name
            return False
        was_served = any(taker.transfer_id == transfer_id for taker in served & self._aborted)
        return num_later > 0 or (num_at_once > 0 and (was_served or num_aborted > num_at_once))
