# SPDX-License-Identifier: Apache-2.0
"""Layer by layer to several destinations: order, independence, failures, time-outs.

The senders are fakes: they stand for the wire and are held and released by events. The synchronisers are what a user
writes.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datadist_core.cache.desc import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from datadist_core.cache.layerwise import (
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
    start_task,
)
from datadist_core.errors import ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost
from datadist_core.types import LLMStatusCode

SUCCESS, FAILED, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT
#: Far more than anything here takes; a test that waits this long has failed.
WAIT_S = 20.0
WAIT_MS = int(WAIT_S * 1000)
#: What the tasks pass to their synchronisers.
LAYER_TIMEOUT_MS = 1234
#: For waits that are meant to end without a result.
SHORT_MS = 5


@dataclass
class Log:
    """What happened, in order, and in which thread."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    threads: dict[str, set[threading.Thread]] = field(default_factory=dict)

    def add(self, who: str, *what: Any) -> None:
        self.threads.setdefault(who, set()).add(threading.current_thread())
        self.events.append((who, *what))

    def of(self, who: str) -> list[Any]:
        return [event[1] for event in self.events if event[0] == who]


class FakeSender:
    """Stands for the wire. Steps are "open", a layer, "close": each can be held by an event and can fail."""

    def __init__(self, log: Log, name: str, layers: range, failures: dict[Any, BaseException] | None = None) -> None:
        self.log, self.name, self.layers = log, name, layers
        self.failures = failures or {}
        self.held: dict[Any, threading.Event] = {}
        self.reached: dict[Any, threading.Event] = {step: threading.Event() for step in ("open", *layers, "close")}

    def hold(self, step: Any) -> threading.Event:
        self.held[step] = threading.Event()
        return self.held[step]

    def open(self) -> None:
        self._step("open")

    def send(self, layer_index: int) -> None:
        self._step(layer_index)

    def close(self) -> None:
        self._step("close")

    def _step(self, step: Any) -> None:
        self.log.add(self.name, step)
        self.reached[step].set()
        if step in self.held and not self.held[step].wait(WAIT_S):
            raise AssertionError(f"the test never released {self.name} at {step}")
        if step in self.failures:
            raise self.failures[step]

    @property
    def steps(self) -> list[Any]:
        return self.log.of(self.name)


class Synchronizer(LayerSynchronizer):
    """Releases layers by events, as another thread sets them; `answers` replaces the answer for some layers."""

    def __init__(self, log: Log, ready: Sequence[int] | None = None, answers: dict[int, Any] | None = None) -> None:
        self.log = log
        self.answers = answers or {}
        self.all_ready = ready is None
        self.events = {layer: threading.Event() for layer in range(32)}
        for layer in ready or ():
            self.release(layer)

    def release(self, layer: int) -> None:
        self.events[layer].set()

    def release_all(self) -> None:
        for event in self.events.values():
            event.set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.log.add("sync", layer_index, timeout_in_millis)
        if not self.all_ready and not self.events[layer_index].wait(WAIT_S):
            raise AssertionError(f"the test never released layer {layer_index}")
        answer = self.answers.get(layer_index, True)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]


class Scene:
    """Senders, their log, and what was started; at the end everything is released, whatever the test did."""

    def __init__(self) -> None:
        self.log = Log()
        self.senders: list[FakeSender] = []
        self.num_finished = 0
        self._synchronizers: list[Synchronizer] = []
        self._tasks: list[CacheTask] = []

    def sender(self, layers: range, **failures: BaseException) -> FakeSender:
        """`failures`: open=, close=, or layer_3=."""
        steps = {int(k[6:]) if k.startswith("layer_") else k: error for k, error in failures.items()}
        self.senders.append(FakeSender(self.log, f"sender{len(self.senders)}", layers, steps))
        return self.senders[-1]

    def synchronizer(self, ready: Sequence[int] | None = None, answers: dict[int, Any] | None = None) -> Synchronizer:
        self._synchronizers.append(Synchronizer(self.log, ready, answers))
        return self._synchronizers[-1]

    def start(self, synchronizer: LayerSynchronizer | None = None, name: str = "layers-test") -> CacheTask:
        task = start_task(self.senders, synchronizer or self.synchronizer(), LAYER_TIMEOUT_MS, name, self.on_finished)
        self._tasks.append(task)
        return task

    def on_finished(self) -> None:
        self.num_finished += 1
        self.log.add("task", "finished")

    def close(self) -> None:
        for synchronizer in self._synchronizers:
            synchronizer.release_all()
        for sender in self.senders:
            for event in sender.held.values():
                event.set()
        for task in self._tasks:
            task.synchronize(WAIT_MS)
        assert self.num_finished == len(self._tasks)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.closing(Scene()) as one:
        yield one


