# SPDX-License-Identifier: Apache-2.0
"""What is measured besides throughput and latency: what the time and the memory go to that is not the copy."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..checks import HostPort
from ..testing.remote import RemoteObject
from .blocks import MAX_BLOCKS, BlockLists, make_lists
from .contenders import ONE_THREAD, BackendContender
from .contract import PULL, Contender
from .ends import ANSWER_TIMEOUT_S
from .field import Field, Progress
from .footprint import Crowd, Footprint, Hub
from .references import copy_kernel, kernel_is_native
from .results import BlockMemory, Findings, LinkMemory, OutsideCopy, OwnerCpu, SingleCopy, median_ratio

_ONE_THREAD_NAMES = (ONE_THREAD,)
"""Ours whose copy is the one that the references make."""
_MAPPED_NAMES = ("auto", "shm", ONE_THREAD)
_SMALL_BLOCK_BYTES, _BLOCK_BYTES, _TINY_BLOCK_BYTES = 4096, 65536, 64
_MILLION = 1_000_000
_NUM_LINKS = 8
_cluster_ids = itertools.count(2_000_001, _NUM_LINKS + 2)


def find_all(
    field: Field, found: Findings, total_bytes: int, cache_bytes: int, seconds: float, progress: Progress
) -> None:
    """Fill `found`, in about `seconds` for each finding."""
    found.kernel, found.kernel_is_native = copy_kernel(), kernel_is_native()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("which backend auto uses", lambda: _find_used(field, found)),
        ("time outside the copy", lambda: _find_outside_copy(field, found, total_bytes, seconds)),
        ("one contiguous copy", lambda: _find_single_copy(field, found, total_bytes, seconds)),
        ("processor time of the owner", lambda: _find_owner_cpu(field, found, total_bytes, seconds)),
        ("memory per link", lambda: _find_link_memory(field, found)),
        ("memory per million blocks", lambda: _find_block_memory(field, found, cache_bytes)),
    ]
    for title, step in steps:
        progress(title)
        step()


def _find_used(field: Field, found: Findings) -> None:
    for contender in field.contenders("auto"):
        if isinstance(contender, BackendContender):
            found.auto_uses = field.ask(contender, contender.backend_used) or ""


def _find_outside_copy(field: Field, found: Findings, total_bytes: int, seconds: float) -> None:
    """`pull_blocks` in turns with the bare copy of the same lists, whose addresses were made before."""
    lists = make_lists("random", _SMALL_BLOCK_BYTES, min(total_bytes, MAX_BLOCKS * _SMALL_BLOCK_BYTES))
    for duel in _duels(field, _ONE_THREAD_NAMES, lists, lists, seconds):
        share = statistics.median(1 - copy / pull for pull, copy in zip(duel.pull_s, duel.copy_s, strict=True))
        pull_ms, copy_ms = 1e3 * statistics.median(duel.pull_s), 1e3 * statistics.median(duel.copy_s)
        found.outside_copy.append(OutsideCopy(duel.name, lists.num_blocks, lists.block_bytes, pull_ms, copy_ms, share))


def _find_single_copy(field: Field, found: Findings, total_bytes: int, seconds: float) -> None:
    """A contiguous run of blocks in turns with one range of as many bytes."""
    lists = make_lists("contiguous", _BLOCK_BYTES, total_bytes)
    single = BlockLists(lists.num_bytes, 2, np.array([0]), np.array([1]))
    for duel in _duels(field, _MAPPED_NAMES, lists, single, seconds):
        speed, copy_speed = (lists.num_bytes / statistics.median(times) / 1e9 for times in (duel.pull_s, duel.copy_s))
        ratio = median_ratio(duel.copy_s, duel.pull_s)
        found.single_copy.append(SingleCopy(duel.name, speed, duel.copy, copy_speed, ratio))


@dataclass(frozen=True, slots=True)
class _Duel:
    """Seconds of pulls by `name` and of copies by the better reference, in the same rounds."""

    name: str
    pull_s: list[float]
    copy: str
    copy_s: list[float]


def _duels(field: Field, names: Sequence[str], pulled: BlockLists, copied: BlockLists, seconds: float) -> list[_Duel]:
    """All of ours that copy, in turns with the references. `copied` lies in memory prepared for `pulled`."""
    ours, copies = field.contenders(*names), field.contenders("stream", "memcpy")
    samplers: dict[str, Callable[[], list[float]]] = {}
    for contender, lists in [*((c, pulled) for c in ours), *((c, copied) for c in copies)]:
        _warm_up(field, contender, pulled)
        samplers[contender.name] = functools.partial(contender.move_each, PULL, [lists])
    times = field.alternate(samplers, seconds)
    references = [name for name in ("stream", "memcpy") if name in times]
    if not references:
        return []
    best = min(references, key=lambda name: statistics.median(times[name]))
    return [_Duel(name, times[name], best, times[best]) for name in names if name in times]


def _warm_up(field: Field, contender: Contender, lists: BlockLists) -> None:
    """Prepare, and touch every page."""
    field.ask(contender, lambda: contender.prepare(lists))
    field.ask(contender, lambda: contender.move_each(PULL, [lists]))


def _find_owner_cpu(field: Field, found: Findings, total_bytes: int, seconds: float) -> None:
    """In turns with a reference that copies as much, so that the machine is as busy without a pull."""
    lists = make_lists("random", _BLOCK_BYTES, total_bytes)
    others = field.contenders("stream", "memcpy", "socket")[:1]
    for other in others:
        _warm_up(field, other, lists)
    for contender in _in_two_processes(field):
        _warm_up(field, contender, lists)
        pulled, idle = (
            field.ask(contender, functools.partial(_owner_share, contender, mover, lists, seconds))
            for mover in (contender, others[0] if others else None)
        )
        if pulled is not None and idle is not None:
            found.owner_cpu.append(OwnerCpu(contender.name, pulled, idle))


def _in_two_processes(field: Field) -> list[BackendContender]:
    return [c for c in field.contenders() if isinstance(c, BackendContender) and not c.in_process]


def _owner_share(owned: BackendContender, mover: Contender | None, lists: BlockLists, seconds: float) -> float:
    """Part of one core that the owner's process uses while `mover`, or nobody, works."""
    before_s, started_s = owned.owner_cpu_s(), time.perf_counter()
    while (passed_s := time.perf_counter() - started_s) < seconds:
        if mover is None:
            time.sleep(min(0.01, seconds))
        else:
            mover.move_each(PULL, [lists])
    return (owned.owner_cpu_s() - before_s) / passed_s


