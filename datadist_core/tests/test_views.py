# SPDX-License-Identifier: Apache-2.0
"""Views of cache memory: no copy, every data type, and the memory stays for as long as anybody looks at it.

torch is optional for datadist_core, so what needs it skips without; everything else here runs on NumPy alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datadist_core
from datadist_core import CacheKey, LLMConfig, LLMDataDist, LLMRole
from datadist_core.cache.cache import Cache, cache_tensors
from datadist_core.cache.desc import CacheDesc
from datadist_core.cache.views import create_tensors, ndarray_at, torch_at
from datadist_core.errors import CacheNotExist, FeatureNotEnabled, LLMException, OutOfMemory, ParamInvalid
from datadist_core.memory.live import Keeper, LiveRanges, live_ranges
from datadist_core.memory.pool import MemoryPool
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.parallel import require_all
from datadist_core.types import DataType, LLMStatusCode, Placement

ROOT = Path(datadist_core.__file__).parents[1]
MIB = 1 << 20
SHAPE = (4, 8, 16)
NUM_TENSORS = 2
DATA_TYPES = [data_type for data_type in DataType if data_type is not DataType.DT_STRING]
NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def torch_module() -> Any:
    """Only for tests of torch views."""
    return pytest.importorskip("torch")


class Memory:
    """A pool and caches in it, kept the way the library keeps them: a token per cache, ranges known by address."""

    def __init__(self, size_bytes: int = MIB) -> None:
        self.pool = MemoryPool(size_bytes, Placement.HOST, 1, page_shift=12)
        self._frees: list[Callable[[], None]] = []

    def cache(self, data_type: DataType = DataType.DT_FLOAT, shape: tuple[int, ...] = SHAPE) -> Cache:
        desc = CacheDesc(NUM_TENSORS, shape, data_type, Placement.HOST)
        allocation = self.pool.allocate(desc.size * NUM_TENSORS)
        keeper = Keeper(lambda: self.pool.free_from_finalizer(allocation), "cache_id=1")
        addresses = [allocation.address + i * desc.size for i in range(NUM_TENSORS)]
        known = [live_ranges.add(address, desc.size, keeper.hold) for address in addresses]

        def free() -> None:
            for live_range in known:
                live_ranges.remove(live_range)
            self.pool.mark_lingering(allocation)
            keeper.drop()

        self._frees.append(free)
        return Cache(1, desc, addresses, True, hold=keeper.hold)

    def free(self) -> None:
        """All caches."""
        while self._frees:
            self._frees.pop()()

    @property
    def used_bytes(self) -> int:
        gc.collect()
        return self.pool.stats().used_bytes

    def close(self) -> None:
        self.free()
        self.pool.close()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Many tests here collect garbage; what is there before them need not be looked at each time."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    # In a thread, with a limit: a failed test may have left the pool locked for good.
    require_all([memory.close], timeout_s=30)


def raw(address: int, size_bytes: int) -> Any:
    """The bytes themselves, through nothing of ours."""
    return (ctypes.c_uint8 * size_bytes).from_address(address)


def pattern(cache: Cache, seed: int = 0) -> np.ndarray:
    """Bytes that are valid elements of every type (bools too), different in every place."""
    return np.random.default_rng(seed).integers(0, 2, cache.cache_desc.size, dtype=np.uint8)


# -- no copy, every type


@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda t: t.name)
def test_arrays_lie_over_the_memory(memory: Memory, data_type: DataType) -> None:
    cache = memory.cache(data_type)
    arrays = cache.numpy()
    assert [array.ctypes.data for array in arrays] == cache.tensor_addrs
    for seed, array in enumerate(arrays):
        assert (array.shape, array.dtype.name, array.nbytes) == (SHAPE, data_type.value, cache.cache_desc.size)
        array.reshape(-1).view(np.uint8)[:] = pattern(cache, seed)
        assert bytes(raw(cache.tensor_addrs[seed], array.nbytes)) == pattern(cache, seed).tobytes()


@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda t: t.name)
def test_torch_and_numpy_see_the_same_bytes(memory: Memory, data_type: DataType) -> None:
    torch = torch_module()
    cache = memory.cache(data_type)
    tensors, arrays = cache.tensors(), cache.numpy()
    assert [tensor.data_ptr() for tensor in tensors] == cache.tensor_addrs
    for seed, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, getattr(torch, data_type.value))
        array.reshape(-1).view(np.uint8)[:] = pattern(cache, seed)
        assert bytes(tensor.view(-1).view(torch.uint8).tolist()) == pattern(cache, seed).tobytes()
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(pattern(cache, seed + 9)))
        assert array.tobytes() == pattern(cache, seed + 9).tobytes()


@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda t: t.name)
def test_values_mean_the_same_to_both(memory: Memory, data_type: DataType) -> None:
    """Not only the same bytes: what torch writes as 1.5 (or 1) is 1.5 (or 1) to NumPy, and back."""
    torch_module()
    cache = memory.cache(data_type)
    tensor, array = cache.tensors()[1], cache.numpy()[1]
    value = 1.5 if "float" in data_type.value else 1
    tensor[2, 3, 4] = value
    assert float(array[2, 3, 4]) == value
    array[3, 7, 15] = value
    assert float(tensor[3, 7, 15].item()) == value
    assert np.count_nonzero(array.reshape(-1).view(np.uint8)) == np.count_nonzero(tensor_bytes(tensor))


def tensor_bytes(tensor: Any) -> np.ndarray:
    torch = torch_module()
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda t: t.name)
def test_created_tensors_are_those_of_the_cache(memory: Memory, data_type: DataType) -> None:
    torch = torch_module()
    cache = memory.cache(data_type)
    for array in cache.numpy():
        array.reshape(-1).view(np.uint8)[:] = pattern(cache)
    for dtype in (getattr(torch, data_type.value), data_type):
        created = create_tensors(list(SHAPE), dtype, cache.tensor_addrs)
        for one, other in zip(created, cache.tensors(), strict=True):
            assert (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)
            assert tensor_bytes(one).tobytes() == pattern(cache).tobytes()


def test_created_tensors_may_be_parts_of_a_tensor(memory: Memory) -> None:
    """Block addresses, as a script of the original computes them."""
    torch = torch_module()
    cache = memory.cache()
    cache.numpy()[0][:] = np.arange(4)[:, None, None]
    block_bytes = cache.cache_desc.block_bytes
    blocks = create_tensors(SHAPE[1:], torch.float32, [cache.tensor_addrs[0] + i * block_bytes for i in (3, 1, 1)])
    assert [block.unique().tolist() for block in blocks] == [[3.0], [1.0], [1.0]]
    blocks[1][:] = 7
    assert (cache.numpy()[0][1] == 7).all()


def test_create_tensors_of_no_address_is_empty() -> None:
    torch = torch_module()
    assert create_tensors((1,), torch.float32, ()) == []


def test_the_callers_own_memory_can_be_viewed() -> None:
    """Nothing of ours is there to be kept alive."""
    torch = torch_module()
    mine = np.zeros(24, dtype=np.float32)
    first, second = create_tensors((3, 4), torch.float32, (mine.ctypes.data, mine.ctypes.data + 48))
    first[:], second[:] = 1, 2
    assert mine.tolist() == [1.0] * 12 + [2.0] * 12


# -- what keeps the memory

NUMPY_VIEWS: dict[str, Callable[[Cache], object]] = {
    "list of arrays": lambda cache: cache.numpy(),
    "one array": lambda cache: cache.numpy()[1],
    "slice": lambda cache: cache.numpy()[0][1:2],
    "last row of an iteration": lambda cache: list(cache.numpy()[0])[-1],
    "reshape": lambda cache: cache.numpy()[0].reshape(-1),
    "transpose": lambda cache: cache.numpy()[0].T,
    "other dtype": lambda cache: cache.numpy()[0].view(np.uint8),
    "slice of a slice of a reshape": lambda cache: cache.numpy()[0].reshape(-1)[3:][::2],
    "memoryview": lambda cache: memoryview(cache.numpy()[0]),
    "as_strided": lambda cache: np.lib.stride_tricks.as_strided(cache.numpy()[0], (2, 2)),
    "subclass": lambda cache: cache.numpy()[0].view(np.recarray),
    "ctypes array": lambda cache: (ctypes.c_uint8 * 4).from_buffer(cache.numpy()[0]),
    "Tensor": lambda cache: cache_tensors(cache, 1),
    "array of a Tensor": lambda cache: cache_tensors(cache, 1)[0].numpy(),
    "asarray of a Tensor": lambda cache: np.asarray(cache_tensors(cache)[0]),
}
TORCH_VIEWS: dict[str, Callable[[Cache], object]] = {
    "list of tensors": lambda cache: cache.tensors(),
    "one tensor": lambda cache: cache.tensors()[1],
    "slice": lambda cache: cache.tensors()[0][1:2],
    "view": lambda cache: cache.tensors()[0].view(-1),
    "other dtype": lambda cache: cache.tensors()[0].view(torch_module().int16),
    "as_strided": lambda cache: cache.tensors()[0].as_strided((2, 2), (1, 1)),
    "unbind": lambda cache: cache.tensors()[0].unbind(0)[3],
    "detach": lambda cache: cache.tensors()[0].detach(),
    "storage": lambda cache: cache.tensors()[0].untyped_storage(),
    "array of a tensor": lambda cache: cache.tensors()[0].numpy(),
    "tensor of an array": lambda cache: torch_module().from_numpy(cache.numpy()[0][1:]),
    "dlpack to NumPy": lambda cache: np.from_dlpack(cache.tensors()[0]),
    "dlpack to torch": lambda cache: torch_module().from_dlpack(cache.numpy()[0]),
    "tensor of a Tensor": lambda cache: cache_tensors(cache, 1)[0].torch(),
    "create_tensors": lambda cache: create_tensors((2, 3), DataType.DT_INT8, cache.tensor_addrs),
    "inside create_tensors": lambda cache: create_tensors((5,), DataType.DT_INT8, [cache.tensor_addrs[1] + 77])[0][2:],
}
COPIES: dict[str, Callable[[Cache], object]] = {
    "nothing": lambda cache: None,
    "the handle": lambda cache: cache,
    "the addresses": lambda cache: cache.tensor_addrs,
    "array copy": lambda cache: [array.copy() for array in cache.numpy()],
    "Tensor copy": lambda cache: cache_tensors(cache)[0].numpy(copy=True),
    "np.array of a Tensor": lambda cache: np.array(cache_tensors(cache)[0]),
    "astype": lambda cache: cache.numpy()[0].astype(np.float64),
}


def check_keeps(memory: Memory, make: Callable[[Cache], object]) -> None:
    cache = memory.cache()
    cache.numpy()[0][:] = cache.numpy()[1][:] = 5
    addresses, size = cache.tensor_addrs, cache.cache_desc.size
    used = memory.used_bytes
    view = make(cache)
    memory.free()
    del cache
    assert memory.used_bytes == used
    assert memory.pool.stats().lingering_bytes == used
    fill_what_is_free(memory, 0xFF)
    five = np.full(size // 4, 5, dtype=np.float32).tobytes()
    assert [bytes(raw(address, size)) for address in addresses] == [five, five]
    del view
    assert memory.used_bytes == 0
    assert memory.pool.stats().lingering_bytes == 0


def fill_what_is_free(memory: Memory, stamp: int) -> None:
    """Overwrite every byte that the pool would give to somebody else."""
    taken = []
    with contextlib.suppress(OutOfMemory):
        while True:
            allocation = memory.pool.allocate(memory.pool.stats().largest_free_bytes or 1)
            taken.append(allocation)
            ctypes.memset(allocation.address, stamp, allocation.size_bytes)
    for allocation in taken:
        memory.pool.free(allocation)


@pytest.mark.parametrize("make", NUMPY_VIEWS.values(), ids=NUMPY_VIEWS.keys())
def test_whatever_looks_at_it_keeps_it(memory: Memory, make: Callable[[Cache], object]) -> None:
    check_keeps(memory, make)


@pytest.mark.parametrize("make", TORCH_VIEWS.values(), ids=TORCH_VIEWS.keys())
def test_whatever_torch_looks_at_is_kept(memory: Memory, make: Callable[[Cache], object]) -> None:
    torch_module()
    check_keeps(memory, make)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_copies_and_handles_keep_nothing(memory: Memory, make: Callable[[Cache], object]) -> None:
    cache = memory.cache()
    kept = make(cache)
    memory.free()
    del cache
    assert memory.used_bytes == 0
    del kept


def test_a_torch_clone_keeps_nothing(memory: Memory) -> None:
    torch_module()
    clone = memory.cache().tensors()[0].clone()
    memory.free()
    assert memory.used_bytes == 0
    assert clone.shape == SHAPE


def test_these_tests_would_see_a_view_that_keeps_nothing(memory: Memory) -> None:
    """Negative control: the same check on views made without an owner."""

    def unsafe(cache: Cache) -> object:
        return [ndarray_at(address, SHAPE, DataType.DT_FLOAT, None) for address in cache.tensor_addrs]

    with pytest.raises(AssertionError, match="0 =="):
        check_keeps(memory, unsafe)
    cache = memory.cache()
    views = unsafe(cache)
    views[0][:] = 5
    memory.free()
    fill_what_is_free(memory, 0xFF)
    assert not (views[0] == 5).any()


def test_one_view_of_many_is_enough(memory: Memory) -> None:
    cache = memory.cache()
    first, second = cache.numpy()
    third = cache.numpy()[0]
    memory.free()
    del first, third
    assert memory.used_bytes > 0
    second[:] = 3
    del second
    assert memory.used_bytes == 0


def test_a_view_in_a_reference_cycle_goes_with_the_cycle(memory: Memory) -> None:
    cycle: list[object] = [memory.cache().numpy()]
    cycle.append(cycle)
    memory.free()
    gc.disable()
    try:
        del cycle
        assert memory.pool.stats().used_bytes > 0
    finally:
        gc.enable()
    assert memory.used_bytes == 0


def test_views_of_a_closed_pool_keep_its_mapping() -> None:
    with nothing_left_behind():
        memory = Memory()
        array = memory.cache().numpy()[1]
        address = array.ctypes.data
        memory.close()
        del memory
        gc.collect()
        array[:] = 4
        assert (array[1:] == 4).all()
        with pytest.raises(ParamInvalid, match="freed or never allocated"):
            live_ranges.find(address, 4)
        del array
    assert live_ranges.find(address, 4) is None


@pytest.mark.slow
def test_a_process_may_end_with_live_views() -> None:
    code = """
