# SPDX-License-Identifier: Apache-2.0
"""An LLMDataDist with a cache whose every word says where it belongs: for soaks and tests of faults.

It lives in a process of its own (`start`), moves blocks in a stream and compares every byte after every transfer, and
says what it holds (`Holdings`), so that a leak shows after whatever was done to it or to its peer.

The cache has three areas: FIXED blocks never change and are what peers pull; SLOTS are written by peers that push;
SCRATCH is where this end's own pulls arrive.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.cache import Cache
from ..cache.desc import BlocksCacheKey, CacheDesc
from ..cluster import LLMClusterInfo
from ..config import LLMConfig
from ..datadist import LLMDataDist
from ..errors import LLMException
from ..types import DataType, LLMRole, LLMStatusCode, Placement
from .remote import RemoteObject

AREA = 32
"""Blocks in each of the three areas."""
FIXED, SLOTS, SCRATCH = range(AREA), range(AREA, 2 * AREA), range(2 * AREA, 3 * AREA)
NUM_TENSORS = 2
ANSWER_TIMEOUT_S = 60.0
_LINKED = (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
_PAUSE_S = 0.02
_MAX_BLOCKS = 4
_FEW_FILES = 256
_OF_BOUNDED_POOLS = (
    "datadist-accept",
    "datadist-checksum",
    "datadist-link",
    "datadist-revoke",
    "datadist-service",
    "datadist-soak",
    "datadist-tcp-io",
    "ThreadPoolExecutor",
)
_STARTED_ONCE = ("datadist-tcp-report", "datadist-fences")
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class EndSetup:
    """`seed`: of the content. `listen`: "ip:port" or None. `options`: more of LLMConfig's properties."""

    cluster_id: int
    seed: int
    backend: str = "auto"
    listen: str | None = None
    block_bytes: int = 16 << 10
    pool_bytes: int = 64 << 20
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Whom to link with, and the seed of its content."""

    cluster_id: int
    host: str
    port: int
    seed: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """What an end and its process hold: open files and threads by kind, and counts.

    Threads of pools that only grow to a limit are not among them.
    """

    files: Counter[str]
    threads: Counter[str]
    num_mappings: int
    pool_used_bytes: int
    num_links: int
    num_transfers: int

    def beyond(self, before: Holdings) -> str:
        """What is more than `before`; empty if nothing is."""
        more = [
            f"{name} +{count}"
            for name, count in ((self.files - before.files) + (self.threads - before.threads)).items()
        ]
        for name in ("num_mappings", "pool_used_bytes", "num_links", "num_transfers"):
            now, then = getattr(self, name), getattr(before, name)
            more += [f"{name} {then} -> {now}"] if now > then else []
        return ", ".join(more)


@dataclass(slots=True)
class StreamCounts:
    """Of one stream. `wrong`: transfers that were reported as good and were not. `slowest_s`: of one transfer."""

    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class SoakEnd:
    """What lives in the process. Called by one thread; its streams run in their own."""

    def __init__(self, setup: EndSetup) -> None:
        self._setup = setup
        logging.getLogger("datadist_core").setLevel(logging.CRITICAL)  # everything here goes wrong on purpose
        self._end = LLMDataDist(LLMRole.MIX, setup.cluster_id)
        self._end.init(_config(setup))
        desc = CacheDesc(NUM_TENSORS, (3 * AREA, setup.block_bytes // 4), DataType.DT_UINT32, Placement.HOST)
        self._cache: Cache = self._end.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(setup.cluster_id))
        self._tensors: list[Words] = self._cache.numpy()
        for tensor, block in ((t, b) for t in range(NUM_TENSORS) for b in FIXED):
            self._tensors[tensor][block] = content(setup.seed, tensor, block, setup.block_bytes // 4)
        if setup.listen is not None:  # and not before there is something to pull
            self._end.switch_role(LLMRole.MIX, {"listen_ip_info": setup.listen})
        self._stream: _Stream | None = None
        self._hogged: list[int] = []

    def place(self) -> PeerPlace:
        """Where it listens; port 0 if it does not."""
        address = self._end.listen_address
        host, port = (address.host, address.port) if address else ("", 0)
        return PeerPlace(self._setup.cluster_id, host, port, self._setup.seed)

    # -- one thing at a time

    def link(self, peer: PeerPlace, timeout_ms: int = 30_000) -> tuple[str, str]:
        """Status, and the reason of a failure."""
        _, [status] = self._end.link_clusters([_info(peer)], timeout=timeout_ms)
        return status.name, self.link_failure(peer)

    def link_failure(self, peer: PeerPlace) -> str:
        """Why the last attempt to link has failed; "None" if it has not."""
        return str(self._end.link_failure(peer.cluster_id))

    def is_linked(self, peer: PeerPlace) -> bool:
        link = self._end._open().links.peek(peer.cluster_id)
        return link is not None and link.is_up

    def unlink(self, peer: PeerPlace, force: bool = False) -> str:
        return self._end.unlink_clusters([_info(peer)], timeout=30_000, force=force)[1][0].name

    def pull(self, peer: PeerPlace, blocks: list[int], deadline_s: float = 30.0) -> str:
        """Pull these FIXED blocks into SCRATCH and compare. The status it ended with, or "WRONG BYTES"."""
        return self._status(lambda: self._pull(peer, blocks, [SCRATCH[i] for i in range(len(blocks))], deadline_s))

    def push(self, peer: PeerPlace, slot: int, deadline_s: float = 30.0) -> str:
        """Push a block that never was before into a slot of the peer, pull it back and compare."""
        return self._status(lambda: self._push(peer, slot, deadline_s))

    def backend(self, peer: PeerPlace) -> str:
        return self._end.link_info(peer.cluster_id).backend

    def rejected(self, peer: PeerPlace) -> dict[str, str]:
        """Backends that the link does not use, and why."""
        return dict(self._end.link_info(peer.cluster_id).rejected)

    def holdings(self) -> Holdings:
        gc.collect()
        links = self._end._open().links.links()
        return Holdings(
            files=_open_files(),
            threads=_threads(),
            num_mappings=_num_pool_mappings(),
            pool_used_bytes=self._end.cache_manager.pool_stats(Placement.HOST).used_bytes,
            num_links=len(links),
            num_transfers=sum(link._num_transfers for link in links),
        )

    def cpu_s(self) -> float:
        """Processor time of the whole process so far."""
        return time.process_time()

    def use_up_files(self, num_left: int) -> None:
        """Open files until only `num_left` more can be opened."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with suppress(OSError):
            while True:
                self._hogged.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(num_left):
            os.close(self._hogged.pop())

    def give_files_back(self) -> None:
        """Close them again."""
        while self._hogged:
            os.close(self._hogged.pop())

    # -- a stream of transfers

    def start_stream(self, peer: PeerPlace, num_threads: int, deadline_s: float) -> None:
        """Pull and push without a pause, linking again whenever the link is gone, until `stop_stream`."""
        self._stream = _Stream(self, peer, num_threads, deadline_s)

    def stop_stream(self, timeout_s: float) -> StreamCounts:
        """What it did. RuntimeError if a transfer has not ended within `timeout_s`."""
        stream, self._stream = self._stream, None
        return StreamCounts() if stream is None else stream.stop(timeout_s)

    def close(self) -> None:
        """Idempotent."""
        self._end.finalize()

    # -- inside

    def _status(self, move: Any) -> str:
        try:
            wrong = move()
        except LLMException as error:
            return error.status_code.name
        return f"WRONG BYTES: {wrong}" if wrong else "LLM_SUCCESS"

    def _pull(self, peer: PeerPlace, src: list[int], dst: list[int], deadline_s: float) -> str:
        """What is wrong with the bytes; "" if nothing."""
        self._move("pull_blocks", peer, src, dst, deadline_s)
        for tensor, (block, target) in ((t, pair) for t in range(NUM_TENSORS) for pair in zip(src, dst, strict=True)):
            wanted = content(peer.seed, tensor, block, self._setup.block_bytes // 4)
            if not np.array_equal(self._tensors[tensor][target], wanted):
                return f"block {block} of tensor {tensor}, pulled from cluster {peer.cluster_id}"
        return ""

    def _push(self, peer: PeerPlace, slot: int, deadline_s: float) -> str:
        own, stamp, num_words = SCRATCH[slot], random.getrandbits(31), self._setup.block_bytes // 4
        for tensor in range(NUM_TENSORS):
            self._tensors[tensor][own] = content(stamp, tensor, own, num_words)
        self._move("push_blocks", peer, [own], [SLOTS[slot]], deadline_s)
        for words in self._tensors:
            words[own] = 0
        self._move("pull_blocks", peer, [SLOTS[slot]], [own], deadline_s)
        for tensor in range(NUM_TENSORS):
            if not np.array_equal(
                self._tensors[tensor][own], content(stamp, tensor, own, self._setup.block_bytes // 4)
            ):
                return f"slot {slot} of tensor {tensor}, pushed to cluster {peer.cluster_id}"
        return ""

    def _move(self, method: str, peer: PeerPlace, src: list[int], dst: list[int], deadline_s: float) -> None:
        move = getattr(self._end.cache_manager, method)
        move(BlocksCacheKey(peer.cluster_id), self._cache, src, dst, deadline_s=deadline_s)


class _Stream:
    """Threads that move blocks; each has slots and scratch blocks of its own."""

    def __init__(self, end: SoakEnd, peer: PeerPlace, num_threads: int, deadline_s: float) -> None:
        self._end, self._peer, self._deadline_s = end, peer, deadline_s
        self._stopping = threading.Event()
        self._lock, self._dialling = threading.Lock(), threading.Lock()
        self._counts = StreamCounts()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"datadist-soak-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> StreamCounts:
        self._stopping.set()
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError(f"a transfer of {thread.name} has not ended {timeout_s} s after the stream's end")
        return self._counts

    def _run(self, number: int) -> None:
        choose = random.Random(number)
        own = range(number * _MAX_BLOCKS, (number + 1) * _MAX_BLOCKS)
        while not self._stopping.is_set():
            begun_s = time.monotonic()
            status = self._end._status(lambda: self._one(choose, own))
            self._count(status, time.monotonic() - begun_s)
            if status != "LLM_SUCCESS":
                self._link_again()

    def _link_again(self) -> None:
        with self._dialling:  # by one thread for all
            if not self._end.is_linked(self._peer):
                self._end.link(self._peer, timeout_ms=1000)
        self._stopping.wait(_PAUSE_S)

    def _one(self, choose: random.Random, own: range) -> str:
        if choose.random() < 0.3:
            return self._end._push(self._peer, own[0], self._deadline_s)
        blocks = choose.sample(FIXED, _MAX_BLOCKS)
        return self._end._pull(self._peer, blocks, [SCRATCH[i] for i in own], self._deadline_s)

    def _count(self, status: str, duration_s: float) -> None:
        with self._lock:
            self._counts.slowest_s = max(self._counts.slowest_s, duration_s)
            if status == "LLM_SUCCESS":
                self._counts.good += 1
            elif status.startswith("WRONG"):
                self._counts.wrong.append(status)
            else:
                self._counts.failed[status] += 1


class RemoteEnd:
    """A `SoakEnd` in a process of its own, with the signals that a test sends it. A context manager that kills it."""

    def __init__(self, setup: EndSetup) -> None:
        self.setup = setup
        self._remote = RemoteObject(SoakEnd, (setup,), ANSWER_TIMEOUT_S, forkserver=True)
        self.place: PeerPlace = self._remote.call("place")

    @property
    def pid(self) -> int:
        return self._remote.pid

    def do(self, method: str, *args: Any) -> Any:
        """Call that method of the `SoakEnd`."""
        return self._remote.call(method, *args)

    def link(self, peer: RemoteEnd) -> None:
        """Raises RuntimeError with the reason if it fails."""
        status, reason = self.do("link", peer.place)
        if LLMStatusCode[status] not in _LINKED:
            raise RuntimeError(f"cluster {self.setup.cluster_id} cannot link to {peer.place}: {status}: {reason}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._remote.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self._remote.kill()

    def __enter__(self) -> RemoteEnd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def content(seed: int, tensor: int, block: int, num_words: int) -> Words:
    """Of one block: no two blocks of any seed are alike."""
    first = np.random.default_rng((seed, tensor, block)).integers(1 << 32, dtype=np.uint64)
    return ((np.arange(num_words, dtype=np.uint64) * np.uint64(2654435761) + first) & np.uint64(0xFFFFFFFF)).astype(
        np.uint32
    )


def _config(setup: EndSetup) -> LLMConfig:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.transfer_backend = setup.backend
    config.host_mem_pool_cfg = json.dumps({"memory_size": setup.pool_bytes})
    for name, value in setup.options.items():
        setattr(config, name, value)
    return config


def _info(peer: PeerPlace) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = peer.cluster_id
    info.append_remote_ip_info(peer.host, peer.port)
    return info


def _threads() -> Counter[str]:
    """By name. One of each that a process starts when it first needs it, and keeps, is always counted."""
    names = Counter(t.name for t in threading.enumerate() if not t.name.startswith(_OF_BOUNDED_POOLS))
    return names | Counter(_STARTED_ONCE)


def _open_files() -> Counter[str]:
    """By what they are, sockets and pipes without their numbers."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listdir itself had open
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            found[target if target.startswith("anon_inode:") else target.partition(":[")[0]] += 1
    return found


def _num_pool_mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("datadist-pool" in line for line in lines)
