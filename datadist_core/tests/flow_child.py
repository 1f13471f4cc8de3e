# SPDX-License-Identifier: Apache-2.0
"""Terminals for the tests of the flows: what a user of llm_datadist would type, run in real processes.

A `Terminal` is a Python namespace with the user's imports in it, in a child process (where the package is installed as
llm_datadist) or, for cheap runs, in the test's own process (where it is imported as llm_datadist). `run` executes a
piece of script there and returns the value of its last expression. A process is started once per test file and hosts
a fresh terminal, with an LLMDataDist of its own, for every test.

What must be in a cache is computed from seeds (`content`), and compared with all of its memory, read by address.
"""

from __future__ import annotations

import ast
import ctypes
import itertools
import os
import signal
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datadist_core import LLMRole, LLMStatusCode
from datadist_core.testing.parallel import eventually
from datadist_core.testing.remote import forkserver_context
from datadist_core.tests import patience as patience  # sets limits

ANSWER_TIMEOUT_S = 60
POOL_BYTES = 16 << 20
#: One page of the pools. The caches of these tests fill whole pages, so that neighbours in the pool touch each other.
PAGE_BYTES = 1 << 16

NAMES = """
    BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LayerSynchronizer, LLMClusterInfo,
    LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Placement, TransferConfig, TransferWithCacheKeyConfig,
"""
IMPORTS_INSTALLED = f"""
import threading
import datadist_core
datadist_core.install_as_llm_datadist()
import llm_datadist
from llm_datadist import ({NAMES})
"""
IMPORTS_RENAMED = f"""
import threading
import datadist_core as llm_datadist
from datadist_core import ({NAMES})
"""
HELPERS = """
UNSET = 2**64 - 1

def cluster(cluster_id, port):
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 26000)
    info.append_remote_ip_info("127.0.0.1", port)
    return info

def used(placement=Placement.DEVICE):
    return manager.pool_stats(placement).used_bytes

def contiguous(keys=(), num_tensors=4, shape=(8, 1024), placement=Placement.DEVICE, batch_dim_index=0):
    desc = CacheDesc(num_tensors, shape, DataType.DT_FLOAT16, placement, batch_dim_index)
    return manager.allocate_cache(desc, keys)

def blocks(key=None, num_tensors=4, shape=(16, 512), placement=Placement.DEVICE):
    return manager.allocate_blocks_cache(CacheDesc(num_tensors, shape, DataType.DT_FLOAT16, placement), key)
"""
START = f"""
config = LLMConfig()
config.device_id = 0
config.sync_kv_timeout = 30000
config.transfer_backend = backend
config.host_mem_pool_cfg = '{{"memory_size": {POOL_BYTES}}}'
if v2:
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{{"memory_size": {POOL_BYTES}, "page_shift": 16}}'
else:
    config.ge_options = {{"ge.flowGraphMemMaxSize": "{POOL_BYTES}"}}
if listen:
    config.listen_ip_info = listen
for option, value in more.items():
    setattr(config, option, value)
datadist = LLMDataDist(role, cluster_id)
datadist.init(config.generate_options())
manager = datadist.cache_manager if v2 else datadist.kv_cache_manager
datadist.listen_address.port if listen else 0
"""

_spawn = forkserver_context()
_cluster_ids = itertools.count(1)


# -- what scripts use besides the API


def fill(cache: Any, seed: int) -> None:
    """Write `content(seed)` over every byte of a cache."""
    size = cache.cache_desc.size
    for address, row in zip(cache.tensor_addrs, content(seed, len(cache.tensor_addrs), size), strict=True):
        ctypes.memmove(address, row.ctypes.data, size)


def memory(cache: Any) -> np.ndarray:
    """A copy of every byte of a cache: [num_tensors, bytes of a tensor]."""
    size = cache.cache_desc.size
    rows = [np.frombuffer(ctypes.string_at(a, size), np.uint8) for a in cache.tensor_addrs]
    return np.stack(rows)


