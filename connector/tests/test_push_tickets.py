# SPDX-License-Identifier: Apache-2.0
"""A push whose ticket, or whose P, says of P's workers what is not so. Over the real core, engines in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from connector.tests.patience import WORK_S
from connector.tests.push_worker import LEASE_S, P_KEY, TARGET_TABLE, PushWorker, Shape, offered, opened
from datadist_core.testing.parallel import eventually
from vllm_datadist.messages import Endpoint, PushSource, RemoteLease, StepWork

NUM_TOKENS = 33


@pytest.fixture
def workers() -> Iterator[list[PushWorker]]:
    """Two of P, one of the two of D."""
    started: list[PushWorker] = []
    try:
        for rank in (0, 1, 0):
            started.append(PushWorker("auto", WORK_S, Shape(tp_size=2, tp_rank=rank)))
        yield started
    finally:
        for worker in started:
            worker.close()


@pytest.mark.parametrize("is_swapped", [False, True])
def test_b32_a_worker_of_p_that_has_not_what_its_ticket_says_is_refused(
    workers: list[PushWorker], is_swapped: bool
) -> None:
    """Else P's worker has nothing to send, is done at once, and D takes for written what nobody wrote."""
    *ps, d = workers
    endpoints = tuple(p.endpoint() for p in ps)
    for p in ps:
        p.side.start(StepWork(workers=endpoints))
        p.tell(opened(NUM_TOKENS))
        p.step(0, NUM_TOKENS)
    if is_swapped:
        endpoints = tuple(replace(endpoint, tp_rank=1 - endpoint.tp_rank) for endpoint in endpoints)
    remote = RemoteLease("engine", P_KEY, LEASE_S, endpoints)
    [job] = offered(endpoints[0], 0, NUM_TOKENS).offers
    d.tell(StepWork(offers=[replace(job, source=PushSource("t", endpoints[0].host, endpoints[0].port, remote))]))
    reported = d.received()
    if not is_swapped:
        assert not reported.failed
        assert d.holds(0, NUM_TOKENS)
        return
    assert reported.failed == {job.key.request_id}
    assert "heads 0..0 should come from P's worker of pp_rank 0 and tp_rank 0, which has none" in reported.errors[0]


# --- P's answer when D has no ticket ------------------------------------------------------------------------------

Lie = Callable[[PushWorker, tuple[Endpoint, ...]], tuple[Endpoint, ...]]


def _swapped(p: PushWorker, real: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    return tuple(replace(one, tp_rank=1 - one.tp_rank) for one in real)


def _claims(**changes: object) -> Lie:
    def lie(p: PushWorker, real: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        exchange = p.side._exchange
        assert exchange is not None
        exchange._claim = msgspec.structs.replace(exchange._claim, **changes)
        return real

    return lie


def _names(**changes: object) -> Lie:
    """Of its second worker, which D needs."""
    return lambda p, real: (real[0], replace(real[1], **changes))


#: What P's first worker says, and what D then says why it does not believe it.
LIES: dict[str, tuple[Lie, str]] = {
    "nobody's port": (_names(port=1), ":1: "),  # before there is a link
    "ranks swapped": (_swapped, "tp_rank is 1 there and 0 here"),
    "one too few": (lambda p, real: real[:1], "names 1 workers, of which tp_size 2 is no cut"),
    "one too few, and so it says": (lambda p, real: _claims(tp_size=1)(p, real[:1]), "tp_size is 1 there and 2 here"),
    "itself twice": (lambda p, real: (real[0], replace(real[0], tp_rank=1)), "same cluster_id"),
    "another pipeline stage": (_names(pp_rank=1), "expected one of each pp_rank"),
    "another first layer": (_names(first_layer=1), "first_layer is 1 there and 0 here"),
    "one that is gone": (_names(cluster_id=77), "77"),
    "not itself": (lambda p, real: (replace(real[0], cluster_id=77), real[1]), "does not name itself"),
    "no host": (_names(host="a b"), "that is no host name"),
    "another tp_size": (_claims(tp_size=4), "names 2 workers, of which tp_size 4 is no cut"),
    "another pp_size": (_claims(pp_size=2), "pp_size is 2 there and 1 here"),
    "another data parallel rank": (_claims(dp_rank=3), "dp_rank is 3 there and 0 here"),
    "other block sizes": (_claims(block_tokens={0: 64}), "block_tokens of KV cache group 0 is 64 there and 4 here"),
    "another model": (_claims(fingerprint="00"), "fingerprint is '00' there and '"),
    "nothing of its engine": (lambda p, real: _silent(p, real), "without what its engine is like"),
}


def _silent(p: PushWorker, real: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
    assert p.side._exchange is not None
    p.side._exchange._claim = None  # type: ignore[assignment]
    return real


@pytest.fixture(scope="module")
def pair() -> Iterator[list[PushWorker]]:
    """Two workers of P, and the second one of D's two: each needs the one of its own rank."""
    started: list[PushWorker] = []
    try:
        for rank in (0, 1, 1):
            started.append(PushWorker("auto", WORK_S, Shape(tp_size=2, tp_rank=rank)))
        yield started
    finally:
        for worker in started:
            worker.close()


@pytest.mark.parametrize("name", [*LIES, "the truth"])
def test_what_p_says_of_its_workers_is_held_against_what_each_says_itself(pair: list[PushWorker], name: str) -> None:
    """The load is refused with the difference, soon; nothing is written, and P is free of the offer."""
    lie, text = LIES.get(name, (lambda p, real: real, ""))
    *ps, d = pair
    claim = ps[0].side._exchange._claim  # type: ignore[union-attr]
    d.reported = type(d.reported)()
    d.scribble(TARGET_TABLE)
    endpoints = tuple(p.endpoint() for p in ps)
    number = list(LIES).index(name) + 1 if name in LIES else 0
    key = replace(P_KEY, request_id=f"p-{number}", attempt=number + 1)
    try:
        said = lie(ps[0], endpoints)
        for p in ps:
            p.side.start(StepWork(workers=said))
            p.tell(opened(NUM_TOKENS, key, name=f"t-{number}"))
        [job] = offered(endpoints[0], 0, NUM_TOKENS, key=replace(key, request_id=f"d-{number}")).offers
        source = PushSource(f"t-{number}", endpoints[0].host, endpoints[0].port)
        begun_s = time.monotonic()
        d.tell(StepWork(offers=[replace(job, source=source)]))
        if name == "the truth":
            assert eventually(lambda: ps[1].num_offers() == 1)
            return
        reported = d.received()
        assert time.monotonic() - begun_s < WORK_S
        assert reported.failed == {job.key.request_id}
        assert text in reported.errors[0]
        assert eventually(lambda: not any(p.num_offers() for p in ps))
        assert all(bool((tensor[list(TARGET_TABLE)] == -1).all()) for tensor in d.tensors.values())
    finally:
        ps[0].side._exchange._claim = claim  # type: ignore[union-attr]
