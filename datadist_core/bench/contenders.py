# SPDX-License-Identifier: Apache-2.0
"""Who is measured: our backends, the peers (other engines, used without us), and the references.

To add one, write a `Contender` (`contract.py`) and name it in one of the tables at the end; with whom it is compared
is part of its entry. The peers are used as their own documentation says is fastest, see `peer_ends.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import LLMException
from ..testing.remote import RemoteObject
from .blocks import BlockLists
from .contract import HERE, PULL, THERE, Contender
from .ends import ANSWER_TIMEOUT_S, End, Traced
from .peer_ends import NIXL, NIXL_DEFAULT, NIXL_TCP, MooncakeEngine, NixlEngine
from .peers import MakeEngine, PeerContender
from .references import CopyReference, SocketReference

_cluster_ids = itertools.count(1_000_001)


class _Anywhere(Protocol):
    """An `End`: here, or in a process of its own."""

    def call(self, method: str, *args: Any) -> Any: ...

    def close(self) -> None: ...


class Here:
    """An `End` in this process, called like one that is not."""

    def __init__(self, *arguments: Any) -> None:
        self.end = End(*arguments)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.end, method)(*args)

    def close(self) -> None:
        self.end.close()


def _in_own_process(*arguments: Any) -> RemoteObject:
    return RemoteObject(End, arguments, ANSWER_TIMEOUT_S)


class BackendContender:
    """`pull_blocks` and `push_blocks` over one of our backends. Both ends are processes of their own, or both are here.

    Args:
        registered: move memory that the user allocated and registered, instead of memory from the pool.
        options: of the backend, at both ends.
        huge_pages: both pools lie in huge pages of the system.
        integrity: of the end that moves.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        cache_bytes: int,
        in_process: bool = False,
        registered: bool = False,
        options: Mapping[str, Any] | None = None,
        huge_pages: bool = False,
        integrity: str = "off",
    ) -> None:
        self.name = name
        self.backend = backend
        self.in_process = in_process
        make: Callable[..., _Anywhere] = Here if in_process else _in_own_process
        here_id, self._peer_id = next(_cluster_ids), next(_cluster_ids)
        with ExitStack() as undo:
            self._here = make(backend, here_id, HERE, cache_bytes, False, registered, options, huge_pages, integrity)
            undo.callback(self._here.close)
            self._there = make(backend, self._peer_id, THERE, cache_bytes, True, registered, options, huge_pages)
            undo.callback(self._there.close)
            self._address = self._there.call("address")
            self.link_s()
            undo.callback(self._part)
            self._undo = undo.pop_all()

    def backend_used(self) -> str:
        """The backend that the link has chosen."""
        return str(self._here.call("backend_to", self._peer_id))

    def link_s(self) -> float:
        return float(self._here.call("link", self._peer_id, self._address))

    def unlink(self) -> None:
        self._here.call("unlink", self._peer_id, self._address)

    def prepare(self, lists: BlockLists) -> None:
        for end in (self._here, self._there):
            end.call("prepare", lists.num_cache_blocks, lists.block_bytes)

    def clear(self, op: str) -> None:
        (self._here if op == PULL else self._there).call("clear")

    def move_each(self, op: str, moves: Sequence[BlockLists], repeats: int = 1) -> list[float]:
        times: list[float] = self._here.call("move_each", self._peer_id, op, list(moves), repeats)
        return times

    def verify(self, op: str, lists: BlockLists) -> bool:
        end, seed = (self._here, THERE) if op == PULL else (self._there, HERE)
        return bool(end.call("matches", seed, lists))

    def owner_cpu_s(self) -> float:
        """Processor time that the other end's process has used so far."""
        return float(self._there.call("cpu_s"))

    def traced(self) -> Traced:
        """Memory of the process that starts the transfers; slow until `stop_tracing`."""
        traced: Traced = self._here.call("traced")
        return traced

    def stop_tracing(self) -> None:
        self._here.call("stop_tracing")

    def close(self) -> None:
        self._undo.close()

    def _part(self) -> None:
        """So that neither end reports the other as lost; a link that is down already has been reported."""
        with suppress(LLMException):
            self.unlink()


