# SPDX-License-Identifier: Apache-2.0
"""Moving many byte ranges within this process's address space, as fast as its memory allows.

`scatter_copy` is the one function that every backend moves bytes with. The work is done by `kernel.c`, with the
GIL released, so that other threads of the process run meanwhile. Without the compiled library a loop over
`ctypes.memmove` does the same at a fraction of the speed, and says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .build_hook import LIBRARY, source_number

__all__ = ["native_library", "scatter_copy"]

_log = logging.getLogger(__name__)
_REMEDY = f"with a C compiler installed, run: python {Path(__file__).with_name('build_hook.py')}"

Int64s = npt.NDArray[np.int64]


def scatter_copy(dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
    """Copy `num_bytes[i]` bytes from address `src[i]` to address `dst[i]`, for every i.

    The caller vouches for the addresses: all ranges must be mapped, and no destination may overlap a source or
    another destination. When this returns, the bytes are visible to whoever is told so afterwards.

    Args:
        dst, src, num_bytes: contiguous int64 arrays of equal length; sizes are not negative.

    Raises:
        TypeError: an array is not a contiguous, one-dimensional int64 array.
        ValueError: the lengths differ or a size is negative.

    Safe to call from several threads at once. Releases the GIL while it copies.
    """
    _check(dst, src, num_bytes)
    library = native_library()
    if library is None:
        _copy_in_python(dst, src, num_bytes)
        return
    library.datadist_scatter_copy(dst.ctypes.data, src.ctypes.data, num_bytes.ctypes.data, len(dst))


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled library, or None if there is none that fits; the reason is logged once."""
    try:
        return _load()
    except (OSError, AttributeError) as error:
        _log.warning("no native copy kernel, transfers will be slow (%s); %s", error, _REMEDY)
        return None


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    abi = library.datadist_native_abi
    abi.restype, abi.argtypes = ctypes.c_int64, []
    if abi() != source_number():
        raise OSError(f"{LIBRARY} was built from other sources than those beside it")
    copy = library.datadist_scatter_copy
    copy.restype = None
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return library


def _check(dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
    for name, array in (("dst", dst), ("src", src), ("num_bytes", num_bytes)):
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise TypeError(f"{name} must be a contiguous 1-d int64 array, not {array.dtype} of shape {array.shape}")
    if not len(dst) == len(src) == len(num_bytes):
        raise ValueError(f"lengths differ: {len(dst)} dst, {len(src)} src, {len(num_bytes)} num_bytes")
    if len(num_bytes) and np.minimum.reduce(num_bytes) < 0:
        raise ValueError(f"negative size: {int(num_bytes.min())}")


def _copy_in_python(dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
    for to, source, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
        ctypes.memmove(to, source, size)
