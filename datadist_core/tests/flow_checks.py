# SPDX-License-Identifier: Apache-2.0
"""What the tests of the flows share: the ways to run them, linked terminals, and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from datadist_core import LLMRole, LLMStatusCode
from datadist_core.tests.flow_child import Failed, Here, Process, Terminal, content

OK = LLMStatusCode.LLM_SUCCESS


@dataclass(frozen=True)
class Way:
    """How to run a flow: over which backend, in which generation, both ends in this process or in two."""

    backend: str
    v2: bool
    in_this_process: bool = False

    def __str__(self) -> str:
        place = "one_process" if self.in_this_process else "processes"
        return f"{self.backend}-{'v2' if self.v2 else 'v1'}-{place}"


def ways(*chosen: Way) -> list[Any]:
    """As pytest parameters. What starts processes is slow."""
    return [pytest.param(w, id=str(w), marks=() if w.in_this_process else pytest.mark.slow) for w in chosen]


CHEAP = (Way("loopback", True, in_this_process=True), Way("auto", False, in_this_process=True))
BETWEEN_PROCESSES = tuple(Way(backend, v2) for backend in ("shm", "tcp") for v2 in (False, True))
V1_AND_V2 = ways(*CHEAP, *BETWEEN_PROCESSES)
#: For what does not depend on the generation.
EVERY_BACKEND = ways(CHEAP[0], Way("shm", False), Way("tcp", True))
V2_ONLY = ways(*(w for w in (*CHEAP, *BETWEEN_PROCESSES) if w.v2))


class Processes:
    """The processes that the tests of one file share. Started when first needed; a dead one is replaced."""

    def __init__(self) -> None:
        self._here = Here()
        self._running: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._running:
            process.__exit__()

    def terminal(self, way: Way, number: int) -> Terminal:
        """A new terminal in the process of that number (0 ...)."""
        if way.in_this_process:
            return self._here.terminal()
        self._start(number + 1)
        if not self._running[number].alive:
            self._running[number].__exit__()
            self._running[number] = Process()
        return self._running[number].terminal()

    def _start(self, count: int) -> None:
        # Few tests are content with one.
        while len(self._running) < max(count, 2):
            self._running.append(Process())


@contextmanager
def opened(processes: Processes, way: Way, count: int) -> Iterator[list[Terminal]]:
    """Terminals in `count` processes; closed at the end."""
    with ExitStack() as stack:
        terminals = [processes.terminal(way, number) for number in range(count)]
        for terminal in terminals:
            stack.callback(terminal.close)
        yield terminals


@contextmanager
def linked_pair(
    processes: Processes, way: Way, listen: str = "127.0.0.1:0", **options: Any
) -> Iterator[tuple[Terminal, Terminal]]:
    """(P, D): P listens, D has linked to it. Their scripts know the cluster ids as P and D."""
    with opened(processes, way, 2) as (prompt, decoder):
        start_prompt(prompt, way, listen=listen, **options)
        start_decoder(decoder, way, **options)
        introduce(P=prompt, D=decoder)
        assert decoder.link(prompt) == (OK, [OK])
        yield prompt, decoder


def start_prompt(terminal: Terminal, way: Way, **options: Any) -> None:
    terminal.start(LLMRole.PROMPT, way.backend, way.v2, listen=options.pop("listen", "127.0.0.1:0"), **options)


def start_decoder(terminal: Terminal, way: Way, **options: Any) -> None:
    terminal.start(LLMRole.DECODER, way.backend, way.v2, **options)


def introduce(**terminals: Terminal) -> None:
    """Have the scripts of all these terminals know each other's cluster id by name."""
    for terminal in terminals.values():
        terminal.names.update({name: other.cluster_id for name, other in terminals.items()})


# -- checks


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Every byte of a cache; says which tensors and where they differ first."""
    assert actual.shape == expected.shape
    wrong = np.argwhere(actual != expected)
    assert len(wrong) == 0, f"{len(wrong)} wrong bytes, the first at [tensor, byte] = {wrong[0].tolist()}"


def refused(
    terminal: Terminal,
    status: LLMStatusCode | tuple[LLMStatusCode, ...],
    code: str,
    match: str | None = None,
    **values: Any,
) -> None:
    """The script must raise an LLMException with that status (or one of those)."""
    with pytest.raises(Failed, match=match) as caught:
        terminal.run(code, **values)
    allowed = status if isinstance(status, tuple) else (status,)
    assert caught.value.status_code in allowed, caught.value


def eventually(condition: Callable[[], Any], what: str, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        threading.Event().wait(0.01)


def entry(index: int, num_bytes: int = 2048) -> slice:
    """The bytes of one batch entry (or block) in a tensor, of `num_bytes` each."""
    return slice(index * num_bytes, (index + 1) * num_bytes)


# -- contiguous caches: 4 tensors of 8 batch entries of 2048 bytes, one page of the pool in all

EIGHT_KEYS = "cache = contiguous([CacheKey(P, 100 + i) for i in range(8)]); fill(cache, 1)"


def with_entries(seed: int, moved: dict[int, int], source: np.ndarray | None = None) -> np.ndarray:
    """`content(seed)` after the entries `moved` (target index: source index) of content `source` (1) were put in."""
    expected, source = content(seed), content(1) if source is None else source
    for target, index in moved.items():
        expected[:, entry(target)] = source[:, entry(index)]
    return expected
