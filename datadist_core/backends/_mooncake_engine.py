# SPDX-License-Identifier: Apache-2.0
"""Mooncake's engines: one that serves our memory to peers, and one that our own transfers run on.

Why two: a call that fails says nothing about the rest of its ranges. Mooncake returns with the first range that
failed, or after its time limit, while others go on, into memory that its owner believes to be free again. The one
thing that surely ends them is to destroy the engine. So after a failure the engine of our transfers is retired: new
calls get a new one, those that run on the old one end as usual, then it is destroyed, and only then is the failure
reported. Peers that use our memory do not notice: they talk to the other engine.

Interrupting: a call that waits for a peer ends when the connections to that peer are shut down. That shuts all of them,
whoever uses them, and Mooncake does not notice before it uses them again: it keeps connections, and fails with one that
is dead. So interrupts are counted for each peer (`Peer.num_interrupts`). An engine that was made before the last one
is not used for that peer any more, and a call that failed while the number grew has failed for no reason of its own,
unless it was the one that was meant: it is made again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import ClosedError, LLMException, Unreachable
from ..transfer.plan import CopyList, Op
from ..types import Deadline
from ._mooncake_binding import Binding, RawEngine, environment, load, time_limits
from ._mooncake_options import MooncakeOptions
from ._mooncake_sockets import listening_ports, shut_connections, shut_listener

logger = logging.getLogger(__name__)

_P2P = "P2PHANDSHAKE"  # engines find each other by address, without a metadata server
_FENCE_S = 120.0
_AGAIN_S = 0.2

_making = threading.Lock()
_interrupting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer's serving engine is. `data_port` is 0 if unknown, as with RDMA."""

    host: str
    port: int
    data_port: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    def interrupt(self) -> None:
        """Let calls of this process that wait for the peer fail, as far as they wait for a connection."""
        with _interrupting:
            if shut_connections(self.host, frozenset({self.port, self.data_port} - {0})):
                _interrupts[self] += 1

    def num_interrupts(self) -> int:
        """How often something was shut down so far; waits for an interrupt that is under way."""
        with _interrupting:
            return _interrupts[self]


_interrupts: Counter[Peer] = Counter()


def past_interrupts() -> Counter[Peer]:
    """`Peer.num_interrupts` of every peer, as of now."""
    with _interrupting:
        return Counter(_interrupts)


class Engine:
    """One Mooncake TransferEngine. Thread-safe, but `close` must come after the last call has returned.

    Args:
        host: the IPv4 address that peers reach us at.
    """

    def __init__(self, options: MooncakeOptions, host: str) -> None:
        """Raises Unreachable with the reason."""
        self._binding: Binding = load()
        with _making, environment(time_limits(options.timeout_s)):
            before = listening_ports()
            self._raw: RawEngine | None = self._binding.new_engine()
            self.port = 0
            self._start(options, host)
            others = listening_ports() - before - {self.port}
        # Another thread may have begun to listen meanwhile. Then we do without the port.
        self.data_port = others.pop() if len(others) == 1 and options.protocol == "tcp" else 0

    def register(self, address: int, num_bytes: int) -> bool:
        """Whether Mooncake takes the memory. It refuses what overlaps with what it has."""
        return self._opened().register_memory(address, num_bytes) == 0

    def unregister(self, address: int) -> None:
        self._opened().unregister_memory(address)

    def probe(self, peer: Peer) -> bool:
        """Whether the peer's engine answers."""
        return self._opened().send_probe(peer.name) == 0

    def move(self, peer: Peer, op: Op, ranges: CopyList) -> bool:
        """Move absolute ranges, without the GIL, one core busy waiting. If False, some may be moving still."""
        opcode = self._binding.read_opcode if op is Op.READ else self._binding.write_opcode
        local, remote, num_bytes = ranges.local.tolist(), ranges.remote.tolist(), ranges.num_bytes.tolist()
        return self._opened().batch_transfer_sync(peer.name, local, remote, num_bytes, opcode) == 0

    def close(self) -> None:
        """Destroy the engine: after that none of its threads touches memory any more. Idempotent.

        Mooncake's own listening thread looks up once a second only, and the interpreter stands still while it is
        waited for. So it is woken up; it logs an error for every turn that it makes without a listener.
        """
        raw, self._raw = self._raw, None
        if raw is None:
            return
        with self._binding.silent() as silent:
            if silent:
                shut_listener(self.port)
            del raw

    def _opened(self) -> RawEngine:
        if self._raw is None:
            raise ClosedError("the Mooncake engine is not open")
        return self._raw

    def _start(self, options: MooncakeOptions, host: str) -> None:
        """Without RDMA devices Mooncake quietly starts with something else: that is refused."""
        raw = self._opened()
        code = raw.initialize(host, _P2P, options.protocol, options.device)
        if code != 0:
            self._raw = None
            raise Unreachable(f"Mooncake cannot start on {host} (code {code}); MC_LOG_LEVEL=ERROR says more on stderr")
        self.port = raw.get_rpc_port()
        if options.protocol == "rdma" and not _has_device(raw.get_local_topology()):
            del raw
            self.close()
            raise Unreachable('Mooncake finds no RDMA device here; use the mooncake option protocol="tcp"')


