# SPDX-License-Identifier: Apache-2.0
"""How many threads besides the caller's may help with a copy.

One thread does not use all that the memory can do, two move about 1.7 times as much. Helpers only work while
processors are idle (`threads.c`), so that asking for them costs next to nothing where there are none.
"""

from __future__ import annotations

import os

#: Less is copied before a helper is awake.
MIN_SHARED_BYTES = 2 << 20
#: Of one copy. More hardly gain on any host, and a transfer should not fill one.
MAX_THREADS = 4


def helpers_for(num_bytes: int, max_threads: int = MAX_THREADS) -> int:
    """Threads that may help to copy `num_bytes`; the copy has at most `max_threads` with the caller's."""
    if num_bytes < MIN_SHARED_BYTES or max_threads < 2:
        return 0
    return min(max_threads, len(os.sched_getaffinity(0))) - 1