def await_status(task: CacheTask, index: int, status: LLMStatusCode) -> list[LLMStatusCode | None]:
    """All results, once that of destination `index` is `status`."""
    end_s = time.monotonic() + WAIT_S
    results = task.get_results(SHORT_MS)
    while results[index] is not status:
        assert time.monotonic() < end_s, f"destination {index} is still at {results[index]}"
        results = task.get_results(SHORT_MS)
    return results


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run `call` in a thread; returns what waits for its value."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(call()), name="datadist-test-waiter", daemon=True)
    thread.start()

    def value() -> Any:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return values[0]

    return value


# -- order and threads


def test_one_destination_is_asked_for_and_sent_layer_by_layer(scene: Scene) -> None:
    scene.sender(range(1, 3))
    task = scene.start()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert scene.log.events == [
        ("sync", 1, LAYER_TIMEOUT_MS),
        ("sender0", "open"),
        ("sender0", 1),
        ("sync", 2, LAYER_TIMEOUT_MS),
        ("sender0", 2),
        ("sender0", "close"),
        ("task", "finished"),
    ]
    assert task.get_results() == [SUCCESS]
    assert task.errors == [None]


def test_one_destination_takes_one_thread(scene: Scene) -> None:
    scene.sender(range(4))
    scene.start(name="layers-9").synchronize(WAIT_MS)
    (thread,) = set().union(*scene.log.threads.values())
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name == "datadist-layers-9"


def test_several_destinations_have_a_daemon_thread_each(scene: Scene) -> None:
    scene.sender(range(3))
    scene.sender(range(3))
    scene.start(name="layers-9").synchronize(WAIT_MS)
    names = {}
    for who in ("sync", "sender0", "sender1"):
        (thread,) = scene.log.threads[who]
        assert thread.daemon
        names[who] = thread.name
    assert names == {"sync": "datadist-layers-9", "sender0": "datadist-layers-9-0", "sender1": "datadist-layers-9-1"}


def test_each_layer_is_asked_for_once_whatever_the_ranges(scene: Scene) -> None:
    scene.sender(range(2, 5))
    scene.sender(range(3))
    scene.sender(range(7, 9))
    task = scene.start()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert [e[1:] for e in scene.log.events if e[0] == "sync"] == [
        (layer, LAYER_TIMEOUT_MS) for layer in (0, 1, 2, 3, 4, 7, 8)
    ]
    assert scene.senders[0].steps == ["open", 2, 3, 4, "close"]
    assert scene.senders[1].steps == ["open", 0, 1, 2, "close"]
    assert scene.senders[2].steps == ["open", 7, 8, "close"]
    assert scene.num_finished == 1


@pytest.mark.parametrize("num_destinations", [1, 2])
def test_a_layer_is_sent_only_after_its_release(scene: Scene, num_destinations: int) -> None:
    senders = [scene.sender(range(3)) for _ in range(num_destinations)]
    synchronizer = scene.synchronizer(ready=())
    task = scene.start(synchronizer)
    assert task.get_results(SHORT_MS) == [None] * num_destinations
    for layer in range(3):
        assert all(layer not in sender.steps for sender in senders)
        synchronizer.release(layer)
        for sender in senders:
            assert sender.reached[layer].wait(WAIT_S)
    assert task.synchronize(WAIT_MS) is SUCCESS


def test_start_returns_at_once(scene: Scene) -> None:
    sender = scene.sender(range(2))
    gate = sender.hold("open")
    task = scene.start()
    assert sender.reached["open"].wait(WAIT_S)
    assert task.synchronize(SHORT_MS) is TIMEOUT
    gate.set()
    assert task.synchronize(WAIT_MS) is SUCCESS


