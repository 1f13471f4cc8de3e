# SPDX-License-Identifier: Apache-2.0
"""What a linked peer that keeps no rule can read and write: registered memory that is open to peers, and no byte else.

The peer here is a real, linked end. What makes it hostile is that its questions and batches are made by hand, without
the checks that this package makes before it asks. Each refusal has its counterpart that is served, so that it is the
forbidden part which was refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from datadist_core import BlocksCacheKey, Cache, CacheDesc, DataType, LLMDataDist, Placement
from datadist_core.backends import _shm_server, _tcp_runtime
from datadist_core.backends._mooncake_binding import load as load_mooncake
from datadist_core.backends._shm_client import RegionClient
from datadist_core.backends.mooncake import MooncakeBackend
from datadist_core.backends.shm import ShmBackend
from datadist_core.errors import CacheNotExist, LLMException, ParamInvalid, PeerLost, Unreachable
from datadist_core.memory.grid import Grid
from datadist_core.testing.end import Export, LocalEnd
from datadist_core.testing.pair import A_KNOWS_B_AS, BackendPair
from datadist_core.testing.parallel import WAIT_S
from datadist_core.tests.core_ends import fill, filled_cache, linked, make_end, manager, must_link
from datadist_core.tests.optional import REQUIRE_ALL
from datadist_core.tests.test_tcp import request_body
from datadist_core.transfer.plan import Batch, GridPair, Op, Slice
from datadist_core.types import Deadline
from datadist_core.wire import messages as m

NUM_BLOCKS, BLOCK = 16, 256
ITEM_BYTES = 4 * BLOCK
INT64_MAX = 2**63 - 1
both_ops = pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=["read", "write"])


@dataclass(frozen=True)
class Owner:
    """The end that is attacked: what it has registered, and for whom."""

    end: LLMDataDist
    open: Cache
    closed: Cache
    closed_array: np.ndarray

    def grid_of(self, cache: Cache) -> Grid:
        return self.end._open().table.by_id(cache.cache_id).grids[0]

    def memory(self) -> list[bytes]:
        """Of everything that the peer is not to touch, and of what it may touch."""
        beacon = self.end._open().beacon_memory
        view = beacon.pool.mapping.view(0, beacon.pool.region.size_bytes)
        return [self.closed_array.tobytes(), view[beacon.grid.offset_bytes :][: beacon.grid.item_bytes].tobytes()]


@dataclass(frozen=True)
class Attacker:
    """A linked peer of the owner."""

    end: LLMDataDist
    own: Cache
    cluster_id: int

    @property
    def link(self) -> Any:
        return self.end._open().links.get(self.cluster_id)

    def ask(self, message: Any) -> Any:
        """Raises what the owner answers."""
        return self.link.request(lambda i: msgspec.structs.replace(message, request_id=i), Deadline.after(WAIT_S))

    def move(
        self,
        op: Op,
        remote: Grid,
        items: Sequence[int] = (1,),
        slices: Sequence[tuple[int, int]] = ((0, ITEM_BYTES),),
    ) -> None:
        """One batch of whatever it says, straight to the backend. Raises how it ended."""
        parts = self.end._open()
        (mine, *_) = parts.table.by_id(self.own.cache_id).grids
        # What is asked for has to look sound to our own end: it goes by what the batch says of its local side.
        local = Grid(mine.grid_id, mine.region_id, mine.offset_bytes, 4096, 4096, 4)
        sizes = tuple(Slice(0, offset, size) for offset, size in slices)
        remote = replace(remote, region_id=self.link.peer.beacon.region.region_id)
        pairs = (GridPair(local, remote),)
        here = np.zeros(len(items), dtype=np.int64)
        there = np.array(items, dtype=np.int64)
        batch = Batch(self.link.link_id, op, pairs, here, there, sizes, Deadline.after(WAIT_S))
        parts.engine.run(self.link.backends[0], batch)

    def content(self) -> bytes:
        return b"".join(tensor.tobytes() for tensor in self.own.numpy())


def desc(num_tensors: int = 1) -> CacheDesc:
    return CacheDesc(num_tensors, (NUM_BLOCKS, BLOCK), DataType.DT_FLOAT, Placement.HOST)


@contextmanager
def attacked(backend: str) -> Iterator[tuple[Owner, Attacker]]:
    with linked(backend) as (prompt, decoder):
        closed_array = np.full(NUM_BLOCKS * BLOCK, 7.5, dtype=np.float32)
        closed = manager(prompt).register_blocks_cache(
            desc(), [closed_array.ctypes.data], BlocksCacheKey(prompt.cluster_id, 9), False
        )
        owner = Owner(prompt, filled_cache(prompt, 1, 3, desc()), closed, closed_array)
        own = manager(decoder).allocate_blocks_cache(desc())
        fill(own, 2)
        yield owner, Attacker(decoder, own, prompt.cluster_id)


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[tuple[Owner, Attacker]]:
    with attacked("tcp") as ends:
        yield ends


def refused(owner: Owner, attacker: Attacker, op: Op, error: Any = (ParamInvalid, CacheNotExist), **batch: Any) -> None:
    """The batch is refused, and nothing has changed at either end; the link goes on."""
    theirs, mine = owner.memory(), attacker.content()
    open_before = owner.open.numpy()[0].tobytes()
    with pytest.raises(error):
        attacker.move(op, **batch)
    assert owner.memory() == theirs
    assert owner.open.numpy()[0].tobytes() == open_before
    assert attacker.content() == mine
    attacker.move(Op.READ, owner.grid_of(owner.open))


def in_64_bits(batch: Batch) -> bytes:
    """The body of a request whose indices travel as they are, also negative ones."""
    parts = [(part.remote_offset, part.num_bytes) for part in batch.slices]
    return request_body([pair.remote for pair in batch.pairs], parts, batch.remote_items.tolist())


class TestServedBatches:
    """Over tcp, where the owner looks at every request."""

    @both_ops
    def test_what_is_allowed(self, over_tcp: tuple[Owner, Attacker], op: Op) -> None:
        """The control: the same hand-made batch, of an open cache."""
        owner, attacker = over_tcp
        attacker.move(op, owner.grid_of(owner.open), (3,))
        assert attacker.own.numpy()[0][0].tobytes() == owner.open.numpy()[0][3].tobytes()

    @both_ops
    def test_a_cache_that_is_not_open_to_peers(self, over_tcp: tuple[Owner, Attacker], op: Op) -> None:
        owner, attacker = over_tcp
        refused(owner, attacker, op, remote=owner.grid_of(owner.closed))

    @both_ops
    @pytest.mark.parametrize("grid_id", [0, -1, 1 << 40, INT64_MAX, -INT64_MAX])
    def test_unknown_ids(self, over_tcp: tuple[Owner, Attacker], op: Op, grid_id: int) -> None:
        owner, attacker = over_tcp
        refused(owner, attacker, op, CacheNotExist, remote=replace(owner.grid_of(owner.open), grid_id=grid_id))

    @both_ops
    def test_a_freed_cache(self, over_tcp: tuple[Owner, Attacker], op: Op) -> None:
        """Its memory is another cache's by now; ids are never used again."""
        owner, attacker = over_tcp
        freed = filled_cache(owner.end, 5, 77, desc())
        grid = owner.grid_of(freed)
        attacker.move(Op.READ, grid)
        manager(owner.end).deallocate_blocks_cache(freed)
        again = filled_cache(owner.end, 6, 78, desc())
        assert owner.grid_of(again).offset_bytes == grid.offset_bytes
        refused(owner, attacker, op, CacheNotExist, remote=grid)
        manager(owner.end).deallocate_blocks_cache(again)

    def test_the_beacon_may_be_read_only(self, over_tcp: tuple[Owner, Attacker]) -> None:
        owner, attacker = over_tcp
        beacon = owner.end._open().beacon_memory.grid
        part = ((0, beacon.item_bytes),)
        attacker.move(Op.READ, beacon, (0,), part)
        refused(owner, attacker, Op.WRITE, ParamInvalid, remote=beacon, items=(0,), slices=part)

    @both_ops
    @pytest.mark.parametrize("index", [-1, NUM_BLOCKS, 1 << 31, 1 << 32, (1 << 32) + 1, INT64_MAX, -INT64_MAX - 1])
    def test_indices_that_are_none(
        self, over_tcp: tuple[Owner, Attacker], op: Op, index: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, attacker = over_tcp
        monkeypatch.setattr(_tcp_runtime, "encode_request", in_64_bits)
        refused(owner, attacker, op, ParamInvalid, remote=owner.grid_of(owner.open), items=(1, index, 2))

    @both_ops
    @pytest.mark.parametrize(
        "part", [(-1, 8), (ITEM_BYTES - 4, 8), (ITEM_BYTES, 1), (1 << 62, 8), (INT64_MAX, 8), (-INT64_MAX, 8)]
    )
    def test_slices_beyond_the_item(self, over_tcp: tuple[Owner, Attacker], op: Op, part: tuple[int, int]) -> None:
        owner, attacker = over_tcp
        refused(owner, attacker, op, ParamInvalid, remote=owner.grid_of(owner.open), slices=(part,))

    @both_ops
    @pytest.mark.parametrize(
        "change",
        [
            {"offset_bytes": -1},
            {"offset_bytes": -8 * ITEM_BYTES},
            {"offset_bytes": 8},
            {"offset_bytes": INT64_MAX},
            {"num_items": NUM_BLOCKS + 1},
            {"num_items": INT64_MAX},
            {"num_items": -1},
            {"num_items": 0},
            {"stride_bytes": 2 * ITEM_BYTES},
            {"stride_bytes": INT64_MAX},
            {"stride_bytes": -ITEM_BYTES},
            {"stride_bytes": 0},
            {"item_bytes": ITEM_BYTES + 1},
            {"item_bytes": 0},
            {"item_bytes": INT64_MAX, "stride_bytes": INT64_MAX},
            {"item_bytes": 1 << 32, "stride_bytes": 1 << 32, "num_items": 1 << 32},
        ],
        ids=str,
    )
    def test_memory_divided_beyond_its_ends(
        self, over_tcp: tuple[Owner, Attacker], op: Op, change: dict[str, int]
    ) -> None:
        """Also where 64 bits would overflow and come out small."""
        owner, attacker = over_tcp
        theirs = replace(owner.grid_of(owner.open), **change)
        refused(owner, attacker, op, ParamInvalid, remote=theirs, slices=((0, 1),))
        if theirs.num_items > 1:
            refused(owner, attacker, op, ParamInvalid, remote=theirs, items=(theirs.num_items - 1,), slices=((0, 1),))

    def test_a_division_within_the_ends_is_served(self, over_tcp: tuple[Owner, Attacker]) -> None:
        """The control of the one above."""
        owner, attacker = over_tcp
        whole = owner.grid_of(owner.open)
        finer = replace(whole, stride_bytes=128, item_bytes=64, num_items=8, offset_bytes=whole.offset_bytes + 8)
        attacker.move(Op.READ, finer, (7,), ((8, 8),))
        expected = owner.open.numpy()[0].tobytes()[8 + 7 * 128 + 8 :][:8]
        assert attacker.own.numpy()[0].tobytes()[:8] == expected


class TestQuestions:
    """Over the control connection; of any backend."""

    @pytest.mark.parametrize("kind", ["blocks", "id"])
    def test_look_up_of_what_is_not_open(self, over_tcp: tuple[Owner, Attacker], kind: str) -> None:
        owner, attacker = over_tcp
        query = m.Lookup(0, kind, owner.end.cluster_id, model_id=9, cache_id=owner.closed.cache_id)
        with pytest.raises(ParamInvalid, match="not accessible"):
            attacker.ask(query)
        found = attacker.ask(msgspec.structs.replace(query, model_id=3, cache_id=owner.open.cache_id))
        assert found.cache.cache_id == owner.open.cache_id

    @pytest.mark.parametrize("cache_id", [-1, 1 << 40, INT64_MAX, 2**64 - 1])
    def test_look_up_of_unknown_ids(self, over_tcp: tuple[Owner, Attacker], cache_id: int) -> None:
        owner, attacker = over_tcp
        with pytest.raises(CacheNotExist):
            attacker.ask(m.Lookup(0, "id", owner.end.cluster_id, cache_id=cache_id))

    @pytest.mark.parametrize("change", [{"kind": "any"}, {"cluster_id": 1}, {"batch_index": -1}, {"batch_index": 99}])
    def test_look_up_that_is_malformed(self, over_tcp: tuple[Owner, Attacker], change: dict[str, Any]) -> None:
        owner, attacker = over_tcp
        query = m.Lookup(0, "id", owner.end.cluster_id, cache_id=owner.open.cache_id)
        assert attacker.ask(query).cache.cache_id == owner.open.cache_id
        with pytest.raises(LLMException):
            attacker.ask(msgspec.structs.replace(query, **change))

    def test_addresses_beside_open_memory(self, over_tcp: tuple[Owner, Attacker]) -> None:
        """Before, behind, of a closed cache, of the beacon, and none at all: in no cache that peers may use."""
        owner, attacker = over_tcp
        (start,) = owner.open.tensor_addrs
        end = start + NUM_BLOCKS * ITEM_BYTES
        answer = attacker.ask(m.Locate(0, [start, end - 1]))
        assert [place.offset_bytes for place in answer.places] == [0, NUM_BLOCKS * ITEM_BYTES - 1]
        (closed,) = owner.closed.tensor_addrs
        beacon = owner.end._open().beacon_memory.address
        pool = owner.end._open().store._pool(Placement.HOST).region
        outside = [start - 1, end, closed, closed + 8, beacon, pool.end_address - 1, 0, -1, -start, 2**64 - 1]
        for address in outside:
            with pytest.raises(ParamInvalid):
                attacker.ask(m.Locate(0, [start, address]))

    def test_a_place_gives_no_right_beyond_its_tensor(self, over_tcp: tuple[Owner, Attacker]) -> None:
        """A transfer from the last byte on, of two bytes: it straddles the end."""
        owner, attacker = over_tcp
        whole = owner.grid_of(owner.open)
        last = replace(whole, offset_bytes=whole.end_bytes - 1, stride_bytes=1, item_bytes=1, num_items=1)
        attacker.move(Op.READ, last, (0,), ((0, 1),))
        refused(owner, attacker, Op.READ, ParamInvalid, remote=replace(last, num_items=2), items=(1,), slices=((0, 1),))
        straddling = replace(last, stride_bytes=2, item_bytes=2)
        refused(owner, attacker, Op.WRITE, ParamInvalid, remote=straddling, items=(0,), slices=((0, 2),))

    def test_checksums_of_what_is_not_open(self, over_tcp: tuple[Owner, Attacker]) -> None:
        """They would tell what closed memory holds."""
        owner, attacker = over_tcp
        grids = {name: owner.grid_of(cache) for name, cache in (("open", owner.open), ("closed", owner.closed))}
        one = np.zeros(1, dtype="<i8").tobytes()

        def question(grid: Grid, items: bytes = one) -> m.AskChecksums:
            info = m.GridInfo(grid.grid_id, grid.region_id, *grid.division)
            return m.AskChecksums(0, [info], items, [m.SumPart(0, 8)], 1)

        assert len(attacker.ask(question(grids["open"])).sums) == 8
        beyond = replace(grids["open"], num_items=NUM_BLOCKS + 1)
        for wrong in (
            question(grids["closed"]),
            question(beyond, np.array([NUM_BLOCKS], dtype="<i8").tobytes()),
            question(grids["open"], np.array([-1], dtype="<i8").tobytes()),
        ):
            with pytest.raises(LLMException):
                attacker.ask(wrong)


def write_anew(fd: int) -> None:
    """By a new descriptor, opened for writing."""
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        file.write(b"x")


class TestSharedMemory:
    """What leaves its owner are descriptors of whole pools: to whom, and of which."""

    @pytest.fixture
    def pair(self) -> Iterator[BackendPair[LocalEnd]]:
        with BackendPair.in_process(ShmBackend) as pair:
            pair.link()
            yield pair

    def test_only_what_is_registered_and_open(self, pair: BackendPair[LocalEnd]) -> None:
        client = pair.a.backend._links[A_KNOWS_B_AS].client
        (export,) = pair.b.exports()
        closed = replace(pair.b.region, region_id=export.region_id + 10_000, for_peers=False)
        assert pair.b.backend.register(closed) is None
        for region_id in (closed.region_id, -1, 0, 1 << 40, INT64_MAX, 2**64 - 1):
            with pytest.raises(Unreachable, match="or not for peers"):
                client.fetch(region_id, Deadline.after(WAIT_S))
        with open(client.fetch(export.region_id, Deadline.after(WAIT_S)), "rb"):
            pass  # the control
        pair.b.backend.unregister(export.region_id)
        with pytest.raises(Unreachable, match="or not for peers"):
            client.fetch(export.region_id, Deadline.after(WAIT_S))

    def test_nothing_for_who_is_not_of_a_link_or_not_any_more(self, pair: BackendPair[LocalEnd]) -> None:
        (export,) = pair.b.exports()
        stranger = RegionClient(pair.b.backend._server.address)
        with contextlib.closing(stranger), pytest.raises(PeerLost):
            stranger.fetch(export.region_id, Deadline.after(WAIT_S))
        client = pair.a.backend._links[A_KNOWS_B_AS].client
        pair.b.disconnect(next(iter(pair.b.backend._links)))
        with pytest.raises(PeerLost):
            client.fetch(export.region_id, Deadline.after(WAIT_S))

    def test_a_guest_of_another_server_is_none_here(self, pair: BackendPair[LocalEnd]) -> None:
        """The proof names the server: that of a link to one end is of no use at another."""
        with BackendPair.in_process(ShmBackend) as other:
            token = b"t" * 16
            pair.b.backend._server.admit(_shm_server.Admission(1, token))
            thief = RegionClient(pair.b.backend._server.address)
            thief._address = other.b.backend._server.address
            with contextlib.closing(thief), pytest.raises(LLMException):
                thief.greet(token, Deadline.after(0.2))

    def test_the_beacon_cannot_be_written(self) -> None:
        """Else one peer could keep all others from linking: what they read would be wrong."""
        with attacked("shm") as (owner, attacker):
            (shm,) = attacker.link.backends
            beacon = owner.end._open().beacon_memory
            client = shm._links[attacker.link.link_id].client
            with open(client.fetch(beacon.pool.region.region_id, Deadline.after(WAIT_S)), "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                assert beacon.value in mapped[:]
                with pytest.raises(PermissionError):
                    mmap.mmap(file.fileno(), 0)
                for change in (
                    lambda: os.pwrite(file.fileno(), b"x", 0),
                    lambda: os.ftruncate(file.fileno(), 0),
                    lambda: fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
                    lambda: write_anew(file.fileno()),
                ):
                    with pytest.raises(OSError, match="not permitted"):
                        change()
            part = ((0, beacon.grid.item_bytes),)
            with pytest.raises(ParamInvalid, match="lets nobody write"):
                attacker.move(Op.WRITE, beacon.grid, (0,), part)
            attacker.move(Op.READ, beacon.grid, (0,), part)
            with make_end("shm") as honest:
                must_link(honest, owner.end)

    def test_the_layer_above_hands_out_no_memory_that_is_closed(self) -> None:
        """All the way: a cache that is registered without `remote_accessible` is no region for peers."""
        with attacked("shm,cma,tcp") as (owner, attacker):
            regions = owner.end._open().regions
            closed_id, open_id = (owner.grid_of(cache).region_id for cache in (owner.closed, owner.open))
            assert regions.get(closed_id).descriptors == {}
            assert set(regions.get(open_id).descriptors) == {"shm", "cma", "tcp"}
            (shm,) = (b for b in attacker.link.backends if b.name == "shm")
            client = shm._links[attacker.link.link_id].client
            with pytest.raises(Unreachable):
                client.fetch(closed_id, Deadline.after(WAIT_S))


@pytest.mark.slow
def test_mooncake_lets_nobody_at_closed_memory() -> None:
    """Its engines ask nobody for anything but a range that is registered: what is closed must not be."""
    with suppress(Unreachable):
        load_mooncake()
    try:
        pair = BackendPair.in_process(MooncakeBackend)
    except Unreachable as error:
        if REQUIRE_ALL:
            raise
        pytest.skip(str(error))
    with pair:
        pair.link()
        for for_peers in (True, False):
            grid = pair.b.add_private_grid(4, 4096, for_peers)
            descriptor = msgspec.msgpack.encode([pair.b.view(grid.region_id).ctypes.data, 4 * 4096])
            forged = Export(grid.region_id, 4 * 4096, descriptor)
            if for_peers:
                pair.a.attach(A_KNOWS_B_AS, forged, WAIT_S)
            else:
                with pytest.raises(Unreachable, match="does not give region"):
                    pair.a.attach(A_KNOWS_B_AS, forged, WAIT_S)


def test_other_links_see_nothing_of_a_refusal(over_tcp: tuple[Owner, Attacker]) -> None:
    """A second peer is served while the first one is refused again and again."""
    owner, attacker = over_tcp
    with make_end("tcp") as honest:
        must_link(honest, owner.end)
        mine = manager(honest).allocate_blocks_cache(desc())
        for _ in range(5):
            refused(owner, attacker, Op.WRITE, remote=owner.grid_of(owner.closed))
            manager(honest).pull_blocks(BlocksCacheKey(owner.end.cluster_id, 3), mine, [2], [2])
        assert np.array_equal(mine.numpy()[0][2], owner.open.numpy()[0][2])