import datadist_core.tests.test_views as t
memory = t.Memory()
arrays, tensors = memory.cache().numpy(), t.cache_tensors(memory.cache())
try:
    torch_views = [memory.cache().tensors(), t.create_tensors((2,), t.DataType.DT_INT8, memory.cache().tensor_addrs)]
except t.FeatureNotEnabled:
    pass
memory.close()
arrays[0][:] = 1
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")


# -- freed, or never there


def test_a_freed_cache_gives_no_new_views(memory: Memory) -> None:
    cache = memory.cache()
    keep = cache.numpy()
    memory.free()
    for view in (cache.numpy, cache.tensors, lambda: cache_tensors(cache)):
        with pytest.raises(CacheNotExist, match="cache_id=1"):
            view()
    assert keep[0].shape == SHAPE


@pytest.mark.parametrize("with_views", [False, True])
def test_addresses_of_a_freed_cache_are_refused(memory: Memory, with_views: bool) -> None:
    torch_module()
    cache = memory.cache()
    views = cache.numpy() if with_views else None
    mine = np.zeros(1, dtype=np.uint8)
    memory.free()
    with pytest.raises(ParamInvalid, match=r"addrs\[1\]=0x.*freed or never allocated"):
        create_tensors((1,), DataType.DT_INT8, [mine.ctypes.data, cache.tensor_addrs[1]])
    del views


