# SPDX-License-Identifier: Apache-2.0
"""Layer by layer to several destinations, while the model still computes: what `transfer_cache_async` runs on.

A task asks the user's `LayerSynchronizer` for one layer after the other and hands each released layer to the
destinations that want it. How bytes move is not known here: a `LayerSender` per destination does that.

Threads. With several destinations one thread asks the synchroniser and each destination has its own, fed by a queue
of released layers: one that is slow, hangs or fails touches neither the others nor the asking. With one destination a
single thread asks, sends, asks again. The next call then comes after the send, and that is harmless: a synchroniser
waits for work that goes on elsewhere, so a later call finds more of it done, and if the only destination fails, no
layer is asked for in vain. It saves one thread, and one thread switch per layer.

Failures. A destination ends with its first error in layer order. When the synchroniser fails, every destination that
lacks a layer ends with that error, after the layers it was already given; one that was given all of its layers is
not affected. The task ends with its last destination; a call of the synchroniser that is still running then is not
waited for. But while a destination needs a layer, a synchroniser that blocks for ever keeps the task, and the source
cache, for ever: it is given a time limit and has to keep it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..checks import check_range, check_type
from ..errors import LLMException, ParamInvalid
from ..types import LLMStatusCode
from .desc import UINT64_MAX, BlocksCacheKey, CacheKeyByIdAndIndex

#: No cache has more; ranges of layers are checked against it so that their lengths are ordinary numbers.
MAX_LAYERS = 2**31

# -- what users write and read


class LayerSynchronizer(ABC):
    """Tells when a layer of the source cache holds its final data. Users implement it."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Return when layer `layer_index` may be sent.

        Called once per layer, in ascending order, from a thread of the task, until no destination needs more layers.

        Args:
            layer_index: index of the layer in the source cache.
            timeout_in_millis: how long to wait at most, in ms; None for no limit.

        Returns:
            True (also NumPy's) to have the layer sent. False fails the task. So does any other type, also if it is
            "truthy": a status code other than LLM_SUCCESS is, and the layer would be sent before it is ready.

        Raises:
            Anything: fails the task with LLM_FAILED, or with the status code of an LLMException.
        """


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """A destination by address.

    Args:
        dst_cluster_id: a linked cluster (uint64).
        dst_addrs: addresses in its memory (uint64), one per tensor of the sent layers: two per layer, unless
            `tensor_num_per_layer` says otherwise. Kept as a copy, as a list.
        src_layer_range: the layers to send, with step 1; None for all.
        src_batch_index: batch entry to send, where the source is contiguous.

    Raises TypeError, ValueError (an id or address that is no uint64) or ParamInvalid, naming the argument.
    """

    dst_cluster_id: int
    dst_addrs: list[int] = field(hash=False)
    src_layer_range: range | None = None
    src_batch_index: int = 0

    def __post_init__(self) -> None:
        _check_uint64("dst_cluster_id", self.dst_cluster_id)
        check_type("dst_addrs", self.dst_addrs, list, tuple)
        for i, address in enumerate(self.dst_addrs):
            _check_uint64(f"dst_addrs[{i}]", address)
        _check_layers("src_layer_range", self.src_layer_range)
        _check_batch_index(self.src_batch_index)
        object.__setattr__(self, "dst_addrs", list(self.dst_addrs))

    @property
    def cluster_id(self) -> int:
        """The destination."""
        return self.dst_cluster_id


@dataclass(frozen=True, slots=True)
class TransferWithCacheKeyConfig:
    """A destination by the key of its cache.

    Args:
        cache_key: names the destination's cluster and its cache there.
        src_layer_range, dst_layer_range: equally long ranges of layers with step 1; None for all.
        src_batch_index: batch entry to send, where the source is contiguous.

    Raises TypeError or ParamInvalid, naming the argument.
    """

    cache_key: BlocksCacheKey | CacheKeyByIdAndIndex
    src_layer_range: range | None = None
    dst_layer_range: range | None = None
    src_batch_index: int = 0

    def __post_init__(self) -> None:
        check_type("cache_key", self.cache_key, BlocksCacheKey, CacheKeyByIdAndIndex)
        _check_layers("src_layer_range", self.src_layer_range)
        _check_layers("dst_layer_range", self.dst_layer_range)
        _check_equally_long(self.src_layer_range, self.dst_layer_range)
        _check_batch_index(self.src_batch_index)

    @property
    def cluster_id(self) -> int:
        """The destination."""
        return self.cache_key.cluster_id


class CacheTask:
    """A running `transfer_cache_async`. It runs to its end whether or not anybody keeps this object.

    Thread-safe; every method may be called many times.
    """

    __slots__ = ("_destinations", "_end")

    def __init__(self, destinations: Sequence[_Destination], end: _End) -> None:
        self._destinations = destinations
        self._end = end

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait until every destination has ended and the task has let go of the source cache.

        Args:
            timeout_in_millis: how long to wait, in ms, greater than 0; None for no limit.

        Returns:
            LLM_SUCCESS; or the status of the first destination, in the order of the configs, that failed; or
            LLM_TIMEOUT if the task has not ended in time. It goes on in that case.
        """
        if not self._end.wait(_timeout_s(timeout_in_millis)):
            return LLMStatusCode.LLM_TIMEOUT
        failures = (error.status_code for error in self.errors if error is not None)
        return next(failures, LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait like `synchronize` and tell how far each destination got.

        Returns:
            One per config, in order: the final status of a destination that has ended; LLM_TIMEOUT for one that was
            still being sent to when time ran out; None for one that had not been started (its first layer had not
            been released).
        """
        self._end.wait(_timeout_s(timeout_in_millis))
        return [destination.status() for destination in self._destinations]

    @property
    def errors(self) -> list[LLMException | None]:
        """What went wrong, per config; None where nothing has. (An extension.)"""
        return [destination.error for destination in self._destinations]


# -- what the cache manager gives and calls


class LayerSender(Protocol):
    """Moves the layers of one destination. Its methods are called one at a time, all from the same thread."""

    @property
    def layers(self) -> range:
        """The source layers it wants: ascending, at least one."""

    def open(self) -> None:
        """Resolve the destination. Called once, when its first layer has been released. Raises LLMException."""

    def send(self, layer_index: int) -> None:
        """Send one source layer; return when it has arrived. Raises LLMException."""

    def close(self) -> None:
        """Let go of everything. Called once, always: also if `open` failed or was never called."""


def start_task(
    senders: Sequence[LayerSender],
    synchronizer: LayerSynchronizer,
    timeout_ms: int,
    name: str,
    on_finished: Callable[[], None],
) -> CacheTask:
    """Start to send; returns at once.

    Args:
        senders: one per destination, in the order of the configs.
        timeout_ms: passed to each `synchronize_layer`.
        name: for the names of the threads, "datadist-NAME...".
        on_finished: called once, after the last sender has been closed and before `CacheTask.synchronize` returns;
            usually from a thread of the task. What it raises goes to `threading.excepthook` and changes no status.

    Raises:
        ParamInvalid: there is no sender, or one that wants no layer. Then nothing was started or closed, and
            `on_finished` is not called. Nothing else is raised: that no thread could be started is a failure of the
            destinations.
    """
    if not senders or not all(len(sender.layers) for sender in senders):
        raise ParamInvalid("a layer-wise transfer needs at least one destination, and each at least one layer")
    end = _End(len(senders), on_finished)
    destinations = [_Destination(sender, end) for sender in senders]
    released = _released_layers(destinations, synchronizer, timeout_ms)
    if len(destinations) == 1:
        _run_in_thread(name, destinations[0].run, released)
    else:
        for i, destination in enumerate(destinations):
            _run_in_thread(f"{name}-{i}", destination.run, destination.given())
        _run_in_thread(name, lambda layers: _hand_out(layers, destinations), released)
    return CacheTask(destinations, end)


# -- inside


class _End:
    """Counts the destinations that have ended, finishes the task with the last one, and lets others wait for that."""

    def __init__(self, num_destinations: int, on_finished: Callable[[], None]) -> None:
        self._num_running = num_destinations
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._on_finished = on_finished

    def one_ended(self) -> None:
        with self._lock:
            self._num_running -= 1
            is_last = self._num_running == 0
        if is_last:
            try:
                self._on_finished()
            finally:
                self._reached.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._reached.wait(timeout_s)


class _Destination:
    """One sender and how far it has got. Only its own thread writes the state; others read it."""

    def __init__(self, sender: LayerSender, end: _End) -> None:
        self._sender = sender
        self._end = end
        self._given: queue.SimpleQueue[int | LLMException] = queue.SimpleQueue()
        self.layers = sender.layers
        self.has_started = False
        self.has_ended = False
        self.error: LLMException | None = None  # written before `has_ended`

    def needs(self, layer: int) -> bool:
        """Whether it still wants this layer or a later one."""
        return self.error is None and layer <= self.layers[-1]

    def give(self, layer_or_failure: int | LLMException) -> None:
        """Its next layer has been released, or none of those it lacks ever will be."""
        self._given.put(layer_or_failure)

    def given(self) -> Iterator[int]:
        """Its layers, each as soon as it is given. No time limit: whoever walks over the layers always ends it."""
        for _ in self.layers:
            item = self._given.get()
            if isinstance(item, LLMException):
                raise item
            yield item

    def run(self, layers: Iterator[int]) -> None:
        """Its whole life, in its own thread."""
        try:
            self._send_all(layers)
        except BaseException as error:  # SystemExit too: a thread that just goes away would leave everybody waiting
            self.error = _as_llm_exception(error, "sending to this destination")
        try:
            self._sender.close()
        except BaseException as error:
            self.error = self.error or _as_llm_exception(error, "closing this destination")
        self.has_ended = True
        self._end.one_ended()

    def _send_all(self, layers: Iterator[int]) -> None:
        for layer in layers:
            if not self.has_started:
                self.has_started = True
                self._sender.open()
            self._sender.send(layer)

    def status(self) -> LLMStatusCode | None:
        """See `CacheTask.get_results`."""
        if self.has_ended:
            return LLMStatusCode.LLM_SUCCESS if self.error is None else self.error.status_code
        return LLMStatusCode.LLM_TIMEOUT if self.has_started else None


def _released_layers(
    destinations: Sequence[_Destination], synchronizer: LayerSynchronizer, timeout_ms: int
) -> Iterator[int]:
    """Every layer that any destination wants, each after the synchroniser has released it, while any needs more."""
    for layer in sorted(set(itertools.chain.from_iterable(d.layers for d in destinations))):
        if not any(destination.needs(layer) for destination in destinations):
            return
        _synchronize(synchronizer, layer, timeout_ms)
        yield layer


def _synchronize(synchronizer: LayerSynchronizer, layer: int, timeout_ms: int) -> None:
    call = f"synchronize_layer({layer}, {timeout_ms})"
    try:
        answer: object = synchronizer.synchronize_layer(layer, timeout_ms)
    except BaseException as error:
        status = error.status_code if isinstance(error, LLMException) else LLMStatusCode.LLM_FAILED
        raise LLMException(f"{call} raised {_text(error)}", status) from error
    if not isinstance(answer, bool | np.bool_):
        raise LLMException(f"{call} returned {answer!r}; it must return True or False")
    if not answer:
        raise LLMException(f"{call} returned False: the layer was not released")


def _hand_out(layers: Iterator[int], destinations: Sequence[_Destination]) -> None:
    """Give each released layer to all that want it; in the end, give a failure to all."""
    try:
        for layer in layers:
            for destination in destinations:
                if layer in destination.layers:
                    destination.give(layer)
    except BaseException as error:
        failure = _as_llm_exception(error, "waiting for a layer")
        for destination in destinations:  # those that were given all their layers do not read it
            destination.give(_copy_of(failure))


def _copy_of(error: LLMException) -> LLMException:
    """The same error to raise in another thread: raising one object in several would mix up their tracebacks."""
    copy = LLMException(str(error), error.status_code)
    copy.__cause__ = error.__cause__
    return copy


def _run_in_thread(name: str, run: Callable[[Iterator[int]], None], layers: Iterator[int]) -> None:
    """Run in a daemon thread. If there can be none, `run` meets that error in place of its first layer."""
    try:
        threading.Thread(target=run, args=(layers,), name=f"datadist-{name}", daemon=True).start()
    except RuntimeError as error:  # too many threads, or the interpreter is exiting
        run(_failing(_as_llm_exception(error, f"starting the thread datadist-{name}")))


def _failing(error: LLMException) -> Iterator[int]:
    yield from ()
    raise error


def _as_llm_exception(error: BaseException, doing: str) -> LLMException:
    if isinstance(error, LLMException):
        return error
    failure = LLMException(f"{doing} failed: {_text(error)}")
    failure.__cause__ = error
    return failure


def _text(error: BaseException) -> str:
    """Class and text of a foreign exception; safe also if its `__str__` raises."""
    return "".join(traceback.format_exception_only(error)).strip()


def _timeout_s(timeout_in_millis: int | None) -> float | None:
    if timeout_in_millis is None:
        return None
    check_type("timeout_in_millis", timeout_in_millis, int)
    if timeout_in_millis <= 0:
        raise ParamInvalid(f"timeout_in_millis={timeout_in_millis} must be greater than 0, or None for no limit")
    return min(timeout_in_millis, int(threading.TIMEOUT_MAX) * 1000) / 1000


def _check_uint64(name: str, value: object) -> None:
    check_type(name, value, int)
    check_range(name, value, 0, UINT64_MAX)  # type: ignore[arg-type]


def _check_layers(name: str, layers: range | None) -> None:
    if layers is None:
        return
    check_type(name, layers, range)
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= MAX_LAYERS:
        raise ParamInvalid(f"{name}={layers} must be a non-empty range of layers (0..{MAX_LAYERS - 1}) with step 1")


def _check_equally_long(src_layers: range | None, dst_layers: range | None) -> None:
    if src_layers is not None and dst_layers is not None and len(src_layers) != len(dst_layers):
        raise ParamInvalid(
            f"src_layer_range={src_layers} has {len(src_layers)} layers but dst_layer_range={dst_layers} has "
            f"{len(dst_layers)}; they must be equally long"
        )


def _check_batch_index(value: int) -> None:
    check_type("src_batch_index", value, int)
    if value < 0:
        raise ParamInvalid(f"src_batch_index={value} must be 0 or greater")
