# SPDX-License-Identifier: Apache-2.0
"""The test end, `datadist doctor --listen`: it links with anybody who may, and serves memory that means nothing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ..cache.desc import BlocksCacheKey, CacheDesc
from ..checks import HostPort
from ..config import LLMConfig
from ..datadist import LLMDataDist
from ..errors import LLMException, ProtocolError
from ..types import DataType, LLMRole, Placement

#: A service that every test end answers, and no other.
SCRATCH_SERVICE = "datadist_core.doctor.scratch"
BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 128
_POOL_BYTES = BLOCK_BYTES * (NUM_BLOCKS + 16)
_MODEL_ID = 0


class Scratch(msgspec.Struct, frozen=True):
    """What a test end offers: a cache of blocks, filled with `pattern(seed)`."""

    model_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class EndOptions:
    """How to make an end. `security` is the option's JSON text, or "". `backend_options`: by backend."""

    backends: str = "auto"
    security: str = ""
    backend_options: Mapping[str, Any] = field(default_factory=dict)


def make_end(options: EndOptions, listen: HostPort | None, v2: bool = True, pool_bytes: int = 0) -> LLMDataDist:
    """An end with a random cluster id. Raises what `init` raises."""
    config = LLMConfig()
    config.transfer_backend = options.backends
    config.enable_cache_manager = v2
    config.global_resource_config = json.dumps(dict(options.backend_options))
    if pool_bytes:
        config.host_mem_pool_cfg = json.dumps({"memory_size": pool_bytes})
    if listen is not None:
        config.listen_ip_info = str(listen)
    # One of 2**62: never that of an engine, nor of another doctor. In V1 it is the decoder that dials.
    end = LLMDataDist(LLMRole.MIX if listen is not None else LLMRole.DECODER, secrets.randbits(62) + 1)
    settings = config.generate_options()
    if options.security:
        settings["llm.Security"] = options.security
    end.init(settings)
    return end


class TestEnd:
    """An end with scratch memory. Also what lives in the child process of the self-test."""

    __test__ = False  # for pytest: this is no test

    def __init__(self, options: EndOptions, listen: HostPort) -> None:
        self._end = make_end(options, listen, pool_bytes=_POOL_BYTES)
        desc = CacheDesc(1, (NUM_BLOCKS, BLOCK_BYTES), DataType.DT_UINT8, Placement.HOST)
        key = BlocksCacheKey(self._end.cluster_id, _MODEL_ID)
        self._cache = self._end.cache_manager.allocate_blocks_cache(desc, key)
        seed = secrets.randbits(32)
        self._cache.numpy()[0][:] = pattern(seed)
        answer = msgspec.msgpack.encode(Scratch(_MODEL_ID, seed))
        self._end._open().services.register(SCRATCH_SERVICE, lambda cluster_id, body: answer)

    def address(self) -> HostPort:
        address = self._end.listen_address
        if address is None:
            raise LLMException("the test end does not listen")
        return address

    def cluster_id(self) -> int:
        return self._end.cluster_id

    def unavailable(self) -> dict[str, str]:
        """Backends that were asked for and cannot be opened, with the reason."""
        return dict(self._end._open().engine.unavailable)

    def close(self) -> None:
        self._end.finalize()


def pattern(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the scratch memory holds."""
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def decode_scratch(body: bytes) -> Scratch:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=Scratch)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the test end describes its scratch memory wrongly: {error}") from error
