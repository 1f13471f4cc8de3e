# SPDX-License-Identifier: Apache-2.0
"""datadist_core: the API of LLM-DataDist on any machine, over pluggable transfer backends.

Read on in `datadist.py` (the public face), `transfer/backend.py` (the contract) and `backends/loopback.py` (the
reference). Importing this package imports neither torch nor vLLM.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import errors
from .cache.cache import Cache, KvCache
from .cache.desc import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, MemInfo
from .cache.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from .cache.manager import CacheManager, KvCacheManager
from .cache.report import TransferReport
from .cache.views import Tensor, create_tensors
from .checks import HostPort
from .cluster import LLMClusterInfo
from .config import LLMConfig, LlmConfig
from .datadist import LLMDataDist
from .errors import LLMException
from .link.link import LinkInfo
from .memory.pool import PoolStats
from .types import DataType, Deadline, LLMRole, LLMStatusCode, Memtype, Placement, RegisterMemStatus

MemType = Memtype


def install_as_llm_datadist() -> None:
    """Make `import llm_datadist` give this package, so that scripts written for it run unchanged.

    Call it before the first such import. Raises RuntimeError if the vendor's package is imported already.
    """
    present = sys.modules.get("llm_datadist")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            "llm_datadist is imported already; call install_as_llm_datadist() before the first import of it"
        )
    sys.modules["llm_datadist"] = sys.modules[__name__]
    if not any(isinstance(finder, _LlmDatadistFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LlmDatadistFinder())


class _LlmDatadistFinder(MetaPathFinder, Loader):
    """`llm_datadist.x` is `datadist_core.x`: not a second copy, whose exceptions nobody would catch."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("llm_datadist.") or sys.modules.get("llm_datadist") is not sys.modules[__name__]:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(__name__ + spec.name[len("llm_datadist") :])

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed under its own name."""


__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "DataType",
    "Deadline",
    "HostPort",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LinkInfo",
    "LlmConfig",
    "MemInfo",
    "MemType",
    "Memtype",
    "Placement",
    "PoolStats",
    "RegisterMemStatus",
    "Tensor",
    "TransferConfig",
    "TransferReport",
    "TransferWithCacheKeyConfig",
    "create_tensors",
    "errors",
    "install_as_llm_datadist",
]
