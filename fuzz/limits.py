# SPDX-License-Identifier: Apache-2.0
"""What one input may cost."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

#: Processor time of the thread, so that a busy machine is no finding.
MAX_S = 1.0
#: A byte of MessagePack or JSON can become an empty list or dict; typed decoding and copies add to that.
MAX_BYTES_PER_BYTE = 256
MAX_BYTES_AT_ALL = 1 << 20


class TooMuch(Exception):
    """An input cost more time or memory than its size can explain."""


def limited(run: Callable[[bytes], None], data: bytes) -> None:
    """Raises TooMuch, or what `run` raises."""
    if not tracemalloc.is_tracing():
        tracemalloc.start(1)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    started = time.thread_time()
    run(data)
    seconds = time.thread_time() - started
    _, peak = tracemalloc.get_traced_memory()
    if seconds > MAX_S:
        raise TooMuch(f"{len(data)} bytes took {seconds:.2f} s of processor time")
    allowed = MAX_BYTES_AT_ALL + MAX_BYTES_PER_BYTE * len(data)
    if peak - before > allowed:
        raise TooMuch(f"{len(data)} bytes took {peak - before} bytes of memory, more than {allowed}")