# -- destinations are independent


def test_a_hanging_destination_delays_neither_the_others_nor_the_asking(scene: Scene) -> None:
    slow = scene.sender(range(4))
    scene.sender(range(6))
    gate = slow.hold(0)
    task = scene.start()
    assert await_status(task, 1, SUCCESS) == [TIMEOUT, SUCCESS]
    assert scene.log.of("sync") == [0, 1, 2, 3, 4, 5]
    assert slow.steps == ["open", 0]
    assert task.synchronize(SHORT_MS) is TIMEOUT
    assert scene.num_finished == 0
    gate.set()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert slow.steps == ["open", 0, 1, 2, 3, "close"]


def test_a_destination_that_hangs_while_it_is_opened_delays_no_other(scene: Scene) -> None:
    gate = scene.sender(range(2)).hold("open")
    scene.sender(range(2))
    task = scene.start()
    assert await_status(task, 1, SUCCESS) == [TIMEOUT, SUCCESS]
    gate.set()
    assert task.get_results(WAIT_MS) == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("step", ["open", "layer_0", "layer_1", "layer_2", "close"])
def test_a_failing_destination_fails_alone(scene: Scene, step: str) -> None:
    error = PeerLost("gone")
    good, bad, late = scene.sender(range(3)), scene.sender(range(3), **{step: error}), scene.sender(range(4, 6))
    task = scene.start()
    assert task.synchronize(WAIT_MS) is LLMStatusCode.LLM_LINK_FAILED
    assert task.get_results() == [SUCCESS, LLMStatusCode.LLM_LINK_FAILED, SUCCESS]
    assert task.errors == [None, error, None]
    assert good.steps == ["open", 0, 1, 2, "close"]
    assert late.steps == ["open", 4, 5, "close"]
    order = ["open", 0, 1, 2, "close"]
    failed_at = order.index({"open": "open", "close": "close"}.get(step) or int(step[6:]))
    assert bad.steps == order[: failed_at + 1] + ["close"] * (step != "close")
    assert scene.num_finished == 1


def test_the_first_failure_in_config_order_counts(scene: Scene) -> None:
    """Not the first in time: destination 1 fails while destination 0 is held."""
    first = scene.sender(range(2), layer_1=NotYetLinked("no link"))
    gate = first.hold(0)
    scene.sender(range(2), open=PeerLost("gone"))
    scene.sender(range(2))
    task = scene.start()
    await_status(task, 1, LLMStatusCode.LLM_LINK_FAILED)
    gate.set()
    assert task.synchronize(WAIT_MS) is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED, SUCCESS]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ClosedError("finalized"), LLMStatusCode.LLM_ENGINE_FINALIZED),
        (ParamInvalid("dst_addrs[0] is outside"), LLMStatusCode.LLM_PARAM_INVALID),
        (LLMException("own", LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (KeyError("x"), FAILED),
        (SystemExit(3), FAILED),
    ],
)
def test_what_a_sender_raises_is_the_status(scene: Scene, error: BaseException, status: LLMStatusCode) -> None:
    scene.sender(range(2), layer_0=error)
    task = scene.start()
    assert task.synchronize(WAIT_MS) is status
    (kept,) = task.errors
    assert kept is not None
    if isinstance(error, LLMException):
        assert kept is error
    else:
        assert kept.__cause__ is error
        assert type(error).__name__ in str(kept)


def test_an_error_while_closing_does_not_hide_the_first_one(scene: Scene) -> None:
    error = PeerLost("gone")
    scene.sender(range(2), layer_1=error, close=KeyError("also"))
    task = scene.start()
    assert task.synchronize(WAIT_MS) is LLMStatusCode.LLM_LINK_FAILED
    assert task.errors == [error]
    assert scene.num_finished == 1


def test_a_destination_counts_as_running_until_it_is_closed(scene: Scene) -> None:
    """Before that it may still use the memory."""
    sender = scene.sender(range(1), layer_0=PeerLost("gone"))
    gate = sender.hold("close")
    task = scene.start()
    assert sender.reached["close"].wait(WAIT_S)
    assert task.get_results(SHORT_MS) == [TIMEOUT]
    assert scene.num_finished == 0
    gate.set()
    assert task.get_results(WAIT_MS) == [LLMStatusCode.LLM_LINK_FAILED]


