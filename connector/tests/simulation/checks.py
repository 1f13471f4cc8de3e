# SPDX-License-Identifier: Apache-2.0
"""What an engine may do with blocks, checked against what really happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_datadist.messages import RequestKey

from .blocks import BLOCK_TOKENS, Request
from .world import Violation

if TYPE_CHECKING:
    from .engine import Engine
    from .worker import SimWorker


class Checks:
    """Of one engine. Each raises Violation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tags(self, request: Request, worker: SimWorker, num_tokens: int) -> None:
        for i in range(0, num_tokens, BLOCK_TOKENS):
            end = min(i + BLOCK_TOKENS, num_tokens)
            self.tokens(request, worker, request.blocks[i // BLOCK_TOKENS], i, end)

    def tokens(self, request: Request, worker: SimWorker, block: int, first: int, end: int) -> None:
        """Tokens first..end-1, all of one block."""
        at = block * BLOCK_TOKENS + first % BLOCK_TOKENS
        for head in worker.heads:
            found, right = worker.memory[head][at : at + end - first], request.tags[head][first:end]
            if found != right:
                raise Violation(
                    "tags",
                    f"{worker.name} request {request.request_id}, head {head}: tokens {first}..{end - 1} in block "
                    f"{block} are {found}, not {right}",
                )

    def loaded(self, request: Request) -> None:
        """Its KV cache is used from now on: it must have been D's to read, all of it, all the time; or P's to write."""
        key = request.load_key
        if key is not None and key in self._engine.written:
            self._pushed(request, key)
        else:
            self._read(request, key)
        for worker in self._engine.workers:
            self.tags(request, worker, request.num_computed_tokens)

    def _read(self, request: Request, key: RequestKey | None) -> None:
        reads = self._engine.reads_of.get(key, {}) if key is not None else {}
        for worker in self._engine.workers:
            own = [read for (rank, _), read in reads.items() if rank == worker.place.index]
            heads = {head for read in own for head in read.heads}
            if heads != set(worker.heads) or not all(read.was_protected for read in own):
                raise Violation(
                    "lease",
                    f"{worker.name} uses what it read for {key}: heads {heads} of {list(worker.heads)}, leases in "
                    f"force {[read.was_protected for read in own]}",
                )

    def _pushed(self, request: Request, key: RequestKey) -> None:
        first = request.num_load_from
        for worker in self._engine.workers:
            for head in worker.heads:
                for token in range(first, request.num_computed_tokens):
                    if (worker.place.index, head, token) not in self._engine.written[key]:
                        raise Violation(
                            "complete", f"{worker.name} uses head {head} of token {token} of {key}: it was not written"
                        )

    def nobody_writes(self, request: Request) -> None:
        """Its blocks are not reserved any more, or not its own."""
        key = request.load_key
        for worker in self._engine.workers:
            if key is not None and worker.loader.is_reading(key):
                raise Violation("blocks", f"{worker.name}: the blocks of {key} are given away during its read")
            for send in self._engine.network.sends_to(worker.cluster_id):
                ref = send.push.ref.request
                if key is not None and (ref.request_id, ref.attempt) == (key.request_id, key.attempt):
                    raise Violation(
                        "reserved", f"{worker.name}: {send.worker.name} writes into blocks of {key}, given away"
                    )

    def may_be_freed(self, request: Request) -> None:
        request.awaits_load = False
        self.nobody_writes(request)
        for worker in self._engine.workers:
            for send in worker.pusher.sends.values():
                if request.hold_key is not None and send.send.key == request.hold_key:
                    raise Violation("source", f"{worker.name}: the blocks of {request.hold_key} are freed under a send")
            if request.hold_key is not None and worker.truth.protects(request.hold_key):
                raise Violation(
                    "blocks",
                    f"{worker.name}: the blocks of {request.hold_key} are freed under lease",
                )
