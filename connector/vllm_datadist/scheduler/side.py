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

from ..counts import Counts, Mode, Reason
from ..groups import GroupInfo, has_state, missing_position, transfer_table
from ..handoff.request import RequestEvent, RequestState, Tell
from ..messages import (
    AnnounceJob,
    Endpoint,
    LeaseOpen,
    LoadJob,
    OfferJob,
    ReleaseJob,
    RemoteLease,
    StepWork,
    Watch,
    WithdrawJob,
    WorkerNotes,
)
from ..params import (
    PrefixDigests,
    Ticket,
    TicketError,
    asks_remote_decode,
    asks_remote_prefill,
    is_ticket,
    parse_push_source,
    parse_ticket,
    transfer_id,
    transfer_mode,
)
from .conversation import cut_to_shared, digest_prefixes, num_vouched_tokens
from .holds import HoldTable
from .identity import kv_digest
from .jobs import BlockLike, load_job, prompt_digest, target_table
from .pins import BlockPool
from .pushes import PushRequests
from .requests import Handoff, HandoffTable
from .settling import SettlingTable
from .states import cut_to_state, is_state_settled, leave_last_token
from .tallies import Ledger, why_refused

_HANDED_OFF_BY = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class RequestLike(Protocol):
    """What is read of a vLLM request."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    status: Any
    kv_transfer_params: dict[str, Any] | None


class TransferOutput(Protocol):
    """What is read and corrected of vLLM's report of a step."""

    finished_sending: set[str] | None
    finished_recving: set[str] | None
    failed_recving: set[str]
    kv_connector_worker_meta: Any


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """This engine. `engine_id` is new each time it starts; `groups` are those whose blocks are transferred; `no_push`
    is why it cannot push as a P, "" if it can."""

    engine_id: str
    is_producer: bool
    is_consumer: bool
    groups: tuple[GroupInfo, ...]
    tp_size: int
    pp_size: int
    lease_s: float
    transfer_mode: str = "pull"
    no_push: str = ""


