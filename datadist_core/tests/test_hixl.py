# SPDX-License-Identifier: Apache-2.0
"""What is particular to the cann backend, over the STAND-IN for the vendor's package: nothing here ran on Ascend.

The rules that hold for every backend are in `test_backends.py`, which runs them over the stand-in too. That the
stand-in finds wrong calls is in `test_hixl_standin.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import datadist_core
from datadist_core import BlocksCacheKey, LLMDataDist, LLMException, LLMRole
from datadist_core.backends._hixl_blocks import MAX_BLOCKS, MAX_BYTES, BlockRuns, divides, stage, to_runs
from datadist_core.backends._hixl_options import CannOptions, address_for, parse_options
from datadist_core.backends.hixl import CannBackend
from datadist_core.errors import ClosedError, ParamInvalid, PeerLost, TimedOut, Unreachable
from datadist_core.memory.grid import Grid
from datadist_core.memory.region import Region
from datadist_core.settings import Settings
from datadist_core.testing import ascend_standin as standin
from datadist_core.testing._suite_base import check_equal_items, check_works, make_grids, require_ok
from datadist_core.testing.ascend_standin_types import LLMStatusCode
from datadist_core.testing.end import Export, LocalEnd
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.pair import A_KNOWS_B_AS, B_KNOWS_A_AS, BackendPair
from datadist_core.testing.parallel import WAIT_S, eventually, require_all, run_all
from datadist_core.tests.core_ends import desc, filled_cache, linked, make_end, manager, must_link, plain_cache
from datadist_core.transfer.backend import BackendContext, CompletionStatus
from datadist_core.transfer.plan import CopyList, Op, Slice
from datadist_core.transfer.registry import AUTO_ORDER, backend_names, create_backend
from datadist_core.types import Placement

ROOT = Path(datadist_core.__file__).parent.parent
OVER_STAND_IN = "datadist_core.testing.ascend_standin:CannOverStandIn"
NO_OPTIONS = BackendContext(lambda *_: None, lambda _: None, "127.0.0.1")  # type: ignore[arg-type,return-value]


@pytest.fixture(autouse=True)
def _no_complaints() -> Iterator[None]:
    """Whatever a test does, the backend keeps to the published API."""
    standin.complaints.clear()
    yield
    assert standin.complaints == []


@pytest.fixture
def pair() -> Iterator[BackendPair[LocalEnd]]:
    with BackendPair.in_process(standin.CannOverStandIn) as pair:
        yield pair


@pytest.fixture
def linked_pair(pair: BackendPair[LocalEnd]) -> BackendPair[LocalEnd]:
    pair.link()
    return pair


def run_python(code: str, *path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(map(str, [*path, ROOT]))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- byte ranges as blocks


@st.composite
def range_lists(draw: st.DrawFn, unit: int = 1) -> CopyList:
    """Ranges of two regions of `SIZE` bytes that do not overlap here."""
    local, remote, sizes, at = [], [], [], 0
    for _ in range(draw(st.integers(1, 6))):
        at += draw(st.integers(0, 40)) * unit
        size = draw(st.integers(1, 300)) * unit
        local.append(at)
        remote.append(draw(st.integers(0, (SIZE - size) // unit)) * unit)
        sizes.append(size)
        at += size
    return CopyList(*(np.array(values, dtype=np.int64) for values in (local, remote, sizes)))


SIZE = 1 << 16


def copied(ranges: CopyList, there: np.ndarray, here: np.ndarray) -> np.ndarray:
    result = here.copy()
    for at, of, size in zip(ranges.local.tolist(), ranges.remote.tolist(), ranges.num_bytes.tolist(), strict=True):
        result[at : at + size] = there[of : of + size]
    return result


def moved(runs: list[BlockRuns], there: np.ndarray, here: np.ndarray) -> None:
    """What `pull_blocks` of all calls does. IndexError for a block that does not exist."""
    for run in runs:
        size = run.block_bytes
        for call in run.calls():
            assert 0 < len(call.local) <= MAX_BLOCKS
            assert len(call.local) * size <= max(size, MAX_BYTES)
            assert min(call.local.min(), call.remote.min()) >= 0
            source = there[: len(there) // size * size].reshape(-1, size)
            here[: len(here) // size * size].reshape(-1, size)[call.local] = source[call.remote]


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(range_lists(), st.sampled_from([(1,), (1, 64), (1, 16, 256), (512, 16, 1)]))
def test_blocks_cover_the_ranges_exactly(ranges: CopyList, sizes: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    there, here = (random.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2))
    want = copied(ranges, there, here)
    moved(to_runs(ranges, sizes), there, here)
    assert np.array_equal(here, want)


@settings(deadline=None)
@given(range_lists(), range_lists(unit=16), st.sampled_from([(1, 64), (16, 256), (64,), (16,)]))
def test_staged_ranges_are_the_same_bytes(reads: CopyList, writes: CopyList, sizes: tuple[int, ...]) -> None:
    """Through a buffer that is far too small for all at once; a READ of what blocks do not divide, too."""
    staging_bytes = 4096
    random = np.random.default_rng(2)
    there, here = (random.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2))
    want = copied(reads, there, here)
    for filling in stage(reads, sizes, Op.READ, SIZE, staging_bytes):
        staging = np.zeros(staging_bytes, dtype=np.uint8)
        moved(filling.runs, there, staging)
        here = copied(filling.copies, staging, here)
    assert np.array_equal(here, want)

    if min(sizes) > 16:
        return
    want = copied(CopyList(writes.remote, writes.local, writes.num_bytes), here, there)
    if len(writes.remote) > 1:  # two writes to one place have no result
        writes = CopyList(writes.local[:1], writes.remote[:1], writes.num_bytes[:1])
        want = copied(CopyList(writes.remote, writes.local, writes.num_bytes), here, there)
    for filling in stage(writes, sizes, Op.WRITE, SIZE, staging_bytes):
        staging = copied(
            CopyList(filling.copies.remote, filling.copies.local, filling.copies.num_bytes),
            here,
            np.zeros(staging_bytes, np.uint8),
        )
        moved([BlockRuns(run.block_bytes, run.remote, run.local, run.counts) for run in filling.runs], staging, there)
    assert np.array_equal(there, want)


def test_blocks_are_as_large_as_they_can_be() -> None:
    ranges = CopyList(
        *(np.array(values, dtype=np.int64) for values in ([65536, 3 * 18432], [0, 18432], [65536, 18432]))
    )
    assert divides(ranges, 512)
    assert not divides(ranges, 16384)
    assert {run.block_bytes: int(run.counts.sum()) for run in to_runs(ranges, (1, 512, 16384))} == {16384: 4, 512: 36}


def test_a_write_of_less_than_a_block_is_refused() -> None:
    some = CopyList(*(np.array([value], dtype=np.int64) for value in (0, 512, 100)))
    with pytest.raises(ParamInvalid, match=r"WRITE of 100 bytes at 512.*block_bytes"):
        stage(some, (512,), Op.WRITE, SIZE, 4096)
    with pytest.raises(ParamInvalid, match="whole blocks of 512"):
        to_runs(some, (512,))
    end = CopyList(*(np.array([value], dtype=np.int64) for value in (0, 1000, 100)))
    with pytest.raises(ParamInvalid, match="READ"):  # the region's end is in no block
        stage(end, (512,), Op.READ, 1100, 4096)


# -- the vendor's package: absent, behind our own alias, or something else


def test_without_the_package_it_says_which_and_what_to_do() -> None:
    with pytest.raises(Unreachable, match=r"llm_datadist.*CANN.*auto"):
        create_backend("cann").open(NO_OPTIONS)
    with LLMDataDist(LLMRole.PROMPT, 1) as end, pytest.raises(ParamInvalid, match="llm_datadist"):
        end.init({"llm.TransferBackend": "cann"})


def test_hixl_runs_off_the_device() -> None:
    """A script for Ascend that asks for it gets what `auto` gives, and a line that says why not the vendor's engine."""
    with linked("hixl") as (prompt, decoder):
        source, target = filled_cache(prompt, 1), plain_cache(decoder, 2)
        manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 0), target, [1, 2], [4, 5])
        np.testing.assert_array_equal(target.numpy()[0][4:6], source.numpy()[0][1:3])
        info = decoder.link_info(prompt.cluster_id)
        assert info.backend == "loopback"
        assert "llm_datadist" in info.rejected["cann"]


