# SPDX-License-Identifier: Apache-2.0
"""P's table of push requests: what the workers are told of each with every step, from vLLM's scheduler output.

A step computes tokens `num_computed_tokens` .. + `num_scheduled_tokens` of a request. Only tokens of the prompt are
pushed: what lies behind them may be drafts that are rejected. Tokens of earlier steps are in their blocks when the
step begins, with one exception: vLLM counts a block as cached as soon as its tokens are scheduled. So what the first
step of a request finds cached may be computed by another request in that very step, and counts as computed by it.

Blocks. New ones are appended step by step; a request that comes back from preemption begins anew. A group with a
sliding window drops its oldest blocks meanwhile, of which this table hears nothing. As long as the prompt is being
computed they are none that D's next query sees: D's window ends where the prompt does; those that a D with larger
blocks wants before are kept (`pins`). A request that generates on and on would drop what D's query sees too, so its
push ends when the window leaves that, at the latest when the request does: before it asks for the request's blocks,
vLLM frees what its last token does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..groups import GroupInfo, first_token_seen
from ..messages import PushChunk, PushEnd, PushOpen, PushVoid, RequestKey, StepWork, Table
from .pins import BlockPins, Pins

#: How a request ends when its blocks are not to be had any more.
_NOT_HANDED_OFF = "P has ended the request as {}"


@dataclass(slots=True)
class _Push:
    """`request`: vLLM's own; `num_final`: tokens in their blocks once the steps so far have run."""

    key: RequestKey
    transfer_id: str
    request: Any
    num_groups: int
    num_preemptions: int
    tables: list[list[int]] = field(default_factory=list)
    num_final: int = 0
    is_closed: bool = False
    pins: Pins = field(default_factory=Pins)

    def forget_blocks(self) -> None:
        self.tables = [[] for _ in range(self.num_groups)]
        self.num_final = 0