class SchedulerSide:
    """See the module. Called by vLLM's scheduler, from one thread."""

    def __init__(self, facts: EngineFacts, log: logging.Logger) -> None:
        self._facts = facts
        self._log = log
        self._workers: tuple[Endpoint, ...] = ()
        self._holds = HoldTable()
        self._handoffs = HandoffTable()
        self._pushes = PushRequests(facts.groups)
        self._settling = SettlingTable()
        self._work = StepWork()
        self.ledger = Ledger(log)
        self._warned: set[str] = set()

    def set_workers(self, workers: Iterable[Endpoint]) -> None:
        """Where this engine's workers listen; goes into every ticket."""
        self._workers = tuple(sorted(workers, key=lambda worker: (worker.pp_rank, worker.tp_rank)))
        self._work.workers = self._workers

    def bind_block_pool(self, pool: BlockPool) -> None:
        """vLLM's own, in which blocks can be kept."""
        self._pushes.pins.bind(pool)

    # --- a request's life -------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestLike) -> None:
        params = request.kv_transfer_params
        if asks_remote_decode(params) and not self._facts.is_producer:
            self._warn_once(
                "do_remote_decode",
                "a request asks for a hand-off (do_remote_decode), but this engine is a kv_consumer: it serves such "
                "requests itself. Set kv_role to kv_producer or kv_both, or send them elsewhere.",
            )
        elif params is not None and asks_remote_decode(params):
            leave_last_token(self._facts.groups, request)
            self._open_push(request, params)
            push = self._pushes.transfer_of(request.request_id)
            self.ledger.asked(request.request_id, "" if push is None else push[1])
        if params is not None and asks_remote_prefill(params):
            self._accept_ticket(request, params)

    def num_new_matched_tokens(self, request: RequestLike, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `num_computed_tokens`, whether asynchronously). Changes nothing.

        None = ask again later: a request with the same ticket is being loaded.
        """
        handoff = self._handoffs.queued(request.request_id)
        count, reason = (0, None) if handoff is None else self._num_loadable(handoff, num_computed_tokens)
        self.ledger.looked_up(request.request_id, num_computed_tokens, count, reason)
        return count, bool(count)

    def _num_loadable(self, handoff: Handoff, num_computed_tokens: int) -> tuple[int | None, Reason | None]:
        if handoff.refused:
            return 0, None
        if handoff.leader is not None:
            return None if self._handoffs.must_wait(handoff) else 0, Reason.FOLLOWER
        end_token = self._end_token(handoff)
        if end_token <= num_computed_tokens:
            return 0, self._why_too_short(handoff, end_token)
        if self._why_not_loadable(handoff, num_computed_tokens):
            return 0, Reason.WINDOW_GONE
        return end_token - num_computed_tokens, None

    def _why_too_short(self, handoff: Handoff, end_token: int) -> Reason | None:
        """Why a ticket has nothing more than is cached here. None: all but the last token is."""
        if end_token == 0:  # the prompt departs from the ticket's at once, or not where a state was taken
            return Reason.TICKET_PROMPT
        return Reason.BEYOND_TICKET if end_token < handoff.num_prompt_tokens - 1 else None

    def update_state_after_alloc(
        self, request: RequestLike, blocks: Sequence[Sequence[BlockLike]], num_external_tokens: int
    ) -> None:
        """vLLM has given the request blocks (one list per group); it waits for a load if the number is > 0."""
        self.ledger.allocated(request.request_id, num_external_tokens)
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
        self.ledger.finished(request.request_id, is_aborted=request.status.name == "FINISHED_ABORTED")
        is_held = asks_remote_decode(request.kv_transfer_params) and self._can_hand_off(request, block_ids)
        push = self._pushes.transfer_of(request.request_id)
        pins = self._pushes.finish(self._work, request.request_id, is_held, request.status.name)
        mode = Mode.PULL if push is None else Mode.PUSH
        if not is_held:
            if asks_remote_decode(request.kv_transfer_params) and self._facts.is_producer:
                self.ledger.not_held(mode)
            return False, None
        key, name = push or (self._holds.next_key(request.request_id), "")
        self._holds.hold(key)
        self._work.leases.append(LeaseOpen(key, self._facts.lease_s))
        remote = RemoteLease(self._facts.engine_id, key, self._facts.lease_s, self._workers)
        num_tokens = num_vouched_tokens(request)
        self.ledger.held(key, num_tokens, mode, name)
        prefixes = self._prefixes(request, num_tokens)
        tables = [pins.filled(group.index, block_ids[group.index]) for group in self._facts.groups]
        ticket = Ticket(
            remote,
            tuple(tuple(transfer_table(*pair, num_tokens)) for pair in zip(self._facts.groups, tables, strict=True)),
            tuple(group.table_tokens for group in self._facts.groups),
            num_tokens,
            self._facts.tp_size,
            prompt_digest(request),
            prefixes,
            "" if prefixes else name,  # what has been generated is not pushed
        )
        return True, ticket.to_params()

    def _prefixes(self, request: RequestLike, num_tokens: int) -> PrefixDigests | None:
        """A ticket for a prompt is for that prompt only; one for generated tokens too is for whatever comes next."""
        if num_tokens <= request.num_prompt_tokens:
            return None
        return digest_prefixes(request, num_tokens, max(group.block_tokens for group in self._facts.groups))

    # --- once per step ----------------------------------------------------------------------------------------

    def take_work(self, scheduler_output: Any = None) -> StepWork:
        """What the workers are told with this step. None: a step that computes nothing."""
        if scheduler_output is not None:
            self._pushes.step(self._work, scheduler_output)
        work, self._work = self._work, StepWork()
        return work

    def has_work(self) -> bool:
        """Whether something waits to be told to the workers, so that the engine must make another step."""
        return not self._work.is_empty()

    def update_output(self, output: TransferOutput) -> None:
        """Follow the workers' report, and take out of it what vLLM has been told before."""
        self.ledger.heard(getattr(output, "kv_connector_worker_meta", None))
        received, sent = output.finished_recving or set(), output.finished_sending or set()
        failed = output.failed_recving
        for request_id in list(received):
            if not self._load_ended(request_id, request_id in failed):
                self._log.warning("the end of the load of request %s was reported again; dropped", request_id)
                received.discard(request_id)
                failed.discard(request_id)
        self._keep_back_unsettled(output, received)
        for request_id in list(sent):
            self._pushes.pins.leases_ended(request_id)
            self.ledger.hold_ended(request_id)
            if not self._holds.end(request_id):
                self._log.warning("the end of the hand-off of request %s was reported again; dropped", request_id)
                sent.discard(request_id)

    def _keep_back_unsettled(self, output: TransferOutput, received: set[str]) -> None:
        notes = getattr(output, "kv_connector_worker_meta", None)
        if notes is None and self._settling.is_idle:
            return
        told = self._settling.update(received, notes if isinstance(notes, WorkerNotes) else None)
        for request_id in received - told:
            self._log.error(
                "request %s: its push failed, and P may still write into its blocks: they are kept until it cannot",
                request_id,
            )
        output.finished_recving = told or None

    def take_counts(self) -> Counts:
        """For the metrics, what this side has counted since the last call."""
        return self.ledger.take_counts()

    # --- D ----------------------------------------------------------------------------------------------------

    def _accept_ticket(self, request: RequestLike, params: dict[str, Any]) -> None:
        if not self._facts.is_consumer:
            self._warn_once(
                "do_remote_prefill",
                "a request came with a ticket (do_remote_prefill), but this engine is a kv_producer: it prefills such "
                "requests itself. Set kv_role to kv_consumer or kv_both, or send them elsewhere.",
            )
            self.ledger.refused(request.request_id, request.num_prompt_tokens, Reason.ROLE)
            return
        try:
            handoff = self._parse(request, params)
        except TicketError as error:
            self.ledger.refused(request.request_id, request.num_prompt_tokens, Reason.TICKET_MALFORMED)
            self._log.warning("request %s: unusable ticket, prefilling here: %s", request.request_id, error)
            return
        is_refused_already = getattr(request, "abort_immediately", False)
        if handoff.ticket is not None and not is_refused_already:
            handoff.refused = self._why_unfit(handoff.ticket, request)
        self._handoffs.lead(handoff)
        replaced = self._handoffs.add(handoff)
        if replaced is not None:
            self._step(replaced, RequestEvent.REPLACED)
        self._begin(handoff)

    def _parse(self, request: RequestLike, params: dict[str, Any]) -> Handoff:
        """Raises TicketError."""
        ticket, source = None, None
        if is_ticket(params) or transfer_mode(params, self._facts.transfer_mode) == "pull":
            whole = parse_ticket(params)
            ticket = cut_to_state(self._facts.groups, whole, cut_to_shared(whole, request), request.num_prompt_tokens)
            source = ticket.push_source
        elif has_state(self._facts.groups):
            raise TicketError("a model with Mamba-like state is handed off by pull, with the ticket that P returns")
        else:
            source = parse_push_source(params)
        handoff = Handoff(self._holds.next_key(request.request_id), ticket, request.num_prompt_tokens, source)
        handoff.prompt = prompt_digest(request) if ticket is None else ticket.prompt
        return handoff

    def _begin(self, handoff: Handoff) -> None:
        mode, name = (Mode.PULL, "") if handoff.source is None else (Mode.PUSH, handoff.source.transfer_id)
        if handoff.source is None and handoff.remote is not None:
            name = handoff.remote.key.request_id
        reason = why_refused(handoff.refused)
        self.ledger.arrived(handoff.key, handoff.num_prompt_tokens, mode, handoff.origin, name, reason)
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
        digest = kv_digest(request, ticket.prompt.num_tokens)
        checks = (
            ("number of KV cache groups", len(facts.groups), len(ticket.block_ids)),
            ("number of block sizes", len(facts.groups), sum(size > 0 for size in ticket.block_size)),
            ("prompt_digest", digest, ticket.prompt.digest),
        )
        return "; ".join(f"{name} is {ours} here and {theirs} at P" for name, ours, theirs in checks if ours != theirs)

    def _end_token(self, handoff: Handoff) -> int:
        """Without a ticket P is expected to compute all of the prompt."""
        num_prompt_tokens = handoff.num_prompt_tokens
        return num_prompt_tokens if handoff.ticket is None else min(num_prompt_tokens, handoff.ticket.num_tokens)

    def _why_not_loadable(self, handoff: Handoff, first_token: int) -> str:
        """Why tokens from `first_token` on cannot be loaded exactly; "" if they can."""
        end_token, num_prompt_tokens = self._end_token(handoff), handoff.num_prompt_tokens
        for index, (group, table) in enumerate(zip(self._facts.groups, self._source_ids(handoff), strict=True)):
            size = None if handoff.ticket is None else handoff.ticket.block_size[index]
            token = missing_position(group, table, first_token, end_token, num_prompt_tokens, size)
            if token is not None:
                return f"token {token} has left the window of KV cache group {group.index}"
        return ""

    def _source_ids(self, handoff: Handoff) -> Sequence[Sequence[int]]:
        """P's blocks per group. Without a ticket: P still has all that it is going to compute."""
        if handoff.ticket is not None:
            return handoff.ticket.block_ids
        return [[1] * -(-handoff.num_prompt_tokens // group.block_tokens) for group in self._facts.groups]

    def _start_load(self, handoff: Handoff, blocks: Sequence[Sequence[BlockLike]], num_external_tokens: int) -> None:
        handoff.num_remote_tokens = num_external_tokens
        end_token = self._end_token(handoff)
        first_token = max(0, end_token - num_external_tokens)
        groups = self._facts.groups
        targets = tuple(target_table(transfer_table(group, blocks[group.index], end_token)) for group in groups)
        job = load_job(handoff, self._source_ids(handoff), targets, first_token, end_token)
        self._step(handoff, RequestEvent.LOAD, job)

    def _settle_without_load(self, handoff: Handoff, event: RequestEvent) -> None:
        """Nothing will come from P."""
        self._handoffs.settled(handoff)
        self._step(handoff, event)

    def _step(self, handoff: Handoff, event: RequestEvent, load: LoadJob | OfferJob | None = None) -> None:
        """Move it on, and note what the workers are to be told."""
        key, remote, work = handoff.key, handoff.remote, self._work
        for tell in handoff.step(event):
            if tell is Tell.WATCH and remote is not None:
                work.watches.append(Watch(key, remote))
            elif tell is Tell.WATCH and handoff.source is not None:
                work.announcements.append(AnnounceJob(key, handoff.source))
            elif tell is Tell.LOAD and isinstance(load, OfferJob):
                work.offers.append(load)
            elif tell is Tell.LOAD and load is not None:
                work.loads.append(load)
            elif tell is Tell.RELEASE and handoff.source is not None:
                work.withdrawals.append(WithdrawJob(key, handoff.source))
            elif tell is Tell.RELEASE and remote is not None:
                work.releases.append(ReleaseJob(key, remote))
            elif tell is Tell.END:
                work.ended.append(key)

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
        handoff = self._handoffs.load_ended(request_id, failed)
        if handoff is None:
            return not self._handoffs.was_reported(request_id)
        self.ledger.load_ended(request_id, failed)
        return True

    # --- P ----------------------------------------------------------------------------------------------------

    def _open_push(self, request: RequestLike, params: dict[str, Any]) -> None:
        """A request that is to be pushed; one whose parameters cannot be read is handed off by pull."""
        try:
            is_pulled = has_state(self._facts.groups) or transfer_mode(params, self._facts.transfer_mode) == "pull"
            if is_pulled:
                return
            # A ticket's transfer id is that of the push this request comes by, not of the one it is handed on by.
            name = "" if is_ticket(params) else transfer_id(params)
        except TicketError as error:
            self._log.warning("request %s: handed off by pull: %s", request.request_id, error)
            return
        if self._pushes.is_taken(name):
            self._log.warning(
                "request %s: another request has transfer_id %r; this one gets an id of its own, which its ticket says",
                request.request_id, name,
            )  # fmt: skip
            name = ""
        key = self._holds.next_key(request.request_id)
        if self._facts.no_push:
            self._warn_once("no_push", f"requests for a push are handed off by pull: {self._facts.no_push}")
            if name:
                self._pushes.refuse(self._work, request, key, name, self._facts.no_push)
            return
        name = name or f"{self._facts.engine_id}/{key.attempt}"
        self._pushes.open(self._work, request, key, name, prompt_digest(request).digest)

    def _can_hand_off(self, request: RequestLike, block_ids: Sequence[Sequence[int]]) -> bool:
        if not self._facts.is_producer or request.status.name not in _HANDED_OFF_BY:
            return False
        if not self._workers:
            self._warn_once(
                "workers", "this engine's workers have not said where they listen: requests are not handed off"
            )
            return False
        if not is_state_settled(self._facts.groups, request, num_vouched_tokens(request)):
            return False
        return any(any(block_ids[group.index]) for group in self._facts.groups)

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            self._log.warning("%s", text)
