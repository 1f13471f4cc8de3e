# SPDX-License-Identifier: Apache-2.0
"""A process whose time of day jumps by days, thirty times a second, while its monotonic clock goes on as ever.

A small library in front of the C library adds an offset to what the real clock says. The clock of the system is never
touched, so a wait in the kernel by the real clock would not notice; Python has none where the C library can do without.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DAY_S = 86400

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static volatile long offset_s;

void jump_by(long seconds) { offset_s += seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    int result = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return result;
}

time_t time(time_t *where) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (where) *where = fine.tv_sec;
    return fine.tv_sec;
}
"""


def keep_jumping() -> None:
    """In the child: from now on a day forth, two back, a day forth. AssertionError if the clock does not jump."""
    jump_by = ctypes.CDLL(None).jump_by
    jump_by.argtypes = [ctypes.c_long]
    begun_s = time.time()
    jump_by(DAY_S)
    assert time.time() - begun_s > DAY_S / 2, "the clock has not jumped: this would show nothing"

    def jump() -> None:
        for step in itertools.cycle((DAY_S, -2 * DAY_S, DAY_S)):
            jump_by(step)
            threading.Event().wait(0.03)

    threading.Thread(target=jump, daemon=True).start()


def run_under_a_jumping_clock(run: Callable[[], None], folder: Path) -> None:
    """Run a function that can be imported, in a child; it calls `keep_jumping` itself. AssertionError if it raises."""
    (folder / "clock.c").write_text(CLOCK)
    library = str(folder / "clock.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(folder / "clock.c"), "-ldl"], check=True, timeout=60)
    code = f"from {run.__module__} import {run.__name__} as run; run(); print('right')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_PRELOAD": library},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "right\n", done.stderr
