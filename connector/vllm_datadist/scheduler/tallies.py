# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's book on hand-offs: it sees each request once, however many workers there are.

D: a request that came with a ticket has a page from its arrival until it is known where its prompt's tokens come from:
from P, from the prefix cache here, or computed here, and then why. That is also when the one line at DEBUG is written:

    queued  -- blocks, nothing to load ----------------------------> concluded
            -- blocks, a load --> loading -- load ended well ------> concluded
                                          -- failed --> restarting -- blocks again (recompute), or finished -> concluded
    finished before: aborted, concluded (while loading: when the load has ended)

P: a request has a page from when its blocks are held until they are free.

What only workers know (bytes, peers, times, why a load failed) comes in their reports, before vLLM hears of the end.
Without a report (an older vLLM does not pass them on) those parts of the line are missing. Nothing here raises for
what vLLM may do, in whatever order: unknown requests are not in the book.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .. import trace
from ..counts import Awaited, Counts, Failure, HoldOutcome, Mode, Outcome, Reason
from ..messages import LoadReport, RequestKey, WorkerNotes
from .step_trace import StepTrace


class _Phase(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    RESTARTING = "restarting"


@dataclass(slots=True)
class _Page:
    """One request at D. `num_loadable`: tokens we told vLLM P has for it. Times are of the ledger's clock."""

    key: RequestKey
    mode: Mode
    num_prompt_tokens: int
    arrived_s: float
    source: str = ""
    trace_key: str = ""
    reason: Reason | None = None
    is_refused: bool = False
    phase: _Phase = _Phase.QUEUED
    num_cached: int = 0
    num_loadable: int = 0
    num_remote: int = 0
    blocks_s: float = 0.0
    load_s: float = 0.0
    is_finished: bool = False
    is_aborted: bool = False
    reports: list[LoadReport] = field(default_factory=list)


@dataclass(slots=True)
class _Hold:
    """One request at P."""

    key: RequestKey
    mode: Mode
    num_tokens: int
    since_s: float
    trace_key: str
    outcomes: list[HoldOutcome] = field(default_factory=list)


#: What is said of a hand-off whose workers disagree: the first of these that any of them reports.
_WORST_FIRST = (
    HoldOutcome.EXPIRED,
    HoldOutcome.ABANDONED,
    HoldOutcome.RELEASED,
)
_FAILURES: Mapping[Failure, Reason] = {
    Failure.LINK: Reason.LOAD_LINK,
    Failure.TIMED_OUT: Reason.LOAD_TIMED_OUT,
    Failure.LEASE_LOST: Reason.LOAD_LEASE_LOST,
    Failure.REFUSED: Reason.LOAD_REFUSED,
    Failure.INTEGRITY: Reason.LOAD_INTEGRITY,
    Failure.PEER: Reason.LOAD_PEER,
}
_REFUSALS: Mapping[str, Reason] = {
    "number of KV cache groups": Reason.TICKET_GROUPS,
    "number of block sizes": Reason.TICKET_GROUPS,
    "prompt_digest": Reason.TICKET_PROMPT,
}
#: Of workers that failed differently: a load that was cancelled, because another part of it had failed, says least.
_LEAST_TELLING = (Failure.CANCELLED, Failure.OTHER)
_OUTCOMES: Mapping[Reason, Outcome] = {
    Reason.NOTHING_NEEDED: Outcome.NOT_NEEDED,
    Reason.BEYOND_TICKET: Outcome.NOT_NEEDED,
    Reason.OTHER_CONNECTOR: Outcome.NOT_NEEDED,
    Reason.FOLLOWER: Outcome.FOLLOWED,
}


class Ledger:
    """See the module. Called by vLLM's scheduler, from one thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._counts = Counts()
        self._pages: dict[str, _Page] = {}
        self._holds: dict[str, _Hold] = {}
        self._num_holds_told = 0
        self._steps = StepTrace()

    def take_counts(self) -> Counts:
        """What was counted since the last call."""
        if len(self._holds) != self._num_holds_told:
            self._num_holds_told = len(self._holds)
            self._counts.gauge("active_leases", self._num_holds_told)
        counts, self._counts = self._counts, Counts()
        return counts

    def num_open(self) -> int:
        """Pages that are not concluded."""
        return len(self._pages) + len(self._holds)

    # --- D ----------------------------------------------------------------------------------------------------

    def arrived(
        self,
        key: RequestKey,
        num_prompt_tokens: int,
        mode: Mode = Mode.PULL,
        source: str = "",
        trace_key: str = "",
        reason: Reason | None = None,
    ) -> None:
        """A request with a ticket. `source`: P's engine; `reason`: why its ticket is of no use, if it is not."""
        before = self._pages.get(key.request_id)
        if before is not None:
            self._conclude(before, Outcome.ABORTED)
        self._pages[key.request_id] = _Page(
            key, mode, num_prompt_tokens, self._clock(), source, trace_key or key.request_id, reason, reason is not None
        )

    def refused(self, request_id: str, num_prompt_tokens: int, reason: Reason) -> None:
        """A request whose ticket cannot even be read, or is not for this engine."""
        self.arrived(RequestKey(request_id, 0), num_prompt_tokens, reason=reason)

    def looked_up(
        self, request_id: str, num_cached: int, num_loadable: int | None, reason: Reason | None = None
    ) -> None:
        """vLLM's prefix cache has so many of its tokens, and P so many more (None: ask again later).

        `reason`: why P has none, if nothing is loaded in the end.
        """
        page = self._pages.get(request_id)
        if page is None or page.phase is _Phase.LOADING:
            return
        page.num_cached = num_cached
        if page.phase is _Phase.QUEUED and not page.is_refused:
            page.num_loadable, page.reason = num_loadable or 0, reason

    def allocated(self, request_id: str, num_remote: int) -> None:
        """vLLM has given it blocks, and waits for a load if the number is > 0."""
        page = self._pages.get(request_id)
        if page is None or page.phase is _Phase.LOADING:
            return
        if page.phase is _Phase.RESTARTING:
            self._conclude(page, Outcome.FAILED)
            return
        page.blocks_s = self._clock()
        self._counts.time("wait_seconds", page.blocks_s - page.arrived_s, Awaited.BLOCKS, page.mode, "scheduler")
        trace.record("queued", page.trace_key, page.arrived_s, page.blocks_s, "queued", request=request_id)
        if num_remote > 0:
            page.phase, page.num_remote, page.reason = _Phase.LOADING, num_remote, None
            return
        default = Reason.OTHER_CONNECTOR if page.num_loadable else Reason.NOTHING_NEEDED
        page.reason = page.reason or default
        self._conclude(page, _OUTCOMES.get(page.reason, Outcome.REFUSED))

    def load_ended(self, request_id: str, failed: bool) -> None:
        """All workers have ended its load."""
        page = self._pages.get(request_id)
        if page is None or page.phase is not _Phase.LOADING:
            return
        ended_s = self._clock()
        page.load_s = ended_s - page.blocks_s
        self._counts.time("load_seconds", page.load_s, page.mode)
        error = {"error": self._failure(page).value} if failed else {}
        trace.record("load", page.trace_key, page.blocks_s, ended_s, "loads", request=request_id, **error)
        if not failed:
            self._conclude(page, Outcome.ABORTED if page.is_finished else Outcome.LOADED)
            return
        if not page.is_aborted:
            self._counts.count("failed_loads", 1, page.mode)
        page.phase = _Phase.RESTARTING
        page.reason = _FAILURES.get(self._failure(page), Reason.LOAD_OTHER)
        if page.is_finished:
            self._conclude(page, Outcome.ABORTED if page.is_aborted else Outcome.FAILED)

    def finished(self, request_id: str, is_aborted: bool) -> None:
        """vLLM is done with a request, for whatever reason."""
        self._steps.finished(request_id)
        page = self._pages.get(request_id)
        if page is None or page.is_finished:
            return
        page.is_finished, page.is_aborted = True, is_aborted
        if page.phase is _Phase.QUEUED:
            self._conclude(page, Outcome.ABORTED)
        elif page.phase is _Phase.RESTARTING:
            self._conclude(page, Outcome.FAILED)

    def heard(self, notes: object) -> None:
        """What the workers say, if that is what it is."""
        if not isinstance(notes, WorkerNotes):
            return
        for load in notes.loads:
            page = self._pages.get(load.key.request_id)
            if page is not None and page.key == load.key and page.phase is _Phase.LOADING:
                page.reports.append(load)
        for one in notes.holds:
            hold = self._holds.get(one.key.request_id)
            if hold is not None and hold.key == one.key:
                hold.outcomes.append(one.outcome)

    def scheduled(self, scheduler_output: Any) -> None:
        """What vLLM has decided for a step; only a trace wants to know."""
        if trace.is_on():
            self._steps.scheduled(scheduler_output)

    # --- P ----------------------------------------------------------------------------------------------------

    def asked(self, request_id: str, trace_key: str = "") -> None:
        """A request that P is to hand off has arrived."""
        self._steps.await_prefill(request_id, trace_key or request_id)

    def held(self, key: RequestKey, num_tokens: int, mode: Mode = Mode.PULL, trace_key: str = "") -> None:
        """The blocks of a request that P has prefilled are kept from now on."""
        self._holds[key.request_id] = _Hold(key, mode, num_tokens, self._clock(), trace_key or key.request_id)

    def hold_ended(self, request_id: str) -> None:
        """All workers have let go of its blocks."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return
        now_s = self._clock()
        outcome = next((one for one in _WORST_FIRST if one in hold.outcomes), HoldOutcome.UNKNOWN)
        self._counts.count("handoffs", 1, hold.mode, outcome)
        self._counts.count("leases_expired", int(outcome is HoldOutcome.EXPIRED))
        self._counts.time("lease_seconds", now_s - hold.since_s, hold.mode)
        trace.record("lease", hold.trace_key, hold.since_s, now_s, "leases", outcome=outcome.value)
        self._log.debug(
            "request %s: handed off %d tokens (%s): %s after %.1f ms",
            request_id,
            hold.num_tokens,
            hold.mode.value,
            outcome.value,
            1000 * (now_s - hold.since_s),
        )

    def not_held(self, mode: Mode) -> None:
        """A request of P for which a hand-off was begun ended without one."""
        self._counts.count("handoffs", 1, mode, HoldOutcome.ABANDONED)

    # --- inside -----------------------------------------------------------------------------------------------

    def _failure(self, page: _Page) -> Failure:
        found = [report.failure for report in page.reports if report.failure is not None]
        telling = [failure for failure in found if failure not in _LEAST_TELLING]
        return (telling or found or [Failure.OTHER])[0]

    def _conclude(self, page: _Page, outcome: Outcome) -> None:
        """Count it, say it, and close the page."""
        self._pages.pop(page.key.request_id, None)
        self._counts.count("requests", 1, page.mode, outcome)
        split = _split(page, outcome)
        self._counts.count("remote_tokens", split.num_remote, page.mode)
        self._counts.count("cached_tokens", split.num_cached)
        self._counts.count("local_tokens", split.num_cached + split.num_computed)
        self._counts.count("recomputed_tokens", split.num_computed, page.reason or Reason.BEYOND_TICKET)
        if not page.is_finished:
            self._steps.await_first(page.key.request_id, page.trace_key)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s", _line(page, outcome, split))


@dataclass(frozen=True, slots=True)
class _Split:
    """Where the tokens of a prompt came from."""

    num_remote: int = 0
    num_cached: int = 0
    num_computed: int = 0


def why_refused(text: str) -> Reason | None:
    """The kind of a refusal, from the name of the field that its text begins with. None for no text."""
    if not text:
        return None
    return next((reason for name, reason in _REFUSALS.items() if text.startswith(name)), Reason.TICKET_OTHER)


def _split(page: _Page, outcome: Outcome) -> _Split:
    """Nothing of a request that was finished before it had its tokens."""
    if page.is_finished or outcome is Outcome.ABORTED:
        return _Split()
    num_remote = min(page.num_remote, page.num_prompt_tokens) if outcome is Outcome.LOADED else 0
    num_cached = min(page.num_cached, page.num_prompt_tokens - num_remote)
    return _Split(num_remote, num_cached, page.num_prompt_tokens - num_remote - num_cached)


def _line(page: _Page, outcome: Outcome, split: _Split) -> str:
    reason = page.reason or (Reason.BEYOND_TICKET if split.num_computed else None)
    why = "" if reason is None else f" because {reason.value}"
    source = f" {page.source}" if page.source else ""
    return (
        f"request {page.key.request_id}: {outcome.value} ({page.mode.value}): of {page.num_prompt_tokens} prompt "
        f"tokens {split.num_remote} from P{source}, {split.num_cached} cached here, {split.num_computed} computed "
        f"here{why}{_details(page)}"
    )


def _details(page: _Page) -> str:
    """Peers, bytes and times of its load; "" if there was none."""
    if page.phase is _Phase.QUEUED:
        return ""
    moved = f"; {1000 * (page.blocks_s - page.arrived_s):.1f} ms for blocks, {1000 * page.load_s:.1f} ms to load"
    if not page.reports:
        return moved
    peers = _listed(peer for report in page.reports for peer in report.peers)
    return f"{moved}:{_bytes(page.reports)} from {peers}{_waits(page)}"


def _bytes(reports: Sequence[LoadReport]) -> str:
    backends = _listed(backend for report in reports for backend in report.backends)
    num_bytes = sum(report.num_bytes for report in reports)
    if not num_bytes:
        return ""
    return f" {num_bytes} bytes in {1000 * max(report.transfer_s for report in reports):.1f} ms over {backends}"


def _waits(page: _Page) -> str:
    """The longest one of any worker, for each."""
    longest: dict[str, float] = {}
    for report in page.reports:
        for awaited, seconds in report.waits_s.items():
            longest[awaited] = max(longest.get(awaited, 0.0), seconds)
    texts = [f"{1000 * seconds:.1f} ms for {awaited}" for awaited, seconds in longest.items()]
    return ", waited " + ", ".join(texts) if texts else ""


def _listed(names: Iterable[str], most: int = 8) -> str:
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) + more) or "nobody"
