# SPDX-License-Identifier: Apache-2.0
"""D's calls about P's leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from datadist_core.errors import ProtocolError
from datadist_core.types import Deadline

from ..messages import (
    RELEASE,
    RENEW,
    Endpoint,
    LeaseAnswer,
    LeaseRef,
    LeaseState,
    Release,
    Renew,
    RequestKey,
    lease_ref,
)

#: A call is answered at once, or after P's wait for a lease that is not open yet (LeaseTable.arrival_wait_s).
CALL_TIMEOUT_S = 5.0


class Caller(Protocol):
    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes: ...


class LeaseCalls:
    """Thread-safe. Every call ends by the deadline, at the latest after CALL_TIMEOUT_S."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def renew(self, endpoint: Endpoint, keys: Sequence[RequestKey], deadline: Deadline) -> list[LeaseState]:
        return self._ask(endpoint, RENEW, msgspec.msgpack.encode(Renew(_refs(keys))), len(keys), deadline)

    def release(
        self,
        endpoint: Endpoint,
        keys: Sequence[RequestKey],
        reader: RequestKey,
        deadline: Deadline,
        num_readers: int = 1,
    ) -> list[LeaseState]:
        """`reader`: our own request that had, or has, the use of these leases.

        Args:
            num_readers: how many workers of our engine release these leases at this worker of P.
        """
        body = msgspec.msgpack.encode(Release(_refs(keys), lease_ref(reader), num_readers))
        return self._ask(endpoint, RELEASE, body, len(keys), deadline)

    def _ask(self, endpoint: Endpoint, name: str, body: bytes, count: int, deadline: Deadline) -> list[LeaseState]:
        reply = self._caller.call(endpoint.cluster_id, name, body, deadline.earlier(CALL_TIMEOUT_S).remaining_s())
        try:
            states = msgspec.msgpack.decode(reply, type=LeaseAnswer).states
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"{name}: the peer's answer cannot be read: {error}") from error
        if len(states) != count:
            raise ProtocolError(f"{name}: {len(states)} answers to {count} questions")
        return states


def _refs(keys: Sequence[RequestKey]) -> list[LeaseRef]:
    return [lease_ref(key) for key in keys]