# -- the synchroniser


class BadText(Exception):
    """A user's exception whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


class BadRepr:
    """A user's answer that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


SYNCHRONIZER_FAILURES = [
    (False, FAILED, "returned False"),
    (np.False_, FAILED, "returned False"),
    (None, FAILED, "returned None"),
    (1, FAILED, "must return True or False"),
    ("yes", FAILED, "must return True or False"),
    (LLMStatusCode.LLM_TIMEOUT, FAILED, "must return True or False"),
    (BadRepr(), FAILED, "no repr"),
    (ValueError("user text"), FAILED, "ValueError: user text"),
    (BadText(), FAILED, "BadText"),
    (SystemExit(1), FAILED, "SystemExit"),
    (LLMException("late", LLMStatusCode.LLM_TIMEOUT), TIMEOUT, "late"),
    (ClosedError("finalized"), LLMStatusCode.LLM_ENGINE_FINALIZED, "finalized"),
]


@pytest.mark.parametrize("num_destinations", [1, 3])
@pytest.mark.parametrize(("answer", "status", "text"), SYNCHRONIZER_FAILURES)
def test_the_synchroniser_fails_the_task(
    scene: Scene, num_destinations: int, answer: Any, status: LLMStatusCode, text: str
) -> None:
    for _ in range(num_destinations):
        scene.sender(range(4))
    task = scene.start(scene.synchronizer(answers={2: answer}))
    assert task.get_results(WAIT_MS) == [status] * num_destinations
    assert task.synchronize() is status
    assert scene.log.of("sync") == [0, 1, 2]
    for sender, error in zip(scene.senders, task.errors, strict=True):
        assert sender.steps == ["open", 0, 1, "close"]
        assert text in str(error)
    assert scene.num_finished == 1


@pytest.mark.parametrize("num_destinations", [1, 2])
def test_what_the_synchroniser_raised_is_the_cause(scene: Scene, num_destinations: int) -> None:
    for _ in range(num_destinations):
        scene.sender(range(2))
    cause = ValueError("user text")
    task = scene.start(scene.synchronizer(answers={1: cause}))
    task.synchronize(WAIT_MS)
    assert [error and error.__cause__ for error in task.errors] == [cause] * num_destinations
    assert len({id(error) for error in task.errors}) == num_destinations
    assert all(f"synchronize_layer(1, {LAYER_TIMEOUT_MS})" in str(error) for error in task.errors)


def test_numpy_true_releases_a_layer(scene: Scene) -> None:
    scene.sender(range(2))
    assert scene.start(scene.synchronizer(answers={0: np.True_})).synchronize(WAIT_MS) is SUCCESS


def test_destinations_that_have_all_their_layers_survive_the_synchroniser(scene: Scene) -> None:
    done, running, waiting = scene.sender(range(2)), scene.sender(range(1, 4)), scene.sender(range(3, 5))
    task = scene.start(scene.synchronizer(answers={2: False}))
    assert task.get_results(WAIT_MS) == [SUCCESS, FAILED, FAILED]
    assert done.steps == ["open", 0, 1, "close"]
    assert running.steps == ["open", 1, "close"]
    assert waiting.steps == ["close"]


def test_released_layers_are_sent_though_the_synchroniser_failed_meanwhile(scene: Scene) -> None:
    """So the outcome does not depend on the pace: the destination with all its layers succeeds, however late."""
    complete, incomplete = scene.sender(range(2)), scene.sender(range(3))
    gates = [complete.hold(0), incomplete.hold(0)]
    quick = scene.sender(range(3))
    task = scene.start(scene.synchronizer(answers={2: False}))
    assert await_status(task, 2, FAILED) == [TIMEOUT, TIMEOUT, FAILED]
    for gate in gates:
        gate.set()
    assert task.get_results(WAIT_MS) == [SUCCESS, FAILED, FAILED]
    assert incomplete.steps == quick.steps == ["open", 0, 1, "close"]


