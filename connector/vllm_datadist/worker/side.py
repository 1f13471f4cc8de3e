# SPDX-License-Identifier: Apache-2.0
"""The worker half of the connector: puts the pieces together and passes the engine's calls on to them.

P's part: `saves.LeaseTable`, and the services that peers call. D's part: `peers`, `renewals` and `loads`. Both parts
exist in every worker; a request decides which is used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import torch

from datadist_core.errors import CacheNotExist, LLMException, ProtocolError

from ..description import Description, check_compatible, decode, encode
from ..handoff.desk import StepDesk, StepEnds, WorkerPlace
from ..handoff.lease import Reader
from ..messages import (
    DESCRIBE,
    RELEASE,
    RENEW,
    Endpoint,
    LeaseAnswer,
    LeaseRef,
    LeaseState,
    Release,
    Renew,
    RequestKey,
    StepWork,
)
from .exchange import PushExchange, PushLimits
from .kv_layout import LocalCache
from .lease_calls import LeaseCalls
from .load_book import LoadBook
from .loads import LoadLimits, LoadResult, LoadRunner
from .memory import KvCachePlacement
from .node import DataDistNode
from .peers import PeerDirectory
from .pulls import BlockPuller, RegisteredCache
from .renewals import Renewals
from .saves import LeaseTable
from .shares import SourceBook
from .step_trace import ForwardTrace


class UnsupportedMemory(RuntimeError):
    """The KV cache lies in memory that no built-in backend can move. The text names what is missing."""


_Question = TypeVar("_Question", Renew, Release)
#: What this worker tells vLLM after a step.
StepResults = StepEnds[LoadResult]


class WorkerSide:
    """See the module. The engine's thread calls everything here but the service handlers."""

    def __init__(
        self,
        node: DataDistNode,
        place: WorkerPlace,
        limits: LoadLimits,
        log: logging.Logger,
        push_limits: PushLimits | None = None,
    ) -> None:
        self._push_limits = push_limits or PushLimits()
        self._exchange: PushExchange | None = None
        self._node = node
        self.place = place
        self._limits = limits
        self._log = log
        self._description: Description | None = None
        self._placement: KvCachePlacement | None = None
        self.leases = LeaseTable()
        self.book = LoadBook(place.index)
        self._lease_calls = LeaseCalls(node)
        self._peers = PeerDirectory(node, self._describe_ourselves, limits.link_timeout_s, log)
        self._renewals = Renewals(self._peers, self._lease_calls, log)
        self._loads: LoadRunner | None = None
        self._desk: StepDesk[LoadResult] | None = None
        self._forward = ForwardTrace()
        self._serve()

    # --- start ------------------------------------------------------------------------------------------------

    def place_kv_cache(self, size_bytes: int) -> KvCachePlacement:
        """The context for vLLM's KV cache allocation of `size_bytes`."""
        self._placement = KvCachePlacement(size_bytes, self._node.allocate)
        return self._placement

    def register(
        self, tensors: Mapping[str, torch.Tensor], caches: Sequence[LocalCache], description: Description
    ) -> None:
        """Make the KV cache known to peers. From now on this worker can take part in hand-offs."""
        check_memory(tensors)
        if self._placement is not None and not self._placement.placed:
            self._log.info("vLLM made its KV cache elsewhere than in the connector's pool: peers cannot map it")
        registered = [RegisteredCache(self._node.register(cache), cache.description) for cache in caches]
        puller = BlockPuller(self._node, registered, description)
        self._loads = LoadRunner(self._peers, self._lease_calls, puller, self._limits, self._log, self.book)
        push_limits, link_timeout_s = self._push_limits, self._limits.link_timeout_s
        self._exchange = PushExchange(
            self._node,
            registered,
            description,
            self.leases,
            self._peers,
            self.place,
            push_limits,
            link_timeout_s,
            self._log,
            self.book,
        )
        offers, pushes = self._exchange.offers, self._exchange.pushes
        find_sources = SourceBook(description).find_for
        self._desk = StepDesk(self.place, self.leases, self._renewals, self._loads, offers, pushes, find_sources)
        self._description = description

    @property
    def endpoint(self) -> Endpoint:
        """Goes into tickets."""
        place, node = self.place, self._node
        stages = (0,) if self._description is None else self._description.stages
        first_layer = stages[place.pp_rank] if place.pp_rank < len(stages) else 0
        return Endpoint(place.pp_rank, place.tp_rank, node.host, node.port, node.cluster_id, first_layer)

    @property
    def num_links(self) -> int:
        """Links of this worker that are up, from either side."""
        return self._node.num_links

    # --- every step -------------------------------------------------------------------------------------------

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler side decided. Never waits."""
        if work.drain_s is not None:
            self._log.info("the engine ends: %d hand-offs have %.1f s left", self.leases.num_active, work.drain_s)
            self.leases.end_within(work.drain_s)
        self._forward.begin(work)
        if work.workers and self._exchange is not None:
            self._exchange.set_workers(work.workers)
        if not work.is_empty():
            self._started_desk.start(work)

    def retract(self, work: StepWork) -> None:
        """Requests have lost their blocks to this step, which has not written to them yet. Never waits."""
        if self._exchange is not None:
            self._exchange.pushes.retract(work)

    def layer_computed(self, layer_name: str) -> None:
        """By this step's forward pass. Costs microseconds."""
        if self._exchange is not None:
            self._exchange.progress.computed(layer_name)
        self._forward.layer(layer_name)

    def step_computed(self) -> None:
        """All layers are, unless an error ends the step. Never waits."""
        if self._exchange is not None:
            self._exchange.progress.end(has_failed=sys.exc_info()[0] is not None)
        self._forward.end()

    def take_results(self) -> StepResults:
        if self._desk is None:
            return StepEnds(set(), set(), set(), ())
        return self._desk.take_ends()

    def drain(self, limit_s: float) -> None:
        """Let hand-offs that are outstanding end: nothing writes to their blocks any more."""
        self.leases.end_within(limit_s)
        num_left = self.leases.wait_until_none(limit_s)
        if num_left:
            self._log.warning("%d hand-offs were not taken within the %g s before this worker ends", num_left, limit_s)

    def close(self) -> None:
        """End threads, links and memory. Idempotent."""
        self._renewals.close()
        if self._loads is not None:
            self._loads.close()
        if self._exchange is not None:
            self._exchange.close()
        self._node.close()

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> LoadRunner:
        if self._loads is None:
            raise RuntimeError("register the KV cache before the first step")
        return self._loads

    @property
    def _started_desk(self) -> StepDesk[LoadResult]:
        if self._desk is None:
            raise RuntimeError("register the KV cache before the first step")
        return self._desk

    def _describe_ourselves(self) -> Description:
        if self._description is None:
            raise CacheNotExist("this engine is still starting: its KV cache is not registered yet")
        return self._description

    # --- services: called by peers, in the core's threads -----------------------------------------------------

    def _serve(self) -> None:
        self._node.serve(DESCRIBE, self._on_describe)
        self._node.serve(RENEW, self._on_renew)
        self._node.serve(RELEASE, self._on_release)
        self._node.on_link_lost(self._link_lost)

    def _link_lost(self, cluster_id: int, error: LLMException) -> None:
        self._peers.lost(cluster_id)
        if self._exchange is not None:
            self._exchange.link_lost(cluster_id, error)

    def _on_describe(self, cluster_id: int, body: bytes) -> bytes:
        ours, theirs = self._describe_ourselves(), decode(body)
        check_compatible(ours, theirs)
        if self._exchange is not None:
            self._exchange.described(cluster_id, theirs)
        return encode(ours)

    def _on_renew(self, cluster_id: int, body: bytes) -> bytes:
        question = _decode(RENEW, body, Renew)
        return _encode(self.leases.renew(_keys(question.leases)))

    def _on_release(self, cluster_id: int, body: bytes) -> bytes:
        question = _decode(RELEASE, body, Release)
        reader = Reader(cluster_id, _key(question.reader))
        return _encode(self.leases.release(_keys(question.leases), reader, question.num_readers))


def check_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedMemory for tensors that are not in CPU memory."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise device_unsupported(tensor.device.type, f"layer {name}")


def device_unsupported(device_type: str, what: str) -> UnsupportedMemory:
    return UnsupportedMemory(
        f"{what}: the KV cache is in {device_type} memory, but this version moves CPU memory only. "
        "Run vLLM's CPU build, or use another connector."
    )


def _decode(name: str, body: bytes, kind: type[_Question]) -> _Question:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"{name}: the question cannot be read: {error}") from error


def _encode(states: list[LeaseState]) -> bytes:
    return msgspec.msgpack.encode(LeaseAnswer(states))


def _keys(refs: list[LeaseRef]) -> list[RequestKey]:
    return [_key(ref) for ref in refs]


def _key(ref: LeaseRef) -> RequestKey:
    return RequestKey(ref.request_id, ref.attempt)
