# SPDX-License-Identifier: Apache-2.0
"""The vendor's Python package `llm_datadist`: how it is loaded, what is used of it, what its errors mean to us.

Only documented names are used, and only as documented: V2 (`cache_manager`), `link_clusters`, `unlink_clusters`,
`check_link_status`, `switch_role`, `register_blocks_cache`, `unregister_cache`, `pull_blocks`, `push_blocks`.

`install_as_llm_datadist()` gives our own package that very name. A script that did so still gets the vendor's package
here: our alias is taken out of `sys.modules` while the vendor's is imported, and put back. Another thread that imports
`llm_datadist` in that moment gets the vendor's.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from ..errors import (
    CacheNotExist,
    ClosedError,
    LLMException,
    ParamInvalid,
    PeerLost,
    RemoteError,
    TimedOut,
    Unreachable,
)

PACKAGE = "llm_datadist"
_OURS = __name__.partition(".")[0]
_REMEDY = (
    "it comes with Huawei's CANN toolkit for Ascend devices (source its set_env.sh, or put its Python packages on "
    'PYTHONPATH); on other machines use transfer_backend="auto"'
)
_NAMES = (
    "BlocksCacheKey", "CacheDesc", "DataType", "LLMClusterInfo", "LLMConfig", "LLMDataDist", "LLMRole",
    "LLMStatusCode", "Placement",
)  # fmt: skip
_lock = threading.Lock()
_loaded: list[ModuleType] = []


class VendorCache(Protocol):
    """A registered cache, as `register_blocks_cache` returns it."""

    @property
    def cache_id(self) -> int: ...


class VendorCacheManager(Protocol):
    """What is used of the vendor's `CacheManager`. Calls return when the data is visible, and raise on failure."""

    def register_blocks_cache(
        self, cache_desc: Any, addrs: list[int], blocks_cache_key: Any = None, remote_accessible: bool | None = None
    ) -> VendorCache: ...

    def unregister_cache(self, cache_id: int) -> None: ...

    def pull_blocks(
        self,
        src_cache_key: Any,
        dst_cache: VendorCache,
        src_blocks: list[int],
        dst_blocks: list[int],
        *,
        tensor_num_per_layer: int = 2,
    ) -> None: ...

    def push_blocks(
        self,
        dst_cache_key: Any,
        src_cache: VendorCache,
        src_blocks: list[int],
        dst_blocks: list[int],
        *,
        tensor_num_per_layer: int = 2,
    ) -> None: ...


class VendorDataDist(Protocol):
    """What is used of the vendor's `LLMDataDist`. Time limits are in ms; statuses are of the vendor's LLMStatusCode."""

    @property
    def cache_manager(self) -> VendorCacheManager: ...

    def init(self, options: dict[str, str]) -> None: ...

    def finalize(self) -> None: ...

    def link_clusters(self, clusters: list[Any], timeout: int = 3000) -> tuple[Any, list[Any]]: ...

    def unlink_clusters(
        self, clusters: list[Any], timeout: int = 3000, force: bool = False
    ) -> tuple[Any, list[Any]]: ...

    def check_link_status(self, remote_cluster_id: int) -> None: ...

    def switch_role(self, role: Any, switch_options: Mapping[str, str] | None = None) -> None: ...


def load_vendor() -> Any:
    """The vendor's package, loaded by the first call. Raises Unreachable with the reason and the remedy."""
    with _lock:
        if not _loaded:
            _loaded.append(_checked(_import()))
        return _loaded[0]


def _import() -> ModuleType:
    try:
        if _is_ours(sys.modules.get(PACKAGE)):
            with _without_our_alias():
                return importlib.import_module(PACKAGE)
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise Unreachable(f"the Python package {PACKAGE} cannot be imported ({error}): {_REMEDY}") from error
    except Exception as error:  # whatever its libraries make of a host that lacks the device's driver
        raise Unreachable(f"importing the Python package {PACKAGE} failed ({error!r}): {_REMEDY}") from error


def _checked(module: ModuleType) -> ModuleType:
    missing = [name for name in _NAMES if not hasattr(module, name)]
    if missing:
        raise Unreachable(
            f"the package {PACKAGE} at {module.__file__} has no {', '.join(missing)}: is it the vendor's?"
        )
    return module


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == _OURS


@contextmanager
def _without_our_alias() -> Iterator[None]:
    """`llm_datadist` and what is below it are not ours in this block. What the vendor's import adds stays."""
    hidden = {name: module for name, module in sys.modules.items() if (name + ".").startswith(PACKAGE + ".")}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


_ERRORS: dict[str, type[LLMException]] = {
    "LLM_PARAM_INVALID": ParamInvalid,
    "LLM_KV_CACHE_NOT_EXIST": CacheNotExist,
    "LLM_TIMEOUT": TimedOut,
    "LLM_WAIT_PROCESS_TIMEOUT": TimedOut,
    "LLM_NOT_YET_LINK": PeerLost,
    "LLM_LINK_FAILED": PeerLost,
    "LLM_ENGINE_FINALIZED": ClosedError,
}


@contextmanager
def vendor_errors(what: str) -> Iterator[None]:
    """Whatever the vendor raises in this block becomes an error of ours, by its status code."""
    try:
        yield
    except LLMException:
        raise
    except Exception as error:  # the edge: nothing foreign leaves a backend
        status = status_name(getattr(error, "status_code", None))
        kind = _ERRORS.get(status, RemoteError)
        raise kind(f"the vendor's {PACKAGE} could not {what}: {status} {error}") from error


def status_name(status: object) -> str:
    """The vendor's status by its documented name; its numbers need not be ours."""
    return "" if status is None else str(getattr(status, "name", status))
