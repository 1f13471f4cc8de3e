# SPDX-License-Identifier: Apache-2.0
"""A worker side over the real core, and what its engine would do: for tests of pushes, here or in another process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from connector.tests.patience import LINK_S, WORK_S
from datadist_core.testing.parallel import eventually
from datadist_core.testing.remote import RemoteObject
from vllm_datadist.description import PROTOCOL_VERSION, Description
from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import (
    Endpoint,
    LeaseOpen,
    OfferJob,
    PushChunk,
    PushEnd,
    PushOpen,
    PushSource,
    RemoteLease,
    RequestKey,
    StepWork,
    WorkerNotes,
)
from vllm_datadist.worker.exchange import PushLimits
from vllm_datadist.worker.kv_layout import HeadShare, describe_caches
from vllm_datadist.worker.loads import LoadLimits
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import WorkerPlace, WorkerSide

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 32, 2, 4, 8
LAYERS = ("layers.0", "layers.1", "layers.2")
P_KEY, D_KEY = RequestKey("p-1", 1), RequestKey("d-1", 1)
LEASE_S = 2 * WORK_S
#: Of 33 tokens.
SOURCE_TABLE, TARGET_TABLE = (3, 9, 1, 12, 7, 20, 21, 22, 23), (8, 2, 14, 4, 5, 6, 10, 11, 13)


@dataclass(frozen=True)
class Shape:
    """Of the worker's engine, and which of its ranks it is. Its KV cache holds NUM_BLOCKS * TOKENS tokens."""

    block_tokens: int = TOKENS
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def num_heads(self) -> int:
        return HEADS // self.tp_size

    @property
    def first_head(self) -> int:
        return self.tp_rank * self.num_heads

    @property
    def num_blocks(self) -> int:
        return NUM_BLOCKS * TOKENS // self.block_tokens


class Reported:
    """What vLLM has been told so far."""

    def __init__(self) -> None:
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.errors: list[str] = []
        self.notes = WorkerNotes()