def test_auto_is_what_it_was() -> None:
    assert backend_names("auto") == AUTO_ORDER == ("loopback", "shm", "cma", "tcp")
    assert backend_names("hixl") == ("cann", *AUTO_ORDER)
    assert backend_names("tcp,hixl") == ("tcp", "cann", "loopback", "shm", "cma")


def test_our_alias_is_not_taken_for_the_vendors_package() -> None:
    said = run_python(
        """
        import sys
        import datadist_core
        datadist_core.install_as_llm_datadist()
        import llm_datadist.errors
        from datadist_core.backends._hixl_vendor import load_vendor
        try:
            load_vendor()
        except llm_datadist.errors.Unreachable as error:
            print(error)
        assert sys.modules["llm_datadist"] is datadist_core, sys.modules["llm_datadist"]
        assert sys.modules["llm_datadist.errors"] is datadist_core.errors
        """
    )
    assert "No module named 'llm_datadist'" in said


def test_the_package_is_found_behind_our_alias(tmp_path: Path) -> None:
    """An unchanged script for Ascend after `install_as_llm_datadist()`, on a host that has the vendor's package."""
    package = tmp_path / "llm_datadist"
    package.mkdir()
    (package / "__init__.py").write_text("from llm_datadist.inner import *\n")
    (package / "inner.py").write_text(
        "from datadist_core.testing.ascend_standin import StandInPackage\n"
        "for name in vars(package := StandInPackage()):\n"
        "    globals()[name] = getattr(package, name)\n"
    )
    said = run_python(
        """
        import sys
        import datadist_core
        datadist_core.install_as_llm_datadist()
        from llm_datadist import LLMConfig, LLMDataDist, LLMRole
        config = LLMConfig()
        config.transfer_backend = "hixl"
        config.enable_cache_manager = True
        config.device_id = 3
        with LLMDataDist(LLMRole.PROMPT, 1) as end:
            end.init(config.generate_options())
            engine = end._open().engine
            assert list(engine.backends) == ["cann", "loopback", "shm", "cma", "tcp"], engine.unavailable
            assert sys.modules["llm_datadist"] is datadist_core
            print(engine.backends["cann"]._standing.engine._vendor.__file__)
        """,
        tmp_path,
    )
    assert said == str(package / "__init__.py")