def test_create_cpu_cache_keeps_the_pool_memory_below_it(memory: Memory) -> None:
    allocated = memory.cache()
    wrapped = Cache.create_cpu_cache(allocated.cache_desc, allocated.tensor_addrs)
    array = wrapped.numpy()[1]
    used = memory.used_bytes
    memory.free()
    assert memory.used_bytes == used
    with pytest.raises(ParamInvalid, match=r"tensor_addrs\[0\].*freed or never allocated"):
        wrapped.numpy()
    del array
    assert memory.used_bytes == 0


def test_a_registered_cache_may_be_unregistered_under_its_views() -> None:
    """`hold` says whether the cache exists; its memory is the caller's, which the views need not keep."""
    mine = np.zeros((NUM_TENSORS, *SHAPE), dtype=np.float32)
    registered = True

    def hold() -> None:
        if not registered:
            raise CacheNotExist("cache_id=5 is unregistered")

    desc = CacheDesc(NUM_TENSORS, SHAPE, DataType.DT_FLOAT, Placement.HOST)
    cache = Cache(5, desc, [one.ctypes.data for one in mine], True, hold=hold)
    view = cache.numpy()[1]
    registered = False
    view[:] = 2
    assert (mine[1] == 2).all()
    with pytest.raises(CacheNotExist, match="unregistered"):
        cache.numpy()