@dataclass(frozen=True, slots=True)
class Entry:
    """How to make a contender, given the bytes of its largest cache.

    Attributes:
        name: of its rows.
        references: whom it is compared with.
    """

    name: str
    make: Callable[[int], Contender]
    references: tuple[str, ...] = ()


_COPIES = ("stream", "memcpy")
_SOCKETS = ("socket",)


def _ours(
    backend: str,
    references: tuple[str, ...],
    name: str = "",
    registered: bool = False,
    options: Mapping[str, Any] | None = None,
    huge_pages: bool = False,
    integrity: str = "off",
) -> Entry:
    name = name or backend
    make = functools.partial(
        BackendContender,
        name,
        backend,
        registered=registered,
        options=options,
        huge_pages=huge_pages,
        integrity=integrity,
    )
    return Entry(name, make, references)


def _peer(name: str, make_engine: MakeEngine, references: tuple[str, ...], busy_when_idle: bool = False) -> Entry:
    return Entry(name, lambda size: PeerContender(name, make_engine, size, busy_when_idle), references)


ONE_THREAD = "shm-1"
"""shm with the caller's thread alone, which is what one can expect where no processor is idle."""

HUGE_PAGES = "shm-1-huge"
"""The same with both pools in huge pages, of which the system must have enough."""

CHECKED = tuple(f"{name}-checksum" for name in ("shm", "tcp"))
"""The same with `integrity="checksum"`: compared with the backend itself, they show what that costs."""

OURS: dict[str, Entry] = {
    "auto": _ours("auto", _COPIES),
    "shm": _ours("shm", _COPIES),
    ONE_THREAD: _ours("shm", _COPIES, name=ONE_THREAD, options={"copy_threads": 1}),
    HUGE_PAGES: _ours("shm", _COPIES, name=HUGE_PAGES, options={"copy_threads": 1}, huge_pages=True),
    "cma": _ours("cma", _COPIES, registered=True),
    "tcp": _ours("tcp", _SOCKETS),
    "nixl": _ours("nixl", (*_COPIES, *_SOCKETS), name="datadist-nixl"),
    "mooncake": _ours("mooncake", _SOCKETS, name="datadist-mooncake"),
    "loopback": Entry(
        "loopback", lambda size: BackendContender("loopback", "loopback", size, in_process=True), _COPIES
    ),
    **{name: _ours(name.split("-")[0], (), name=name, integrity="checksum") for name in CHECKED},
}
"""By the backend's name. Rows of one on another engine are called datadist-NAME: NAME is the engine itself."""

PEERS: dict[str, Entry] = {
    "nixl": _peer("nixl", functools.partial(NixlEngine, NIXL), _COPIES, busy_when_idle=True),
    "nixl-tcp": _peer("nixl-tcp", functools.partial(NixlEngine, NIXL_TCP), _SOCKETS, busy_when_idle=True),
    "nixl-default": _peer("nixl-default", functools.partial(NixlEngine, NIXL_DEFAULT), _COPIES, busy_when_idle=True),
    "mooncake": _peer("mooncake", MooncakeEngine, _SOCKETS),
}

REFERENCES: dict[str, Entry] = {
    "memcpy": Entry("memcpy", lambda size: CopyReference("memcpy", size, streaming=False)),
    "stream": Entry("stream", lambda size: CopyReference("stream", size, streaming=True)),
    "socket": Entry("socket", lambda size: SocketReference("socket", size)),
}

DEFAULT_PEERS = tuple(PEERS)
DEFAULT_BACKENDS = tuple(name for name in OURS if name not in ("loopback", HUGE_PAGES, *CHECKED))
OUR_NAMES = tuple(entry.name for entry in OURS.values())
SAME_HOST_NAMES = ("auto", "shm", ONE_THREAD, "cma")


def entries_of(backends: Sequence[str], peers: Sequence[str]) -> list[Entry]:
    """Those asked for, then the references that they are compared with."""
    chosen = [*(OURS[name] for name in backends), *(PEERS[name] for name in peers)]
    needed = {reference for entry in chosen for reference in entry.references}
    return [*chosen, *(entry for name, entry in REFERENCES.items() if name in needed)]
