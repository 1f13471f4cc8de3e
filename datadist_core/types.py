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
    """What a cluster does: PROMPT computes KV cache (prefill), DECODER uses it, MIX does both."""

    PROMPT = 1
    DECODER = 2
    MIX = 3
    # The vendor's documents also spell the members this way.
    Prompt = 1
    Decoder = 2
    Mix = 3


class Placement(IntEnum):
    """Where a cache lives. Without an accelerator both mean CPU memory, in two distinct pools."""

    HOST = 0
    DEVICE = 1


class Memtype(IntEnum):
    """Kind of memory in a `MemInfo`."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(IntEnum):
    """State of a communicator made by `LLMDataDist.link`."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class LLMStatusCode(IntEnum):
    """Status of an operation. `LLM_SUCCESS` is 0; `LLMException.status_code` is always one of these."""

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


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock that travels down a call, so that nested waits share one budget."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    def remaining_s(self) -> float:
        """Seconds left, never negative; `math.inf` for `never()`."""
        return max(0.0, self.at_s - time.monotonic())

    def timeout(self) -> float | None:
        """What to hand to a blocking call: seconds left, or None to wait without a bound."""
        return None if math.isinf(self.at_s) else self.remaining_s()

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at_s

    def earlier(self, seconds: float) -> Deadline:
        """This deadline or `seconds` from now, whichever is first."""
        return Deadline(min(self.at_s, time.monotonic() + seconds))
