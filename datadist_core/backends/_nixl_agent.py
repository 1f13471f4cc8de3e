# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent, with typed calls, our errors, and an end that is certain. The only module that imports nixl.

What NIXL 1.5 with UCX was found to guarantee, which decides how this backend is built:

- A request whose status is done has ended, at both ends: UCX flushes behind it.
- Releasing a request that is in progress, or forgetting the remote agent, does NOT end it. Both return success, and
  the bytes may still arrive afterwards (seen over UCX's TCP, with a peer that was stopped and went on later).
- A request whose status is an error may have parts that are still in progress.
- Destroying the agent destroys UCX's worker with its connections. After that nothing of it touches memory.
- Over TCP, UCX reads by asking the other side to send ("software emulation" in its own words). If the reader goes away
  with such questions open, the process that it read from may abort: the first answer fails, UCX puts a stub in the
  place of the connection, queues the next answer there, and takes the stub's refusal for impossible
  ("ucp_request.inl:356 Fatal: unexpected error: Endpoint timeout"; seldom "stubs.c:107 Assertion `0' failed"). Always
  if the owner was stopped meanwhile (3 of 3), now and then if the reader is killed (2 of 13 runs of 10 to 25 kills on
  a busy machine). No setting prevents it. As often with: error handling mode "none", UCX_HANDLE_ERRORS=none, one lane
  on one device, other sizes of segments and buffers, blocks of 4 KiB, 64 KiB and 1 MiB; with UCX_PROTO_ENABLE=n
  NIXL cannot read at all. So what is posted is left to end by itself as long as that is bearable. Writing does not
  do it, nor does reading within one host (CMA), where nobody is asked. RDMA was not tried.

So an agent is also the unit that can be fenced: `Agent.close` destroys it, and says whether it could. That takes that
nothing in Python still refers to it, which is why requests and prepared lists belong to their agent here, and why
NIXL's exceptions lose their tracebacks: those refer to the handles of the calls that failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, LLMException, ParamInvalid, PeerLost, RemoteError, Unreachable
from ..transfer.plan import Op
from ._nixl_options import NixlOptions

Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]

_INSTALL = 'pip install "vllm-datadist[nixl]"'
_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")  # which `nixl` tries in this order if there is no CUDA
_MEMORY = "DRAM"
_PROGRESS_DELAY_US = 100_000
#: What `sys.getrefcount` says of an attribute's value that nobody else refers to.
_REFERENCES_IF_LAST = 2

Result = TypeVar("Result")

_import_lock = threading.Lock()


class Prepared:
    """A list of blocks that NIXL has looked up and translated, to be used by index."""

    __slots__ = ("__weakref__", "_agent", "_handle")

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle

    def __del__(self) -> None:
        # NIXL's handle calls the agent when it goes, which only one thread may do at a time.
        self._agent._dropped.append(self._handle)


class Request:
    """A transfer that was posted. `done`: it was moved, all of it, and nothing of it is left."""

    __slots__ = ("_agent", "_failure", "_handle", "done")

    def __init__(self, agent: Agent, handle: Any) -> None:
        self.done = False
        self._agent = agent
        self._handle = handle
        self._failure: LLMException | None = None

    def is_done(self) -> bool:
        """Ask NIXL. Raises what ended it early: then parts of it may still be in progress."""
        if self._failure is not None:
            raise self._failure
        return self.done or self._agent._quick_call(self._agent._check, self)


@dataclass(frozen=True, slots=True, eq=False)
class IndexedPiece:
    """Blocks of prepared lists."""

    local: Prepared
    local_indices: Indices
    remote: Prepared
    remote_indices: Indices


@dataclass(frozen=True, slots=True, eq=False)
class RangePiece:
    """Byte ranges of (address, size, 0) each."""

    peer_name: str
    local: Rows
    remote: Rows


Piece = IndexedPiece | RangePiece


