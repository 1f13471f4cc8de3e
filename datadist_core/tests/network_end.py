# SPDX-License-Identifier: Apache-2.0
"""An LLMDataDist with one cache, in a process of its own, in a network namespace of its own."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datadist_core import BlocksCacheKey, LLMConfig, LLMDataDist, LLMException, LLMRole
from datadist_core.testing.lossy_network import in_namespace
from datadist_core.testing.parallel import require_all
from datadist_core.testing.remote import RemoteObject
from datadist_core.tests.core_ends import LINK_MS, desc, filled_cache, manager, remote_info

ANSWER_TIMEOUT_S = 90.0
NUM_TENSORS = 2
Blocks = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Size:
    """Of the cache."""

    num_blocks: int
    block_floats: int


@dataclass(frozen=True, slots=True)
class Move:
    """Pull blocks `src` of the peer into `dst`, or push ours `src` into its `dst`."""

    push: bool
    src: Sequence[int]
    dst: Sequence[int]


class NetworkEnd:
    """What lives in the process; see `end_in`. Its cache is filled with its cluster id as the seed."""

    def __init__(self, cluster_id: int, address: str, size: Size, options: dict[str, Any]) -> None:
        config = LLMConfig()
        config.transfer_backend = "tcp"
        config.enable_cache_manager = True
        config.listen_ip_info = f"{address}:0"
        config.host_mem_pool_cfg = '{"memory_size": 67108864}'
        config.global_resource_config = json.dumps({"tcp": options})
        self.end = LLMDataDist(LLMRole.MIX, cluster_id)
        self.end.init(config)
        self.cache = filled_cache(self.end, cluster_id, 0, desc(NUM_TENSORS, size.num_blocks, size.block_floats))

    def port(self) -> int:
        address = self.end.listen_address
        assert address is not None
        return address.port

    def link(self, cluster_id: int, host: str, port: int, timeout_ms: int = LINK_MS) -> tuple[str, str]:
        """Status, and the reason of a failure."""
        _, each = self.end.link_clusters([remote_info(cluster_id, host, port)], timeout=timeout_ms)
        return each[0].name, str(self.end.link_failure(cluster_id))

    def forget(self, cluster_id: int, host: str, port: int) -> str:
        """Forced unlink: does not need the peer."""
        _, each = self.end.unlink_clusters([remote_info(cluster_id, host, port)], timeout=LINK_MS, force=True)
        return each[0].name

    def move(self, peer_id: int, move: Move, deadline_s: float) -> None:
        run = manager(self.end).push_blocks if move.push else manager(self.end).pull_blocks
        run(BlocksCacheKey(peer_id), self.cache, list(move.src), list(move.dst), deadline_s=deadline_s)

    def move_at_once(self, peer_id: int, moves: Sequence[Move], deadline_s: float) -> None:
        require_all([functools.partial(self.move, peer_id, move, deadline_s) for move in moves])

    def failure(self, peer_id: int, move: Move, deadline_s: float) -> str:
        """The status that a move ends with."""
        try:
            self.move(peer_id, move, deadline_s)
        except LLMException as error:
            return error.status_code.name
        return "LLM_SUCCESS"

    def blocks(self) -> Blocks:
        return [tensor.copy() for tensor in self.cache.numpy()]

    def check(self, cluster_id: int) -> None:
        self.end.check_link_status(cluster_id)


def end_in(namespace: str, cluster_id: int, address: str, size: Size, **options: Any) -> RemoteObject:
    """A `NetworkEnd` in that namespace, with `address` to listen at and options of the backend. The caller kills it."""
    return RemoteObject(
        in_namespace, (namespace, NetworkEnd, (cluster_id, address, size, options)), ANSWER_TIMEOUT_S, forkserver=True
    )


def initial_blocks(cluster_id: int, size: Size) -> Blocks:
    """What the cache of a new end holds."""
    numbers = np.random.default_rng(cluster_id)
    shape = (size.num_blocks, size.block_floats)
    return [numbers.random(shape, dtype=np.float32) for _ in range(NUM_TENSORS)]
