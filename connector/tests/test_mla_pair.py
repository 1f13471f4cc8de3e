# SPDX-License-Identifier: Apache-2.0
"""The MLA layout, one latent vector of 576 values per token, moved between two workers over the real core, bit by bit.

This is the exactness test of MLA: vLLM's CPU kernel cannot be one, because it does not reproduce its own text.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from connector.tests.test_worker_pair import ALONE, LAYERS, LEASE_S, LIMITS, Worker, _describe, _lease, _results, log
from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import BlockTables, LeaseOpen, LoadJob, RequestKey, StepWork
from vllm_datadist.worker.kv_layout import HeadShare, describe_caches
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import WorkerSide

NUM_BLOCKS, TOKENS, LATENT = 12, 16, 576
GROUP = GroupInfo(0, TOKENS, None, LAYERS)
SIZE_BYTES = len(LAYERS) * NUM_BLOCKS * TOKENS * LATENT * 4


def _start(backend: str) -> Worker:
    side = WorkerSide(DataDistNode("127.0.0.1", 0, backend, SIZE_BYTES), ALONE, LIMITS, log)
    with side.place_kv_cache(SIZE_BYTES):
        raw = torch.zeros(SIZE_BYTES, dtype=torch.int8, device="cpu")
    views = raw.view(torch.float32).view(len(LAYERS), NUM_BLOCKS, 1, TOKENS, LATENT)
    tensors = dict(zip(LAYERS, views, strict=True))
    caches = describe_caches(tensors, [GROUP], ["mla_attention"], NUM_BLOCKS, HeadShare(0, 1, 1))
    described = _describe(use_mla=True, caches=[cache.description for cache in caches])
    side.register(tensors, caches, msgspec.structs.replace(described))
    return Worker(side, tensors)


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    workers: list[Worker] = []
    try:
        workers += [_start(request.param), _start(request.param)]
        yield workers[0], workers[1]
    finally:
        for worker in workers:
            worker.side.close()


@pytest.mark.parametrize(
    ("source", "target", "first_token", "end_token"),
    [
        pytest.param([5], [2], 0, 1, id="1"),
        pytest.param([5, 3], [2, 9], 0, TOKENS + 1, id="B+1"),
        pytest.param([5, 3, 4], [2, 9, 10], 0, 3 * TOKENS, id="3B"),
        pytest.param([5, 3, 4, 11], [2, 9, 10, 0], 2 * TOKENS, 3 * TOKENS + 1, id="two blocks are here"),
    ],
)
def test_latent_blocks_arrive_bit_by_bit(
    pair: tuple[Worker, Worker], source: list[int], target: list[int], first_token: int, end_token: int
) -> None:
    p, d = pair
    for seed, name in enumerate(LAYERS):
        p.tensors[name].copy_(torch.rand(p.tensors[name].shape, generator=torch.Generator().manual_seed(seed)))
    remote = _lease(p)
    p.side.start(StepWork(leases=[LeaseOpen(remote.key, LEASE_S)]))
    tables = BlockTables(tuple(source), tuple(target))
    d.side.start(StepWork(loads=[LoadJob(RequestKey("d-1", 1), remote, (tables,), first_token, end_token)]))
    results = _results(d, lambda results: bool(results.received))
    assert results.failed == set(), results.loads[0].error
    first = first_token // TOKENS
    assert torch.equal(d.blocks(target[first:]), p.blocks(source[first:]))
    untouched = [i for i in range(NUM_BLOCKS) if i not in target[first:]]
    assert not d.blocks(untouched).any()
