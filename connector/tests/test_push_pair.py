# SPDX-License-Identifier: Apache-2.0
"""Two worker sides in one process over the real core: P pushes into D's blocks, step by step and layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from connector.tests.patience import WORK_S
from connector.tests.push_worker import (
    CONTENT,
    D_KEY,
    LAYERS,
    P_KEY,
    SOURCE_TABLE,
    TARGET_TABLE,
    TOKENS,
    Shape,
    Start,
    chunk,
    held,
    offer_is_there,
    offered,
    opened,
    source,
    workers_started,
)
from datadist_core.testing.parallel import eventually
from vllm_datadist.handoff import pushes
from vllm_datadist.messages import (
    AnnounceJob,
    PushEnd,
    PushSource,
    PushVoid,
    RequestKey,
    StepWork,
    WithdrawJob,
)
from vllm_datadist.worker.planner import BlockPairs
from vllm_datadist.worker.push_moves import BlockPusher, _Part

NUM_TOKENS = 33


@pytest.fixture
def workers() -> Iterator[Start]:
    with workers_started() as start:
        yield start


CASES = [("shm", size, order) for size in (1, 3, 5, 33) for order in ("offer first", "in the middle", "ticket")]
CASES += [("tcp", 5, "offer first"), ("tcp", 33, "offer last")]


@pytest.mark.parametrize(("backend", "size", "order"), CASES)
def test_the_blocks_arrive_in_either_order(workers: Start, backend: str, size: int, order: str) -> None:
    """B26, B28: the offer begins at a later block; chunk sizes around block bounds."""
    p, d, first = workers(backend), workers(backend), 8
    offer = offered(p.endpoint(), first, NUM_TOKENS, order == "ticket")
    p.tell(opened(NUM_TOKENS))
    steps = [(i, min(i + size, NUM_TOKENS)) for i in range(0, NUM_TOKENS, size)]
    for number, (begin, end) in enumerate(steps):
        if number == {"offer first": 0, "in the middle": len(steps) // 2}.get(order):
            d.tell(offer)
            offer_is_there(p)
        p.step(begin, end)
    p.tell(held())
    if order in ("offer last", "ticket"):
        d.tell(offer)
    assert not d.received().failed
    assert d.holds(first, NUM_TOKENS)
    assert d.is_untouched(TARGET_TABLE[: first // TOKENS])
    p.sent()
    assert p.side.leases.num_active == 0


@pytest.mark.parametrize("number", [0, 3, -1])
def test_negative_control_a_block_that_is_left_out_is_seen(
    workers: Start, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def leave_one_out(self: BlockPusher, *arguments: object) -> list[_Part]:
        return [replace(part, pairs=_without(part.pairs, number)) for part in make(self, *arguments)]

    make = BlockPusher._parts
    monkeypatch.setattr(BlockPusher, "_parts", leave_one_out)
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, NUM_TOKENS)
    assert not d.received().failed
    assert not d.holds(0, NUM_TOKENS)


def _without(pairs: BlockPairs, number: int) -> BlockPairs:
    source_blocks, target_blocks = list(pairs.source), list(pairs.target)
    del source_blocks[number], target_blocks[number]
    return BlockPairs(tuple(source_blocks), tuple(target_blocks))


@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [
        (Shape(block_tokens=8), Shape(block_tokens=4)),
        (Shape(block_tokens=4), Shape(block_tokens=8)),
        (Shape(tp_size=2), Shape()),
        (Shape(), Shape(tp_size=2)),
        (Shape(block_tokens=8, tp_size=2), Shape(block_tokens=4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [5, 33])
def test_engines_of_different_shapes(workers: Start, p_shape: Shape, d_shape: Shape, size: int) -> None:
    """Each worker of D has its heads from those of P that hold them; one that sends to two is free when both are."""
    ps = [workers("auto", WORK_S, replace(p_shape, tp_rank=rank)) for rank in range(p_shape.tp_size)]
    ds = [workers("auto", WORK_S, replace(d_shape, tp_rank=rank)) for rank in range(d_shape.tp_size)]
    all_of_p = StepWork(workers=tuple(p.endpoint() for p in ps))
    for p in ps:
        p.side.start(all_of_p)
        p.tell(opened(NUM_TOKENS))
    offer = offered(ps[0].endpoint(), 8, NUM_TOKENS, block_tokens=d_shape.block_tokens)
    for d in ds:
        d.tell(offer)
    assert eventually(lambda: all(p.num_offers() == len(ds) for p in ps))
    for begin in range(0, NUM_TOKENS, size):
        for p in ps:
            p.step(begin, min(begin + size, NUM_TOKENS))
    for d in ds:
        assert not d.received().failed
        assert d.holds(8, NUM_TOKENS)
        assert d.is_untouched(TARGET_TABLE[: 8 // d_shape.block_tokens])
    for p in ps:
        p.tell(held())
        p.sent()


def test_a_layer_is_sent_while_the_next_one_is_computed(workers: Start) -> None:
    p, d = workers(), workers()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.side.start(opened(NUM_TOKENS))
    p.side.start(chunk(0, NUM_TOKENS))
    for number, layer in enumerate(LAYERS):
        assert not d.poll().received
        p.compute(0, NUM_TOKENS, SOURCE_TABLE, layers=[layer])
        assert eventually(lambda number=number: d.holds(0, NUM_TOKENS, layers=LAYERS[: number + 1]))
    p.side.step_computed()
    assert not d.received().failed


def test_layers_whose_hook_does_not_come_follow_at_the_steps_end(workers: Start) -> None:
    p, d = workers(), workers()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.side.start(opened(NUM_TOKENS))
    p.side.start(chunk(0, NUM_TOKENS))
    hook, p.side.layer_computed = p.side.layer_computed, lambda name: None
    p.compute(0, NUM_TOKENS, SOURCE_TABLE)
    p.side.layer_computed = hook
    assert not d.poll().received
    p.side.step_computed()
    assert not d.received().failed
    assert d.holds(0, NUM_TOKENS)


def test_a_preempted_request_is_sent_again_from_its_new_blocks(workers: Start) -> None:
    """What was sent before counts for nothing, also if it is in the middle of a step."""
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, 20, seed=7)
    p.tell(StepWork(push_voids=[PushVoid(P_KEY)]))
    p.scribble(SOURCE_TABLE)
    again = tuple(reversed(SOURCE_TABLE))
    p.step(0, 20, again)
    p.step(20, NUM_TOKENS, again)
    assert not d.received().failed
    assert d.holds(0, NUM_TOKENS)
    p.tell(held())
    p.sent()


def test_what_is_void_is_not_sent_on(workers: Start) -> None:
    """The request loses its blocks while layers wait to be sent: they are not sent any more."""
    p, d = workers(), workers()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.side.start(opened(NUM_TOKENS))
    p.side.start(chunk(0, NUM_TOKENS))
    p.compute(0, NUM_TOKENS, SOURCE_TABLE, layers=LAYERS[:1])
    assert eventually(lambda: d.holds(0, NUM_TOKENS, layers=LAYERS[:1]))
    p.side.retract(StepWork(push_ends=[PushEnd(P_KEY, "aborted")]))
    p.scribble(SOURCE_TABLE)
    p.side.step_computed()
    assert d.received().failed == {"d-1"}
    for layer in LAYERS[1:]:
        assert not d.tensors[layer].any()


def test_what_is_done_stays_done_when_the_request_is_preempted_afterwards(workers: Start) -> None:
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, NUM_TOKENS)
    assert not d.received().failed
    p.tell(StepWork(push_voids=[PushVoid(P_KEY)]))
    p.step(0, NUM_TOKENS, seed=3)
    p.tell(held())
    p.sent()
    assert d.holds(0, NUM_TOKENS)


def test_a_request_that_p_aborts_fails_at_d_with_the_reason(workers: Start) -> None:
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, 20)
    p.tell(StepWork(push_ends=[PushEnd(P_KEY, "P has ended the request as FINISHED_ABORTED")]))
    reported = d.received()
    assert reported.failed == {"d-1"}
    assert "FINISHED_ABORTED" in reported.errors[0]
    assert reported.notes.is_empty()  # P has said that it writes no more


def test_an_engine_step_that_fails_is_never_pushed(workers: Start) -> None:
    p, d = workers(), workers()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.side.start(opened(NUM_TOKENS))
    p.side.start(chunk(0, NUM_TOKENS))
    p.compute(0, NUM_TOKENS, SOURCE_TABLE, layers=LAYERS[:1])
    try:
        raise RuntimeError("out of memory")
    except RuntimeError:
        p.side.step_computed()
    assert d.received().failed == {"d-1"}


def test_a_request_that_d_aborts_is_taken_back_and_p_is_free(workers: Start) -> None:
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    p.step(0, 20)
    d.tell(StepWork(ended=[D_KEY]))
    assert d.received().notes.is_empty()
    d.scribble(TARGET_TABLE)  # the blocks are another request's now
    p.step(20, NUM_TOKENS)
    p.tell(held())
    p.sent()
    assert all(bool((tensor[list(TARGET_TABLE)] == -1.0).all()) for tensor in d.tensors.values())


@pytest.mark.parametrize("is_early", [True, False])
def test_a_d_that_needs_nothing_frees_p(workers: Start, is_early: bool) -> None:
    p, d = workers(), workers()
    withdrawal = StepWork(withdrawals=[WithdrawJob(D_KEY, source(p.endpoint()))])
    p.tell(opened(NUM_TOKENS))
    if is_early:
        d.tell(withdrawal)
        assert eventually(lambda: bool(p.pushes._table._served))
    p.step(0, NUM_TOKENS)
    p.tell(held())
    if not is_early:
        d.tell(withdrawal)
    p.sent()


def test_another_prompt_is_refused_with_both_values(workers: Start) -> None:
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS, digest="aaa"))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS, digest="bbb"))
    reported = d.received()
    assert reported.failed == {"d-1"}
    assert "prompt digest is bbb at D and aaa at P" in reported.errors[0]


def test_a_second_d_with_the_same_transfer_is_refused(workers: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "COME_AGAIN_S", 0.3)
    p, d, second = workers(), workers(), workers()
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    second.tell(offered(p.endpoint(), 0, NUM_TOKENS, key=RequestKey("d-2", 1)))
    assert "another request has offered" in second.received().errors[0]


def test_a_push_that_p_never_begins_ends_by_its_deadline(workers: Start) -> None:
    p, d = workers(), workers("auto", 77.5)
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    offer_is_there(p)
    d.run_out()
    reported = d.received()
    assert reported.failed == {"d-1"}
    assert "77.5 s" in reported.errors[0]
    assert eventually(lambda: p.num_offers() == 0)


def test_nobody_there_fails_within_the_link_timeout(workers: Start) -> None:
    d = workers("auto", WORK_S, Shape(), CONTENT, 1.0)
    job = replace(offered(d.endpoint(), 0, NUM_TOKENS).offers[0], source=PushSource("t", "127.0.0.1", 1))
    d.tell(StepWork(offers=[job]))
    assert "127.0.0.1:1" in d.received().errors[0]


@pytest.mark.parametrize("is_announced", [True, False])
def test_an_announced_offer_keeps_the_lease_alive(workers: Start, is_announced: bool) -> None:
    """Without a ticket D knows no lease that it could renew while its request queues."""
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    if is_announced:
        d.tell(StepWork(announcements=[AnnounceJob(D_KEY, source(p.endpoint()))]))
        assert eventually(lambda: p.pushes.num_announced() == 1)
    p.step(0, NUM_TOKENS)
    passed = p.age_leases(3.0)
    p.tell(held(lease_s=0.6))
    if not is_announced:
        p.sent()  # nobody has come in time
        return
    assert passed.wait(WORK_S)  # d's request queues
    assert not p.poll().sent
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    assert not d.received().failed
    p.sent()


def test_closing_leaves_no_thread(workers: Start) -> None:
    before = set(threading.enumerate())
    p, d = workers(), workers()
    p.tell(opened(NUM_TOKENS))
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    p.step(0, NUM_TOKENS)
    assert not d.received().failed
    for worker in (p, d):
        worker.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