def test_one_destination_that_failed_has_no_more_layers_asked_for(scene: Scene) -> None:
    scene.sender(range(5), layer_1=PeerLost("gone"))
    scene.start().synchronize(WAIT_MS)
    assert scene.log.of("sync") == [0, 1]


def test_the_synchroniser_is_asked_no_more_once_all_have_failed(scene: Scene) -> None:
    """The call that is in progress then is not waited for."""
    scene.sender(range(5), layer_0=PeerLost("gone"))
    scene.sender(range(5), layer_0=PeerLost("gone"))
    synchronizer = scene.synchronizer(ready=[0])
    task = scene.start(synchronizer)
    assert task.synchronize(WAIT_MS) is LLMStatusCode.LLM_LINK_FAILED
    synchronizer.release_all()
    (asker,) = scene.log.threads["sync"]
    asker.join(WAIT_S)
    assert not asker.is_alive()
    assert scene.log.of("sync") in ([0], [0, 1])
    assert scene.num_finished == 1


def test_the_synchroniser_is_asked_on_for_whom_it_matters(scene: Scene) -> None:
    """All but one have failed, and that one has not even been started."""
    scene.sender(range(8), open=PeerLost("gone"))
    scene.sender(range(2), layer_0=PeerLost("gone"))
    late = scene.sender(range(4, 6))
    synchronizer = scene.synchronizer(ready=[0])
    task = scene.start(synchronizer)
    lost = LLMStatusCode.LLM_LINK_FAILED
    await_status(task, 0, lost)
    assert await_status(task, 1, lost) == [lost, lost, None]
    synchronizer.release_all()
    assert task.get_results(WAIT_MS) == [lost, lost, SUCCESS]
    assert late.steps == ["open", 4, 5, "close"]
    (asker,) = scene.log.threads["sync"]
    asker.join(WAIT_S)
    assert scene.log.of("sync") == [0, 1, 2, 3, 4, 5]  # 6 and 7 only a failed destination wanted


# -- waiting for a task


def test_results_of_an_unfinished_task(scene: Scene) -> None:
    scene.sender(range(1))
    running = scene.sender(range(2))
    scene.sender(range(1, 3))
    scene.sender(range(3), open=NotYetLinked("no link"))
    gate = running.hold(0)
    synchronizer = scene.synchronizer(ready=[0])
    task = scene.start(synchronizer)
    assert running.reached[0].wait(WAIT_S)
    await_status(task, 0, SUCCESS)
    results = await_status(task, 3, LLMStatusCode.LLM_NOT_YET_LINK)
    assert results == [SUCCESS, TIMEOUT, None, LLMStatusCode.LLM_NOT_YET_LINK]
    assert task.synchronize(SHORT_MS) is TIMEOUT
    gate.set()
    synchronizer.release_all()
    assert task.get_results() == [SUCCESS, SUCCESS, SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK]
    assert task.synchronize() is LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.parametrize("call", ["synchronize", "get_results"])
@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (0, ParamInvalid),
        (-1, ParamInvalid),
        (1.5, TypeError),
        (True, TypeError),
        ("5", TypeError),
        ([5], TypeError),
    ],
)
def test_a_bad_timeout_is_refused_by_name(scene: Scene, call: str, timeout: Any, error: type[Exception]) -> None:
    scene.sender(range(1))
    task = scene.start()
    with pytest.raises(error, match="timeout_in_millis"):
        getattr(task, call)(timeout)
    assert task.synchronize(timeout_in_millis=WAIT_MS) is SUCCESS


@pytest.mark.parametrize("timeout", [None, 1, 2**31, 2**63, pytest.param(2**4000, id="huge")])
def test_any_positive_timeout_works(scene: Scene, timeout: int | None) -> None:
    scene.sender(range(1))
    task = scene.start()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert task.synchronize(timeout) is SUCCESS
    assert task.get_results(timeout_in_millis=timeout) == [SUCCESS]


def test_several_threads_may_wait_for_one_task(scene: Scene) -> None:
    sender = scene.sender(range(2))
    gate = sender.hold(1)
    task = scene.start()
    assert sender.reached[1].wait(WAIT_S)
    waiting = [in_thread(call) for call in (task.synchronize, task.get_results, task.synchronize)]
    gate.set()
    assert [value() for value in waiting] == [SUCCESS, [SUCCESS], SUCCESS]


