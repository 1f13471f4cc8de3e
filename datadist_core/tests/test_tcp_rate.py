# SPDX-License-Identifier: Apache-2.0
"""The option max_bytes_per_s of the tcp backend: what an end sends is limited, and nothing else is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, Cache, CacheDesc, DataType, LLMDataDist, LLMRole, Placement
from datadist_core.backends._tcp_rate import RateLimit
from datadist_core.errors import TimedOut
from datadist_core.testing.parallel import run_all
from datadist_core.tests.core_ends import config, fill, linked, make_end, manager, must_link

MB = 1_000_000


class Clock:
    """Time that passes when told to, for a limit of 1 byte per microsecond."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.woken_at_s: list[float] = []
        self.limit = RateLimit(MB, self.woken_at_s.append, lambda: self.now_s)

    def until_due(self) -> None:
        self.now_s = self.woken_at_s[-1] + 1e-9
        self.limit.sweep()


def test_it_is_as_fast_as_it_says_and_saves_up_little() -> None:
    clock = Clock()
    clock.now_s += 3600  # nothing was sent for an hour
    assert clock.limit.take(10**9, lambda: None) == 64 << 10
    started_s, sent = clock.now_s, 0
    while sent < 5 * MB:
        taken = clock.limit.take(10**9, lambda: None)
        if not taken:
            clock.until_due()
        sent += taken
    assert clock.now_s - started_s == pytest.approx(sent / MB, rel=0.01)


def test_late_sweeps_cost_nothing_as_long_as_they_are_not_very_late() -> None:
    clock = Clock()
    clock.limit.take(64 << 10, lambda: None)
    started_s, sent = clock.now_s, 0
    while sent < 5 * MB:
        clock.now_s += 0.05
        clock.limit.sweep()
        sent += clock.limit.take(10**9, lambda: None)
    assert clock.now_s - started_s == pytest.approx(sent / MB, rel=0.01)


def test_those_who_wait_take_turns_and_newcomers_come_last() -> None:
    clock = Clock()
    clock.limit.take(64 << 10, lambda: None)
    served: dict[str, int] = {"a": 0, "b": 0, "c": 0}

    def send(name: str) -> None:
        while taken := clock.limit.take(10**9, lambda: send(name)):
            served[name] += taken

    for name in served:
        send(name)
    late: list[int] = []
    assert clock.limit.take(0, lambda: late.append(sum(served.values()))) == 0  # it would fit, but others were first
    for _ in range(300):
        clock.until_due()
    assert late[0] > 0
    assert min(served.values()) > 0.9 * max(served.values())


@contextmanager
def limited_pair(bytes_per_s: int) -> Iterator[tuple[LLMDataDist, LLMDataDist]]:
    """(P, D): what P sends is limited."""
    made = config("tcp", "127.0.0.1:0", timeout_ms=60_000)
    made.global_resource_config = f'{{"tcp": {{"max_bytes_per_s": {bytes_per_s}}}}}'
    with LLMDataDist(LLMRole.MIX, 1) as prompt, make_end("tcp", "127.0.0.1:0") as decoder:
        prompt.init(made)
        must_link(decoder, prompt)
        yield prompt, decoder


def cache_of(end: LLMDataDist, seed: int) -> Cache:
    """2 MB in blocks of 16 KB."""
    the_desc = CacheDesc(1, (125, 4000), DataType.DT_FLOAT, Placement.HOST)
    cache = manager(end).allocate_blocks_cache(the_desc, BlocksCacheKey(end.cluster_id))
    fill(cache, seed)
    return cache


ALL = list(range(125))


@pytest.mark.parametrize("what", ["pull by the peer", "push"])
def test_what_it_sends_is_limited(what: str) -> None:
    with limited_pair(10 * MB) as (prompt, decoder):
        source, target = cache_of(prompt, 1), cache_of(decoder, 2)
        started_s = time.monotonic()
        if what == "push":
            manager(prompt).push_blocks(BlocksCacheKey(decoder.cluster_id), source, ALL, ALL)
        else:
            manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, ALL, ALL)
        took_s = time.monotonic() - started_s
        assert (2 * MB - 0.02 * 10 * MB) / (10 * MB) <= took_s < 60
        np.testing.assert_array_equal(source.numpy()[0], target.numpy()[0])


def test_all_links_share_it_and_what_it_receives_and_says_is_not_limited() -> None:
    with limited_pair(4 * MB) as (prompt, decoder), make_end("tcp") as other:
        must_link(other, prompt)
        sources, targets = cache_of(prompt, 1), [cache_of(decoder, 2), cache_of(other, 3)]
        key = BlocksCacheKey(prompt.cluster_id)

        def pull(end: LLMDataDist, target: Cache) -> None:
            manager(end).pull_blocks(key, target, ALL[:50], ALL[:50], deadline_s=60)

        def meanwhile() -> None:  # pushes to P, and calls, each with a deadline that data which P sends could not meet
            prompt.register_service("echo", lambda cluster_id, body: body)
            for _ in range(5):
                assert decoder.call(prompt.cluster_id, "echo", b"x", 60) == b"x"
                manager(decoder).push_blocks(key, targets[0], ALL[60:], ALL[60:], deadline_s=60)

        started_s = time.monotonic()
        for outcome in run_all([lambda: pull(decoder, targets[0]), lambda: pull(other, targets[1]), meanwhile]):
            if isinstance(outcome, BaseException):
                raise outcome
        assert time.monotonic() - started_s >= (2 * 0.8 * MB - 0.02 * 4 * MB) / (4 * MB)
        for target in targets:
            np.testing.assert_array_equal(sources.numpy()[0][:50], target.numpy()[0][:50])
        np.testing.assert_array_equal(sources.numpy()[0][60:], targets[0].numpy()[0][60:])


def test_a_transfer_that_waits_for_its_turn_ends_at_its_deadline() -> None:
    with limited_pair(10_000) as (prompt, decoder):  # 200 s
        source, target = cache_of(prompt, 1), cache_of(decoder, 2)
        started_s = time.monotonic()
        with pytest.raises(TimedOut):
            manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id), target, ALL, ALL, deadline_s=0.1)
        with pytest.raises(TimedOut):
            manager(prompt).push_blocks(BlocksCacheKey(decoder.cluster_id), source, ALL, ALL, deadline_s=0.1)
        assert time.monotonic() - started_s < 60


def test_without_the_option_there_is_no_limit() -> None:
    with linked("tcp") as (prompt, _):
        running = prompt._open().engine.backends["tcp"]._running
        assert [stream.connection.limit for link in running.links.values() for stream in link._streams] == [None]