def _find_link_memory(field: Field, found: Findings) -> None:
    """In fresh processes, so that nothing else is counted."""
    for contender in _in_two_processes(field):
        memory = field.ask(contender, functools.partial(_link_memory, contender.name, contender.backend))
        if memory is not None:
            found.link_memory.append(memory)


def _link_memory(name: str, backend: str) -> LinkMemory:
    """The first link also makes what all links share; it is not counted."""
    hub_id = next(_cluster_ids)
    with ExitStack() as undo:
        crowd = RemoteObject(Crowd, (backend, hub_id + 1, _NUM_LINKS + 1), ANSWER_TIMEOUT_S)
        undo.callback(crowd.close)
        hub = RemoteObject(Hub, (backend, hub_id), ANSWER_TIMEOUT_S)
        undo.callback(hub.close)
        addresses: list[HostPort] = crowd.call("addresses")
        first: Footprint = hub.call("link", hub_id + 1, addresses[:1])
        all_of_them: Footprint = hub.call("link", hub_id + 2, addresses[1:])
        hub.call("unlink")
    return LinkMemory(
        name,
        (all_of_them.private_bytes - first.private_bytes) / 1024 / _NUM_LINKS,
        (all_of_them.num_threads - first.num_threads) / _NUM_LINKS,
        (all_of_them.num_files - first.num_files) / _NUM_LINKS,
    )


def _find_block_memory(field: Field, found: Findings, cache_bytes: int) -> None:
    num_blocks = min(cache_bytes // _TINY_BLOCK_BYTES, 2 * _MILLION)
    permutation = np.random.default_rng(0).permutation(num_blocks)
    half = num_blocks // 2
    lists = BlockLists(_TINY_BLOCK_BYTES, num_blocks, permutation[:half], permutation[half : 2 * half])
    for contender in _in_two_processes(field)[:1]:
        memory = field.ask(contender, functools.partial(_block_memory, contender, lists))
        if memory is not None:
            found.block_memory.append(memory)


def _block_memory(contender: BackendContender, lists: BlockLists) -> BlockMemory:
    """Of the process that pulls. The memory of the cache itself is not counted."""
    try:
        before = contender.traced()
        contender.prepare(lists)
        contender.move_each(PULL, [lists])
        held = contender.traced()
        contender.move_each(PULL, [lists])
        pulled = contender.traced()
    finally:
        contender.stop_tracing()
    mib_per_million = _MILLION / (1 << 20)
    return BlockMemory(
        contender.name,
        lists.num_cache_blocks,
        (held.now_bytes - before.now_bytes) / lists.num_cache_blocks * mib_per_million,
        (pulled.peak_bytes - held.now_bytes) / lists.num_blocks * mib_per_million,
    )
