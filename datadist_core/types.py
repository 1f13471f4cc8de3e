# SPDX-License-Identifier: Apache-2.0
"""Enums, status codes and the one clock everything waits by.

The enums and their values are those of LLM-DataDist, so that numbers stored or logged by existing scripts
keep their meaning.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum, IntEnum


class LLMRole(IntEnum):
    """What a cluster does.

    Attributes:
        PROMPT: computes KV cache (prefill).
        DECODER: uses it.
        MIX: does both.
    """

    PROMPT = 1
    DECODER = 2
    MIX = 3
    # The vendor's documents also spell the members this way.
    Prompt = 1
    Decoder = 2
    Mix = 3


class Placement(IntEnum):
    """Where a cache lives. Without an accelerator both mean CPU memory, in two distinct pools.

    Attributes:
        HOST: the pool of `LLMConfig.host_mem_pool_cfg`.
        DEVICE: the pool of `LLMConfig.mem_pool_cfg` or `ge.flowGraphMemMaxSize`.
    """

    HOST = 0
    DEVICE = 1


class Memtype(IntEnum):
    """Kind of memory in a `MemInfo`.

    Attributes:
        MEM_TYPE_DEVICE: memory of an accelerator.
        MEM_TYPE_HOST: CPU memory.
    """

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(IntEnum):
    """State of a communicator made by `LLMDataDist.link`.

    Attributes:
        OK: all members have joined and are linked pairwise.
        PREPARING: some have not yet.
        FAILED: that did not come about in time, or a member has died or left since.
    """

    OK = 0
    PREPARING = 1
    FAILED = 2


class LLMStatusCode(IntEnum):
    """Status of an operation; `LLMException.status_code` is always one of these.

    Attributes:
        LLM_SUCCESS: it was done. Never the code of an exception.
        LLM_FAILED: a failure without a code of its own: a call before `init`, a layer that was not released, a
            service of a peer that raised, a transfer that was cancelled, or one whose checksums differ.
        LLM_PARAM_INVALID: an argument or option that cannot work: bad indices, ranges, sizes, descriptors that do
            not match, no pool of that placement; in V1 also a call that the role forbids.
        LLM_WAIT_PROCESS_TIMEOUT: in V1, a transfer out of time.
        LLM_KV_CACHE_NOT_EXIST: the cache or key is unknown to its owner, or was freed. Harmless, may be retried.
        LLM_REPEAT_REQUEST: kept for scripts that name it; not used here.
        LLM_REQUEST_ALREADY_COMPLETED: kept for scripts that name it; not used here.
        LLM_ENGINE_FINALIZED: after `finalize`; or this end unlinked or finalized during the operation.
        LLM_NOT_YET_LINK: there is no link to that cluster.
        LLM_ALREADY_LINK: there is a healthy link to that cluster already.
        LLM_LINK_FAILED: the link could not be made, was refused, or broke: the peer died or went away.
        LLM_UNLINK_FAILED: transfers on the link did not end in time; the link stays.
        LLM_NOTIFY_PROMPT_UNLINK_FAILED: this end is unlinked, but the peer did not confirm it.
        LLM_CLUSTER_NUM_EXCEED_LIMIT: kept for scripts that name it; there is no limit here.
        LLM_PROCESSING_LINK: another call, or the other end, is making this link.
        LLM_DEVICE_OUT_OF_MEMORY: in V1, the pool has no free range that is large enough.
        LLM_PREFIX_ALREADY_EXIST: kept for scripts that name it; not used here.
        LLM_PREFIX_NOT_EXIST: kept for scripts that name it; not used here.
        LLM_SEQ_LENOVERLIMIT: kept for scripts that name it; not used here.
        LLM_NO_FREE_BLOCK: kept for scripts that name it; not used here.
        LLM_BLOCKS_OUT_OF_MEMORY: kept for scripts that name it; not used here.
        LLM_EXIST_LINK: `switch_role` while there are links.
        LLM_FEATURE_NOT_ENABLED: it needs an option that was not set, or a package that is not installed.
        LLM_TIMEOUT: out of time: linking, a link check, waiting for a `CacheTask`; in V2 also a transfer.
        LLM_LINK_BUSY: the link is being unlinked. Otherwise any number of calls share a link without conflict.
        LLM_OUT_OF_MEMORY: in V2, the pool has no free range that is large enough; or no pool of that size can be made.
        LLM_DEVICE_MEM_ERROR: kept for scripts that name it; not used here.
        LLM_SUSPECT_REMOTE_ERROR: the peer could not do what it was asked, or broke the protocol.
        LLM_UNKNOWN_ERROR: the peer answered with a status that this version does not know.
    """

    LLM_SUCCESS = 0
    LLM_FAILED = 1
    LLM_PARAM_INVALID = 2
    LLM_WAIT_PROCESS_TIMEOUT = 3
    LLM_KV_CACHE_NOT_EXIST = 4
    LLM_REPEAT_REQUEST = 5
    LLM_REQUEST_ALREADY_COMPLETED = 6
    LLM_ENGINE_FINALIZED = 7
    LLM_NOT_YET_LINK = 8
    LLM_ALREADY_LINK = 9
    LLM_LINK_FAILED = 10
    LLM_UNLINK_FAILED = 11
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 12
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 13
    LLM_PROCESSING_LINK = 14
    LLM_DEVICE_OUT_OF_MEMORY = 15
    LLM_PREFIX_ALREADY_EXIST = 16
    LLM_PREFIX_NOT_EXIST = 17
    LLM_SEQ_LENOVERLIMIT = 18
    LLM_NO_FREE_BLOCK = 19
    LLM_BLOCKS_OUT_OF_MEMORY = 20
    LLM_EXIST_LINK = 21
    LLM_FEATURE_NOT_ENABLED = 22
    LLM_TIMEOUT = 23
    LLM_LINK_BUSY = 24
    LLM_OUT_OF_MEMORY = 25
    LLM_DEVICE_MEM_ERROR = 26
    LLM_SUSPECT_REMOTE_ERROR = 27
    LLM_UNKNOWN_ERROR = -1


class DataType(Enum):
    """Element type of a cache. The value is the name NumPy (or ml_dtypes) knows it by."""

    DT_FLOAT = "float32"
    DT_FLOAT16 = "float16"
    DT_BF16 = "bfloat16"
    DT_INT8 = "int8"
    DT_INT16 = "int16"
    DT_UINT16 = "uint16"
    DT_UINT8 = "uint8"
    DT_INT32 = "int32"
    DT_INT64 = "int64"
    DT_UINT32 = "uint32"
    DT_UINT64 = "uint64"
    DT_BOOL = "bool"
    DT_DOUBLE = "float64"
    DT_STRING = "string"
    # Not in the original: fp8 KV caches.
    DT_FLOAT8_E4M3 = "float8_e4m3fn"
    DT_FLOAT8_E5M2 = "float8_e5m2"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 0 for DT_STRING, which no cache can hold."""
        return _ITEM_BYTES[self.value]


_ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8,
    "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "string": 0,
}  # fmt: skip


#: As good as never (23 days), and in range for every call of the system that waits.
LONGEST_S = 2_000_000.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock that travels down a call, so that nested waits share one budget.

    Attributes:
        at_s: seconds on `time.monotonic`.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """`seconds` from now."""
        return cls(time.monotonic() + min(seconds, LONGEST_S))

    @classmethod
    def never(cls) -> Deadline:
        """A deadline that does not pass."""
        return cls(math.inf)

    def remaining_s(self) -> float:
        """Seconds left, never negative; `math.inf` for `never()`."""
        return max(0.0, self.at_s - time.monotonic())

    def timeout(self) -> float | None:
        """What to hand to a blocking call: seconds left, or None to wait without a bound."""
        return None if math.isinf(self.at_s) else self.remaining_s()

    @property
    def expired(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at_s

    def earlier(self, seconds: float) -> Deadline:
        """This deadline or `seconds` from now, whichever is first."""
        return Deadline(min(self.at_s, time.monotonic() + min(seconds, LONGEST_S)))
