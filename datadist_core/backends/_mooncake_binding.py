# SPDX-License-Identifier: Apache-2.0
"""Loading Mooncake's binding, and what can be told to it only through the environment or its libraries.

Logging: Mooncake logs with glog to stderr, several lines for every engine and one for every request that fails. What
goes wrong becomes an exception here, so nothing of that is shown unless MC_LOG_LEVEL is set (INFO, WARNING, ERROR)
or Mooncake was in use before us.

Time limits: Mooncake reads them from the environment when an engine is made. They are set for that moment only, and
only those that the user has not set: MC_TRANSFER_TIMEOUT (one call), MC_TCP_STATUS_TIMEOUT_SEC and
MC_TCP_PROGRESS_TIMEOUT_SEC (a connection on which nothing moves). Without us each is 30 s.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import Unreachable

_MODULE = "mooncake.engine"
_REMEDY = 'install it with pip install "vllm-datadist[mooncake]"'
_PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
"""What its wheel links and does not bring."""
_TIME_LIMITS = ("MC_TRANSFER_TIMEOUT", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
_LOG_LEVEL = "MC_LOG_LEVEL"
_GLOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"  # glog's FLAGS_minloglevel
_NOTHING = 3  # only what ends the process

_lock = threading.RLock()


class RawEngine(Protocol):
    """What is used of `mooncake.engine.TransferEngine`. Calls return 0 or an error code, if nothing else is said."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def get_local_topology(self) -> str: ...

    def register_memory(self, address: int, num_bytes: int) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def send_probe(self, name: str) -> int: ...

    def batch_transfer_sync(
        self, name: str, local: list[int], remote: list[int], num_bytes: list[int], opcode: Any, /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class Binding:
    """The loaded binding. `log_level` is glog's own variable, None if it was not found."""

    new_engine: Callable[[], RawEngine]
    read_opcode: Any
    write_opcode: Any
    log_level: ctypes.c_int | None

    @contextmanager
    def silent(self) -> Iterator[bool]:
        """Without log lines, if that is possible (the value). For provoking errors inside Mooncake."""
        with _lock:
            level = self.log_level
            if level is None:
                yield False
                return
            before, level.value = level.value, _NOTHING
            try:
                yield True
            finally:
                level.value = before


def load() -> Binding:
    """Mooncake, loaded by the first call. Raises Unreachable with the reason and the remedy."""
    with _lock:
        in_use = _MODULE in sys.modules
        try:
            with environment({} if in_use else {_LOG_LEVEL: "ERROR"}):
                module = importlib.import_module(_MODULE)
            level = _find_log_level(module.__file__ or "")
            if level is not None and not in_use and _LOG_LEVEL not in os.environ:
                level.value = _NOTHING
            opcodes = module.TransferOpcode
            return Binding(module.TransferEngine, opcodes.Read, opcodes.Write, level)
        except ModuleNotFoundError as error:
            raise Unreachable(f"Mooncake is not installed ({error}); {_REMEDY}") from error
        except (ImportError, OSError) as error:
            raise Unreachable(_why_not_loadable(error)) from error
        except AttributeError as error:
            raise Unreachable(f"this version of Mooncake has another interface ({error}); {_REMEDY}") from error


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """`settings` in the environment, but for those that the user has made, until the block is left."""
    with _lock:
        ours = {name: value for name, value in settings.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


def time_limits(timeout_s: int) -> dict[str, str]:
    return dict.fromkeys(_TIME_LIMITS, str(timeout_s))


def _find_log_level(path: str) -> ctypes.c_int | None:
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(path), _GLOG_LEVEL)
    except (OSError, ValueError):
        return None


def _why_not_loadable(error: Exception) -> str:
    package = next((package for library, package in _PACKAGES.items() if library in str(error)), None)
    hint = f"; the library is in Debian's and Ubuntu's package {package}" if package else ""
    return f"Mooncake is installed but cannot be loaded ({error}){hint}; otherwise {_REMEDY}"