class PushWorker:
    """`content`: elements of one head of one token; the more, the longer a transfer takes."""

    def __init__(
        self,
        backend: str,
        push_timeout_s: float = WORK_S,
        shape: Shape = Shape(),
        content: int = CONTENT,
        link_timeout_s: float = LINK_S,
    ) -> None:
        self.shape = shape
        size = len(LAYERS) * NUM_BLOCKS * shape.num_heads * TOKENS * content * 4
        log = logging.getLogger("vllm_datadist.push_worker")
        log.setLevel(logging.CRITICAL)  # things go wrong here on purpose
        node = DataDistNode("127.0.0.1", 0, backend, size)
        limits = LoadLimits(load_timeout_s=WORK_S, link_timeout_s=link_timeout_s, num_threads=2)
        place = WorkerPlace(0, shape.tp_rank, shape.tp_size, shape.tp_size)
        self.side = WorkerSide(node, place, limits, log, PushLimits(push_timeout_s, 2))
        with self.side.place_kv_cache(size):
            raw = torch.zeros(size, dtype=torch.int8, device="cpu")
        dims = len(LAYERS), shape.num_blocks, shape.num_heads, shape.block_tokens, content
        self.tensors = dict(zip(LAYERS, raw.view(torch.float32).view(dims), strict=True))
        group = GroupInfo(0, shape.block_tokens, None, LAYERS)
        heads = HeadShare(shape.tp_rank, shape.tp_size, HEADS)
        caches = describe_caches(self.tensors, [group], ["full_attention"], shape.num_blocks, heads)
        self.side.register(self.tensors, caches, _describe(shape, [cache.description for cache in caches]))
        self.side.start(StepWork(workers=(self.side.endpoint,)))
        self.reported = Reported()

    @property
    def pushes(self) -> Any:
        return self.side._exchange.pushes

    @property
    def offers(self) -> Any:
        return self.side._exchange.offers

    def endpoint(self) -> Endpoint:
        return self.side.endpoint

    def close(self) -> None:
        self.side.close()

    # --- P's engine ---

    def tell(self, work: StepWork) -> None:
        """A step that computes nothing."""
        self.side.retract(work)
        self.side.start(work)
        self.side.step_computed()

    def step(self, first: int, end: int, table: Sequence[int] = SOURCE_TABLE, seed: int = 1) -> None:
        """One step: told, computed layer by layer, ended."""
        self.side.start(chunk(first, end, table, block_tokens=self.shape.block_tokens))
        self.compute(first, end, table, seed)
        self.side.step_computed()

    def compute(
        self, first: int, end: int, table: Sequence[int], seed: int = 1, layers: Sequence[str] = LAYERS
    ) -> None:
        """What a forward pass writes: the value of each token in each layer is its own."""
        for name in layers:
            for token in range(first, end):
                self._cell(name, token, table)[:] = self._values(seed, name, token)
            self.side.layer_computed(name)

    def _cell(self, name: str, token: int, table: Sequence[int]) -> torch.Tensor:
        """One token: [heads, content]."""
        size = self.shape.block_tokens
        return self.tensors[name][table[token // size], :, token % size]

    def _values(self, seed: int, name: str, token: int) -> torch.Tensor:
        first, count = self.shape.first_head, self.shape.num_heads
        return torch.tensor([[value(seed, name, token) + head / 16] for head in range(first, first + count)])

    def num_offers(self) -> int:
        return int(self.pushes.num_open())

    def age_leases(self, end_s: float) -> threading.Event:
        """From now on time passes for leases before each sweep, and only then, half a second. The event: the end."""
        leases, now_s, passed = self.side.leases.unlocked, [0.0], threading.Event()
        leases._clock = lambda: now_s[0]
        renew = leases.renew

        def after_a_while(keys: Sequence[RequestKey]) -> object:
            now_s[0] = min(end_s, now_s[0] + 0.5)
            states = renew(keys)
            if now_s[0] >= end_s:
                passed.set()
            return states

        leases.renew = after_a_while  # type: ignore[method-assign]
        return passed

    # --- D's engine ---

    def holds(
        self, first: int, end: int, table: Sequence[int] = TARGET_TABLE, seed: int = 1, layers: Sequence[str] = LAYERS
    ) -> bool:
        return all(
            bool((self._cell(name, token, table) == self._values(seed, name, token)).all())
            for name in layers
            for token in range(first, end)
        )

    def run_out(self, grace_s: float = WORK_S) -> None:
        """The time of what D has offered is over; without P's word it is reported as failed after `grace_s` more."""
        with self.offers.lock:
            runs, now_s = dict(self.offers._runs), time.monotonic()
            for machine in runs:
                machine.deadline_s = now_s
            for group in self.offers._table._groups.values():
                group.gives_up_s = now_s + grace_s
        for run in runs.values():
            run.wake()

    def is_untouched(self, blocks: Sequence[int]) -> bool:
        return not any(bool(tensor[list(blocks)].any()) for tensor in self.tensors.values())

    def scribble(self, blocks: Sequence[int]) -> None:
        """Other requests have got these blocks."""
        for tensor in self.tensors.values():
            tensor[list(blocks)] = -1.0

    # --- what vLLM is told ---

    def poll(self) -> Reported:
        results, reported = self.side.take_results(), self.reported
        reported.sent |= results.sent
        assert not reported.received & results.received, "reported twice"
        reported.received |= results.received
        reported.failed |= results.failed
        reported.errors += [str(end.error) for end in results.pushes if end.error is not None]
        reported.notes = reported.notes.aggregate(results.notes)
        return reported

    def until(self, done: Callable[[Reported], bool], seconds: float = 2 * WORK_S) -> Reported:
        """Poll as the engine does; fails when it takes too long."""
        until_s = time.monotonic() + seconds
        while not done(self.poll()):
            if time.monotonic() > until_s:
                raise AssertionError(f"not reported in time: {vars(self.reported)}")
            threading.Event().wait(0.002)
        return self.reported

    def received(self, seconds: float = 2 * WORK_S) -> Reported:
        return self.until(lambda reported: bool(reported.received), seconds)

    def settled(self, seconds: float = 2 * WORK_S) -> Reported:
        return self.until(lambda reported: reported.notes.settled == reported.notes.unsettled, seconds)

    def sent(self, seconds: float = 2 * WORK_S) -> Reported:
        return self.until(lambda reported: bool(reported.sent), seconds)


class RemotePushWorker:
    """A `PushWorker` in a process of its own. It must be killed or closed."""

    def __init__(self, *arguments: Any) -> None:
        self._remote = RemoteObject(PushWorker, arguments, 3 * WORK_S)
        self.pid = self._remote.pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._remote.call(name, *arguments)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._remote.kill()


def value(seed: int, layer: str, token: int) -> float:
    return seed * 10000 + LAYERS.index(layer) * 1000 + token + 1


def opened(num_tokens: int, key: RequestKey = P_KEY, digest: str = "x", name: str = "t") -> StepWork:
    return StepWork(push_opens=[PushOpen(key, name, num_tokens, digest)])


def chunk(
    first: int, end: int, table: Sequence[int] = SOURCE_TABLE, key: RequestKey = P_KEY, block_tokens: int = TOKENS
) -> StepWork:
    return StepWork(push_chunks=[PushChunk(key, first, end, (tuple(table[: -(-end // block_tokens)]),))])


def held(key: RequestKey = P_KEY, lease_s: float = LEASE_S) -> StepWork:
    return StepWork(leases=[LeaseOpen(key, lease_s)], push_ends=[PushEnd(key)])


def source(endpoint: Endpoint, has_ticket: bool = False) -> PushSource:
    remote = RemoteLease("engine", P_KEY, LEASE_S, (endpoint,)) if has_ticket else None
    return PushSource("t", endpoint.host, endpoint.port, remote)


def offered(
    endpoint: Endpoint,
    first: int,
    end: int,
    has_ticket: bool = False,
    key: RequestKey = D_KEY,
    digest: str = "x",
    block_tokens: int = TOKENS,
) -> StepWork:
    """D has the blocks before `first` from its prefix cache: they are in the table, and must not be written."""
    targets = tuple(TARGET_TABLE[: -(-end // block_tokens)])
    return StepWork(offers=[OfferJob(key, source(endpoint, has_ticket), (targets,), first, end, end, digest)])


def _describe(shape: Shape, caches: list[Any]) -> Description:
    return Description(
        version=PROTOCOL_VERSION, model="tiny", revision=None, quantization=None, dtype="float32", cache_dtype="auto",
        use_mla=False, speculative="none", tp_size=shape.tp_size, pp_size=1, tp_rank=shape.tp_rank, pp_rank=0,
        model_config={}, caches=caches,
    )  # fmt: skip


Start = Callable[..., PushWorker]


@contextmanager
def workers_started() -> Iterator[Start]:
    """Starts workers and ends them all, also when the test fails."""
    started: list[PushWorker] = []

    def start(*arguments: object) -> PushWorker:
        started.append(PushWorker(*(arguments or ("auto",))))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.close()


def offer_is_there(p: PushWorker) -> None:
    assert eventually(lambda: p.num_offers() == 1)
