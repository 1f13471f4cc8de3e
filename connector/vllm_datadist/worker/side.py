# SPDX-License-Identifier: Apache-2.0
"""The worker half of the connector: puts the pieces together and passes the engine's calls on to them.

P's part: `saves.LeaseTable`, and the services that peers call. D's part: `peers`, `renewals` and `loads`. Both parts
exist in every worker; a request decides which is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from datadist_core.errors import CacheNotExist, LinkFailed, ProtocolError

from ..description import Description, check_compatible, decode, encode
from ..messages import (
    DESCRIBE,
    RELEASE,
    RENEW,
    Endpoint,
    LeaseAnswer,
    LeaseState,
    LoadJob,
    Release,
    RemoteLease,
    Renew,
    RequestKey,
    StepWork,
)
from .kv_layout import LocalCache
from .lease_calls import LeaseCalls
from .loads import LoadLimits, LoadResult, LoadRunner
from .memory import KvCachePlacement
from .node import DataDistNode
from .peers import PeerDirectory
from .pulls import BlockPuller, RegisteredCache
from .renewals import Renewals
from .saves import LeaseTable


class UnsupportedMemory(RuntimeError):
    """The KV cache lies in memory that no built-in backend can move. The text names what is missing."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """This worker among its engine's workers."""

    pp_rank: int
    tp_rank: int
    tp_size: int
    world_size: int

    @property
    def index(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def counts(self) -> bool:
        """Whether this worker reports what all workers see alike."""
        return self.index == 0


@dataclass(frozen=True, slots=True)
class StepResults:
    """What this worker tells vLLM: request ids, each exactly once. `failed` is part of `received`."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    loads: tuple[LoadResult, ...]


class WorkerSide:
    """See the module. The engine's thread calls everything here but the service handlers."""

    def __init__(self, node: DataDistNode, place: WorkerPlace, limits: LoadLimits, log: logging.Logger) -> None:
        self._node = node
        self.place = place
        self._limits = limits
        self._log = log
        self._description: Description | None = None
        self._placement: KvCachePlacement | None = None
        self.leases = LeaseTable()
        self._lease_calls = LeaseCalls(node)
        self._peers = PeerDirectory(node, self._describe_ourselves, limits.link_timeout_s, log)
        self._renewals = Renewals(self._peers, self._lease_calls, log)
        self._loads: LoadRunner | None = None
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
        self._loads = LoadRunner(
            self._peers, self._lease_calls, BlockPuller(self._node, registered), self._limits, self._log
        )
        self._description = description

    @property
    def endpoint(self) -> Endpoint:
        """Goes into tickets."""
        place, node = self.place, self._node
        return Endpoint(place.pp_rank, place.tp_rank, node.host, node.port, node.cluster_id)

    # --- every step -------------------------------------------------------------------------------------------

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler side decided. Never waits."""
        for lease in work.leases:
            self.leases.open(lease.key, lease.lease_s)
        for watch in work.watches:
            endpoint = self._counterpart(watch.remote)
            if endpoint is not None:
                self._renewals.watch(watch.key, watch.remote, endpoint)
        for load in work.loads:
            self._start_load(load)
        for release in work.releases:
            self._renewals.unwatch(release.key)
            for endpoint in self._share_of(release.remote):
                self._runner.submit_release(release, endpoint)
        for key in work.ended:
            self._end(key)

    def take_results(self) -> StepResults:
        loads = tuple(self._loads.take_results()) if self._loads is not None else ()
        for load in loads:
            self._renewals.unwatch(load.key)
        return StepResults(
            sent={key.request_id for key in self.leases.take_finished()},
            received={load.key.request_id for load in loads},
            failed={load.key.request_id for load in loads if load.error is not None},
            loads=loads,
        )

    def close(self) -> None:
        """End threads, links and memory. Idempotent."""
        self._renewals.close()
        if self._loads is not None:
            self._loads.close()
        self._node.close()

    # --- inside -----------------------------------------------------------------------------------------------

    @property
    def _runner(self) -> LoadRunner:
        if self._loads is None:
            raise RuntimeError("register the KV cache before the first step")
        return self._loads

    def _start_load(self, load: LoadJob) -> None:
        endpoint = self._counterpart(load.remote)
        if endpoint is None:
            self._runner.fail_load(load, LinkFailed(f"P has no worker of rank {self.place.index}"))
        else:
            self._runner.submit_load(load, endpoint)

    def _end(self, key: RequestKey) -> None:
        self._renewals.unwatch(key)
        self._runner.cancel(key)

    def _counterpart(self, remote: RemoteLease) -> Endpoint | None:
        """P's worker of our rank."""
        place = self.place
        ranks = (place.pp_rank, place.tp_rank)
        return next((worker for worker in remote.workers if (worker.pp_rank, worker.tp_rank) == ranks), None)

    def _share_of(self, remote: RemoteLease) -> tuple[Endpoint, ...]:
        """The workers of P that this worker tells; together ours tell all, also if there are more or fewer."""
        return remote.workers[self.place.index :: self.place.world_size]

    def _describe_ourselves(self) -> Description:
        if self._description is None:
            raise CacheNotExist("this engine is still starting: its KV cache is not registered yet")
        return self._description

    # --- services: called by peers, in the core's threads -----------------------------------------------------

    def _serve(self) -> None:
        self._node.serve(DESCRIBE, self._on_describe)
        self._node.serve(RENEW, self._on_renew)
        self._node.serve(RELEASE, self._on_release)
        self._node.on_link_lost(lambda cluster_id, error: self._peers.lost(cluster_id))

    def _on_describe(self, cluster_id: int, body: bytes) -> bytes:
        ours = self._describe_ourselves()
        check_compatible(ours, decode(body))
        return encode(ours)

    def _on_renew(self, cluster_id: int, body: bytes) -> bytes:
        return _answer(self.leases.renew, RENEW, body, Renew)

    def _on_release(self, cluster_id: int, body: bytes) -> bytes:
        return _answer(self.leases.release, RELEASE, body, Release)


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


def _answer(
    act: Callable[[list[RequestKey]], list[LeaseState]], name: str, body: bytes, kind: type[Renew] | type[Release]
) -> bytes:
    try:
        leases = msgspec.msgpack.decode(body, type=kind).leases
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{name}: the question cannot be read: {error}") from error
    keys = [RequestKey(lease.request_id, lease.attempt) for lease in leases]
    return msgspec.msgpack.encode(LeaseAnswer(act(keys)))
