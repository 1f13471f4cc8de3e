# SPDX-License-Identifier: Apache-2.0
"""Who P's workers are, as P says or a ticket names them: what cannot be is refused at once, and in no time.

Finding the holders of a head takes time for each rank there is, so the ranks are checked before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from connector.tests.shaped_engine import Layers, Shape, engine
from datadist_core.errors import ProtocolError, RemoteError
from vllm_datadist.description import Description, Incompatible
from vllm_datadist.messages import Endpoint
from vllm_datadist.params import MAX_WORKERS
from vllm_datadist.worker.claims import check_claim, engine_claim
from vllm_datadist.worker.directory import EngineClaim, WorkerAddress, Workers
from vllm_datadist.worker.planner import PlanError
from vllm_datadist.worker.shares import find_sources
from vllm_datadist.worker.sources import read_workers

#: A D with these takes minutes, or all memory, if it looks at every rank up to the largest.
HUGE = 2**40
IMPOSSIBLE = [
    [(0, HUGE)],
    [(0, 0), (0, HUGE)],
    [(0, 0), (HUGE, 0)],
    [(0, -1)],
    [(0, -1), (0, 1)],
    [(-1, 0), (0, 0)],
    [(0, 0), (0, 2)],
]
Ranks = Sequence[tuple[int, int]]


def _reply(ranks: Ranks) -> bytes:
    workers = [WorkerAddress(pp, tp, "10.0.0.1", 7000 + i, i + 1) for i, (pp, tp) in enumerate(ranks)]
    return msgspec.msgpack.encode(Workers(workers))


@pytest.mark.parametrize("ranks", IMPOSSIBLE, ids=str)
def test_ranks_that_so_many_workers_cannot_have_are_refused(ranks: Ranks) -> None:
    [d] = engine(Shape(1), 16, seed=1)
    started_s = time.monotonic()
    workers = [replace(d.endpoint, pp_rank=pp, tp_rank=tp, cluster_id=i + 1) for i, (pp, tp) in enumerate(ranks)]
    with pytest.raises(PlanError, match=r"P's \d workers have (pp|tp)_rank -?\d+\.\.-?\d+"):
        find_sources(d.description, workers)
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("ranks", [*IMPOSSIBLE, [(0, 0), (0, 0)]], ids=str)
def test_a_peer_that_names_such_workers_is_not_believed(ranks: Ranks) -> None:
    with pytest.raises(ProtocolError, match=r"datadist\.workers: the peer names .* expected one of each pp_rank"):
        read_workers(_reply(ranks), 1)


def test_a_peer_that_names_too_many_workers_or_none_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_WORKERS + 1} workers, expected 1..{MAX_WORKERS}"):
        read_workers(_reply([(0, rank) for rank in range(MAX_WORKERS + 1)]), 1)
    with pytest.raises(RemoteError, match="has not told its workers of each other yet"):
        read_workers(_reply([]), 1)
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_workers(b"\xc1", 1)


def test_the_workers_of_one_engine_are_found_in_any_order() -> None:
    found = read_workers(_reply([(1, 1), (0, 0), (1, 0), (0, 1)]), 1).workers
    assert found[0] == Endpoint(1, 1, "10.0.0.1", 7000, 1)
    assert {(one.pp_rank, one.tp_rank) for one in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"host": ""}, "names a worker at '', port 7000: a host is a text of 1..254 characters"),
        ({"host": "a b"}, "names a worker at 'a b', port 7000: that is no host name"),
        ({"host": "x" * 300}, "a host is a text of 1..254 characters"),
        ({"port": 0}, "port 0: a port is 1..65535"),
        ({"port": 1 << 40}, "a port is 1..65535"),
        ({"cluster_id": 0}, "cluster_id 0 and first_layer 0 are no worker's"),
        ({"cluster_id": -1}, "cluster_id -1"),
        ({"first_layer": -1}, "first_layer -1 are no worker's"),
        ({"cluster_id": 2}, "some have the same cluster_id"),
        ({"cluster_id": 99}, r"does not name itself \(cluster 1\)"),
    ],
)
def test_a_worker_that_cannot_be_one_is_not_looked_for(change: dict[str, object], text: str) -> None:
    workers = [WorkerAddress(0, rank, "10.0.0.1", 7000 + rank, rank + 1) for rank in range(2)]
    workers[0] = msgspec.structs.replace(workers[0], **change)
    with pytest.raises(ProtocolError, match=text) as caught:
        read_workers(msgspec.msgpack.encode(Workers(workers)), 1)
    assert len(str(caught.value)) < 300


UNLIKE_STAGES = Shape(2, stages=(0, 2), groups=(Layers((0, 1)), Layers((2, 3), window=24, total_heads=2)))


def _described(shape: Shape) -> list[tuple[Endpoint, Description]]:
    scaled = []
    for rank in engine(shape, 16, seed=1):
        of_a_layer = {f"layer {rank.pp_rank}: K and V scales": "[1, 1]", "hidden_size": "64"}
        scaled.append((rank.endpoint, msgspec.structs.replace(rank.description, model_config=of_a_layer)))
    return scaled


def test_each_worker_of_an_engine_may_speak_for_all() -> None:
    """Also where stages have other layers, groups and scales."""
    workers = _described(UNLIKE_STAGES)
    for _, asked in workers:
        claim = msgspec.msgpack.decode(msgspec.msgpack.encode(engine_claim(asked)), type=EngineClaim)
        for named, found in workers:
            check_claim(named, claim, found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp_rank": 1}, "tp_rank is 0 there and 1 here"),
        ({"pp_rank": 1}, "pp_rank is 0 there and 1 here; first_layer is 0 there and 2 here"),
        ({"tp_size": 4}, "tp_size is 2 there and 4 here"),
        ({"pp_size": 3}, "pp_size is 2 there and 3 here"),
        ({"dp_rank": 1}, "dp_rank is 0 there and 1 here"),
        ({"stages": (1, 2)}, "first_layer is 0 there and 1 here"),
        ({"stages": (0, 3)}, "fingerprint is '"),
        ({"model": "other"}, "fingerprint is '"),
        ({"model_config": {"hidden_size": "128"}}, "fingerprint is '"),
        ({"model_layers": ()}, "fingerprint is '"),
    ],
    ids=str,
)
def test_a_worker_that_says_something_else_of_itself_is_named_with_both_values(
    changes: dict[str, object], text: str
) -> None:
    (named, found), *_ = _described(UNLIKE_STAGES)
    with pytest.raises(Incompatible, match=re.escape(text)) as caught:
        check_claim(named, engine_claim(found), msgspec.structs.replace(found, **changes))
    assert "P's worker at p:1 is not what its engine's answer to datadist.workers says" in str(caught.value)


def test_blocks_of_another_size_are_named() -> None:
    (named, found), *_ = _described(UNLIKE_STAGES)
    other = engine_claim(_described(replace(UNLIKE_STAGES, block_tokens=64))[0][1])
    with pytest.raises(Incompatible, match="block_tokens of KV cache group 0 is 64 there and 16 here"):
        check_claim(named, other, found)