class Agent:
    """Thread-safe: one call at a time, which is all that an agent with one UCX worker can do anyway.

    Raises Unreachable, from its constructor, with the reason why NIXL cannot be used on this host.
    """

    def __init__(self, name: str, options: NixlOptions) -> None:
        self.name = name
        self._plugin = options.plugin
        self._lock = threading.Lock()
        self._lists: weakref.WeakSet[Prepared] = weakref.WeakSet()
        self._requests: set[Request] = set()
        self._dropped: deque[Any] = deque()
        self._inner: Any = None
        self._bindings, self._agent = _create(name, options)

    def close(self) -> bool:
        """Let no more calls in, and destroy it. Whether it is destroyed: then nothing of it touches memory any more.

        May be repeated. False while somebody else refers to NIXL's object, which nothing here does for long.
        """
        with self._lock:
            agent, self._agent = self._agent, None
            for prepared in list(self._lists):
                prepared._handle = None
            for request in self._requests:
                request._handle = None
            self._requests.clear()
            self._dropped.clear()
            if agent is not None:
                # NIXL's Python wrapper and the handles refer to one C++ object, which has to go with the last of them.
                self._inner, agent.agent = agent.agent, None
            if self._inner is not None and sys.getrefcount(self._inner) > _REFERENCES_IF_LAST:
                gc.collect()
                if sys.getrefcount(self._inner) > _REFERENCES_IF_LAST:
                    return False
            self._inner = None
            return True

    @property
    def closed(self) -> bool:
        """Whether calls are refused, which comes before it is destroyed."""
        return self._agent is None

    @property
    def destroyed(self) -> bool:
        return self._agent is None and self._inner is None

    def connection(self) -> bytes:
        """What another agent must `load` to reach this one."""
        with self._call() as agent:
            return bytes(agent.get_partial_agent_metadata(self._no_memory(), True, [self._plugin]))

    def register(self, address: int, size_bytes: int) -> Any:
        """Make memory usable; what `export` and `deregister` want."""
        with self._call() as agent:
            row = np.array([[address, size_bytes, 0]], dtype=np.uint64)
            return agent.register_memory(row, _MEMORY, [self._plugin])

    def deregister(self, registered: Any) -> None:
        with self._call() as agent:
            agent.deregister_memory(registered, [self._plugin])

    def export(self, registered: Any) -> bytes:
        """What another agent must `load` to reach this memory, besides `connection`."""
        with self._call() as agent:
            return bytes(agent.get_partial_agent_metadata(registered, False, [self._plugin]))

    def load(self, peer_name: str, metadata: bytes) -> None:
        """Learn about another agent, or about memory of it. Raises Unreachable if that is not what it is."""
        try:
            with self._call() as agent:
                found = bytes(agent.add_remote_agent(metadata)).decode(errors="replace")
        except (PeerLost, ParamInvalid, RemoteError) as error:
            raise Unreachable(f"NIXL cannot use what the peer says of itself: {error}") from error
        if found != peer_name:
            raise Unreachable(f"a peer that calls itself {peer_name} describes the NIXL agent {found}")

    def unload(self, peer_name: str) -> None:
        """Forget an agent. Only when no request with it is in progress."""
        with self._call() as agent:
            agent.remove_remote_agent(peer_name)

    def notify(self, peer_name: str, note: bytes) -> None:
        with self._call() as agent:
            agent.send_notif(peer_name, note)

    def take_notes(self) -> list[bytes]:
        """What others have sent with `notify` since the last call."""
        with self._call() as agent:
            return [note for notes in agent.get_new_notifs([self._plugin]).values() for note in notes]

    def prepare(self, peer_name: str, rows: Rows) -> Prepared:
        """Rows of (address, block bytes, 0, stride, blocks); `peer_name` is "" for local memory."""
        with self._call() as agent:
            prepared = Prepared(self, agent.prep_xfer_dlist(peer_name, rows, _MEMORY, [self._plugin]))
            self._lists.add(prepared)
            return prepared

    def start(self, op: Op, piece: Piece) -> Request:
        """Move a piece, or begin to. Raises if NIXL refuses it, and then nothing was touched.

        What goes wrong later, posting it included, is raised by `Request.is_done`.
        """
        return self._quick_call(self._start, op, piece)

    def _start(self, agent: Any, op: Op, piece: Piece) -> Request:
        handle = self._make_handle(agent, "READ" if op is Op.READ else "WRITE", piece)
        request = Request(self, handle)
        self._requests.add(request)
        try:
            self._note(request, agent.transfer(handle))
        except LLMException as error:
            request._failure = error.with_traceback(None)
        except Exception as error:
            request._failure = _translated(error)
            request._failure.__cause__ = error.with_traceback(None)
        return request

    def _make_handle(self, agent: Any, op: str, piece: Piece) -> Any:
        if isinstance(piece, IndexedPiece):
            local, remote = piece.local._handle, piece.remote._handle
            return agent.make_prepped_xfer(
                op, local, piece.local_indices, remote, piece.remote_indices, b"", [self._plugin]
            )
        here, there = (agent.get_xfer_descs(rows, _MEMORY) for rows in (piece.local, piece.remote))
        return agent.initialize_xfer(op, here, there, piece.peer_name, b"", [self._plugin])

    def _check(self, agent: Any, request: Request) -> bool:
        self._note(request, agent.check_xfer_state(request._handle))
        return request.done

    def _note(self, request: Request, state: str) -> None:
        """Keep what NIXL says of a request. The handle of one that is done goes now, while no other call is let in."""
        if state == "ERR":
            raise RemoteError("NIXL reports that the transfer failed, without a reason")
        if state == "DONE":
            request.done = True
            request._handle = None
            self._requests.discard(request)

    def _no_memory(self) -> Any:
        return self._bindings.nixlRegDList(self._bindings.DRAM_SEG)

    def _quick_call(self, function: Callable[..., Result], *args: Any) -> Result:
        """`_call` for what happens with every block: a context manager would double its cost."""
        with self._lock:
            agent = self._agent
            if agent is None:
                raise ClosedError("the NIXL agent was closed")
            try:
                return function(agent, *args)
            except LLMException:
                raise
            except Exception as error:
                raise _translated(error) from error.with_traceback(None)

    @contextlib.contextmanager
    def _call(self) -> Iterator[Any]:
        """The agent, for one call. What NIXL raises leaves as one of our errors."""
        with self._lock:
            agent = self._agent
            if agent is None:
                raise ClosedError("the NIXL agent was closed")
            self._dropped.clear()
            try:
                yield agent
            except LLMException:
                raise
            except Exception as error:
                raise _translated(error) from error.with_traceback(None)


