# SPDX-License-Identifier: Apache-2.0
"""The question who the workers of an engine are, D to P where no ticket names them, and its answer."""

from __future__ import annotations

import msgspec

WORKERS = "datadist.workers"


class AskWorkers(msgspec.Struct, frozen=True):
    """Which workers does your engine have?"""


class WorkerAddress(msgspec.Struct, frozen=True):
    """An `Endpoint` on its way."""

    pp_rank: int
    tp_rank: int
    host: str
    port: int
    cluster_id: int
    first_layer: int = 0


class EngineClaim(msgspec.Struct, frozen=True):
    """What the worker that is asked says of its engine; each of its workers must say so too: see `worker.claims`.

    Attributes:
        block_tokens: tokens per block, by KV cache group, of the groups that this worker has layers of.
        fingerprint: of all that they must say alike.
    """

    tp_size: int
    pp_size: int
    dp_rank: int
    block_tokens: dict[int, int]
    fingerprint: str


class Workers(msgspec.Struct, frozen=True):
    """All workers of an engine; none as long as the worker that is asked has not been told.

    `engine`: None only of a peer of another protocol version.
    """

    workers: list[WorkerAddress]
    engine: EngineClaim | None = None
