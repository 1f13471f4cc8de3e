# SPDX-License-Identifier: Apache-2.0
"""Who links when: attempts are shared, the next one waits a while after a failure, nobody is refused for ever.

The core is a stand-in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import pytest

from datadist_core.errors import CacheNotExist, LinkFailed, LLMException, ParamInvalid, TimedOut
from datadist_core.types import Deadline
from vllm_datadist.description import PROTOCOL_VERSION, Description, Incompatible, encode
from vllm_datadist.messages import Endpoint
from vllm_datadist.worker.peers import (
    FIRST_REFUSAL_S,
    FORGET_S,
    LONGEST_PAUSE_S,
    LONGEST_REFUSAL_S,
    Peer,
    PeerDirectory,
)

P = Endpoint(0, 0, "10.0.0.1", 5000, 11)
RESTARTED_P = Endpoint(0, 0, "10.0.0.1", 5000, 12)
OURS = Description(
    version=PROTOCOL_VERSION, model="tiny", revision=None, quantization=None, dtype="f", cache_dtype="auto",
    use_mla=False, speculative="none", tp_size=1, pp_size=1, tp_rank=0, pp_rank=0, model_config={}, caches=[],
)  # fmt: skip


class StandInCore:
    """Links when `gate` is open, as `outcomes` says (one per attempt, then success)."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.outcomes: list[LLMException] = []
        self.linked: list[int] = []
        self.unlinked: list[int] = []
        self.theirs = OURS
        self.refusal: LLMException | None = None

    def link(self, endpoint: Endpoint, timeout_s: float) -> str:
        assert self.gate.wait(30)
        self.linked.append(endpoint.cluster_id)
        if self.outcomes:
            raise self.outcomes.pop(0)
        return "over nothing"

    def unlink(self, endpoint: Endpoint) -> None:
        self.unlinked.append(endpoint.cluster_id)

    def call(self, cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        return encode(self.theirs)


class Clock:
    """Time passes only in pauses."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(round(seconds, 6))
        self.now_s += seconds


@pytest.fixture
def core() -> StandInCore:
    return StandInCore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(core: StandInCore, clock: Clock) -> PeerDirectory:
    return PeerDirectory(
        core, lambda: OURS, 5.0, logging.getLogger("test"), lambda: clock.now_s, clock.pause, lambda: 1.0
    )


def _soon() -> Deadline:
    return Deadline.after(30)


def test_all_who_wait_share_one_attempt(core: StandInCore, peers: PeerDirectory) -> None:
    core.gate.clear()
    futures = [peers.prepare(P) for _ in range(8)]
    core.gate.set()
    assert len({id(future.result(30)) for future in futures}) == 1
    assert core.linked == [11]
    assert peers.ready(P, _soon()) is futures[0].result()


def test_all_who_wait_share_a_failure_and_the_next_use_tries_again(core: StandInCore, peers: PeerDirectory) -> None:
    core.gate.clear()
    core.outcomes = [LinkFailed("refused")]
    futures = [peers.prepare(P) for _ in range(8)]
    core.gate.set()
    assert {str(future.exception(30)) for future in futures} == {"refused"}
    assert core.linked == [11]
    assert peers.ready(P, _soon()).endpoint == P
    assert core.linked == [11, 11]


def test_one_who_waits_gives_up_at_its_own_deadline(core: StandInCore, peers: PeerDirectory) -> None:
    core.gate.clear()
    with pytest.raises(TimedOut, match=r"10\.0\.0\.1:5000"):
        peers.ready(P, Deadline.after(0.01))
    core.gate.set()
    assert peers.ready(P, _soon()).endpoint == P
    assert core.linked == [11]


def test_the_pause_before_an_attempt_grows_with_failures_and_is_gone_with_a_success(
    core: StandInCore, peers: PeerDirectory, clock: Clock
) -> None:
    core.outcomes = [LinkFailed("refused") for _ in range(7)]
    for _ in range(7):
        with pytest.raises(LinkFailed, match="refused"):
            peers.ready(P, _soon())
    peer = peers.ready(P, _soon())
    assert clock.pauses == [0, 0.1, 0.2, 0.4, 0.8, 1.6, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    peers.drop(peer)
    peers.ready(P, _soon())
    assert clock.pauses[-1] == 0, "a link that has worked is made anew at once"


def test_time_that_has_passed_anyway_is_not_waited_for_again(
    core: StandInCore, peers: PeerDirectory, clock: Clock
) -> None:
    core.outcomes = [LinkFailed("refused") for _ in range(6)]
    for _ in range(6):
        with pytest.raises(LinkFailed, match="refused"):
            peers.ready(P, _soon())
        clock.now_s += LONGEST_PAUSE_S
    assert set(clock.pauses) == {0}
    assert len(core.linked) == 6


def test_who_comes_during_the_pause_shares_the_attempt_that_follows(core: StandInCore) -> None:
    paused, go_on = threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        if seconds:
            paused.set()
            assert go_on.wait(30)

    peers = PeerDirectory(core, lambda: OURS, 5.0, logging.getLogger("test"), pause=pause)
    core.outcomes = [LinkFailed("refused")]
    with pytest.raises(LinkFailed, match="refused"):
        peers.ready(P, _soon())
    first = peers.prepare(P)
    assert paused.wait(30)
    others = [peers.prepare(P) for _ in range(4)]
    with pytest.raises(TimedOut):
        peers.ready(P, Deadline.after(0.01))
    go_on.set()
    assert {id(future.result(30)) for future in (first, *others)} == {id(first.result())}
    assert core.linked == [11, 11]


def test_other_peers_do_not_wait_for_one_that_failed(core: StandInCore, peers: PeerDirectory, clock: Clock) -> None:
    core.outcomes = [LinkFailed("refused")]
    with pytest.raises(LinkFailed, match="refused"):
        peers.ready(P, _soon())
    peers.ready(Endpoint(0, 0, "10.0.0.9", 5000, 99), _soon())
    assert clock.pauses == [0, 0]


def test_a_peer_that_does_not_fit_is_unlinked_and_not_asked_again(core: StandInCore, peers: PeerDirectory) -> None:
    core.theirs = msgspec.structs.replace(OURS, dtype="g")
    for _ in range(2):
        with pytest.raises(Incompatible, match="dtype is 'f' here and 'g' at the peer"):
            peers.ready(P, _soon())
    assert (core.linked, core.unlinked) == ([11], [11])


def test_a_peer_that_refuses_us_is_not_asked_again(core: StandInCore, peers: PeerDirectory) -> None:
    core.refusal = ParamInvalid("the peer answered: dtype is 'g' here and 'f' at the peer")
    for _ in range(2):
        with pytest.raises(Incompatible, match="refused: the peer answered: dtype is 'g' here"):
            peers.ready(P, _soon())
    assert core.linked == [11]


def test_a_peer_that_did_not_fit_is_asked_again_later(core: StandInCore, peers: PeerDirectory, clock: Clock) -> None:
    """Such as one whose services were not there yet when it was asked."""
    core.refusal = ParamInvalid("the peer answered: service 'describe' does not exist at this end")
    for number in range(1, 9):
        for _ in range(3):
            with pytest.raises(Incompatible, match="does not exist"):
                peers.ready(P, _soon())
        assert len(core.linked) == number, "asked once per pause"
        clock.now_s += min(LONGEST_REFUSAL_S, FIRST_REFUSAL_S * 2 ** (number - 1)) + 0.001
    core.refusal = None
    assert peers.ready(P, _soon()).endpoint == P


def test_failures_of_peers_that_never_come_again_are_forgotten(
    core: StandInCore, peers: PeerDirectory, clock: Clock
) -> None:
    for cluster_id in range(50):
        core.outcomes = [LinkFailed("refused")]
        with pytest.raises(LinkFailed):
            peers.ready(Endpoint(0, 0, "10.0.0.1", 5000, cluster_id), _soon())
        clock.now_s += FORGET_S / 4
    assert len(peers._troubles) < 10


def test_a_peer_that_is_still_starting_is_asked_again(core: StandInCore, peers: PeerDirectory) -> None:
    core.refusal = CacheNotExist("still starting")
    with pytest.raises(CacheNotExist, match="still starting"):
        peers.ready(P, _soon())
    core.refusal = None
    assert peers.ready(P, _soon()).endpoint == P


def test_a_peer_that_does_not_fit_is_linked_for_as_long_as_a_call_takes(
    core: StandInCore, peers: PeerDirectory
) -> None:
    core.theirs = msgspec.structs.replace(OURS, dtype="g")
    with peers.linked(P, _soon()):
        assert (core.linked, core.unlinked) == ([11, 11], [11])
    assert core.unlinked == [11, 11]


def test_a_restarted_peer_is_another_one_and_replaces_what_was_there(core: StandInCore, peers: PeerDirectory) -> None:
    peers.ready(P, _soon())
    peers.ready(RESTARTED_P, _soon())
    assert (core.unlinked, peers.num_peers()) == ([11], 1)


def test_a_dropped_link_is_made_anew_and_dropped_once(core: StandInCore, peers: PeerDirectory) -> None:
    old = peers.ready(P, _soon())
    peers.drop(old)
    new = peers.ready(P, _soon())
    peers.drop(old)
    assert (core.linked, core.unlinked) == ([11, 11], [11])
    assert peers.ready(P, _soon()) is new


def test_a_link_that_the_core_lost_is_made_anew(core: StandInCore, peers: PeerDirectory) -> None:
    peers.ready(P, _soon())
    peers.lost(P.cluster_id)
    peers.lost(999)
    peers.ready(P, _soon())
    assert core.linked == [11, 11]


def test_a_fault_in_an_attempt_reaches_those_who_wait(core: StandInCore, peers: PeerDirectory) -> None:
    link: Callable[[Endpoint, float], str] = core.link

    def broken(endpoint: Endpoint, timeout_s: float) -> str:
        core.link = link  # type: ignore[method-assign]
        raise ZeroDivisionError("a fault")

    core.link = broken  # type: ignore[method-assign]
    future: Future[Peer] = peers.prepare(P)
    error = future.exception(30)
    assert isinstance(error, LinkFailed), "what those who wait expect"
    assert "ZeroDivisionError('a fault')" in str(error)
    assert peers.ready(P, _soon()).endpoint == P


def test_calls_to_a_peer_that_does_not_fit_take_turns(core: StandInCore, peers: PeerDirectory) -> None:
    """Else the first that has ended would take the link from the others."""
    core.theirs = msgspec.structs.replace(OURS, dtype="g")
    with pytest.raises(Incompatible):
        peers.ready(P, _soon())
    core.unlinked.clear()
    has_begun, num_unlinked = threading.Event(), []

    def second() -> None:
        has_begun.set()
        with peers.linked(P, _soon()):
            num_unlinked.append(len(core.unlinked))

    with peers.linked(P, _soon()):
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert has_begun.wait(30)
        with pytest.raises(TimedOut, match="one by one"), peers.linked(P, Deadline.after(0.05)):
            pass
    thread.join(30)
    assert num_unlinked == [1]


def test_an_attempt_that_cannot_even_begin_reaches_those_who_wait(
    core: StandInCore, peers: PeerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        first = peers.prepare(P)
    with pytest.raises(LinkFailed, match=r"10\.0\.0\.1:5000 .*can't start new thread"):
        first.result(30)
    assert peers.ready(P, _soon()).endpoint == P
