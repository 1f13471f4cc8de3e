# SPDX-License-Identifier: Apache-2.0
"""Backends that go wrong on purpose, chosen like any other.

With `transfer_backend="datadist_core.testing.faults:FaultyShm"` a link uses one of them. Each wraps a real backend and
spoils some of its batches, as the option `fault` says:

    {"kind": "corrupt", "nth": 3}        the third batch, if it is a READ, reports OK over one inverted block
    {"kind": "drop", "nth": 1}           the first batch never completes until it is cancelled, or its link ends
    {"kind": "fail", "nth": 0}           every batch fails
    {"kind": "delay", "seconds": 0.5}    every batch starts half a second late
    {"kind": "throttle", "bytes_per_s": 1e6}  batches start as if all of them shared a link of that speed
    {"file": "/a/path"}                  what that file says, as JSON, when a batch comes; nothing while it is missing.
                                         Batches are counted anew when it changes: put a new one there by renaming

Whatever goes wrong, the contract holds: one completion per batch, and nothing touches its memory after that. Held
batches wait outside of the wrapped backend, so that a test decides what happens and not the timing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import Cancelled, ClosedError, LLMException, NotYetLinked, ParamInvalid, PeerLost, RemoteError
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Capabilities, Completion, CompletionStatus, DoneCallback
from ..transfer.plan import Batch, Op
from ..types import Deadline
from .child import import_by_name

__all__ = ["Fault", "FaultyBackend", "FaultyLoopback", "FaultyShm", "FaultyTcp"]

KINDS = ("corrupt", "drop", "fail", "delay", "throttle")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        kind: one of `KINDS`.
        nth: which submit, counted from 1 over the backend's whole life; 0 for each of them.
        index: corrupt: which of the batch's items is inverted, in all of its grids.
        seconds: delay: how long.
        bytes_per_s: throttle: how fast.
    """

    kind: str
    nth: int = 0
    index: int = 0
    seconds: float = 0.0
    bytes_per_s: float = math.inf

    @classmethod
    def from_option(cls, option: dict[str, Any]) -> Fault:
        """Raise ParamInvalid unless `option` describes a fault."""
        try:
            fault = cls(**option)
        except TypeError as error:
            raise ParamInvalid(f"option fault={option}: {error}") from error
        if fault.kind not in KINDS:
            raise ParamInvalid(f"option fault: kind={fault.kind!r} is not one of {', '.join(KINDS)}")
        if fault.nth < 0 or fault.index < 0 or fault.seconds < 0 or not fault.bytes_per_s > 0:
            raise ParamInvalid(f"option fault={option} has a number that is out of range")
        return fault