class PushRequests:
    """By vLLM's request id. Deterministic; not thread-safe.

    Args:
        groups: those that are transferred, in the order of the tables of a `PushChunk`.
    """

    def __init__(self, groups: Sequence[GroupInfo]) -> None:
        self._groups = tuple(groups)
        self.pins = BlockPins()
        self._pushes: dict[str, _Push] = {}
        self._transfers: dict[str, RequestKey] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def is_taken(self, transfer_id: str) -> bool:
        """Whether a request that has not ended yet has this transfer id."""
        return transfer_id in self._transfers

    def open(self, work: StepWork, request: Any, key: RequestKey, transfer_id: str, prompt_digest: str) -> None:
        """A new request, before its first step."""
        num_groups = 1 + max((group.index for group in self._groups), default=0)
        push = _Push(key, transfer_id, request, num_groups, _num_preemptions(request))
        push.forget_blocks()
        self._pushes[request.request_id] = push
        self._transfers[transfer_id] = key
        work.push_opens.append(PushOpen(key, transfer_id, request.num_prompt_tokens, prompt_digest))

    def refuse(self, work: StepWork, request: Any, key: RequestKey, transfer_id: str, reason: str) -> None:
        """A push that this engine cannot make: whoever offers blocks for it hears why, at once."""
        work.push_opens.append(PushOpen(key, transfer_id, request.num_prompt_tokens, ""))
        work.push_ends.append(PushEnd(key, reason))

    def step(self, work: StepWork, scheduler_output: Any) -> None:
        """What vLLM has decided for the step that `work` goes with."""
        if not self._pushes:
            return
        for push in self._pushes.values():
            self._see_preemption(work, push)
        for scheduled in _scheduled(scheduler_output):
            push_of_it = self._pushes.get(scheduled.request_id)
            if push_of_it is not None and not push_of_it.is_closed:
                self._compute(work, push_of_it, scheduled)

    def transfer_of(self, request_id: str) -> tuple[RequestKey, str] | None:
        """(its key, its transfer id) if that request is a push request."""
        push = self._pushes.get(request_id)
        return None if push is None else (push.key, push.transfer_id)

    def finish(self, work: StepWork, request_id: str, is_held: bool, status: str) -> Pins:
        """vLLM is done with the request. `is_held`: its blocks stay, under a lease with the same key.

        Returns:
            Blocks that stay beside those that vLLM says: until then too, see `BlockPins.leases_ended`.
        """
        push = self._pushes.pop(request_id, None)
        if push is None:
            return Pins()
        if self._transfers.get(push.transfer_id) == push.key:
            del self._transfers[push.transfer_id]
        if not push.is_closed:
            num_tokens = _num_processed_tokens(push.request)
            error = self._dropped(push, num_tokens) if is_held else _NOT_HANDED_OFF.format(status)
            work.push_ends.append(PushEnd(push.key, error))
            if not error:
                self.pins.hold(request_id, push.pins)
                return push.pins
        self.pins.drop(push.pins)
        return Pins()

    def _see_preemption(self, work: StepWork, push: _Push) -> None:
        num_preemptions = _num_preemptions(push.request)
        if num_preemptions != push.num_preemptions:
            push.num_preemptions = num_preemptions
            self.pins.drop(push.pins)
            push.forget_blocks()
            if not push.is_closed:
                work.push_voids.append(PushVoid(push.key))

    def _compute(self, work: StepWork, push: _Push, scheduled: _Scheduled) -> None:
        if scheduled.is_whole_table:  # blocks that are kept stay so: they may be sent at this moment
            push.tables = [[] for _ in range(push.num_groups)]
        num_known = [len(table) for table in push.tables]
        for table, new in zip(push.tables, scheduled.new_blocks, strict=False):
            table.extend(new)
        if push.num_preemptions == 0:  # else there may be too few blocks, and the same would happen again and again
            for group in self._groups:
                table, first_new = push.tables[group.index], num_known[group.index]
                self.pins.keep(push.pins, group, table, first_new, push.request)
        end_token = min(scheduled.first_token + scheduled.num_tokens, push.request.num_prompt_tokens)
        if end_token > push.num_final:
            tables = tuple(self._table(push, group, end_token) for group in self._groups)
            work.push_chunks.append(PushChunk(push.key, push.num_final, end_token, tables))
            push.num_final = end_token
        elif dropped := self._dropped(push, scheduled.first_token):
            push.is_closed = True
            self.pins.drop(push.pins)
            work.push_ends.append(PushEnd(push.key, dropped))

    def _table(self, push: _Push, group: GroupInfo, end_token: int) -> Table:
        """Blocks up to `end_token`, without those that vLLM frees when the prompt is computed: 0 is its null block.

        A D with larger blocks may want the tokens before those too. It gets them only if they are kept for it: else the
        next step may compute something else in their blocks while they are sent.
        """
        ids = push.pins.filled(group.index, push.tables[group.index])[: -(-end_token // group.block_tokens)]
        first_kept = first_token_seen(group, push.request.num_prompt_tokens) // group.block_tokens
        is_there = (i >= first_kept or push.pins.at(group.index, i) for i in range(len(ids)))
        return tuple(block_id or None if there else None for block_id, there in zip(ids, is_there, strict=True))

    def _dropped(self, push: _Push, num_computed_tokens: int) -> str:
        """Which token that D may want has left the window at P by now; "" if none has."""
        num_prompt_tokens = push.request.num_prompt_tokens
        for group in self._groups:
            wanted = first_token_seen(group, num_prompt_tokens) // group.block_tokens
            if first_token_seen(group, num_computed_tokens) // group.block_tokens > wanted:
                return f"token {wanted * group.block_tokens} has left the window of KV cache group {group.index} at P"
        return ""


@dataclass(frozen=True, slots=True)
class _Scheduled:
    """One request of a step. `new_blocks` per group of vLLM; `is_whole_table`: they replace those known before."""

    request_id: str
    first_token: int
    num_tokens: int
    new_blocks: Sequence[Sequence[int]]
    is_whole_table: bool


def _scheduled(output: Any) -> Iterator[_Scheduled]:
    num_tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        count = num_tokens.get(new.req_id, 0)
        yield _Scheduled(new.req_id, new.num_computed_tokens, count, new.block_ids, True)
    cached = output.scheduled_cached_reqs
    for request_id, blocks, first in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        is_resumed = request_id in cached.resumed_req_ids
        yield _Scheduled(request_id, first, num_tokens.get(request_id, 0), blocks or (), is_resumed)


def _num_processed_tokens(request: Any) -> int:
    """By which vLLM drops blocks: without those of a step in flight."""
    return max(0, request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0))


def _num_preemptions(request: Any) -> int:
    return int(getattr(request, "num_preemptions", 0))
