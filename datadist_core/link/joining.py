# SPDX-License-Identifier: Apache-2.0
"""What the members of a communicator say to one another, as bodies of service calls, and how plans differ."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import ProtocolError
from .rank_table import CommunicatorPlan

#: Services that members answer to one another.
JOIN = "datadist_core.communicator.join"
LEAVE = "datadist_core.communicator.leave"


class Join(msgspec.Struct, frozen=True):
    """A member (the sender) has linked to us. `complete`: it has joined all members below it.

    `made`: its end of the link was made for communicators, and so is to end with them.
    """

    name: str
    rank_of: dict[int, int]
    attempt: bytes
    host: str
    port: int
    made: bool
    complete: bool


class Where(msgspec.Struct, frozen=True):
    """Where a member listens for the others."""

    cluster_id: int
    host: str
    port: int


class Joined(msgspec.Struct, frozen=True):
    """Answer to a Join.

    `attempt` is the answering member's, empty if it has not called `link` yet, or has given up. From the host also:
    `all_joined` and where members are to be dialled; `ready`, which is that all are linked pairwise.
    """

    attempt: bytes = b""
    all_joined: bool = False
    members: list[Where] = []
    ready: bool = False


class Leave(msgspec.Struct, frozen=True):
    """The sender gives up, or calls `unlink`."""

    name: str
    attempt: bytes
    reason: str


_S = TypeVar("_S", bound=msgspec.Struct)


def encode(message: Join | Joined | Leave) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[_S]) -> _S:
    """Raises ProtocolError: the peer is not trusted."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"this is no {kind.__name__} of a communicator: {error}") from error


def difference(plan: CommunicatorPlan, remote_cluster_id: int, join: Join) -> str | None:
    """Which field the joining member was told differently from us, with both values; None if all agree."""
    mine, theirs = plan.rank_of, join.rank_of
    there = f"at cluster {remote_cluster_id}"
    if sorted(mine) != sorted(theirs):
        names = f"cluster_rank_info names clusters {sorted(theirs)} {there}"
        return f"{names}, but {sorted(mine)} at cluster {plan.own_id}"
    if remote_cluster_id not in mine:
        return f"cluster_rank_info={mine} does not name cluster {remote_cluster_id}, which joined"
    for cluster_id, rank in mine.items():
        if theirs[cluster_id] != rank:
            field = f"cluster_rank_info[{cluster_id}]"
            return f"{field} is {theirs[cluster_id]} {there}, but {rank} at cluster {plan.own_id}"
    return None