def test_tasks_do_not_wait_for_one_another() -> None:
    with contextlib.ExitStack() as stack:
        scenes = [stack.enter_context(contextlib.closing(Scene())) for _ in range(4)]
        gates = [scene.sender(range(3)).hold(i % 3) for i, scene in enumerate(scenes)]
        for scene in scenes:
            scene.sender(range(1, 5))
        tasks = [scene.start() for scene in scenes]
        for gate, task in reversed(list(zip(gates, tasks, strict=True))):
            await_status(task, 1, SUCCESS)
            gate.set()
            assert task.synchronize(WAIT_MS) is SUCCESS
        assert [scene.num_finished for scene in scenes] == [1, 1, 1, 1]


# -- the end of a task


@pytest.mark.parametrize("num_destinations", [1, 3])
def test_the_source_is_let_go_before_anybody_hears_of_the_end(scene: Scene, num_destinations: int) -> None:
    for _ in range(num_destinations):
        scene.sender(range(2))
    seen, gate = threading.Event(), threading.Event()

    def on_finished() -> None:
        scene.log.add("task", "finished")
        seen.set()
        assert gate.wait(WAIT_S)

    task = start_task(scene.senders, scene.synchronizer(), LAYER_TIMEOUT_MS, "layers-test", on_finished)
    try:
        assert seen.wait(WAIT_S)
        assert scene.log.events[-1] == ("task", "finished")
        assert task.synchronize(SHORT_MS) is TIMEOUT
        assert task.get_results(SHORT_MS) == [SUCCESS] * num_destinations
    finally:
        gate.set()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert scene.log.of("task") == ["finished"]


def test_an_error_at_the_end_is_reported_and_changes_no_status(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException | None] = []
    hooked = threading.Event()

    def hook(args: threading.ExceptHookArgs) -> None:
        reported.append(args.exc_value)
        hooked.set()

    monkeypatch.setattr(threading, "excepthook", hook)
    error = KeyError("pin")

    def on_finished() -> None:
        raise error

    scene.sender(range(2))
    task = start_task(scene.senders, scene.synchronizer(), LAYER_TIMEOUT_MS, "layers-test", on_finished)
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert task.get_results() == [SUCCESS]
    assert hooked.wait(WAIT_S)
    assert reported == [error]


@pytest.mark.parametrize("num_destinations", [1, 2])
def test_a_task_that_nobody_keeps_runs_to_its_end(num_destinations: int) -> None:
    log, finished = Log(), threading.Event()
    senders = [FakeSender(log, f"sender{i}", range(3)) for i in range(num_destinations)]
    synchronizer = Synchronizer(log, ready=())
    task = start_task(senders, synchronizer, LAYER_TIMEOUT_MS, "layers-test", finished.set)
    del task
    gc.collect()
    synchronizer.release_all()
    assert finished.wait(WAIT_S)
    assert all(sender.steps == ["open", 0, 1, 2, "close"] for sender in senders)


@pytest.mark.parametrize("layers", [[], [range(3), range(2, 2)]])
def test_nothing_to_send_is_refused_before_anything_starts(scene: Scene, layers: list[range]) -> None:
    for one in layers:
        scene.sender(one)
    with pytest.raises(ParamInvalid, match="at least one"):
        scene.start()
    assert scene.log.events == []


