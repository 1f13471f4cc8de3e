# SPDX-License-Identifier: Apache-2.0
"""Two backends, connected, over memory of their own: what every test of a backend starts from.

    with BackendPair.in_process(MyBackend) as pair:
        mine, theirs = pair.a.add_grid(8, 256), pair.b.add_grid(8, 256)
        pair.link()
        completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 1], [6, 7]))

`a` dials and lives in this process; `b` accepts and lives in this process or in a child. The two ends know each
other by different peer ids, so that a backend which mixes them up is found out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..memory.grid import Grid
from ..transfer.backend import Backend
from ..transfer.plan import Batch, GridPair, Op, Slice, whole_item
from ..types import Deadline
from .child import ChildEnd, ChildSetup, import_by_name
from .end import Bytes, End, LocalEnd
from .parallel import WAIT_S, run_all

__all__ = ["A_KNOWS_B_AS", "B_KNOWS_A_AS", "BackendPair", "make_batch", "naive_copy"]

A_KNOWS_B_AS = 71
B_KNOWS_A_AS = 92

OtherEnd = TypeVar("OtherEnd", bound=End, covariant=True)


class BackendPair(Generic[OtherEnd]):
    """Ends `a` and `b`; closes both when left."""

    def __init__(self, a: LocalEnd, b: OtherEnd) -> None:
        self.a = a
        self.b: OtherEnd = b

    @staticmethod
    def in_process(
        make_backend: Callable[[], Backend], pool_bytes: int = 4 << 20, options: dict[str, Any] | None = None
    ) -> BackendPair[LocalEnd]:
        """Both ends in this process: two backends that `make_backend` made."""
        a = LocalEnd(make_backend(), pool_bytes, options)
        try:
            return BackendPair(a, LocalEnd(make_backend(), pool_bytes, options))
        except BaseException:
            a.close()
            raise

    @staticmethod
    def two_processes(
        factory: str, pool_bytes: int = 4 << 20, options: dict[str, Any] | None = None
    ) -> BackendPair[ChildEnd]:
        """`b` in a spawned process. `factory` is "module:callable", usually the backend's class."""
        a = LocalEnd(import_by_name(factory)(), pool_bytes, options)
        try:
            return BackendPair(a, ChildEnd(ChildSetup(factory, pool_bytes, options or {})))
        except BaseException:
            a.close()
            raise

    def __enter__(self) -> BackendPair[OtherEnd]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def link(self) -> None:
        """Connect both ends and attach all regions, both ways."""
        self.connect()
        self.attach()

    def connect(self, token_a: bytes | None = None, token_b: bytes | None = None, timeout_s: float = WAIT_S) -> None:
        """Both ends at once, as a link does. Raises what either end raises (that of `a` if both do).

        Args:
            token_a, token_b: what each end believes to be the link's token; the same random one by default.
            timeout_s: for each end.
        """
        failures = self.try_connect(token_a, token_b, timeout_s)
        for failure in failures:
            if failure is not None:
                raise failure

    def try_connect(
        self, token_a: bytes | None = None, token_b: bytes | None = None, timeout_s: float = WAIT_S
    ) -> list[BaseException | None]:
        """`connect`, with what the two ends raise as the result: [of a, of b], None for success."""
        token = os.urandom(16)
        identity_a, identity_b = self.a.identity(), self.b.identity()
        return run_all(
            [
                lambda: self.a.connect(A_KNOWS_B_AS, identity_b, True, token_a or token, timeout_s),
                lambda: self.b.connect(B_KNOWS_A_AS, identity_a, False, token_b or token, timeout_s),
            ]
        )

    def attach(self) -> None:
        """Attach every exported region at the other end."""
        for export in self.b.exports():
            self.a.attach(A_KNOWS_B_AS, export, WAIT_S)
        for export in self.a.exports():
            self.b.attach(B_KNOWS_A_AS, export, WAIT_S)

    def disconnect(self) -> None:
        self.a.disconnect(A_KNOWS_B_AS)
        self.b.disconnect(B_KNOWS_A_AS)

    def close(self) -> None:
        try:
            self.a.close()
        finally:
            self.b.close()

    def batch(
        self,
        op: Op,
        local: Grid | Sequence[Grid],
        remote: Grid | Sequence[Grid],
        local_items: Sequence[int] | npt.NDArray[np.int64],
        remote_items: Sequence[int] | npt.NDArray[np.int64],
        slices: tuple[Slice, ...] | None = None,
    ) -> Batch:
        """A batch for `a` to submit; `reversed_batch` makes one for `b`. Whole items unless `slices` are given."""
        return make_batch(A_KNOWS_B_AS, op, local, remote, local_items, remote_items, slices)

    def reversed_batch(
        self,
        op: Op,
        local: Grid | Sequence[Grid],
        remote: Grid | Sequence[Grid],
        local_items: Sequence[int] | npt.NDArray[np.int64],
        remote_items: Sequence[int] | npt.NDArray[np.int64],
    ) -> Batch:
        """A batch of whole items for `b` to submit: `local` grids are b's."""
        return replace(self.batch(op, local, remote, local_items, remote_items), peer_id=B_KNOWS_A_AS)


def make_batch(
    peer_id: int,
    op: Op,
    local: Grid | Sequence[Grid],
    remote: Grid | Sequence[Grid],
    local_items: Sequence[int] | npt.NDArray[np.int64],
    remote_items: Sequence[int] | npt.NDArray[np.int64],
    slices: tuple[Slice, ...] | None = None,
) -> Batch:
    """A checked batch over one grid or several on each side."""
    locals_ = (local,) if isinstance(local, Grid) else tuple(local)
    remotes = (remote,) if isinstance(remote, Grid) else tuple(remote)
    batch = Batch(
        peer_id,
        op,
        tuple(GridPair(mine, theirs) for mine, theirs in zip(locals_, remotes, strict=True)),
        np.asarray(local_items, dtype=np.int64),
        np.asarray(remote_items, dtype=np.int64),
        slices if slices is not None else whole_item(locals_[0].item_bytes),
        Deadline.after(WAIT_S),
    )
    batch.check()
    return batch


def naive_copy(batch: Batch, local: dict[int, Bytes], remote: dict[int, Bytes]) -> None:
    """What `batch` has to do, done by the plainest loop there is, on copies of the regions by region id."""
    for pair in batch.pairs:
        for mine, theirs in zip(batch.local_items.tolist(), batch.remote_items.tolist(), strict=True):
            for part in batch.slices:
                here = pair.local.offset_bytes + mine * pair.local.stride_bytes + part.local_offset
                there = pair.remote.offset_bytes + theirs * pair.remote.stride_bytes + part.remote_offset
                at, peer = local[pair.local.region_id], remote[pair.remote.region_id]
                if batch.op is Op.READ:
                    at[here : here + part.num_bytes] = peer[there : there + part.num_bytes]
                else:
                    peer[there : there + part.num_bytes] = at[here : here + part.num_bytes]