class _FaultFile:
    """A fault that changes while the backend is in use. Not thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def has_changed(self) -> bool:
        """Whether the file is another one than at the last call."""
        try:
            found = os.stat(self._path)
            now = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            now = None
        changed, self._seen = now != self._seen, now
        return changed

    def read(self) -> Fault | None:
        try:
            with open(self._path, "rb") as file:
                return Fault.from_option(json.load(file))
        except FileNotFoundError:
            return None


class FaultyBackend(Backend):
    """Wraps the backend that `wrapped` names ("module:Class")."""

    wrapped: ClassVar[str]

    def __init__(self) -> None:
        self._inner: Backend = import_by_name(self.wrapped)()
        self._context: BackendContext | None = None
        self._fault: Fault | None = None
        self._fault_file: _FaultFile | None = None
        self._held = _HeldBatches(self._inner.submit)
        self._lock = threading.Lock()
        self._num_submits = 0
        self._busy_until_s = 0.0

    def capabilities(self) -> Capabilities:
        return replace(self._inner.capabilities(), inline=False)

    def open(self, context: BackendContext) -> None:
        options = dict(context.options)
        option = options.pop("fault", None)
        self._fault_file = None
        if option is not None and set(option) == {"file"}:
            self._fault_file = _FaultFile(option["file"])
        elif option is not None:
            self._fault = Fault.from_option(option)
        self._inner.open(replace(context, options=options))
        self._context = context

    def close(self) -> None:
        self._context = None
        self._held.close()
        self._inner.close()

    def listen(self, host: str) -> None:
        self._inner.listen(host)

    def identity(self) -> bytes:
        return self._inner.identity()

    def connect(self, peer_id: int, identity: bytes, *, initiator: bool, link_token: bytes, deadline: Deadline) -> None:
        self._inner.connect(peer_id, identity, initiator=initiator, link_token=link_token, deadline=deadline)

    def disconnect(self, peer_id: int) -> None:
        self._held.end_peer(peer_id)
        self._inner.disconnect(peer_id)

    def is_fenced(self, peer_id: int) -> bool:
        return self._inner.is_fenced(peer_id)

    def register(self, region: Region) -> bytes | None:
        return self._inner.register(region)

    def unregister(self, region_id: int) -> None:
        self._inner.unregister(region_id)

    def attach(self, peer_id: int, region_id: int, size_bytes: int, descriptor: bytes, deadline: Deadline) -> None:
        self._inner.attach(peer_id, region_id, size_bytes, descriptor, deadline)

    def detach(self, peer_id: int, region_id: int) -> None:
        self._inner.detach(peer_id, region_id)

    def submit(self, batch_id: int, batch: Batch, done: DoneCallback) -> None:
        context = self._context
        if context is None:
            raise ClosedError(f"the {self.name} backend is not open")
        fault = self._next_fault()
        if fault is None:
            self._inner.submit(batch_id, batch, done)
        elif fault.kind == "corrupt":
            self._inner.submit(batch_id, batch, _corrupting(batch, fault.index, context, done))
        elif fault.kind == "fail":
            done(Completion.failed(batch_id, RemoteError(f"injected fault: batch {batch_id} fails")))
        else:
            self._held.hold(_Held(batch_id, batch, done, self._due_s(fault, batch)))

    def poll(self) -> None:
        self._inner.poll()

    def cancel(self, batch_id: int) -> None:
        if not self._held.cancel(batch_id):
            self._inner.cancel(batch_id)

    def _next_fault(self) -> Fault | None:
        with self._lock:
            if self._fault_file is not None and self._fault_file.has_changed():
                self._fault = self._fault_file.read()
                self._num_submits = 0
            self._num_submits += 1
            hit = self._fault is not None and self._fault.nth in (0, self._num_submits)
            return self._fault if hit else None

    def _due_s(self, fault: Fault, batch: Batch) -> float:
        """When, on the monotonic clock, a held batch may start."""
        now_s = time.monotonic()
        if fault.kind == "drop":
            return math.inf
        if fault.kind == "delay":
            return now_s + fault.seconds
        with self._lock:
            self._busy_until_s = max(now_s, self._busy_until_s) + batch.num_bytes / fault.bytes_per_s
            return self._busy_until_s


class FaultyLoopback(FaultyBackend):
    name = "faulty-loopback"
    wrapped = "datadist_core.backends.loopback:LoopbackBackend"


class FaultyShm(FaultyBackend):
    name = "faulty-shm"
    wrapped = "datadist_core.backends.shm:ShmBackend"


class FaultyTcp(FaultyBackend):
    name = "faulty-tcp"
    wrapped = "datadist_core.backends.tcp:TcpBackend"


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    batch_id: int
    batch: Batch
    done: DoneCallback
    due_s: float


class _HeldBatches:
    """Accepted batches that the wrapped backend has not seen yet. Whoever takes one out completes or starts it."""

    def __init__(self, start: Callable[[int, Batch, DoneCallback], None]) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._held: dict[int, _Held] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def hold(self, held: _Held) -> None:
        with self._changed:
            if self._closed:
                raise ClosedError("the backend is closed")
            self._held[held.batch_id] = held
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="datadist-faults", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, batch_id: int) -> bool:
        """Whether the batch was held here; it is complete then."""
        with self._changed:
            held = self._held.pop(batch_id, None)
        if held is None:
            return False
        held.done(Completion.cancelled(batch_id, Cancelled(f"batch {batch_id} was cancelled")))
        return True

    def end_peer(self, peer_id: int) -> None:
        error = PeerLost(f"peer {peer_id} was disconnected")
        self._end([h for h in self._all() if h.batch.peer_id == peer_id], error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        self._end(self._all(), ClosedError("the backend was closed"))
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _all(self) -> list[_Held]:
        with self._changed:
            return list(self._held.values())

    def _end(self, ending: list[_Held], error: LLMException) -> None:
        for held in ending:
            with self._changed:
                mine = self._held.pop(held.batch_id, None)
            if mine is not None:
                mine.done(Completion.failed(mine.batch_id, error))

    def _run(self) -> None:
        while (held := self._next_due()) is not None:
            self._start_late(held)

    def _next_due(self) -> _Held | None:
        """Take out the next batch whose time has come; None once closed."""
        with self._changed:
            while not self._closed:
                first = min(self._held.values(), key=lambda held: held.due_s, default=None)
                wait_s = math.inf if first is None else first.due_s - time.monotonic()
                if first is not None and wait_s <= 0:
                    return self._held.pop(first.batch_id)
                self._changed.wait(None if math.isinf(wait_s) else wait_s)
            return None

    def _start_late(self, held: _Held) -> None:
        """The batch was accepted long ago, so what `submit` raises now is how it ends."""
        try:
            self._start(held.batch_id, held.batch, held.done)
        except NotYetLinked as error:
            lost = PeerLost(f"peer {held.batch.peer_id} was disconnected")
            lost.__cause__ = error
            held.done(Completion.failed(held.batch_id, lost))
        except LLMException as error:
            held.done(Completion.failed(held.batch_id, error))


def _corrupting(batch: Batch, index: int, context: BackendContext, done: DoneCallback) -> DoneCallback:
    """A callback that inverts one block of a READ's destination before anybody hears that it is OK."""

    def spoil(completion: Completion) -> None:
        if completion.status is CompletionStatus.OK and batch.op is Op.READ and index < len(batch.local_items):
            _invert(batch, index, context)
        done(completion)

    return spoil


def _invert(batch: Batch, index: int, context: BackendContext) -> None:
    """Flip every bit of the parts that the batch moved into its item number `index`, in all grids."""
    for pair in batch.pairs:
        region = context.local_region(pair.local.region_id)
        item = pair.local.offset_bytes + int(batch.local_items[index]) * pair.local.stride_bytes
        for part in batch.slices:
            raw = (ctypes.c_uint8 * part.num_bytes).from_address(region.address + item + part.local_offset)
            block = np.ctypeslib.as_array(raw)
            np.invert(block, out=block)