@pytest.mark.parametrize(
    ("num_destinations", "refused", "expected"),
    [
        (1, {"datadist-t"}, [FAILED]),
        (3, {"datadist-t-1"}, [SUCCESS, FAILED, SUCCESS]),
        (2, {"datadist-t"}, [FAILED, FAILED]),
        (2, {"datadist-t", "datadist-t-0", "datadist-t-1"}, [FAILED, FAILED]),
    ],
)
def test_a_thread_that_cannot_be_started_is_a_failure(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    num_destinations: int,
    refused: set[str],
    expected: list[LLMStatusCode],
) -> None:
    start = threading.Thread.start

    def start_unless_refused(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
    for _ in range(num_destinations):
        scene.sender(range(2))
    task = scene.start(name="t")
    assert task.get_results(WAIT_MS) == expected
    assert all(sender.steps[-1] == "close" for sender in scene.senders)
    assert all("can't start new thread" in str(error) for error in task.errors if error is not None)
    assert scene.num_finished == 1


EXITS_WHILE_RUNNING = """
import threading
from datadist_core.cache.layerwise import LayerSynchronizer, start_task

sending, asked, never = threading.Event(), threading.Event(), threading.Event()

class Hangs:
    layers = range(1)
    def open(self): sending.set(); never.wait()
    def send(self, layer_index): pass
    def close(self): pass

class Later(Hangs):
    layers = range(2)

class Waits(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        if layer_index == 1: asked.set(); never.wait()
        return True

start_task([Hangs()], Waits(), 1000, "one", lambda: None)
start_task([Hangs(), Later()], Waits(), 1000, "two", lambda: None)
assert sending.wait(20) and asked.wait(20)
print("exits")
"""


def test_the_interpreter_exits_while_tasks_hang() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS_WHILE_RUNNING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "exits", "")


# -- any ranges, any failures, against a model


@dataclass(frozen=True)
class Plan:
    """Random input: layers and failure point of each destination, and where the synchroniser fails."""

    layers: list[range]
    fails_at: list[Any]
    unreleased: int | None


@dataclass(frozen=True)
class Expected:
    """What one destination must have done, and the last layer that had to be asked for it."""

    status: LLMStatusCode
    steps: list[Any]
    last_asked: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    starts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    layers = [range(start, start + draw(st.integers(1, 5))) for start in starts]
    fails_at = [draw(st.one_of(st.none(), st.sampled_from(["open", "close", *one]))) for one in layers]
    return Plan(layers, fails_at, draw(st.one_of(st.none(), st.integers(0, 11))))


def expected(layers: range, fails_at: Any, unreleased: int | None) -> Expected:
    """A destination alone: layers in order, until its own failure or the first that it lacks for good."""
    lost = LLMStatusCode.LLM_LINK_FAILED
    steps: list[Any] = []
    for layer in layers:
        if unreleased is not None and layer >= unreleased:
            return Expected(FAILED, [*steps, "close"], unreleased)
        steps += ["open", layer] if not steps else [layer]
        if fails_at == "open":
            return Expected(lost, ["open", "close"], layer)
        if fails_at == layer:
            return Expected(lost, [*steps, "close"], layer)
    return Expected(lost if fails_at == "close" else SUCCESS, [*steps, "close"], layers[-1])


@given(plans())
@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
def test_any_ranges_and_failures_agree_with_the_model(plan: Plan) -> None:
    union = sorted(set().union(*plan.layers))
    unreleased = plan.unreleased if plan.unreleased in union else None
    model = [expected(*one, unreleased) for one in zip(plan.layers, plan.fails_at, strict=True)]
    with contextlib.closing(Scene()) as scene:
        for layers, step in zip(plan.layers, plan.fails_at, strict=True):
            scene.sender(layers).failures = {} if step is None else {step: PeerLost("gone")}
        task = scene.start(scene.synchronizer(answers={} if unreleased is None else {unreleased: False}))
        statuses = [one.status for one in model]
        assert task.get_results(WAIT_MS) == statuses
        assert task.synchronize() is next((s for s in statuses if s is not SUCCESS), SUCCESS)
        for asker in scene.log.threads["sync"]:
            asker.join(WAIT_S)
        assert [sender.steps for sender in scene.senders] == [one.steps for one in model]
        assert scene.num_finished == 1
        asked = scene.log.of("sync")
        assert asked == union[: len(asked)]
        last_needed = max(one.last_asked for one in model)
        assert asked[-1] == last_needed if len(model) == 1 else asked[-1] >= last_needed


# -- the configs


def test_configs_are_values() -> None:
    addrs = [1, 2**64 - 1]
    config = TransferConfig(7, addrs, range(1, 2), 3)
    addrs.append(5)
    assert (config.dst_cluster_id, config.dst_addrs) == (7, [1, 2**64 - 1])
    assert (config.src_layer_range, config.src_batch_index, config.cluster_id) == (range(1, 2), 3, 7)
    assert config == TransferConfig(dst_cluster_id=7, dst_addrs=(1, 2**64 - 1), src_layer_range=range(1, 2), src_batch_index=3)  # type: ignore[arg-type]  # fmt: skip  # noqa: E501
    assert config != TransferConfig(7, [1, 2], range(1, 2), 3)
    assert len({config, TransferConfig(7, [1, 2**64 - 1], range(1, 2), 3)}) == 1
    with pytest.raises(FrozenInstanceError):
        config.src_batch_index = 1  # type: ignore[misc]


