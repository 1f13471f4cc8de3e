# SPDX-License-Identifier: Apache-2.0
"""The tcp backend between two network namespaces: over delay and loss, and when the link is cut.

Real processes, the kernel's own TCP; `testing.lossy_network` stands in for netem.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from datadist_core.testing.lossy_network import ADDRESSES, LossyNetwork, why_unavailable
from datadist_core.testing.parallel import eventually, require_all, run_all
from datadist_core.testing.remote import RemoteObject
from datadist_core.tests.network_end import Blocks, Move, Size, end_in, initial_blocks

P, D = 41, 42
SMALL = Size(num_blocks=32, block_floats=1024)
LARGE = Size(num_blocks=32, block_floats=64 << 10)
EASY_S, DEADLINE_S = 60.0, 2.0
both_ways = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Linked:
    """P listens in the first namespace, D in the second has linked to it."""

    network: LossyNetwork
    p: RemoteObject
    d: RemoteObject

    def link(self) -> None:
        status, reason = self.d.call("link", P, ADDRESSES[0], self.p.call("port"))
        assert status == "LLM_SUCCESS", reason

    def forget(self) -> None:
        self.d.call("forget", P, ADDRESSES[0], self.p.call("port"))


MakeLinked = Callable[..., Linked]


@pytest.fixture
def make_linked() -> Iterator[MakeLinked]:
    """`make_linked(network, size, **options)`; whatever it made is gone afterwards."""
    with contextlib.ExitStack() as stack:

        def make(network: LossyNetwork, size: Size, **options: Any) -> Linked:
            reason = why_unavailable()
            if reason is not None and os.environ.get("DATADIST_REQUIRE_ALL") == "1":
                pytest.fail(f"{reason}, and this run must skip nothing")
            if reason is not None:
                pytest.skip(reason)
            stack.enter_context(network)
            ends = []
            for namespace, cluster_id, address in zip(network.namespaces, (P, D), ADDRESSES, strict=True):
                end = end_in(namespace, cluster_id, address, size, **options)
                stack.callback(end.kill)
                ends.append(end)
            linked = Linked(network, *ends)
            linked.link()
            return linked

        yield make


def expected(start: Blocks, *moved: tuple[Blocks, range, range]) -> Blocks:
    """`start` with blocks of others: (whose, which, to where)."""
    blocks = [tensor.copy() for tensor in start]
    for whose, src, dst in moved:
        for tensor, other in zip(blocks, whose, strict=True):
            tensor[list(dst)] = other[list(src)]
    return blocks


def check_blocks(end: RemoteObject, blocks: Blocks) -> None:
    for found, wanted in zip(end.call("blocks"), blocks, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("streams", [1, 4])
def test_exact_over_delay_and_loss(make_linked: MakeLinked, streams: int) -> None:
    """Pull and push from both ends at once, 20 ms away, with one packet in fifty lost."""
    linked = make_linked(LossyNetwork(delay_s=0.02, loss=0.02), SMALL, streams=streams)
    to_d = [Move(False, range(4), range(8, 12)), Move(True, range(4, 8), range(12, 16))]
    to_p = [Move(False, range(4, 8), range(16, 20)), Move(True, range(4), range(20, 24))]
    require_all(
        [
            lambda: linked.d.call("move_at_once", P, to_d, EASY_S),
            lambda: linked.p.call("move_at_once", D, to_p, EASY_S),
        ]
    )
    p, d = initial_blocks(P, SMALL), initial_blocks(D, SMALL)
    check_blocks(linked.d, expected(d, (p, range(4), range(8, 12)), (p, range(4), range(20, 24))))
    check_blocks(linked.p, expected(p, (d, range(4, 8), range(12, 16)), (d, range(4, 8), range(16, 20))))
    assert sum(counts.lost for counts in linked.network.counts()) > 0, "no packet was lost: this showed nothing"


@both_ways
def test_cut_while_data_moves(make_linked: MakeLinked, push: bool) -> None:
    """The transfer ends with an error, both processes live on, and they link again when the cable is back."""
    network = LossyNetwork(delay_s=0.02)
    linked = make_linked(network, LARGE)
    move = Move(push, range(16), range(16, 32))
    before = sum(counts.delivered for counts in network.counts())

    def cut_half_way() -> None:
        assert eventually(lambda: sum(counts.delivered for counts in network.counts()) > before + 200)
        network.cut()

    outcome: list[str] = []
    require_all([lambda: outcome.append(linked.d.call("failure", P, move, DEADLINE_S)), cut_half_way])
    assert outcome in (["LLM_TIMEOUT"], ["LLM_LINK_FAILED"])

    network.heal()
    linked.forget()
    linked.link()
    linked.d.call("move", P, move, EASY_S)
    source, target = (linked.d, linked.p) if push else (linked.p, linked.d)
    own, other = initial_blocks(P if push else D, LARGE), initial_blocks(D if push else P, LARGE)
    check_blocks(target, expected(own, (other, range(16), range(16, 32))))
    check_blocks(source, other)


@both_ways
def test_transfer_over_a_cut_link(make_linked: MakeLinked, push: bool) -> None:
    """Nothing at all comes back, not even a refusal."""
    linked = make_linked(LossyNetwork(delay_s=0.005), SMALL)
    move = Move(push, range(4), range(8, 12))
    linked.d.call("move", P, move, EASY_S)
    linked.network.cut()
    assert linked.d.call("failure", P, move, DEADLINE_S) in ("LLM_TIMEOUT", "LLM_LINK_FAILED")
    linked.network.heal()
    linked.forget()
    linked.link()
    linked.d.call("move", P, move, EASY_S)


def test_link_over_a_cut_cable(make_linked: MakeLinked) -> None:
    """It fails in its time and leaves nothing that is in the way later."""
    linked = make_linked(LossyNetwork(), SMALL)
    linked.forget()
    linked.network.cut()
    status, _ = linked.d.call("link", P, ADDRESSES[0], linked.p.call("port"), 1000)
    assert status in ("LLM_TIMEOUT", "LLM_LINK_FAILED")
    linked.network.heal()
    linked.link()
    linked.d.call("check", P)


def test_successor_of_an_end_that_died_behind_a_cut(make_linked: MakeLinked) -> None:
    """Half open: nobody told P that D is gone. The next D with that id takes its place."""
    linked = make_linked(LossyNetwork(delay_s=0.005), SMALL)
    linked.network.cut()
    linked.d.kill()
    linked.network.heal()
    successor = end_in(linked.network.namespaces[1], D, ADDRESSES[1], SMALL)
    with contextlib.closing(successor):
        fresh = Linked(linked.network, linked.p, successor)
        fresh.link()
        failures = run_all([lambda: successor.call("move", P, Move(False, range(4), range(8, 12)), EASY_S)])
        assert failures == [None]
        check_blocks(successor, expected(initial_blocks(D, SMALL), (initial_blocks(P, SMALL), range(4), range(8, 12))))
