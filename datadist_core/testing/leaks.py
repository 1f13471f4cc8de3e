# SPDX-License-Identifier: Apache-2.0
"""Telling whether something left open files, mapped memory or threads behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker

from ..link.process import this_process
from .parallel import WAIT_S, eventually


@dataclass(frozen=True, slots=True)
class _Held:
    """What this process holds: open files by what they are, threads, and mappings of pools."""

    files: Counter[str]
    threads: frozenset[threading.Thread]
    num_mappings: int

    def beyond(self, before: _Held) -> str:
        """What is held now but was not `before`; empty if nothing."""
        files = self.files - before.files
        threads = [thread.name for thread in self.threads - before.threads]
        mappings = max(0, self.num_mappings - before.num_mappings)
        found = {"files": sorted(files.elements()), "threads": threads, "pool mappings": mappings}
        return ", ".join(f"{name}: {value}" for name, value in found.items() if value)


@contextlib.contextmanager
def nothing_left_behind(timeout_s: float = WAIT_S) -> Iterator[None]:
    """Raise AssertionError if more files, threads or pool mappings exist after the block than before it.

    What ends by itself within `timeout_s` after the block is not counted.
    """
    resource_tracker.ensure_running()  # started with the first spawned process, and stays
    this_process()  # opens a socket once, and keeps it
    before = _look()
    yield
    if not eventually(lambda: not _look().beyond(before), timeout_s):
        raise AssertionError(f"left behind: {_look().beyond(before)}")


def _look() -> _Held:
    gc.collect()
    threads = frozenset(threading.enumerate())
    with open("/proc/self/maps") as maps:
        num_mappings = sum("datadist-pool" in line for line in maps)
    return _Held(Counter(_open_files()), threads, num_mappings)


def _open_files() -> Iterator[str]:
    """Kind or path of every open file. Sockets and pipes without their numbers, which never come again."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listdir itself had open
            yield os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]