def content(seed: int, num_tensors: int = 4, size: int = PAGE_BYTES // 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_tensors, size), dtype=np.uint8)


# -- terminals


class Failed(Exception):
    """A script raised. `kind` is the class of its exception, `status_code` the code if that had one."""

    def __init__(self, kind: str, status_code: LLMStatusCode | None, text: str) -> None:
        super().__init__(f"{kind} {status_code!r}: {text}")
        self.kind = kind
        self.status_code = status_code


class Namespace:
    """Where scripts run. Lives in the child, or here for a terminal in this process."""

    def __init__(self, imports: str) -> None:
        self._values: dict[str, Any] = {"fill": fill, "memory": memory, "content": content, "np": np}
        exec(imports + HELPERS, self._values)

    def run(self, code: str, values: dict[str, Any]) -> tuple[bool, Any]:
        """(True, value of the last expression or None), or (False, arguments of a Failed)."""
        self._values.update(values)
        try:
            return True, self._run(ast.parse(textwrap.dedent(code)))
        except Exception as error:
            text = f"{error}\n{traceback.format_exc()}"
            return False, (type(error).__name__, getattr(error, "status_code", None), text)

    def _run(self, script: ast.Module) -> Any:
        last = script.body.pop() if isinstance(script.body[-1], ast.Expr) else None
        exec(compile(script, "<terminal>", "exec"), self._values)
        if isinstance(last, ast.Expr):
            return eval(compile(ast.Expression(last.value), "<terminal>", "eval"), self._values)
        return None

    def close(self) -> None:
        if "datadist" in self._values:
            self._values["datadist"].finalize()
        self._values.clear()


@dataclass
class Terminal:
    """One user's script, with the LLMDataDist that `start` made."""

    process: Any
    number: int
    cluster_id: int = 0
    port: int = 0
    names: dict[str, int] = field(default_factory=dict)

    def run(self, code: str, **values: Any) -> Any:
        """Run a piece of script and return the value of its last expression. Raises Failed."""
        self.begin(code, **values)
        return self.finish()

    def begin(self, code: str, **values: Any) -> None:
        self.process.send("run", self.number, code, {**self.names, **values})

    def finish(self) -> Any:
        """The value of the script that `begin` started."""
        return self.process.answer()

    def start(self, role: LLMRole, backend: str, v2: bool, listen: str = "", cluster_id: int = 0, **more: Any) -> None:
        """Make and init the LLMDataDist; `more` are further options of LLMConfig."""
        self.cluster_id = cluster_id or next(_cluster_ids)
        start = {"role": role, "backend": backend, "v2": v2, "listen": listen, "cluster_id": self.cluster_id}
        self.port = self.run(START, **start, more=more)

    def link(self, *others: Terminal) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        return self.run(LINK, addresses=_addresses(others))

    def unlink(self, *others: Terminal, **how: Any) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        return self.run(UNLINK, addresses=_addresses(others), how={"timeout": 30_000, **how})

    def close(self) -> None:
        if self.process.alive:
            self.process.send("close", self.number, "", {})
            self.finish()


LINK = "datadist.link_clusters([cluster(*address) for address in addresses], timeout=30000)"
UNLINK = "datadist.unlink_clusters([cluster(*address) for address in addresses], **how)"


def _addresses(terminals: tuple[Terminal, ...]) -> list[tuple[int, int]]:
    # Whoever did not listen has no port; to unlink it, any will do.
    return [(t.cluster_id, t.port or 1) for t in terminals]


class Here:
    """The test's own process, behind the same face as `Process`."""

    alive = True

    def __init__(self) -> None:
        self._namespaces = _Namespaces(IMPORTS_RENAMED)
        self._answer: tuple[bool, Any] = (True, None)

    def terminal(self) -> Terminal:
        return Terminal(self, self._namespaces.new_number())

    def send(self, *message: Any) -> None:
        self._answer = self._namespaces.do(*message)

    def answer(self) -> Any:
        return _value(self._answer)


class Process:
    """A child process with terminals in it. Killed at the end, whatever happens."""

    def __init__(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count(1)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._pipe.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def terminal(self) -> Terminal:
        return Terminal(self, next(self._numbers))

    def send(self, *message: Any) -> None:
        self._pipe.send(message)

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            self.kill()  # its answer must not be taken for that to the next question
            raise TimeoutError("the child process did not answer")
        return _value(self._pipe.recv())

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.alive:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP: alive, but it answers nobody."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            # Its threads stop one by one, each when it runs next.
            assert eventually(lambda: _states_of_threads(self._process.pid) == {"T"})
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


def _states_of_threads(pid: int) -> set[str]:
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


class _Namespaces:
    def __init__(self, imports: str) -> None:
        self._imports = imports
        self._by_number: dict[int, Namespace] = {}
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        return next(self._numbers)

    def do(self, what: str, number: int, code: str, values: dict[str, Any]) -> tuple[bool, Any]:
        if what == "close":
            namespace = self._by_number.pop(number, None)
            if namespace is not None:
                namespace.close()
            return True, None
        if number not in self._by_number:
            self._by_number[number] = Namespace(self._imports)
        return self._by_number[number].run(code, values)


def _serve(pipe: Any) -> None:
    namespaces = _Namespaces(IMPORTS_INSTALLED)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        answer = namespaces.do(*message)
        try:
            pipe.send(answer)
        except Exception as error:  # what cannot be pickled; the process goes on
            pipe.send((False, (type(error).__name__, None, f"the value of {message[2]!r}: {error}")))


def _value(answer: tuple[bool, Any]) -> Any:
    ok, value = answer
    if not ok:
        raise Failed(*value)
    return value
