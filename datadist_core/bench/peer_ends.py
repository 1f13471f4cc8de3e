# SPDX-License-Identifier: Apache-2.0
"""The peers' own engines at their best, each end in a process of its own. Nothing of our transfers is used here.

Memory is registered once, and what can be prepared before a request is prepared before it: NIXL's descriptor lists of
all blocks, Mooncake's lists of addresses with neighbouring blocks merged. What an engine has to do for each request
(NIXL: a request out of two index lists, which merges neighbours itself; then post, wait, release) is timed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..errors import LLMException, TimedOut
from ..transfer.plan import merge_runs
from .blocks import BlockLists, Blocks, fill, matches
from .contract import PULL, PUSH, TRANSFER_TIMEOUT_S, time_each
from .ends import anonymous_memory
from .plain_ends import HOST

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """Attributes:
    ucx: UCX's settings without their prefix. What the environment says, as UCX_NAME=value, comes before these.
    thread_at_starter: a progress thread also where transfers are started and polled for. NIXL's threads poll, too,
        so that on few cores one takes the time of the other. The other end needs its thread to connect at all.
    """

    ucx: Mapping[str, str] = field(default_factory=dict)
    thread_at_starter: bool = False


NIXL = NixlSettings()
"""UCX's own choice for two processes on one host is as fast as any that was tried, see docs/performance.md."""
NIXL_TCP = NixlSettings({"TLS": "tcp"})
NIXL_DEFAULT = NixlSettings(thread_at_starter=True)
"""As NIXL's Python API comes, and as vLLM uses it."""

_MOONCAKE_RANGES = 1000
"""Of one call. Mooncake refuses more than 1024 (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER); more of them are not faster."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the other end must know: `name` and `metadata` are the engine's own."""

    name: str
    metadata: bytes
    outbox_address: int
    inbox_address: int


class Memory:
    """An outbox and an inbox, of the size that the largest blocks need."""

    def __init__(self, seed: int, cache_bytes: int) -> None:
        self.outbox = anonymous_memory(cache_bytes)
        self.inbox = anonymous_memory(cache_bytes)
        self._seed = seed
        self._shape = (1, cache_bytes)

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        self._shape = (num_cache_blocks, block_bytes)
        fill(self._blocks_of(self.outbox), self._seed)
        self.clear()

    def clear(self) -> None:
        self._blocks_of(self.inbox)[:] = 0

    def matches(self, seed: int, lists: BlockLists) -> bool:
        return matches(self._blocks_of(self.inbox), seed, lists)

    def _blocks_of(self, box: Blocks) -> Blocks:
        num_blocks, block_bytes = self._shape
        return box[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)


class Engine(Protocol):
    """One end of another engine. It has registered `memory`, both boxes of it."""

    memory: Memory

    def hello(self) -> Hello: ...

    def meet(self, other: Hello) -> None:
        """Connect, for good."""

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        """What can be done once for all transfers of such blocks."""

    def ready(self, op: str, lists: BlockLists) -> Callable[[], None]:
        """A transfer, to be run any number of times. What is done here is not timed."""


class PeerEnd:
    """What the bench calls, in the engine's process."""

    def __init__(
        self, make_engine: Callable[[bool, int, int], Engine], is_starter: bool, seed: int, cache_bytes: int
    ) -> None:
        # It may be stopped when the bench is killed, and then would not see that its pipe is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._engine = make_engine(is_starter, seed, cache_bytes)

    def hello(self) -> Hello:
        return self._engine.hello()

    def meet(self, other: Hello) -> None:
        self._engine.meet(other)

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        self._engine.memory.prepare(num_cache_blocks, block_bytes)
        self._engine.prepare(num_cache_blocks, block_bytes)

    def clear(self) -> None:
        self._engine.memory.clear()

    def matches(self, seed: int, lists: BlockLists) -> bool:
        return self._engine.memory.matches(seed, lists)

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int) -> list[float]:
        return time_each([self._engine.ready(op, lists) for lists in moves], repeats)


