# SPDX-License-Identifier: Apache-2.0
"""Pools in huge pages: really in them, reachable by peers, and refused with the remedy where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from datadist_core.errors import OutOfMemory, ParamInvalid
from datadist_core.memory._mapping import huge_page_bytes
from datadist_core.memory.pool import MemoryPool
from datadist_core.tests.core_ends import desc, fill, manager, must_link
from datadist_core.types import Placement

SYSCTL = Path("/proc/sys/vm/nr_hugepages")
NEEDED = 24


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """At least NEEDED free ones while the test runs."""
    before = SYSCTL.read_text()
    try:
        SYSCTL.write_text(str(int(before) + NEEDED))
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved by this user: {error}")
    try:
        if _meminfo("HugePages_Free") < NEEDED:
            pytest.skip("the system has no memory left in pieces as large as huge pages")
        yield
    finally:
        SYSCTL.write_text(before)


def _meminfo(name: str) -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])


def make_pool(num_pages: int) -> MemoryPool:
    return MemoryPool(num_pages * huge_page_bytes(), Placement.HOST, 1, huge_pages=True)


def test_memory_is_huge_pages(huge_pages: None) -> None:
    free = _meminfo("HugePages_Free") - _meminfo("HugePages_Rsvd")
    pool = make_pool(4)
    assert _meminfo("HugePages_Free") - _meminfo("HugePages_Rsvd") == free - 4
    assert pool.region.address % huge_page_bytes() == 0
    allocation = pool.allocate(3 << 20)
    view = pool.mapping.view(allocation.offset_bytes, allocation.size_bytes)
    view[:] = 7
    assert _meminfo("HugePages_Free") < free
    del view
    pool.free(allocation)
    again = pool.allocate(pool.stats().largest_free_bytes)
    pool.mapping.view(again.offset_bytes, again.size_bytes)[:] = 1  # all of it is still there


def test_sizes_are_rounded_up(huge_pages: None) -> None:
    pool = MemoryPool(1, Placement.HOST, 1, huge_pages=True)
    assert pool.region.size_bytes == huge_page_bytes()


def test_two_ends_share_them(huge_pages: None) -> None:
    with _end("127.0.0.1:0", LLMRole.PROMPT) as prompt, _end(None, LLMRole.DECODER) as decoder:
        must_link(decoder, prompt)
        theirs = manager(prompt).allocate_blocks_cache(desc(), BlocksCacheKey(prompt.cluster_id, 0))
        mine = manager(decoder).allocate_blocks_cache(desc())
        fill(theirs, 1)
        for block in (3, 4):
            report = manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 0), mine, [block], [block + 1])
            assert report.backend == "shm"
            for ours, others in zip(mine.numpy(), theirs.numpy(), strict=True):
                np.testing.assert_array_equal(ours[block + 1], others[block])


def test_too_few_are_refused_at_once() -> None:
    num_pages = _meminfo("HugePages_Total") + 100_000
    with pytest.raises(OutOfMemory, match=rf"huge_pages takes {num_pages} free huge pages: raise vm.nr_hugepages"):
        make_pool(num_pages)


def test_init_says_so() -> None:
    end = LLMDataDist(LLMRole.MIX, 1)
    config = LLMConfig()
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = f'{{"memory_size": {(_meminfo("HugePages_Total") + 100_000) << 21}, "huge_pages": true}}'
    with pytest.raises(LLMException, match="nr_hugepages") as caught:
        end.init(config)
    assert caught.value.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY


@pytest.mark.parametrize("value", ["1", '"yes"', "null"])
def test_the_option_is_a_bool(value: str) -> None:
    with pytest.raises(ParamInvalid, match="huge_pages"):
        LLMConfig().host_mem_pool_cfg = f'{{"memory_size": 1000, "huge_pages": {value}}}'


def _end(listen: str | None, role: LLMRole) -> LLMDataDist:
    config = LLMConfig()
    config.transfer_backend = "shm"
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = '{"memory_size": 16777216, "huge_pages": true}'
    if listen:
        config.listen_ip_info = listen
    end = LLMDataDist(role, 1 if listen else 2)
    end.init(config)
    return end
