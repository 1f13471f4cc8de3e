# SPDX-License-Identifier: Apache-2.0
"""P and D in processes of their own: one is killed or stopped in the middle of a push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from connector.tests.push_worker import (
    P_KEY,
    SOURCE_TABLE,
    TARGET_TABLE,
    PushWorker,
    RemotePushWorker,
    held,
    offered,
    opened,
)
from datadist_core.errors import LLMException
from datadist_core.testing.parallel import eventually
from vllm_datadist.messages import RequestKey
from vllm_datadist.worker import offers

pytestmark = pytest.mark.slow

NUM_TOKENS = 33
StartRemote = Callable[..., RemotePushWorker]


@pytest.fixture(autouse=True)
def _calls_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A P that is stopped does not answer D."""
    monkeypatch.setattr(offers, "CALL_TIMEOUT_S", 5.0)


@pytest.fixture
def remotes() -> Iterator[StartRemote]:
    started: list[RemotePushWorker] = []

    def start(*arguments: object) -> RemotePushWorker:
        started.append(RemotePushWorker(*arguments))
        return started[-1]

    yield start
    for one in started:
        with suppress(LLMException, OSError):
            one.go_on()
        one.kill()


@pytest.fixture
def here() -> Iterator[Callable[..., PushWorker]]:
    started: list[PushWorker] = []

    def start(*arguments: object) -> PushWorker:
        started.append(PushWorker(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _begin(p: RemotePushWorker | PushWorker, d: PushWorker | RemotePushWorker) -> None:
    """P has been allowed to write, and has written the first blocks; the others are still to be computed."""
    d.tell(offered(p.endpoint(), 0, NUM_TOKENS))
    assert eventually(lambda: p.num_offers() == 1)
    p.tell(opened(NUM_TOKENS))
    p.step(0, 20)
    assert eventually(lambda: d.holds(0, 20))


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_p_is_killed(remotes: StartRemote, here: Callable[..., PushWorker], backend: str) -> None:
    """The load fails at once, its blocks are safe; and a P that was started again serves the next one."""
    p, d = remotes(backend), here(backend)
    _begin(p, d)
    p.kill()
    reported = d.received()
    assert reported.failed == {"d-1"}
    d.settled()
    again = remotes(backend)
    again.tell(opened(NUM_TOKENS))
    d.tell(offered(again.endpoint(), 0, NUM_TOKENS, key=RequestKey("d-2", 2)))
    assert eventually(lambda: again.num_offers() == 1)
    again.step(0, NUM_TOKENS)
    d.until(lambda reported: "d-2" in reported.received)
    assert reported.failed == {"d-1"}
    assert d.holds(0, NUM_TOKENS)


def test_d_is_killed(remotes: StartRemote, here: Callable[..., PushWorker]) -> None:
    """P goes on, and its blocks come back with the lease."""
    p, d = here("shm"), remotes("shm")
    _begin(p, d)
    d.kill()
    assert eventually(lambda: p.num_offers() == 0)
    p.step(20, NUM_TOKENS)
    p.tell(held(lease_s=0.3))
    p.sent()
    assert p.side.leases.num_active == 0


@pytest.mark.parametrize("is_fenced", [None, True], ids=["real fence", "a fence that always says yes"])
def test_p_is_stopped_with_our_memory_mapped(
    remotes: StartRemote, here: Callable[..., PushWorker], is_fenced: bool | None
) -> None:
    """The failure is told in time, the blocks are not given back before P can write no more.

    The second run is the negative control: with a fence that says yes too early they would be.
    """
    p, d = remotes("shm"), here("shm")
    if is_fenced is not None:
        d.side._node.is_fenced = lambda cluster_id, timeout_s: is_fenced
    _begin(p, d)
    p.stop()
    d.run_out(0.5)
    reported = d.received()
    assert reported.failed == {"d-1"}
    threading.Event().wait(3.0)
    is_settled = d.poll().notes.settled == reported.notes.unsettled
    if is_fenced:
        assert is_settled or eventually(lambda: d.poll().notes.settled == reported.notes.unsettled)
        return
    assert not is_settled, "P may still write: it is only stopped"
    p.kill()
    d.settled()


def test_a_stopped_p_that_goes_on_does_not_write_into_blocks_that_were_given_back(
    remotes: StartRemote, here: Callable[..., PushWorker]
) -> None:
    p, d = remotes("shm"), here("shm")
    _begin(p, d)
    p.stop()
    d.run_out(0.5)
    d.received()
    p.go_on()
    d.settled()
    d.scribble(TARGET_TABLE)
    p.step(20, NUM_TOKENS)
    p.tell(held(P_KEY, 0.3))
    p.sent()
    assert all(bool((tensor[list(TARGET_TABLE)] == -1.0).all()) for tensor in d.tensors.values())
    assert len(SOURCE_TABLE) == len(TARGET_TABLE)