def _create(name: str, options: NixlOptions) -> tuple[Any, Any]:
    """NIXL's bindings and a new agent with one plugin."""
    package = _import_nixl()
    api, bindings = (importlib.import_module(f"{package}.{name_of}") for name_of in ("_api", "_bindings"))
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.agent = _quiet_core(bindings, name)
        if options.plugin not in agent.get_plugin_list():
            raise ParamInvalid(
                f"nixl option plugin={options.plugin!r} is not installed; there are {agent.get_plugin_list()}"
            )
        agent.create_backend(options.plugin, options.plugin_params())
    except LLMException:
        raise
    except Exception as error:
        raise Unreachable(
            f"NIXL cannot open its plugin {options.plugin} here ({error}); its log on stderr says more. Parameters: "
            f"{options.plugin_params()}"
        ) from error
    return bindings, agent


def _quiet_core(bindings: Any, name: str) -> Any:
    """The C++ agent under NIXL's Python one, which would have its progress thread spin for as long as it lives.

    With a delay, that thread sleeps until the network wakes it, or the delay is over. It costs nothing when idle,
    answers as fast, and leaves a processor to whoever copies: with two of them, transfers were twice as fast.
    """
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_DELAY_US
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # `Agent` has a lock of its own
    return bindings.nixlAgent(name, config)


def _import_nixl() -> str:
    """Import nixl; the package that it is in."""
    with _import_lock:
        package = _choose_package()
        try:
            importlib.import_module(f"{package}._api")
        except ImportError as error:
            raise Unreachable(f"the nixl package cannot be imported ({error}); install it with {_INSTALL}") from error
        if "NIXL_LOG_LEVEL" not in os.environ:
            # It announces every agent on standard output, which belongs to the program that uses us.
            logging.getLogger("nixl").setLevel(logging.WARNING)
    return package


def _choose_package() -> str:
    """Of several builds, the one that is in use already: two cannot be in one process.

    `nixl` itself chooses by the CUDA version of torch, and imports torch for that unless it finds one: seconds. That is
    spared where the choice is clear.
    """
    built = [name for name in _BUILDS if importlib.util.find_spec(name) is not None]
    in_use = [name for name in built if f"{name}._bindings" in sys.modules]
    if in_use:
        return in_use[0]
    return built[0] if len(built) == 1 or (built and _torch_has_no_cuda()) else "nixl"


def _torch_has_no_cuda() -> bool:
    """Without importing torch: it is not installed, or its version says that it is a build for processors only."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def _translated(error: Exception) -> LLMException:
    """By name: NIXL's exceptions have no base class of their own."""
    name = type(error).__name__
    text = f"NIXL: {error} ({name})"
    if name in ("nixlRemoteDisconnectError", "nixlNotFoundError"):
        return PeerLost(text)
    if name == "nixlInvalidParamError":
        return ParamInvalid(text)
    return RemoteError(text)
