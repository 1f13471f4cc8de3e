# SPDX-License-Identifier: Apache-2.0
"""Arguments that are lists and that may be tuples: one entry per parameter, with a value that works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from datadist_core import (
    Cache,
    CacheDesc,
    CacheTask,
    DataType,
    LLMConfig,
    LLMStatusCode,
    TransferConfig,
    create_tensors,
)
from datadist_core.tests.argument_caches import ALLOCATE, REGISTER, REGISTER_BLOCKS, REMAP
from datadist_core.tests.argument_ends import LINK_CLUSTERS, UNLINK_CLUSTERS
from datadist_core.tests.argument_moves import COPY_BLOCKS, PULL_BLOCKS, PUSH_BLOCKS
from datadist_core.tests.argument_rows import Callee, Where
from datadist_core.tests.argument_tasks import BY_KEY, TRANSFER
from datadist_core.tests.argument_world import World, blocks_desc


@dataclass(frozen=True, slots=True)
class Accept:
    """`parameter` of `callee` is a sequence; `wrap` puts it where it belongs, if it is part of the argument."""

    callee: Callee
    parameter: str
    wrap: Callable[[Sequence[object]], object] = lambda items: items

    def __str__(self) -> str:
        return f"{self.callee.name}-{self.parameter}"

    def call(self, world: World, kind: Callable[[Sequence[object]], Sequence[object]]) -> None:
        """Call it with a `kind` of sequence; raises if it is refused or fails."""
        items = self.callee.arguments(world)[self.parameter]
        result = self.callee.call(world, **{self.parameter: self.wrap(kind(items))})
        if isinstance(result, tuple) and isinstance(result[0], LLMStatusCode):
            assert result[0] is LLMStatusCode.LLM_SUCCESS
        if isinstance(result, CacheTask):
            assert result.synchronize(10_000) is LLMStatusCode.LLM_SUCCESS


def _device_id() -> Callee:
    return Callee(
        "LLMConfig.device_id",
        lambda w: lambda value: setattr(LLMConfig(), "device_id", value),
        lambda w: {"value": [0, 1]},
        Where.NOWHERE,
    )


ACCEPTS = [
    Accept(_device_id(), "value"),
    Accept(LINK_CLUSTERS, "clusters"),
    Accept(UNLINK_CLUSTERS, "clusters"),
    Accept(
        Callee(
            "CacheDesc",
            lambda w: CacheDesc,
            lambda w: {"num_tensors": 1, "shape": [4, 8], "data_type": DataType.DT_FLOAT},
        ),
        "shape",
    ),
    Accept(
        Callee(
            "Cache.create_cpu_cache",
            lambda w: Cache.create_cpu_cache,
            lambda w: {"cache_desc": blocks_desc(), "addrs": w.addrs},
        ),
        "addrs",
    ),
    Accept(
        Callee(
            "TransferConfig",
            lambda w: TransferConfig,
            lambda w: {"dst_cluster_id": 1, "dst_addrs": [4096, 8192]},
        ),
        "dst_addrs",
    ),
    *(
        Accept(
            Callee(
                "create_tensors",
                lambda w: create_tensors,
                lambda w: {"shape": [4, 8], "dtype": DataType.DT_FLOAT, "addrs": w.addrs},
            ),
            name,
        )
        for name in ("shape", "addrs")
    ),
    *(Accept(one, "cache_keys") for one in (ALLOCATE, REGISTER)),
    *(Accept(one, "addrs") for one in (REGISTER, REGISTER_BLOCKS)),
    Accept(REMAP, "mem_infos"),
    *(Accept(one, name) for one in (PULL_BLOCKS, PUSH_BLOCKS) for name in ("src_blocks", "dst_blocks")),
    *(
        Accept(replace(one, good=lambda w, one=one: one.good(w) | {"slices": [(0, 0, 8)]}), "slices")
        for one in (PULL_BLOCKS, PUSH_BLOCKS)
    ),
    Accept(
        replace(COPY_BLOCKS, good=lambda w: COPY_BLOCKS.good(w) | {"copy_block_info": [4, 5]}),
        "copy_block_info",
        lambda items: {0: items},
    ),
    *(Accept(TRANSFER, name) for name in ("transfer_configs", "src_block_indices", "dst_block_indices")),
    Accept(replace(BY_KEY, good=lambda w: BY_KEY.good(w) | {"slices": [(0, 0, 8)]}), "slices"),
]
