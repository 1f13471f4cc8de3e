# SPDX-License-Identifier: Apache-2.0
"""Memory of this host: pools, /dev/shm, locked memory, huge pages."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ..backends._cma_host import credentials
from ..cache.store import next_region_id
from ..errors import LLMException
from ..memory.pool import MemoryPool
from ..types import Placement
from .findings import Finding, fail, note, ok, warn

_CAP_IPC_LOCK = 14
_SMALL_SHM_BYTES = 64 << 20
_SHM = Path("/dev/shm")
_REMEDY_SHM = "free it, or make it larger (docker: --shm-size=8g, Kubernetes: an emptyDir with medium Memory there)"


def check_memory(pool_bytes: int, huge_pages: bool, locks_memory: bool) -> Iterator[Finding]:
    """Args:
    pool_bytes: of the pool that a process is to have.
    huge_pages: whether it is to lie in huge pages.
    locks_memory: whether a backend is asked for that locks the pool for RDMA.
    """
    yield _pool()
    yield _room_for(pool_bytes)
    yield _dev_shm()
    yield _locked(pool_bytes, locks_memory)
    yield _huge_pages(pool_bytes, huge_pages)


def _pool() -> Finding:
    """The memory file is really made, mapped and touched."""
    try:
        pool = MemoryPool(1 << 20, Placement.HOST, next_region_id())
        pool.mapping.view(0, 4096)[:] = 1
        pool.close()
    except LLMException as error:
        return fail("memory file", str(error), "memory pools, and so the backend shm, need memfd_create (Linux 3.17)")
    return ok("memory file", "a pool can be made and mapped (memfd)")


def _room_for(pool_bytes: int) -> Finding:
    info = memory_info()
    free = info.get("MemAvailable", 0)
    text = f"{_gib(free)} available of {_gib(info.get('MemTotal', 0))}"
    values = {"available_bytes": free, "pool_bytes": pool_bytes}
    if pool_bytes > free:
        return warn(
            "memory", f"{text}; a full pool takes {_gib(pool_bytes)}", "make the pool smaller (memory_size)", **values
        )
    return ok("memory", text, **values)


def _dev_shm() -> Finding:
    try:
        status = os.statvfs(_SHM)
    except OSError as error:
        return warn("/dev/shm", f"cannot be looked at: {error}", "mount a tmpfs there; vLLM and UCX need it")
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{_mib(free)} free of {_mib(total)}"
    if free < _SMALL_SHM_BYTES:
        return warn(
            "/dev/shm",
            f"{text}: it is full, or nearly. Pools do not lie there (they have no name), but vLLM's own processes and "
            "UCX put their queues there and fail when it is full",
            _REMEDY_SHM,
            free_bytes=free,
            total_bytes=total,
        )
    return ok("/dev/shm", text, free_bytes=free, total_bytes=total)


def _locked(pool_bytes: int, locks_memory: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock():
        how = "unlimited" if soft == resource.RLIM_INFINITY else f"{_mib(soft)}, but CAP_IPC_LOCK lifts it"
        return ok("locked memory", f"limit {how}", soft_bytes=soft)
    text = f"limit of locked memory {_mib(soft)}"
    remedy = "ulimit -l unlimited (limits.conf: memlock, systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)"
    if soft >= pool_bytes:
        return ok("locked memory", f"{text}, enough for the pool", soft_bytes=soft)
    if locks_memory:
        return warn(
            "locked memory",
            f"{text} is less than the pool of {_mib(pool_bytes)}, which nixl and mooncake lock when they use RDMA",
            remedy,
            soft_bytes=soft,
        )
    return note(
        "locked memory",
        f"{text}: enough for shm, cma and tcp, which lock nothing, but not for RDMA (nixl, mooncake)",
        f"for RDMA: {remedy}",
        soft_bytes=soft,
    )


def _may_lock() -> bool:
    try:
        return bool(credentials("self").effective >> _CAP_IPC_LOCK & 1)
    except (OSError, KeyError, ValueError):
        return False


def _huge_pages(pool_bytes: int, wanted: bool) -> Finding:
    info = memory_info()
    size = info.get("Hugepagesize", 0)
    if not size:
        text = "this kernel has no huge pages"
        return fail("huge pages", text, "leave huge_pages off") if wanted else note("huge pages", text)
    total, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0)
    needed = -(-pool_bytes // size)
    text = f"{free} free of {total}, {_mib(size)} each; a pool of {_mib(pool_bytes)} needs {needed}"
    values = {"free": free, "total": total, "needed": needed, "page_bytes": size}
    remedy = f"sysctl vm.nr_hugepages={total - free + needed} for one process with such a pool"
    if free >= needed:
        return ok("huge pages", text, **values)
    if wanted:
        return fail("huge pages", text, f"{remedy}, or leave huge_pages off", **values)
    return note("huge pages", text, f"only if you want huge_pages: {remedy}", **values)


def memory_info() -> dict[str, int]:
    """/proc/meminfo, sizes in bytes."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        found[name] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 2**10:.0f} KiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