def test_another_package_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llm_datadist.py").write_text("LLMConfig = None\n")
    code = "from datadist_core.backends._hixl_vendor import load_vendor\n{}"
    said = run_python(code.format("try: load_vendor()\nexcept Exception as error: print(type(error), error)"), tmp_path)
    assert "Unreachable" in said
    assert "LLMDataDist" in said
    (tmp_path / "llm_datadist.py").write_text("raise OSError('libascendcl.so')\n")
    said = run_python(code.format("try: load_vendor()\nexcept Exception as error: print(type(error), error)"), tmp_path)
    assert "Unreachable" in said
    assert "libascendcl.so" in said


def test_the_stand_in_is_never_picked_up() -> None:
    said = run_python(
        """
        import sys
        from datadist_core import LLMDataDist, LLMRole
        with LLMDataDist(LLMRole.PROMPT, 1) as end:
            end.init({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"})
            print([name for name in sys.modules if "standin" in name], end._open().engine.unavailable)
        """
    )
    assert said.startswith("[] {'cann':")


# -- options


@pytest.mark.parametrize(
    "given",
    [
        {"device_id": -1}, {"device_id": True}, {"role": "BOTH"}, {"host": ""}, {"port": 65536}, {"timeout_ms": 0},
        {"timeout_ms": 60_000}, {"block_bytes": []}, {"block_bytes": [3]}, {"block_bytes": [1, 1]}, {"block_bytes": 1},
        {"block_bytes": [1 << 21]}, {"local_comm_res": {}}, {"options": {"a": 1}}, {"nonsense": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ParamInvalid, match=f"cann option '?{name}"):
        parse_options(given)


def test_good_options() -> None:
    assert parse_options({}) == CannOptions()
    given = {"device_id": 1, "role": "PROMPT", "host": "h", "port": 7, "timeout_ms": 9, "local_comm_res": ""}
    assert parse_options({**given, "block_bytes": [64, 1]}) == CannOptions(block_bytes=(64, 1), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cann", "hixl", "tcp,cann"])
def test_the_options_of_a_script_for_ascend_reach_the_vendor(backend: str) -> None:
    own = {"cann": {"timeout_ms": 7, "options": {"ge.more": "mine"}}}
    options = {
        "llm.TransferBackend": backend,
        "llm.GlobalResourceConfig": json.dumps(own),
        "ge.exec.deviceId": "3",
        "llm.RdmaTrafficClass": "8",
        "ge.more": "theirs",
        "llm.SyncKvCacheWaitTime": "77",
    }
    part = Settings.from_options(options).backend_options["cann"]
    assert part["timeout_ms"] == 7
    assert part["options"] == {"ge.exec.deviceId": "3", "llm.RdmaTrafficClass": "8", "ge.more": "mine"}
    other = Settings.from_options(options | {"llm.TransferBackend": "auto"})
    assert other.backend_options == own


def test_addresses() -> None:
    assert address_for("127.0.0.1", 7).port == 7
    assert address_for("localhost", 0).port > 0
    assert str(address_for("0.0.0.0", 9)) == str(address_for(None, 9))
    assert address_for(None, 9).host != "0.0.0.0"
    for host in ("::1", "no.such.host.invalid"):
        with pytest.raises(Unreachable, match="IPv4"):
            address_for(host, 0)
    with pytest.raises(Unreachable, match=r"192\.0\.2\.77"):
        address_for("192.0.2.77", 0)


# -- the original's limits


def test_one_per_process_is_enough() -> None:
    """The original's limit, which `test_backends.py` leaves out to have both ends in one process."""
    with BackendPair.two_processes("datadist_core.testing.ascend_standin:CannOverStrictStandIn") as pair:
        pair.link()
        check_works(pair)
        mine, theirs = make_grids(pair)
        for local_end, batch in (
            (pair.a, pair.batch(Op.WRITE, mine, theirs, [1, 2, 9], [3, 4, 0])),
            (pair.b, pair.reversed_batch(Op.READ, theirs, mine, [5, 6], [8, 7])),
        ):
            require_ok(local_end.transfer(batch))
        check_equal_items(pair, mine, theirs, [1, 2, 9, 8, 7], [3, 4, 0, 5, 6])


def test_a_second_one_in_a_process_is_unreachable() -> None:
    first = LocalEnd(standin.CannOverStrictStandIn())
    try:
        with pytest.raises(Unreachable, match="one LLMDataDist per process"):
            LocalEnd(standin.CannOverStrictStandIn())
    finally:
        first.close()
    LocalEnd(standin.CannOverStrictStandIn()).close()


def test_memory_registered_while_linked_is_not_exported(
    linked_pair: BackendPair[LocalEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor is not even asked."""
    num_exports = len(linked_pair.b.exports())
    with monkeypatch.context() as patched:
        patched.delattr("datadist_core.backends._hixl_engine.VendorEngine.register")
        linked_pair.b.add_private_grid(4, 256)
    assert len(linked_pair.b.exports()) == num_exports
    linked_pair.disconnect()
    linked_pair.b.add_private_grid(4, 256)
    assert len(linked_pair.b.exports()) == num_exports + 1


def test_memory_registered_while_linked_goes_over_another_backend() -> None:
    """Per region, as every link does: the pool over the vendor's engine, the late tensors over tcp."""
    with linked(f"{OVER_STAND_IN},tcp") as (prompt, decoder):
        assert decoder.link_info(prompt.cluster_id).backends == ("cann", "tcp")
        source, target = filled_cache(prompt, 1), plain_cache(decoder, 2)
        late = [np.full((16, 256), 7.0 + i, dtype=np.float32) for i in range(4)]
        key = BlocksCacheKey(prompt.cluster_id, 9)
        manager(prompt).register_blocks_cache(desc(), [one.ctypes.data for one in late], key, remote_accessible=True)

        report = manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 0), target, [0, 3], [1, 2])
        assert report.backend == "cann"
        np.testing.assert_array_equal(target.numpy()[3][1:3], source.numpy()[3][[0, 3]])
        report = manager(decoder).pull_blocks(key, target, [0, 3], [8, 9])
        assert report.backend == "tcp"
        assert (target.numpy()[2][8:10] == 9.0).all()
        report = manager(decoder).push_blocks(BlocksCacheKey(prompt.cluster_id, 0), target, [8], [15])
        assert report.backend == "cann"
        assert (source.numpy()[1][15] == 8.0).all()


def test_an_end_without_the_package_is_linked_over_another_backend() -> None:
    with make_end(f"{OVER_STAND_IN},tcp", "127.0.0.1:0") as on_ascend, make_end("hixl") as elsewhere:
        must_link(elsewhere, on_ascend)
        assert elsewhere.link_info(on_ascend.cluster_id).backends == ("tcp",)
        assert "does not offer it" in on_ascend.link_info(elsewhere.cluster_id).rejected["cann"]


def test_caches_registered_before_linking_go_over_the_vendors_engine() -> None:
    """As a script for Ascend does it: its own tensors, registered for DEVICE, then links."""
    mine, theirs = (np.random.default_rng(seed).random((4, 16, 256), dtype=np.float32) for seed in (1, 2))
    with make_end(OVER_STAND_IN, "127.0.0.1:0") as prompt, make_end(OVER_STAND_IN) as decoder:
        key = BlocksCacheKey(prompt.cluster_id, 0)
        manager(prompt).register_blocks_cache(desc(), [one.ctypes.data for one in theirs], key, remote_accessible=True)
        cache = manager(decoder).register_blocks_cache(desc(), [one.ctypes.data for one in mine])
        must_link(decoder, prompt)
        manager(decoder).pull_blocks(key, cache, [5, 6, 0], [1, 2, 15])
        np.testing.assert_array_equal(mine[:, [1, 2, 15]], theirs[:, [5, 6, 0]])


def test_device_memory_is_registered_as_such(pair: BackendPair[LocalEnd]) -> None:
    """And what stands for a device pool but is host memory of ours, as HOST."""
    array = np.zeros(1 << 16, dtype=np.uint8)
    pair.b.add_region(Region(99, array.ctypes.data, array.nbytes, Placement.DEVICE, owner=array))
    caches = pair.b.backend._regions  # type: ignore[attr-defined]
    assert {cache.cache_desc.placement.name for cache in caches[99].caches.values()} == {"DEVICE"}
    assert {cache.cache_desc.placement.name for cache in caches[pair.b.region.region_id].caches.values()} == {"HOST"}


def test_device_memory_is_not_staged(linked_pair: BackendPair[LocalEnd]) -> None:
    """The processor cannot read it: it is registered before the links, or not moved."""
    array = np.zeros(1 << 16, dtype=np.uint8)
    linked_pair.a.add_region(Region(99, array.ctypes.data, array.nbytes, Placement.DEVICE, owner=array))
    theirs = linked_pair.b.add_grid(16, 512)
    batch = linked_pair.batch(Op.READ, Grid(1, 99, 0, 512, 512, 16), theirs, [1], [1])
    error = linked_pair.a.transfer(batch).error
    assert isinstance(error, ParamInvalid)
    assert "before the first link" in str(error)


def test_where_memory_can_be_registered_once_only() -> None:
    """Then the first block size is left: reads still work, and so do writes of whole blocks; others are refused."""
    package = standin.StandInPackage(one_per_process=False, overlapping=False)
    with BackendPair.in_process(lambda: CannBackend(load=lambda: package)) as pair:
        pair.link()
        mine, theirs = pair.a.add_grid(8, 1000), pair.b.add_grid(8, 1000)
        pair.b.fill(1)
        require_ok(pair.a.transfer(pair.batch(Op.READ, mine, theirs, [0, 7], [3, 4], (Slice(7, 301, 333),))))
        here, there = (end.snapshot(end.region.region_id) for end in (pair.a, pair.b))
        for to, of in ((0, 3), (7, 4)):
            at = mine.offset_bytes + to * 1000 + 7
            source = theirs.offset_bytes + of * 1000 + 301
            assert np.array_equal(here[at : at + 333], there[source : source + 333])
        whole, at_peer = pair.a.add_grid(8, 1024), pair.b.add_grid(8, 1024)
        require_ok(pair.a.transfer(pair.batch(Op.WRITE, whole, at_peer, [1], [2])))
        error = pair.a.transfer(pair.batch(Op.WRITE, mine, theirs, [1], [1])).error
        assert isinstance(error, ParamInvalid)
        assert "block_bytes" in str(error)


def test_ends_without_a_common_block_size_do_not_reach_each_other() -> None:
    a = LocalEnd(standin.CannOverStandIn(), options={"block_bytes": [512]})
    b = LocalEnd(standin.CannOverStandIn(), options={"block_bytes": [64, 1]})
    with BackendPair(a, b) as pair:
        pair.connect()
        with pytest.raises(Unreachable, match="block sizes"):
            pair.attach()


def test_more_regions_than_the_vendor_has_addresses_for(pair: BackendPair[LocalEnd]) -> None:
    """240 of them: what comes later is not exported, and nothing fails."""
    for _ in range(standin.MAX_ADDRESSES // 3 + 5):
        pair.b.add_private_grid(1, 1 << 15)
    assert 70 <= len(pair.b.exports()) <= standin.MAX_ADDRESSES // 3
    pair.link()
    check_works(pair)


# -- links


def test_listening_later() -> None:
    a = LocalEnd(standin.CannOverStandIn())
    b = LocalEnd(standin.CannOverStandIn(), listen_host=None)
    with BackendPair(a, b) as pair:
        with pytest.raises(Unreachable, match="does not listen"):
            a.connect(A_KNOWS_B_AS, b.identity(), True, bytes(16), 1.0)
        b.backend.listen("127.0.0.1")
        before = b.identity()
        b.backend.listen("127.0.0.1")
        assert b.identity() == before
        pair.link()
        check_works(pair)
        a.backend.listen("127.0.0.1")
        with pytest.raises(Unreachable, match="LLM_EXIST_LINK"):
            b.backend.listen("127.0.0.2")
        check_works(pair)


def test_ipv6_only_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="IPv4"):
        LocalEnd(standin.CannOverStandIn(), listen_host="::1")


def test_a_port_that_is_taken_is_unreachable() -> None:
    taken = LocalEnd(standin.CannOverStandIn())
    try:
        port = taken.backend._standing.engine.address.port  # type: ignore[attr-defined]
        with pytest.raises(Unreachable, match="cannot listen"):
            LocalEnd(standin.CannOverStandIn(), options={"port": port})
    finally:
        taken.close()


def test_an_older_link_does_not_take_its_successor_down(linked_pair: BackendPair[LocalEnd]) -> None:
    """The vendor has one link per pair of ends: a link of ours that comes late to its end must not end it."""
    pair = linked_pair
    token, identity_a, identity_b = b"t" * 16, pair.a.identity(), pair.b.identity()
    require_all(
        [
            lambda: pair.a.connect(A_KNOWS_B_AS + 1, identity_b, True, token, WAIT_S),
            lambda: pair.b.connect(B_KNOWS_A_AS + 1, identity_a, False, token, WAIT_S),
        ]
    )
    mine, theirs = make_grids(pair)
    old = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [1]))
    assert old.status is CompletionStatus.FAILED
    pair.disconnect()
    for export in pair.b.exports():
        pair.a.attach(A_KNOWS_B_AS + 1, export, WAIT_S)
    batch = pair.batch(Op.READ, mine, theirs, [1], [2])
    require_ok(pair.a.transfer(replace(batch, peer_id=A_KNOWS_B_AS + 1)))


def test_a_descriptor_of_other_memory_is_refused(pair: BackendPair[LocalEnd]) -> None:
    """The test read fails where the peer has registered nothing under that number."""
    pair.connect()
    (export,) = pair.b.exports()
    wrong = export.descriptor.replace(b"\xcd\x02\x00", b"\xcd\x04\x00")  # blocks of 1024 bytes instead of 512
    assert wrong != export.descriptor
    pair.a.attach(A_KNOWS_B_AS, Export(export.region_id, export.size_bytes, wrong), WAIT_S)  # 512 is not used then
    with pytest.raises(Unreachable, match="test read"):
        pair.a.attach(A_KNOWS_B_AS, Export(export.region_id, export.size_bytes, _numbered(wrong)), WAIT_S)


def _numbered(descriptor: bytes) -> bytes:
    """Under model ids that nobody has."""
    size_bytes, models = msgspec.msgpack.decode(descriptor)
    return msgspec.msgpack.encode([size_bytes, {size: number + 1000 for size, number in models.items()}])


# -- failures of the vendor's calls


class Failing(standin.StandInPackage):
    """Moves block after block until `arm` was called; then the next call waits for `go` and fails with `status`."""

    def __init__(self) -> None:
        super().__init__(one_per_process=False)
        self.armed, self.begun, self.go = threading.Event(), threading.Event(), threading.Event()
        self.status, self.num_calls = "LLM_TIMEOUT", 0
        package = self

        class Manager(standin.CacheManager):
            def pull_blocks(self, *args: Any, **kwargs: Any) -> None:
                if package.armed.is_set():
                    package.num_calls += 1
                    package.begun.set()
                    assert package.go.wait(WAIT_S)
                    raise standin.LLMException(LLMStatusCode[package.status], "as told")
                super().pull_blocks(*args, **kwargs)

        class DataDist(self.LLMDataDist):  # type: ignore[name-defined,misc]
            @property
            def cache_manager(self) -> standin.CacheManager:
                found: standin.CacheManager = super().cache_manager
                found.__class__ = Manager
                return found

        self.LLMDataDist = DataDist


@pytest.fixture
def failing() -> Iterator[tuple[Failing, BackendPair[LocalEnd]]]:
    package = Failing()
    with BackendPair.in_process(lambda: CannBackend(load=lambda: package)) as pair:
        pair.link()
        yield package, pair
        package.go.set()


@pytest.mark.parametrize(
    ("status", "kind"),
    [("LLM_TIMEOUT", TimedOut), ("LLM_LINK_FAILED", PeerLost), ("LLM_DEVICE_MEM_ERROR", LLMException)],
)
def test_a_failed_call_ends_the_link(failing: tuple[Failing, BackendPair[LocalEnd]], status: str, kind: type) -> None:
    """It may still be writing: the link is ended first, then the batch is complete."""
    package, pair = failing
    mine, theirs = make_grids(pair)
    package.status = status
    package.armed.set()
    first = pair.a.submit(pair.batch(Op.READ, mine, theirs, [1], [1]))
    assert package.begun.wait(WAIT_S)
    second = pair.a.submit(pair.batch(Op.WRITE, mine, theirs, [2], [2]))
    linked_before = pair.a.backend._standing.engine._dist._wire.num_links  # type: ignore[attr-defined]
    package.go.set()
    completion = pair.a.log.wait(first)
    linked_after = pair.a.backend._standing.engine._dist._wire.num_links  # type: ignore[attr-defined]
    assert (linked_before, linked_after) == (1, 0)
    assert isinstance(completion.error, kind)
    assert "as told" in str(completion.error)
    assert status in str(completion.error)
    assert isinstance(pair.a.log.wait(second).error, PeerLost)
    assert eventually(lambda: A_KNOWS_B_AS in pair.a.lost_peers)
    package.armed.clear()
    pair.disconnect()
    pair.link()
    check_works(pair)


@pytest.mark.parametrize("status", ["LLM_PARAM_INVALID", "LLM_KV_CACHE_NOT_EXIST"])
def test_a_refusal_leaves_the_link(failing: tuple[Failing, BackendPair[LocalEnd]], status: str) -> None:
    package, pair = failing
    mine, theirs = make_grids(pair)
    package.status = status
    package.go.set()
    package.armed.set()
    completion = pair.a.transfer(pair.batch(Op.READ, mine, theirs, [1], [1]))
    assert completion.error is not None
    assert completion.error.status_code.name == status
    package.armed.clear()
    check_works(pair)
    assert pair.a.lost_peers == {}


@pytest.mark.parametrize("ending", ["disconnect", "close"])
def test_nothing_is_under_way_when_a_link_has_ended(
    failing: tuple[Failing, BackendPair[LocalEnd]], ending: str
) -> None:
    """`disconnect` and `close` wait for the call that is under way: its memory may be used for something else then."""
    package, pair = failing
    mine, theirs = make_grids(pair)
    package.armed.set()
    batch_id = pair.a.submit(pair.batch(Op.READ, mine, theirs, [1], [1]))
    assert package.begun.wait(WAIT_S)
    ended = threading.Event()

    def end() -> None:
        pair.a.disconnect(A_KNOWS_B_AS) if ending == "disconnect" else pair.a.backend.close()
        ended.set()

    thread = threading.Thread(target=end, name="datadist-test-end", daemon=True)
    thread.start()
    assert not ended.wait(0.1)
    assert pair.a.log.pending() == [batch_id]
    package.go.set()
    assert ended.wait(WAIT_S)
    assert isinstance(pair.a.log.wait(batch_id).error, PeerLost if ending == "disconnect" else ClosedError)
    thread.join(WAIT_S)


def test_one_call_at_a_time(failing: tuple[Failing, BackendPair[LocalEnd]]) -> None:
    """Nothing is published about calls from several threads: a test read waits for a batch's call."""
    package, pair = failing
    mine, theirs = make_grids(pair)
    (export,) = pair.b.exports()
    batch = pair.batch(Op.READ, mine, theirs, [1], [1])
    package.status = "LLM_PARAM_INVALID"
    package.armed.set()
    batch_id = pair.a.submit(batch)
    assert package.begun.wait(WAIT_S)
    pair.a.backend.detach(A_KNOWS_B_AS, export.region_id)
    failures: list[BaseException | None] = []

    def attach() -> None:
        failures.extend(run_all([lambda: pair.a.attach(A_KNOWS_B_AS, export, WAIT_S)]))

    thread = threading.Thread(target=attach, name="datadist-test-attach", daemon=True)
    thread.start()
    assert not eventually(lambda: package.num_calls > 1, 0.2)
    package.go.set()
    thread.join(WAIT_S)
    assert pair.a.log.wait(batch_id).error is not None
    assert isinstance(failures[0], Unreachable)
    assert package.num_calls == 2


def test_a_cancelled_batch_ends_with_its_call(failing: tuple[Failing, BackendPair[LocalEnd]]) -> None:
    package, pair = failing
    mine, theirs = make_grids(pair)
    package.status = "LLM_PARAM_INVALID"
    package.armed.set()
    first, second = (pair.a.submit(pair.batch(Op.READ, mine, theirs, [i], [i])) for i in (1, 2))
    assert package.begun.wait(WAIT_S)
    pair.a.backend.cancel(second)
    assert pair.a.log.wait(second).status is CompletionStatus.CANCELLED  # it had not begun
    pair.a.backend.cancel(first)
    assert pair.a.log.pending() == [first]
    package.go.set()
    assert pair.a.log.wait(first).status is CompletionStatus.CANCELLED


def test_a_failed_start_leaves_nothing_behind() -> None:
    class NoHostMemory(standin.StandInPackage):
        """Registers nothing."""

        def __init__(self) -> None:
            super().__init__()

            class Manager(standin.CacheManager):
                def register_blocks_cache(self, *args: Any, **kwargs: Any) -> standin.Cache:
                    raise standin.LLMException(LLMStatusCode["LLM_DEVICE_MEM_ERROR"], "no")

            class DataDist(self.LLMDataDist):  # type: ignore[name-defined,misc]
                @property
                def cache_manager(self) -> standin.CacheManager:
                    found: standin.CacheManager = super().cache_manager
                    found.__class__ = Manager
                    return found

            self.LLMDataDist = DataDist

    package = NoHostMemory()
    with nothing_left_behind():
        for _ in range(2):  # one per process: the first has been given back
            with pytest.raises(Unreachable, match="registers no host memory"):
                LocalEnd(CannBackend(load=lambda: package))


# -- the pages


PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ascend.md", "ascend.zh-CN.md")}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_every_option_and_no_test_that_is_not_there(page: str) -> None:
    text = PAGES[page]
    for name in CannOptions.__dataclass_fields__:
        assert f"`{name}`" in text
    named = set(re.findall(r"`(test_\w+)\.py(?:::(test_\w+))?`", text))
    assert {file for file, _ in named} == {"test_hixl", "test_hixl_standin", "test_backends"}
    for file, function in named:
        source = (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source


def test_the_pages_say_that_it_never_ran_on_the_hardware() -> None:
    assert "Never run on Ascend hardware by us" in PAGES["ascend.md"]
    assert "从未在昇腾硬件上运行过" in PAGES["ascend.zh-CN.md"]