class NixlEngine:
    """A NIXL agent with its UCX plugin."""

    def __init__(self, settings: NixlSettings, is_starter: bool, seed: int, cache_bytes: int) -> None:
        for setting, value in settings.ucx.items():
            os.environ.setdefault(f"UCX_{setting}", value)
        api = _load(_nixl_module(), "nixl")
        # It announces itself on standard output otherwise, which is for our tables.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._name = "starter" if is_starter else "owner"
        has_thread = settings.thread_at_starter or not is_starter
        config = api.nixl_agent_config(enable_prog_thread=has_thread, backends=[])
        self._agent = api.nixl_agent(self._name, config)
        self._agent.create_backend("UCX", {})
        self.memory = Memory(seed, cache_bytes)
        rows = [(box.ctypes.data, box.nbytes, 0) for box in (self.memory.outbox, self.memory.inbox)]
        self._registered = self._agent.register_memory(np.array(rows, dtype=np.uint64), "DRAM")
        self._other: Hello | None = None
        self._lists: dict[str, tuple[Any, Any]] = {}

    def hello(self) -> Hello:
        addresses = self.memory.outbox.ctypes.data, self.memory.inbox.ctypes.data
        return Hello(self._name, bytes(self._agent.get_agent_metadata()), *addresses)

    def meet(self, other: Hello) -> None:
        self._agent.add_remote_agent(other.metadata)
        self._agent.make_connection(other.name)
        self._other = other

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        other = _met(self._other)

        def prepared(owner: str, address: int) -> Any:
            row = np.array([[address, block_bytes, 0, block_bytes, num_cache_blocks]], dtype=np.uint64)
            return self._agent.prep_xfer_dlist(owner, row, "DRAM")

        self._lists = {
            PULL: (prepared("", self.memory.inbox.ctypes.data), prepared(other.name, other.outbox_address)),
            PUSH: (prepared("", self.memory.outbox.ctypes.data), prepared(other.name, other.inbox_address)),
        }

    def ready(self, op: str, lists: BlockLists) -> Callable[[], None]:
        agent, (local, remote) = self._agent, self._lists[op]
        src, dst = lists.src.astype(np.int32), lists.dst.astype(np.int32)
        verb, here, there = ("READ", dst, src) if op == PULL else ("WRITE", src, dst)

        def move() -> None:
            handle = agent.make_prepped_xfer(verb, local, here, remote, there)
            state = agent.transfer(handle)
            if state == "PROC":
                state = _await_done(lambda: agent.check_xfer_state(handle))
            handle.release()
            if state != "DONE":
                raise LLMException(f"NIXL: a transfer ended with {state}")

        return move


class MooncakeEngine:
    """A Mooncake TransferEngine without a metadata server, over TCP."""

    def __init__(self, is_starter: bool, seed: int, cache_bytes: int) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        api = _load("mooncake.engine", "mooncake-transfer-engine-non-cuda")
        self._opcodes = api.TransferOpcode
        self._engine = api.TransferEngine()
        code = self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise LLMException(f"Mooncake cannot start on {HOST} (code {code}); MC_LOG_LEVEL=INFO says more on stderr")
        self.memory = Memory(seed, cache_bytes)
        for box in (self.memory.outbox, self.memory.inbox):
            if self._engine.register_memory(box.ctypes.data, box.nbytes) != 0:
                raise LLMException(f"Mooncake does not register {box.nbytes} bytes of memory")
        self._other: Hello | None = None

    def hello(self) -> Hello:
        addresses = self.memory.outbox.ctypes.data, self.memory.inbox.ctypes.data
        return Hello(f"{HOST}:{self._engine.get_rpc_port()}", b"", *addresses)

    def meet(self, other: Hello) -> None:
        self._other = other

    def prepare(self, num_cache_blocks: int, block_bytes: int) -> None:
        """Nothing can be prepared."""

    def ready(self, op: str, lists: BlockLists) -> Callable[[], None]:
        other, engine = _met(self._other), self._engine
        starts, lengths = merge_runs(lists.src, lists.dst)
        src, dst = lists.src[starts] * lists.block_bytes, lists.dst[starts] * lists.block_bytes
        if op == PULL:
            local, remote = dst + self.memory.inbox.ctypes.data, src + other.outbox_address
            opcode = self._opcodes.Read
        else:
            local, remote = src + self.memory.outbox.ctypes.data, dst + other.inbox_address
            opcode = self._opcodes.Write
        sizes = lengths * lists.block_bytes
        calls = [
            (other.name, local[part].tolist(), remote[part].tolist(), sizes[part].tolist(), opcode)
            for part in (slice(start, start + _MOONCAKE_RANGES) for start in range(0, len(sizes), _MOONCAKE_RANGES))
        ]

        def move() -> None:
            for call in calls:
                code = engine.batch_transfer_sync(*call)
                if code != 0:
                    raise LLMException(f"Mooncake: a transfer ended with code {code}")

        return move


def _await_done(state_of: Callable[[], str]) -> str:
    """NIXL wants to be asked. Looking at the clock now and then costs little of the time that is measured."""
    stop_s = time.monotonic() + TRANSFER_TIMEOUT_S
    while time.monotonic() < stop_s:
        for _ in range(64):
            state = state_of()
            if state != "PROC":
                return state
    raise TimedOut(f"NIXL: a transfer did not end within {TRANSFER_TIMEOUT_S} s")


def _met(other: Hello | None) -> Hello:
    if other is None:
        raise LLMException("this end has not met the other one yet")
    return other


def _nixl_module() -> str:
    """`nixl` itself looks for torch, for seconds, to choose between its builds; so only where there are several."""
    builds = [name for name in ("nixl_cu12", "nixl_cu13", "nixl_rocm") if importlib.util.find_spec(name) is not None]
    return f"{builds[0] if len(builds) == 1 else 'nixl'}._api"


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise LLMException(f"{package} cannot be imported ({error}); pip install {package}") from error