@pytest.mark.parametrize("address", [0, -4096, 1 << 64, (1 << 64) - 8])
def test_create_cpu_cache_wants_addresses_that_can_be(address: int) -> None:
    desc = CacheDesc(1, SHAPE, DataType.DT_FLOAT, Placement.HOST)
    with pytest.raises(ParamInvalid, match=rf"addrs\[0\]={address} is not the address of {desc.size} bytes"):
        Cache.create_cpu_cache(desc, [address])


# -- bad arguments of create_tensors and cache_tensors

BAD_CALLS: list[tuple[str, type[Exception], str]] = [
    ("create((), f32, good)", ParamInvalid, "shape is empty"),
    ("create([4, 0], f32, good)", ParamInvalid, r"shape\[1\]=0"),
    ("create([-1], f32, good)", ParamInvalid, r"shape\[0\]=-1"),
    ("create(4, f32, good)", TypeError, "shape must be list or tuple, not int"),
    ("create(None, f32, good)", TypeError, "shape"),
    ("create('44', f32, good)", TypeError, "shape"),
    ("create([4, '4'], f32, good)", TypeError, r"shape\[1\]"),
    ("create([True], f32, good)", TypeError, r"shape\[0\]"),
    ("create([2.0], f32, good)", TypeError, r"shape\[0\]"),
    ("create([1], 'float32', good)", TypeError, "dtype"),
    ("create([1], None, good)", TypeError, "dtype"),
    ("create([1], np.dtype('float32'), good)", TypeError, "dtype"),
    ("create([1], DataType.DT_STRING, good)", ParamInvalid, "dtype=.*DT_STRING"),
    ("create([1], torch.complex64, good)", ParamInvalid, "dtype=torch.complex64.*bfloat16"),
    ("create([1], torch.qint8, good)", ParamInvalid, "dtype=torch.qint8"),
    ("create([1], f32, None)", TypeError, "addrs"),
    ("create([1], f32, good[0])", TypeError, "addrs must be list or tuple, not int"),
    ("create([1], f32, [good[0], '4096'])", TypeError, r"addrs\[1\]"),
    ("create([1], f32, [True])", TypeError, r"addrs\[0\]"),
    ("create([1], f32, [good[0], None])", TypeError, r"addrs\[1\]"),
    ("create([1], f32, [0])", ParamInvalid, r"addrs\[0\]=0 "),
    ("create([1], f32, [-4])", ParamInvalid, r"addrs\[0\]=-4 "),
    ("create([1], f32, [good[0], 1 << 64])", ParamInvalid, r"addrs\[1\]=18446744073709551616 "),
    ("create([2], f32, [(1 << 64) - 4])", ParamInvalid, r"addrs\[0\].*8 bytes"),
    ("create([1 << 62], f32, good)", ParamInvalid, r"addrs\[0\]"),
    ("create([1], f32, [good[0], good[0] + 2])", ParamInvalid, r"addrs\[1\]=\d+ must be a multiple of 4"),
    ("create([513], f32, good[1:])", ParamInvalid, r"addrs\[0\]=0x.*2052 bytes run past.*has 2048 bytes"),
    ("create([2], f32, [good[0], good[1] + 2044])", ParamInvalid, r"addrs\[1\]=0x.*8 bytes run past.*has 4 bytes"),
    ("create([1], f32, [pool.address + MIB // 2])", ParamInvalid, r"addrs\[0\]=0x.*freed or never allocated"),
    ("create([1], f32, [pool.end_address - 4])", ParamInvalid, r"addrs\[0\]=0x.*freed or never allocated"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD_CALLS, ids=[call for call, *_ in BAD_CALLS])
def test_bad_arguments_are_named(memory: Memory, call: str, error: type[Exception], text: str) -> None:
    torch = torch_module()
    good = memory.cache(DataType.DT_FLOAT).tensor_addrs
    names = {"create": create_tensors, "torch": torch, "f32": torch.float32, "good": good, "pool": memory.pool.region}
    with pytest.raises(error, match=text) as caught:
        eval(call, {**globals(), **names})
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert len(create_tensors([512], torch.float32, good)) == 2


@pytest.mark.parametrize("index", [-1, 2, 1 << 70])
def test_tensor_index_has_limits(memory: Memory, index: int) -> None:
    with pytest.raises(ParamInvalid, match=rf"tensor_index={index} is out of range 0\.\.1"):
        cache_tensors(memory.cache(), index)


@pytest.mark.parametrize("index", [None, "0", 0.0, True, [0]])
def test_tensor_index_is_an_int(memory: Memory, index: Any) -> None:
    with pytest.raises(TypeError, match="tensor_index must be int"):
        cache_tensors(memory.cache(), index)


@pytest.mark.parametrize("cache", [None, 1, "cache"])
def test_cache_tensors_wants_a_cache(cache: Any) -> None:
    with pytest.raises(TypeError, match="cache must be Cache"):
        cache_tensors(cache, 0)


# -- Tensor


def test_tensor_index_picks_the_tensor(memory: Memory) -> None:
    cache = memory.cache()
    for index in range(NUM_TENSORS):
        (tensor,) = cache_tensors(cache, index)
        assert (tensor.shape, tensor.data_type) == (SHAPE, DataType.DT_FLOAT)
        assert tensor.numpy().ctypes.data == cache.tensor_addrs[index]
    assert cache_tensors(cache)[0].numpy().ctypes.data == cache.tensor_addrs[0]
    assert repr(tensor) == f"Tensor(shape={SHAPE}, data_type=DT_FLOAT)"


def test_tensor_copies_only_when_asked(memory: Memory) -> None:
    (tensor,) = cache_tensors(memory.cache())
    address = tensor.numpy().ctypes.data
    tensor.numpy()[:] = 6
    copy = tensor.numpy(copy=True)
    assert copy.ctypes.data != address
    assert copy.flags.owndata
    tensor.numpy(False)[0] = 0
    assert (copy == 6).all()
    with pytest.raises(TypeError, match="copy"):
        tensor.numpy(copy=1)  # type: ignore[arg-type]


def test_numpy_asks_tensor_for_its_array(memory: Memory) -> None:
    (tensor,) = cache_tensors(memory.cache())
    address = tensor.numpy().ctypes.data
    tensor.numpy()[:] = 1.5
    assert np.asarray(tensor).ctypes.data == address
    assert np.asarray(tensor, dtype=np.float32).ctypes.data == address
    assert np.array(tensor).ctypes.data != address
    other = np.asarray(tensor, dtype=np.float64)
    assert (other.dtype, other.sum()) == (np.float64, 1.5 * 512)
    assert np.sum(tensor) == 1.5 * 512


def test_array_protocol_respects_copy(memory: Memory) -> None:
    """As NumPy 2 defines it; called directly, so that it holds under NumPy 1 as well."""
    (tensor,) = cache_tensors(memory.cache())
    address = tensor.numpy().ctypes.data
    assert tensor.__array__().ctypes.data == address
    assert tensor.__array__(copy=None).ctypes.data == address
    assert tensor.__array__(np.float32, copy=False).ctypes.data == address
    assert tensor.__array__(copy=True).ctypes.data != address
    assert tensor.__array__(np.int32, copy=True).dtype == np.int32
    with pytest.raises(ValueError, match=r"dtype=int32.*copy"):
        tensor.__array__(np.int32, copy=False)
    if NUMPY_2:
        assert np.asarray(tensor, copy=False).ctypes.data == address
        with pytest.raises(ValueError, match=r"dtype=float16.*copy"):
            np.asarray(tensor, dtype=np.float16, copy=False)


@pytest.mark.parametrize("data_type", DATA_TYPES, ids=lambda t: t.name)
def test_tensor_gives_torch_and_numpy(memory: Memory, data_type: DataType) -> None:
    torch_module()
    (tensor,) = cache_tensors(memory.cache(data_type), 1)
    assert tensor.torch().data_ptr() == tensor.numpy().ctypes.data
    assert str(tensor.torch().dtype) == f"torch.{tensor.numpy().dtype.name}"


def test_without_torch_numpy_still_works(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    cache = memory.cache()
    (tensor,) = cache_tensors(cache)
    tensor.numpy()[:] = 1
    assert np.asarray(tensor).sum() == 512
    for call in (tensor.torch, cache.tensors, lambda: create_tensors((1,), DataType.DT_INT8, [])):
        with pytest.raises(FeatureNotEnabled, match="torch, which is not installed"):
            call()


def test_an_old_torch_says_which_type_it_lacks(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_module()
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(FeatureNotEnabled, match="DT_UINT16"):
        memory.cache(DataType.DT_UINT16).tensors()


def test_misaligned_memory_is_for_numpy_only() -> None:
    mine = np.zeros(16, dtype=np.uint8)
    desc = CacheDesc(1, (3,), DataType.DT_FLOAT, Placement.HOST)
    cache = Cache.create_cpu_cache(desc, [mine.ctypes.data + 1])
    cache.numpy()[0][:] = 1
    assert mine[1:13].tobytes() == np.ones(3, dtype=np.float32).tobytes()
    torch_module()
    with pytest.raises(ParamInvalid, match="multiple of 4"):
        cache.tensors()
    with pytest.raises(ParamInvalid, match="multiple of 4"):
        torch_at(mine.ctypes.data + 1, (3,), DataType.DT_FLOAT, None)


# -- the table of ranges in use


def test_ranges_end_where_they_end() -> None:
    ranges, hold = LiveRanges(), object
    first, second = ranges.add(4096, 100, hold), ranges.add(8192, 100, hold)
    ranges.add_pool(4096, 1 << 16)
    assert ranges.find(4096, 100) is first
    assert ranges.find(4195, 1) is first
    assert ranges.find(8192, 1) is second
    assert ranges.find(4095, 1) is None
    assert ranges.find(4096 + (1 << 16), 1) is None
    bad = [(4196, 1, "never allocated"), (4195, 2, "has 1 bytes"), (8191, 2, "never allocated"), (4095, 2, "run into")]
    for address, size, text in bad:
        with pytest.raises(ParamInvalid, match=f"src={address:#x}.*{text}"):
            ranges.find(address, size, "src")


def test_a_late_remove_spares_the_successor() -> None:
    ranges = LiveRanges()
    first = ranges.add(4096, 100, object)
    ranges.remove(first)
    successor = ranges.add(4096, 200, object)
    ranges.remove(first)
    assert ranges.find(4096, 200) is successor
    ranges.remove(successor)
    assert ranges.find(4096, 1) is None


def test_memory_being_freed_is_refused() -> None:
    """Freed between the look-up and the hold."""
    keeper = Keeper(lambda: None, "cache_id=3")
    ranges = LiveRanges()
    ranges.add(4096, 100, keeper.hold)
    keeper.drop()
    with pytest.raises(ParamInvalid, match=r"x=0x1000.*freed or never allocated"):
        ranges.keep(4096, 1, "x")


def test_keeper_releases_once_and_only_at_the_end() -> None:
    released: list[int] = []
    keeper = Keeper(lambda: released.append(1), "cache_id=3")
    tokens = [keeper.hold(), keeper.hold()]
    keeper.drop()
    keeper.drop()
    tokens.pop()
    assert released == []
    tokens.pop()
    assert released == [1]
    with pytest.raises(CacheNotExist, match="cache_id=3"):
        keeper.hold()
    del keeper
    assert released == [1]


# -- threads, and views that die at the worst moment


def test_the_last_view_may_die_inside_the_pool(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may run anywhere, also while this very thread has the pool locked."""
    views = [memory.cache().numpy()]
    memory.free()
    inside = []
    take = memory.pool._free.take

    def collect_and_take(size_bytes: int) -> int | None:
        views.clear()
        inside.append(memory.pool._lock.locked())
        return take(size_bytes)

    monkeypatch.setattr(memory.pool._free, "take", collect_and_take)
    require_all([lambda: memory.pool.allocate(1)], timeout_s=30)
    assert inside == [True]
    assert memory.pool.stats().used_bytes == 1 << 12
    assert memory.pool.stats().lingering_bytes == 0


def test_the_last_view_may_die_while_another_thread_has_the_pool(memory: Memory) -> None:
    views = [memory.cache().numpy()]
    memory.free()
    with memory.pool._locked():
        require_all([views.clear], timeout_s=30)
        assert memory.pool._used_bytes > 0
    assert memory.pool._used_bytes == 0  # taken back at once, not at the next call


def test_views_die_in_many_threads(memory: Memory) -> None:
    start = threading.Barrier(4)

    def churn() -> None:
        start.wait(30)
        for _ in range(50):
            cache = memory.cache(shape=(2, 8))
            views = [cache.numpy(), cache_tensors(cache)]
            views[0][0][:] = 1
            del cache
            views.clear()

    require_all([churn] * 4)
    memory.free()
    assert memory.used_bytes == 0
    stats = memory.pool.stats()
    assert (stats.lingering_bytes, stats.largest_free_bytes) == (0, stats.total_bytes)


def test_views_race_with_freeing(memory: Memory) -> None:
    """Either the cache is gone, or the view sees this cache's content for as long as it lives."""
    torch_module()
    for stamp in range(1, 40):
        cache = memory.cache(DataType.DT_UINT8)
        for array in cache.numpy():
            array[:] = stamp
        start = threading.Barrier(3)
        calls = [lambda c=cache, s=start, n=stamp: _look(memory, c, s, n) for _ in range(2)]
        require_all([*calls, lambda s=start: _free_and_overwrite(memory, s)])
    del cache, array
    assert memory.used_bytes == 0


def _look(memory: Memory, cache: Cache, start: threading.Barrier, stamp: int) -> None:
    start.wait(30)
    with contextlib.suppress(CacheNotExist, ParamInvalid):
        while True:
            for tensor in [*cache.tensors(), *create_tensors(SHAPE, DataType.DT_UINT8, cache.tensor_addrs)]:
                assert (tensor == stamp).all()


def _free_and_overwrite(memory: Memory, start: threading.Barrier) -> None:
    start.wait(30)
    memory.free()
    fill_what_is_free(memory, 0xFF)


# -- the whole library: what a user sees


@pytest.fixture
def end() -> Iterator[LLMDataDist]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = '{"memory_size": 1048576, "page_shift": 12}'
    with LLMDataDist(LLMRole.PROMPT, 1) as end:
        end.init(config.generate_options())
        yield end


HOST_DESC = CacheDesc(NUM_TENSORS, SHAPE, DataType.DT_BF16, Placement.HOST)


def used_bytes(end: LLMDataDist) -> int:
    gc.collect()
    return end.cache_manager.pool_stats(Placement.HOST).used_bytes


def test_views_keep_the_memory_of_a_freed_cache(end: LLMDataDist) -> None:
    manager = end.cache_manager
    cache = manager.allocate_blocks_cache(HOST_DESC)
    slice_of_one = cache.numpy()[1][2:]
    slice_of_one[:] = 3
    used = used_bytes(end)
    manager.deallocate_blocks_cache(cache)
    assert manager.pool_stats(Placement.HOST).lingering_bytes == used_bytes(end) == used
    with pytest.raises(OutOfMemory, match=rf"{used} bytes are of freed caches that views still keep"):
        manager.allocate_blocks_cache(CacheDesc(1, (MIB,), DataType.DT_INT8, Placement.HOST))
    for call in (cache.numpy, lambda: cache_tensors(cache), lambda: manager.copy_blocks(cache, {0: [1]})):
        with pytest.raises(CacheNotExist):
            call()
    successor = manager.allocate_blocks_cache(HOST_DESC)
    for array in successor.numpy():
        array[:] = 9
    assert (slice_of_one == 3).all()
    del slice_of_one
    assert used_bytes(end) == used


def test_a_deallocated_handle_gives_no_views_though_keys_hold_the_memory(end: LLMDataDist) -> None:
    manager, key = end.cache_manager, CacheKey(1, 7)
    cache = manager.allocate_cache(HOST_DESC, [key])
    manager.deallocate_cache(cache)
    assert used_bytes(end) > 0
    with pytest.raises(CacheNotExist):
        cache.numpy()
    manager.remove_cache_key(key)
    assert used_bytes(end) == 0


def test_an_unregistered_handle_gives_no_views(end: LLMDataDist) -> None:
    mine = np.zeros((NUM_TENSORS, *SHAPE), dtype=np.uint16)
    cache = end.cache_manager.register_blocks_cache(HOST_DESC, [one.ctypes.data for one in mine])
    array = cache.numpy()[1]
    end.cache_manager.unregister_cache(cache.cache_id)
    array[:] = 1
    assert (mine[1] == 0x3F80).all()  # 1 as bf16
    with pytest.raises(CacheNotExist):
        cache.numpy()


def test_a_registered_cache_keeps_the_pool_memory_it_lies_in(end: LLMDataDist) -> None:
    """Else peers could write, through the registered one, into what the pool has given to another cache."""
    manager = end.cache_manager
    allocated = manager.allocate_blocks_cache(HOST_DESC)
    registered = manager.register_blocks_cache(HOST_DESC, allocated.tensor_addrs)
    used = used_bytes(end)
    manager.deallocate_blocks_cache(allocated)
    assert used_bytes(end) == used
    view = registered.numpy()[0]
    manager.unregister_cache(registered.cache_id)
    assert used_bytes(end) == used
    del view
    assert used_bytes(end) == 0
    with pytest.raises(ParamInvalid, match=r"addrs\[0\]=0x.*freed or never allocated"):
        manager.register_blocks_cache(HOST_DESC, allocated.tensor_addrs)


@pytest.mark.parametrize("freed_first", [False, True])
def test_finalize_leaves_the_mapping_to_the_views(freed_first: bool) -> None:
    with nothing_left_behind():
        _look_after_finalize(freed_first)


def _look_after_finalize(freed_first: bool) -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.host_mem_pool_cfg = '{"memory_size": 1048576}'
    end = LLMDataDist(LLMRole.PROMPT, 1)
    end.init(config.generate_options())
    cache = end.cache_manager.allocate_blocks_cache(HOST_DESC)
    array = cache.numpy()[1]
    if freed_first:
        end.cache_manager.deallocate_blocks_cache(cache)
    end.finalize()
    array[:] = 2
    assert (array == 2).all()
    with pytest.raises(LLMException):
        cache.numpy()


def test_a_failed_allocation_leaves_nothing(end: LLMDataDist) -> None:
    known = len(live_ranges)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            end.cache_manager.allocate_blocks_cache(CacheDesc(1, (2 * MIB,), DataType.DT_INT8, Placement.HOST))
    assert (used_bytes(end), len(live_ranges)) == (0, known)


def test_finalize_forgets_all_ranges(end: LLMDataDist) -> None:
    known = len(live_ranges)
    cache = end.cache_manager.allocate_blocks_cache(HOST_DESC)
    assert len(live_ranges) == known + NUM_TENSORS
    end.finalize()
    assert len(live_ranges) == known
    del cache
