# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests and its block pool, as far as a hand-off can tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_datadist.messages import RequestKey

from .shape import NUM_HEADS
from .world import Violation

BLOCK_TOKENS = 4
STATUS = {
    name: SimpleNamespace(name=name)
    for name in (
        "WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED",
        "FINISHED_STOPPED", "FINISHED_ABORTED", "FINISHED_ERROR",
    )
}  # fmt: skip


class Block:
    """As vLLM's KVCacheBlock, as far as it is read."""

    is_null = False
    __slots__ = ("block_id",)

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


BLOCKS = [Block(i) for i in range(256)]


class Prompt:
    """`family`: prompts of one family begin alike. The KV cache of a token is one number that no other token has."""

    def __init__(self, family: int, num_tokens: int) -> None:
        self.family = family
        self.num_tokens = num_tokens
        self.token_ids = [family * 1000 + i for i in range(num_tokens)]

    def tags(self, num_tokens: int, head: int) -> list[int]:
        base = (head + 1) * 10**9 + self.family * 10**6
        own = base + (self.num_tokens + 1) * 10**4
        return [base + i if i < self.num_tokens else own + i for i in range(num_tokens)]


class Request:
    """As vLLM's Request, as far as it is read, and what the model needs besides."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: dict[str, Any] | None,
        num_out: int,
        done: Callable[[Request], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids: list[int] | None = prompt.token_ids
        self.num_prompt_tokens = prompt.num_tokens
        self.num_computed_tokens = 0
        self.num_tokens = prompt.num_tokens
        self.max_tokens = prompt.num_tokens + num_out
        self.kv_transfer_params = params
        self.status = STATUS["WAITING"]
        self.blocks: list[int] = []
        self.tags = [prompt.tags(self.max_tokens, head) for head in range(NUM_HEADS)]
        self.is_freed = False
        #: Its blocks are reserved for a load: nobody computes in them.
        self.awaits_load = False
        self.num_load_from = 0
        self.num_preemptions = 0
        #: How many blocks the workers have been told of; None = never scheduled.
        self.num_told: int | None = None
        self.was_preempted = False
        self.load_key: RequestKey | None = None
        self.is_pushed = False
        self.hold_key: RequestKey | None = None
        self.ticket: dict[str, Any] | None = None
        self.done = done

    @property
    def transfer_id(self) -> str:
        """Of a push that the router has named; "" for others."""
        return (self.kv_transfer_params or {}).get("transfer_id", "")

    @property
    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")


class BlockPool:
    """Reference counts, a prefix cache, and a free list that gives away what came back last (or first)."""

    def __init__(self, num_blocks: int, caches_prefixes: bool, takes_last: bool) -> None:
        self.free: deque[int] = deque(range(1, num_blocks))
        self.num_blocks = num_blocks - 1
        self._caches_prefixes = caches_prefixes
        self._takes_last = takes_last
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, tuple[int, int]] = {}
        self._cached: dict[tuple[int, int], int] = {}

    def hits(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of this request; never all of its tokens."""
        found: list[int] = []
        if self._caches_prefixes:
            for i in range((request.num_prompt_tokens - 1) // BLOCK_TOKENS):
                block = self._cached.get((request.prompt.family, i))
                if block is None:
                    break
                found.append(block)
        return found

    def can_allocate(self, count: int, hits: list[int]) -> bool:
        return count <= len(self.free) - sum(1 for block in hits if self._refs[block] == 0)

    def allocate(self, count: int, hits: list[int]) -> list[int]:
        for block in hits:
            if self._refs[block] == 0:
                self.free.remove(block)
            self._refs[block] += 1
        taken = []
        for _ in range(count):
            block = self.free.pop() if self._takes_last else self.free.popleft()
            old = self._hash_of.pop(block, None)
            if old is not None and self._cached.get(old) == block:
                del self._cached[old]
            self._refs[block] = 1
            taken.append(block)
        return hits + taken

    def remember(self, request: Request, num_tokens: int) -> None:
        if self._caches_prefixes:
            for i in range(min(num_tokens, request.num_prompt_tokens) // BLOCK_TOKENS):
                key, block = (request.prompt.family, i), request.blocks[i]
                if key not in self._cached and block not in self._hash_of:
                    self._cached[key] = block
                    self._hash_of[block] = key

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.free.append(block)
            elif self._refs[block] < 0:
                raise Violation("blocks", f"block {block} was freed twice")