@pytest.mark.parametrize("key", [BlocksCacheKey(9), CacheKeyByIdAndIndex(9, 1, 2)])
def test_configs_by_key_are_values(key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
    config = TransferWithCacheKeyConfig(key, range(2), range(3, 5), 4)
    assert (config.cache_key, config.cluster_id, config.src_batch_index) == (key, 9, 4)
    assert (config.src_layer_range, config.dst_layer_range) == (range(2), range(3, 5))
    assert config == TransferWithCacheKeyConfig(
        cache_key=key, src_layer_range=range(2), dst_layer_range=range(3, 5), src_batch_index=4
    )
    with pytest.raises(FrozenInstanceError):
        config.cache_key = key  # type: ignore[misc]


def test_defaults_of_the_configs() -> None:
    by_address, by_key = TransferConfig(0, []), TransferWithCacheKeyConfig(BlocksCacheKey(1))
    assert (by_address.src_layer_range, by_address.src_batch_index) == (None, 0)
    assert (by_key.src_layer_range, by_key.dst_layer_range, by_key.src_batch_index) == (None, None, 0)


GOOD: dict[type, dict[str, Any]] = {
    TransferConfig: {"dst_cluster_id": 1, "dst_addrs": [64, 128], "src_layer_range": range(1), "src_batch_index": 0},
    TransferWithCacheKeyConfig: {
        "cache_key": BlocksCacheKey(1),
        "src_layer_range": range(2),
        "dst_layer_range": range(2),
        "src_batch_index": 0,
    },
}
BAD_RANGES = [
    (range(0), ParamInvalid),
    (range(3, 3), ParamInvalid),
    (range(0, 4, 2), ParamInvalid),
    (range(4, 0, -1), ParamInvalid),
    (range(-1, 1), ParamInvalid),
    (range(2**70), ParamInvalid),
    ([0, 1], TypeError),
    ((0, 1), TypeError),
    (2, TypeError),
    ("0", TypeError),
]
BAD_INDICES = [(-1, ParamInvalid), (None, TypeError), (0.0, TypeError), (True, TypeError), ("0", TypeError)]
BAD_UINT64S = [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)]
BAD_ARGUMENTS = [
    *[(TransferConfig, "dst_cluster_id", *one) for one in [*BAD_UINT64S, (None, TypeError)]],
    *[(TransferConfig, "dst_addrs", [64, value], error) for value, error in BAD_UINT64S],
    *[(TransferConfig, "dst_addrs", value, TypeError) for value in (None, 64, "64", {64: 1}, range(2))],
    *[(TransferWithCacheKeyConfig, "cache_key", value, TypeError) for value in (None, 1, CacheKey(1, 2))],
    *[(TransferWithCacheKeyConfig, "dst_layer_range", *one) for one in [*BAD_RANGES, (range(3), ParamInvalid)]],
    *[(kind, "src_layer_range", *one) for kind in GOOD for one in BAD_RANGES],
    *[(kind, "src_batch_index", *one) for kind in GOOD for one in BAD_INDICES],
]


@pytest.mark.parametrize(("kind", "name", "value", "error"), BAD_ARGUMENTS)
def test_a_bad_argument_of_a_config_is_refused_by_name(
    kind: type, name: str, value: Any, error: type[Exception]
) -> None:
    kind(**GOOD[kind])
    with pytest.raises(error, match=name) as caught:
        kind(**{**GOOD[kind], name: value})
    assert type(caught.value) is error
    if error is ParamInvalid:
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID  # type: ignore[attr-defined]


def test_a_synchroniser_must_implement_its_method() -> None:
    class Nothing(LayerSynchronizer):
        pass

    with pytest.raises(TypeError, match="synchronize_layer"):
        Nothing()  # type: ignore[abstract]
