# SPDX-License-Identifier: Apache-2.0
"""The contenders that are in the race, and the rounds in which they take turns.

One that cannot start is skipped, with the reason. One that breaks down leaves the race, with the reason: the others'
numbers stay good, and a peer's engine that crashes does so in a process of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from .contenders import Entry
from .contract import Contender
from .results import Results

MIN_ROUNDS = 3

Progress = Callable[[str], None]
T = TypeVar("T")


class Field:
    """Use as a context manager, which closes them all."""

    def __init__(self, results: Results, contenders: Sequence[Contender] = ()) -> None:
        self._results = results
        self._running = {contender.name: contender for contender in contenders}
        self._closing = ExitStack()

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def start(self, entries: Sequence[Entry], cache_bytes: int, progress: Progress) -> None:
        for entry in entries:
            progress(f"starting {entry.name}")
            try:
                contender = entry.make(cache_bytes)
            except (RuntimeError, OSError) as error:
                self._results.skipped[entry.name] = str(error)
                progress(f"skipped {entry.name}: {error}")
                continue
            self._closing.callback(contender.close)
            self._running[entry.name] = contender

    def contenders(self, *names: str) -> list[Contender]:
        """Those still running; with names, those of them that are, in that order."""
        return [self._running[name] for name in names or tuple(self._running) if name in self._running]

    def ask(self, contender: Contender, action: Callable[[], T]) -> T | None:
        """The result; None if the contender broke down, or has before."""
        if contender.name not in self._running:
            return None
        try:
            return action()
        except (RuntimeError, OSError) as error:
            self._results.failed[contender.name] = str(error)
            del self._running[contender.name]
            return None

    def alternate(
        self, samplers: Mapping[str, Callable[[], Sequence[float]]], seconds: float
    ) -> dict[str, list[float]]:
        """Let contenders run in turns, in an order that changes, for about `seconds` each. Their samples, by name.

        What one that breaks down has sampled is dropped, so that all that remain have equally many rounds.
        """
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        shuffle, order = random.Random(0).shuffle, list(samplers)
        stop_s = time.perf_counter() + seconds * len(order)
        num_rounds = 0
        while order and (num_rounds < MIN_ROUNDS or time.perf_counter() < stop_s):
            shuffle(order)
            for name in order:
                samples[name].extend(self._sample(name, samplers[name]))
            order = [name for name in order if name in self._running]
            num_rounds += 1
        return {name: samples[name] for name in samplers if name in order}

    def _sample(self, name: str, sampler: Callable[[], Sequence[float]]) -> Sequence[float]:
        contender = self._running.get(name)
        return () if contender is None else self.ask(contender, sampler) or ()
