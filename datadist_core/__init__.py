# SPDX-License-Identifier: Apache-2.0
"""datadist_core: the API of LLM-DataDist on any machine, over pluggable transfer backends.

Read on in `datadist.py` (the public face), `transfer/backend.py` (the contract) and `backends/loopback.py` (the
reference). Importing this package imports neither torch nor vLLM.
"""

import sys

from . import errors
from .cache.cache import Cache, KvCache
from .cache.desc import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, MemInfo
from .cache.manager import CacheManager, KvCacheManager, TransferReport
from .cluster import LLMClusterInfo
from .config import HostPort, LLMConfig, LlmConfig
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


__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
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
    "LinkInfo",
    "LlmConfig",
    "MemInfo",
    "MemType",
    "Memtype",
    "Placement",
    "PoolStats",
    "RegisterMemStatus",
    "TransferReport",
    "errors",
    "install_as_llm_datadist",
]
