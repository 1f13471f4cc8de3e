# SPDX-License-Identifier: Apache-2.0
"""Only vLLM's one big allocation is answered from the pool; everything else passes through."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch

from vllm_datadist.worker.memory import KvCachePlacement, PoolMemory, tensor_over
from vllm_datadist.worker.side import UnsupportedMemory, check_memory

SIZE = 4096


class Owner:
    """Some memory that lives as long as this does."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(size_bytes)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.buffer)


def _placement() -> tuple[KvCachePlacement, list[Owner]]:
    owners: list[Owner] = []

    def allocate(size_bytes: int) -> PoolMemory:
        owners.append(Owner(size_bytes))
        return PoolMemory(owners[-1].address, size_bytes, owners[-1])

    return KvCachePlacement(SIZE, allocate), owners


def test_the_kv_cache_is_placed() -> None:
    placement, owners = _placement()
    with placement:
        tensor = torch.zeros(SIZE, dtype=torch.int8, device=torch.device("cpu"))
    assert placement.placed
    assert (tensor.data_ptr(), tensor.numel(), tensor.dtype) == (owners[0].address, SIZE, torch.int8)
    tensor.view(torch.float32)[:3] = torch.tensor([1.0, 2.0, 3.0])
    assert ctypes.string_at(owners[0].address, 4) == b"\x00\x00\x80\x3f"


def test_other_calls_and_a_second_one_pass_through() -> None:
    placement, owners = _placement()
    with placement:
        others = [
            torch.zeros(SIZE, dtype=torch.uint8),
            torch.zeros(SIZE + 1, dtype=torch.int8),
            torch.zeros((2, SIZE), dtype=torch.int8),
            torch.ones(SIZE, dtype=torch.int8),
            torch.zeros(SIZE, dtype=torch.int8, device="meta"),
        ]
        assert not placement.placed
        torch.zeros(SIZE, dtype=torch.int8)
        second = torch.zeros(SIZE, dtype=torch.int8)
    assert len(owners) == 1
    assert all(other.device.type == "meta" or other.data_ptr() != owners[0].address for other in (*others, second))
    assert torch.zeros(SIZE, dtype=torch.int8).data_ptr() != owners[0].address


def test_the_tensor_keeps_its_memory_alive() -> None:
    owner = Owner(SIZE)
    alive = weakref.ref(owner)
    view = tensor_over(PoolMemory(owner.address, SIZE, owner)).view(torch.float32)[10:]
    del owner
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_memory_that_is_not_the_cpus_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMemory, match=r"layer a: the KV cache is in meta memory.*CPU memory only"):
        check_memory({"a": torch.zeros(1, device="meta")})
