# SPDX-License-Identifier: Apache-2.0
"""One end of a link between two backends, without an engine: a pool, grids in it, and a backend opened over them.

`LocalEnd` lives in this process. `datadist_core.testing.child.ChildEnd` offers the same methods for an end that
lives in a process of its own, which is why every argument and result here can be pickled.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CacheNotExist, LLMException, ParamInvalid, TimedOut
from ..memory.grid import Grid
from ..memory.pool import MemoryPool
from ..memory.region import Region
from ..transfer.backend import Backend, BackendContext, Completion, CompletionStatus, ServedGrid
from ..transfer.plan import Batch, Op
from ..types import Deadline, Placement
from .parallel import WAIT_S

Bytes = npt.NDArray[np.uint8]

_ids = itertools.count(1)
_batch_ids = itertools.count(1)
_process_token = os.urandom(16)


@dataclass(frozen=True, slots=True)
class Export:
    """What a peer needs to attach one region."""

    region_id: int
    size_bytes: int
    descriptor: bytes


class End(Protocol):
    """What a test can do to either end of a pair."""

    def identity(self) -> bytes: ...

    def exports(self) -> tuple[Export, ...]: ...

    def add_grid(self, num_items: int, item_bytes: int, gap_bytes: int = 0, writable: bool = True) -> Grid: ...

    def connect(self, peer_id: int, identity: bytes, initiator: bool, link_token: bytes, timeout_s: float) -> None: ...

    def attach(self, peer_id: int, export: Export, timeout_s: float) -> None: ...

    def disconnect(self, peer_id: int) -> None: ...

    def fill(self, seed: int) -> None: ...

    def snapshot(self, region_id: int) -> Bytes: ...

    def transfer(self, batch: Batch) -> Completion: ...

    def close(self) -> None: ...


class CompletionLog:
    """Collects what a backend reports, so that a test can tell one completion from none and from two."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: dict[int, list[Completion]] = {}
        self._refused: set[int] = set()

    def expect(self) -> int:
        """A new batch id."""
        batch_id = next(_batch_ids)
        with self._changed:
            self._seen[batch_id] = []
        return batch_id

    def done(self, completion: Completion) -> None:
        """The callback to give to `submit`."""
        with self._changed:
            self._seen.setdefault(completion.batch_id, []).append(completion)
            self._changed.notify_all()

    def wait(self, batch_id: int, timeout_s: float = WAIT_S) -> Completion:
        """The completion of a batch. Raises TimedOut if there is none within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._seen[batch_id], timeout_s):
                raise TimedOut(f"no completion of batch {batch_id} within {timeout_s} s")
            return self._seen[batch_id][0]

    def refused(self, batch_id: int) -> None:
        """`submit` raised: no completion may come, not even one."""
        with self._changed:
            self._refused.add(batch_id)

    def pending(self) -> list[int]:
        """Accepted batches without a completion."""
        with self._changed:
            return [batch_id for batch_id, seen in self._seen.items() if not seen and batch_id not in self._refused]

    def excessive(self) -> list[int]:
        """Batches with more completions than they may have: one if accepted, none if refused."""
        with self._changed:
            return [key for key, seen in self._seen.items() if len(seen) > (0 if key in self._refused else 1)]


class LocalEnd:
    """A backend of this process, opened over a pool of `pool_bytes` and whatever grids are added.

    Args:
        backend: not yet opened.
        pool_bytes: size of the one region that peers attach.
        options: for `BackendContext.options`.
        listen_host: for `BackendContext.listen_host`.
    """

    def __init__(
        self,
        backend: Backend,
        pool_bytes: int = 4 << 20,
        options: dict[str, Any] | None = None,
        listen_host: str | None = "127.0.0.1",
    ) -> None:
        self.backend = backend
        self.log = CompletionLog()
        self.serving_allowed = threading.Event()
        self.serving_allowed.set()
        self.serving_waits = threading.Semaphore(0)
        self.lost_peers: dict[int, LLMException] = {}
        self._pool = MemoryPool(pool_bytes, Placement.HOST, next(_ids), page_shift=12)
        self._regions: dict[int, Region] = {}
        self._grids: dict[int, tuple[Grid, bool]] = {}
        self._exports: list[Export] = []
        self._open(options or {}, listen_host)

    @property
    def region(self) -> Region:
        return self._pool.region

    def _open(self, options: dict[str, Any], listen_host: str | None) -> None:
        context = BackendContext(
            serve_grid=self._serve_grid,
            local_region=self._local_region,
            listen_host=listen_host,
            options=options,
            process_token=_process_token,
            report_peer_lost=self.lost_peers.__setitem__,
        )
        self.backend.open(context)
        try:
            self.add_region(self._pool.region)
        except BaseException:
            self.backend.close()
            raise

    def add_region(self, region: Region) -> None:
        """Register a region; peers that attach later see it unless the backend cannot export it."""
        self._regions[region.region_id] = region
        descriptor = self.backend.register(region)
        if descriptor is not None:
            self._exports.append(Export(region.region_id, region.size_bytes, descriptor))

    def remove_region(self, region_id: int) -> None:
        """Take back a region with its grids, as an owner does who wants the memory for something else."""
        self._grids = {key: kept for key, kept in self._grids.items() if kept[0].region_id != region_id}
        self._exports = [export for export in self._exports if export.region_id != region_id]
        self._regions.pop(region_id, None)
        self.backend.unregister(region_id)

    def add_private_grid(self, num_items: int, item_bytes: int, for_peers: bool = True) -> Grid:
        """A grid in ordinary memory of this process, which nobody else can map."""
        array = np.zeros(num_items * item_bytes, dtype=np.uint8)
        region = Region(next(_ids), array.ctypes.data, array.nbytes, Placement.HOST, owner=array, for_peers=for_peers)
        self.add_region(region)
        return self._add(Grid(next(_ids), region.region_id, 0, item_bytes, item_bytes, num_items), True)

    def add_grid(self, num_items: int, item_bytes: int, gap_bytes: int = 0, writable: bool = True) -> Grid:
        stride = item_bytes + gap_bytes
        offset = self._pool.allocate(num_items * stride).offset_bytes
        return self._add(Grid(next(_ids), self.region.region_id, offset, stride, item_bytes, num_items), writable)

    def _add(self, grid: Grid, writable: bool) -> Grid:
        grid.check_inside(self._regions[grid.region_id].size_bytes)
        self._grids[grid.grid_id] = (grid, writable)
        return grid

    def identity(self) -> bytes:
        return self.backend.identity()

    def exports(self) -> tuple[Export, ...]:
        return tuple(self._exports)

    def connect(self, peer_id: int, identity: bytes, initiator: bool, link_token: bytes, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        self.backend.connect(peer_id, identity, initiator=initiator, link_token=link_token, deadline=deadline)

    def attach(self, peer_id: int, export: Export, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s)
        self.backend.attach(peer_id, export.region_id, export.size_bytes, export.descriptor, deadline)

    def disconnect(self, peer_id: int) -> None:
        self.backend.disconnect(peer_id)

    def view(self, region_id: int) -> Bytes:
        """All bytes of a region, writable, not a copy."""
        region = self._regions[region_id]
        if region is self._pool.region:
            return self._pool.mapping.view(0, region.size_bytes)
        array: Bytes = region.owner  # type: ignore[assignment]  # made in add_private_grid
        return array

    def fill(self, seed: int) -> None:
        """Random bytes in every region."""
        random = np.random.default_rng(seed).bit_generator
        for region_id in self._regions:
            view = self.view(region_id)
            words: npt.NDArray[np.uint64] = random.random_raw(-(-view.size // 8))
            view[:] = words.view(np.uint8)[: view.size]

    def snapshot(self, region_id: int) -> Bytes:
        return self.view(region_id).copy()

    def submit(self, batch: Batch) -> int:
        """Start a batch that must complete exactly once. Returns its id. Raises what `Backend.submit` raises."""
        batch_id = self.log.expect()
        try:
            self.backend.submit(batch_id, batch, self.log.done)
        except BaseException:
            self.log.refused(batch_id)
            raise
        return batch_id

    def transfer(self, batch: Batch) -> Completion:
        """Run one batch to its end. What `submit` raises comes back as a failure, which it is for the owner."""
        try:
            batch_id = self.submit(batch)
        except LLMException as error:
            return Completion.failed(0, error)
        return self.log.wait(batch_id)

    def close(self) -> None:
        """Close the backend. Whatever was still open must be complete then."""
        self.serving_allowed.set()
        self.backend.close()
        self._pool.close()

    def _local_region(self, region_id: int) -> Region:
        try:
            return self._regions[region_id]
        except KeyError:
            raise ParamInvalid(f"region {region_id} is not registered") from None

    @contextmanager
    def _serve_grid(self, grid_id: int, op: Op) -> Iterator[ServedGrid]:
        self._wait_until_allowed()
        found = self._grids.get(grid_id)
        if found is None:
            raise CacheNotExist(f"grid {grid_id} does not exist")
        grid, writable = found
        if op is Op.WRITE and not writable:
            raise ParamInvalid(f"grid {grid_id} may not be written to")
        yield ServedGrid(grid, self._regions[grid.region_id])

    def _wait_until_allowed(self) -> None:
        if self.serving_allowed.is_set():
            return
        self.serving_waits.release()
        if not self.serving_allowed.wait(WAIT_S):
            raise TimedOut("the test never allowed serving again")


def is_ok(completion: Completion) -> bool:
    return completion.status is CompletionStatus.OK