def _has_device(topology: str) -> bool:
    """Mooncake's topology: memory location -> [devices that suit it best, other devices]."""
    return any(names for lists in json.loads(topology).values() for names in lists)


@dataclass(slots=True, eq=False)
class _Generation:
    """One engine in the service of the initiator. `interrupts` had happened when it was made."""

    engine: Engine
    interrupts: Counter[Peer] = field(default_factory=past_interrupts)
    num_calls: int = 0
    ending: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def may_reach(self, peer: Peer) -> bool:
        """Whether it keeps no connection to the peer that was shut down."""
        return self.interrupts[peer] == peer.num_interrupts()


class Initiator:
    """Runs our own transfers, on an engine that is replaced when one has failed. Thread-safe.

    Args:
        make_engine: may raise Unreachable.
        registers: local memory must be registered too, as RDMA needs it.
    """

    def __init__(self, make_engine: Callable[[], Engine], registers: bool) -> None:
        self._make_engine = make_engine
        self._registers = registers
        self._changed = threading.Condition()
        self._memory: dict[int, int] = {}
        self._closed = False
        self._current: _Generation | None = _Generation(make_engine())

    def add(self, address: int, num_bytes: int) -> None:
        """Memory that will be the local side of transfers. What Mooncake refuses overlaps with what it has."""
        if self._registers:
            with self._changed:
                self._memory[address] = num_bytes
                if self._current is not None:
                    self._current.engine.register(address, num_bytes)

    def remove(self, address: int) -> None:
        with self._changed:
            if self._memory.pop(address, None) is not None and self._current is not None:
                self._current.engine.unregister(address)

    def probe(self, peer: Peer, deadline: Deadline) -> bool:
        """Whether the peer's engine answers before the deadline."""
        generation = self._enter(peer)
        try:
            with interrupted_at(deadline, peer):
                return generation.engine.probe(peer)
        finally:
            self._leave(generation)
            self._close_if_unused(generation)

    def move(self, peer: Peer, op: Op, ranges: CopyList) -> bool:
        """Move absolute ranges. On return, also by an exception, nothing touches the memory any more."""
        generation = self._enter(peer)
        moved = False
        try:
            moved = generation.engine.move(peer, op, ranges)
        except (RuntimeError, TypeError, ValueError) as error:
            raise LLMException(f"Mooncake did not accept a transfer: {error}") from error
        finally:
            self._leave(generation)
            if moved:
                self._close_if_unused(generation)
            else:
                self._retire(generation)
        return moved

    def close(self) -> None:
        """After the last call has been made to end. Idempotent."""
        with self._changed:
            self._closed, generation = True, self._current
        if generation is not None:
            self._retire(generation)

    def _enter(self, peer: Peer) -> _Generation:
        with self._changed:
            if self._closed:
                raise ClosedError("the mooncake backend is not open")
            before = self._current
            entered = before if before is not None and before.may_reach(peer) else self._next_generation()
            self._current = entered
            entered.num_calls += 1
        if before is not None and before is not entered:
            self._close_if_unused(before)
        return entered

    def _next_generation(self) -> _Generation:
        generation = _Generation(self._make_engine())
        for address, num_bytes in self._memory.items():
            generation.engine.register(address, num_bytes)
        return generation

    def _leave(self, generation: _Generation) -> None:
        with self._changed:
            generation.num_calls -= 1
            self._changed.notify_all()

    def _close_if_unused(self, generation: _Generation) -> None:
        """Destroy an engine that has a successor, unless somebody still uses it, who then does this."""
        with self._changed:
            unused = self._current is not generation and generation.num_calls == 0 and not generation.ending
            generation.ending = generation.ending or unused
        if unused:
            generation.engine.close()
            generation.gone.set()

    def _retire(self, generation: _Generation) -> None:
        """Destroy the engine once the last call on it has returned, and wait for that."""
        with self._changed:
            if self._current is generation:
                self._current = None
            idle = self._changed.wait_for(lambda: generation.num_calls == 0, _FENCE_S)
            ours = idle and not generation.ending
            generation.ending = generation.ending or ours
        if ours:
            generation.engine.close()
            generation.gone.set()
        if not generation.gone.wait(_FENCE_S):
            logger.error("a call into Mooncake has not returned for %s s; it may still be moving data", _FENCE_S)


@contextmanager
def interrupted_at(deadline: Deadline, peer: Peer) -> Iterator[None]:
    """From the deadline on, if the block is not left before, calls that wait for the peer fail; none after it."""
    left, turn = threading.Event(), threading.Lock()

    def watch() -> None:
        pause = deadline.timeout()
        while not left.wait(pause):
            with turn:
                if not left.is_set():
                    peer.interrupt()
            pause = _AGAIN_S

    threading.Thread(target=watch, name="datadist-mooncake-watch", daemon=True).start()
    try:
        yield
    finally:
        with turn:
            left.set()
