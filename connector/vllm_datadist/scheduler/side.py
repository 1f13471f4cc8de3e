# SPDX-License-Identifier: Apache-2.0
"""The scheduler half of the connector: decides, and leaves the doing to the workers.

P: a finished request becomes a ticket, and its blocks stay until the workers say that the lease is over.
D: a request with a ticket is watched (its lease renewed) while it queues, loaded once it has blocks, or released
when it needs nothing. Deterministic tables only: no torch, no sockets, nothing of vLLM is imported; requests and
blocks are read by the attributes they have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..groups import GroupInfo, missing_position
from ..handoff.request import RequestEvent, RequestState, Tell
from ..messages import BlockTables, Endpoint, LeaseOpen, LoadJob, ReleaseJob, RemoteLease, StepWork, Watch
from ..params import Ticket, TicketError, asks_remote_decode, asks_remote_prefill, parse_ticket, prompt_digest
from .holds import HoldTable
from .requests import Handoff, HandoffTable
from .tallies import TokenTally

_HANDED_OFF_BY = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class RequestLike(Protocol):
    """What is read of a vLLM request."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    status: Any
    kv_transfer_params: dict[str, Any] | None


class BlockLike(Protocol):
    block_id: int
    is_null: bool


class TransferOutput(Protocol):
    """What is read and corrected of vLLM's report of a step."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    failed_recving: set[str]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """This engine. `engine_id` is new each time it starts; `groups` are those whose blocks are transferred."""

    engine_id: str
    is_producer: bool
    is_consumer: bool
    groups: tuple[GroupInfo, ...]
    tp_size: int
    pp_size: int
    lease_s: float


class SchedulerSide:
    """See the module. Called by vLLM's scheduler, from one thread."""

    def __init__(self, facts: EngineFacts, log: logging.Logger) -> None:
        self._facts = facts
        self._log = log
        self._workers: tuple[Endpoint, ...] = ()
        self._holds = HoldTable()
        self._handoffs = HandoffTable()
        self._work = StepWork()
        self._tally = TokenTally()
        self._warned: set[str] = set()

    def set_workers(self, workers: Iterable[Endpoint]) -> None:
        """Where this engine's workers listen; goes into every ticket."""
        self._workers = tuple(sorted(workers, key=lambda worker: (worker.pp_rank, worker.tp_rank)))

    # --- a request's life -------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestLike) -> None:
        params = request.kv_transfer_params
        if asks_remote_decode(params) and not self._facts.is_producer:
            self._warn_once(
                "do_remote_decode",
                "a request asks for a hand-off (do_remote_decode), but this engine is a kv_consumer: it serves such "
                "requests itself. Set kv_role to kv_producer or kv_both, or send them elsewhere.",
            )
        if params is not None and asks_remote_prefill(params):
            self._accept_ticket(request, params)

    def num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `num_computed_tokens`, whether asynchronously). Changes nothing.

        None = ask again later: a request with the same ticket is being loaded.
        """
        handoff = self._handoffs.queued(request.request_id)
        if handoff is None or handoff.refused:
            return 0, False
        if handoff.leader is not None:
            return (None if self._handoffs.must_wait(handoff) else 0), False
        count = self._end_token(handoff) - num_computed_tokens
        if count <= 0 or self._why_not_loadable(handoff, num_computed_tokens):
            return 0, False
        return count, True

    def update_state_after_alloc(
        self, request: RequestLike, blocks: Sequence[Sequence[BlockLike]], num_external_tokens: int
    ) -> None:
        """vLLM has given the request blocks (one list per group); it waits for a load if the number is > 0."""
        handoff = self._handoffs.queued(request.request_id)
        if handoff is None:
            return
        if num_external_tokens > 0:
            self._start_load(handoff, blocks, num_external_tokens)
        else:
            self._settle_without_load(handoff, RequestEvent.NO_LOAD)

    def request_finished(
        self, request: RequestLike, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether vLLM shall keep the blocks until the workers report the id as sent, the ticket)."""
        self._drop_handoff(request)
        if not asks_remote_decode(request.kv_transfer_params) or not self._can_hand_off(request, block_ids):
            return False, None
        key = self._holds.next_key(request.request_id)
        self._holds.hold(key)
        self._work.leases.append(LeaseOpen(key, self._facts.lease_s))
        remote = RemoteLease(self._facts.engine_id, key, self._facts.lease_s, self._workers)
        num_tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        ticket = Ticket(
            remote,
            tuple(tuple(block_ids[group.index]) for group in self._facts.groups),
            tuple(group.block_tokens for group in self._facts.groups),
            max(0, num_tokens),
            self._facts.tp_size,
            prompt_digest(request.prompt_token_ids, request.num_prompt_tokens),
        )
        return True, ticket.to_params()

    # --- once per step ----------------------------------------------------------------------------------------

    def take_work(self) -> StepWork:
        work, self._work = self._work, StepWork()
        return work

    def has_work(self) -> bool:
        """Whether something waits to be told to the workers, so that the engine must make another step."""
        return not self._work.is_empty()

    def update_output(self, output: TransferOutput) -> None:
        """Follow the workers' report, and take out of it what vLLM has been told before."""
        received, sent = output.finished_recving or set(), output.finished_sending or set()
        failed = output.failed_recving
        for request_id in list(received):
            if not self._load_ended(request_id, request_id in failed):
                self._log.warning("the end of the load of request %s was reported again; dropped", request_id)
                received.discard(request_id)
                failed.discard(request_id)
        for request_id in list(sent):
            if not self._holds.end(request_id):
                self._log.warning("the end of the hand-off of request %s was reported again; dropped", request_id)
                sent.discard(request_id)

    def take_tally(self) -> TokenTally:
        tally, self._tally = self._tally, TokenTally()
        return tally

    # --- D ----------------------------------------------------------------------------------------------------

    def _accept_ticket(self, request: RequestLike, params: dict[str, Any]) -> None:
        if not self._facts.is_consumer:
            self._warn_once(
                "do_remote_prefill",
                "a request came with a ticket (do_remote_prefill), but this engine is a kv_producer: it prefills such "
                "requests itself. Set kv_role to kv_consumer or kv_both, or send them elsewhere.",
            )
            return
        try:
            ticket = parse_ticket(params)
        except TicketError as error:
            self._log.warning("request %s: unusable ticket, prefilling here: %s", request.request_id, error)
            return
        handoff = Handoff(self._holds.next_key(request.request_id), ticket, request.num_prompt_tokens)
        is_refused_already = getattr(request, "abort_immediately", False)
        handoff.refused = "" if is_refused_already else self._why_unfit(ticket, request)
        self._handoffs.lead(handoff)
        replaced = self._handoffs.add(handoff)
        if replaced is not None:
            self._step(replaced, RequestEvent.REPLACED)
        self._begin(handoff)

    def _begin(self, handoff: Handoff) -> None:
        if handoff.refused:
            self._log.warning(
                "request %s: ticket does not fit, prefilling here: %s", handoff.key.request_id, handoff.refused
            )
            self._settle_without_load(handoff, RequestEvent.REFUSED)
        else:
            self._step(handoff, RequestEvent.ACCEPTED)

    def _why_unfit(self, ticket: Ticket, request: RequestLike) -> str:
        """Why this engine cannot use that ticket, with both values; "" if it can."""
        facts = self._facts
        block_size = tuple(group.block_tokens for group in facts.groups)
        prompt = prompt_digest(request.prompt_token_ids, ticket.prompt.num_tokens)
        is_comparable = bool(prompt.digest and ticket.prompt.digest)
        checks = (
            ("number of KV cache groups", len(facts.groups), len(ticket.block_ids)),
            ("block_size per group", block_size, ticket.block_size),
            ("tp_size", facts.tp_size, ticket.tp_size),
            ("number of workers", facts.tp_size * facts.pp_size, len(ticket.remote.workers)),
            ("prompt_digest", prompt.digest, ticket.prompt.digest if is_comparable else prompt.digest),
        )
        return "; ".join(f"{name} is {ours} here and {theirs} at P" for name, ours, theirs in checks if ours != theirs)

    def _end_token(self, handoff: Handoff) -> int:
        return min(handoff.num_prompt_tokens, handoff.ticket.num_tokens)

    def _why_not_loadable(self, handoff: Handoff, first_token: int) -> str:
        """Why tokens from `first_token` on cannot be loaded exactly; "" if they can."""
        for group, table in zip(self._facts.groups, handoff.ticket.block_ids, strict=True):
            token = missing_position(group, table, first_token, self._end_token(handoff), handoff.num_prompt_tokens)
            if token is not None:
                return f"token {token} has left the window of KV cache group {group.index}"
        return ""

    def _start_load(self, handoff: Handoff, blocks: Sequence[Sequence[BlockLike]], num_external_tokens: int) -> None:
        end_token = self._end_token(handoff)
        handoff.num_remote_tokens = num_external_tokens
        load = LoadJob(
            handoff.key,
            handoff.ticket.remote,
            tuple(
                BlockTables(_source_table(source), _target_table(blocks[group.index]))
                for group, source in zip(self._facts.groups, handoff.ticket.block_ids, strict=True)
            ),
            max(0, end_token - num_external_tokens),
            end_token,
        )
        self._step(handoff, RequestEvent.LOAD, load)

    def _settle_without_load(self, handoff: Handoff, event: RequestEvent) -> None:
        """Nothing will come from P."""
        self._step(handoff, event)
        self._tally.count(0, handoff.num_prompt_tokens)
        self._log.debug("request %s: 0 tokens from P, %d here", handoff.key.request_id, handoff.num_prompt_tokens)

    def _step(self, handoff: Handoff, event: RequestEvent, load: LoadJob | None = None) -> None:
        """Move it on, and note what the workers are to be told."""
        key, remote = handoff.key, handoff.ticket.remote
        for tell in handoff.step(event):
            if tell is Tell.WATCH:
                self._work.watches.append(Watch(key, remote))
            elif tell is Tell.LOAD and load is not None:
                self._work.loads.append(load)
            elif tell is Tell.RELEASE:
                self._work.releases.append(ReleaseJob(key, remote))
            elif tell is Tell.END:
                self._work.ended.append(key)

    def _drop_handoff(self, request: RequestLike) -> None:
        """The request is gone from vLLM, for whatever reason."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        if handoff.state is RequestState.LOADING:
            handoff.is_aborted = request.status.name == "FINISHED_ABORTED"
        self._step(handoff, RequestEvent.FINISHED)
        if handoff.state is RequestState.GONE:
            self._handoffs.remove(request.request_id)

    def _load_ended(self, request_id: str, failed: bool) -> bool:
        """False if vLLM has been told of it before. Ids we know nothing of may be another connector's."""
        handoff = self._handoffs.load_ended(request_id)
        if handoff is None:
            return not self._handoffs.was_reported(request_id)
        self._count_load(handoff, failed)
        return True

    def _count_load(self, handoff: Handoff, failed: bool) -> None:
        num_remote = 0 if failed else handoff.num_remote_tokens
        if failed and not handoff.is_aborted:
            self._tally.num_failed_loads += 1
        if handoff.state is not RequestState.GONE:
            self._tally.count(num_remote, handoff.num_prompt_tokens - num_remote)
        self._log.debug(
            "request %s: %d tokens from P %s, %d here%s",
            handoff.key.request_id,
            num_remote,
            handoff.ticket.remote.engine_id,
            handoff.num_prompt_tokens - num_remote,
            " (the load failed)" if failed else "",
        )

    # --- P ----------------------------------------------------------------------------------------------------

    def _can_hand_off(self, request: RequestLike, block_ids: Sequence[Sequence[int]]) -> bool:
        if not self._facts.is_producer or request.status.name not in _HANDED_OFF_BY:
            return False
        if not self._workers:
            self._warn_once(
                "workers", "this engine's workers have not said where they listen: requests are not handed off"
            )
            return False
        return any(any(block_ids[group.index]) for group in self._facts.groups)

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self._log.warning("%s", text)


def _source_table(ids: Sequence[int]) -> tuple[int | None, ...]:
    """P writes 0, the id of vLLM's null block, where a window group has no block."""
    return tuple(block_id or None for block_id in ids)


def _target_table(blocks: Sequence[BlockLike]) -> tuple[int | None, ...]:
    return tuple(None if block.is_null else block.block_id for block in blocks)
