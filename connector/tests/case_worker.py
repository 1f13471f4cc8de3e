# SPDX-License-Identifier: Apache-2.0
"""A worker side over the real core, in a process (and network namespace) of its own, told what to do by a test."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from connector.tests.patience import LINK_S, WORK_S
from datadist_core.testing.lossy_network import in_namespace
from datadist_core.testing.remote import RemoteObject
from vllm_datadist.description import PROTOCOL_VERSION, Description
from vllm_datadist.groups import GroupInfo
from vllm_datadist.messages import BlockTables, Endpoint, LeaseOpen, LoadJob, RemoteLease, RequestKey, StepWork
from vllm_datadist.worker.kv_layout import HeadShare, describe_caches
from vllm_datadist.worker.loads import LoadLimits
from vllm_datadist.worker.node import DataDistNode
from vllm_datadist.worker.side import WorkerPlace, WorkerSide

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 32, 2, 16, 64
LAYERS = ("layers.0", "layers.1")
GROUP = GroupInfo(0, TOKENS, None, LAYERS)
ANSWER_TIMEOUT_S = 3 * WORK_S
#: Threads that come with work, or come and go with it, up to a limit.
_BOUNDED = (
    "datadist-accept",
    "datadist-release",
    "datadist-link",
    "datadist-service",
    "datadist-revoke",
    "datadist-tcp",
    "datadist-fences",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended. `wrong`: it was reported as good, and the bytes are not P's."""

    error: str
    seconds: float
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHoldings:
    num_leases: int
    num_peers: int
    num_watched: int
    files: Counter[str]
    threads: Counter[str]

    def beyond(self, before: WorkerHoldings) -> str:
        more = {**(self.files - before.files), **(self.threads - before.threads)}
        for name in ("num_leases", "num_peers", "num_watched"):
            if getattr(self, name) > getattr(before, name):
                more[name] = getattr(self, name)
        return str(more) if more else ""


class CaseWorker:
    """Lives in the process. Block i of a layer is filled with i, the layer's number and the worker's seed."""

    def __init__(
        self, host: str, port: int, seed: int, load_timeout_s: float = WORK_S, link_timeout_s: float = LINK_S
    ) -> None:
        logging.getLogger("datadist_core").setLevel(logging.CRITICAL)  # everything here goes wrong on purpose
        size = len(LAYERS) * NUM_BLOCKS * HEADS * TOKENS * CONTENT * 4
        self._log = logging.getLogger("vllm_datadist.case")
        self._log.setLevel(logging.CRITICAL)
        node = DataDistNode(host, port, "tcp", size)
        self._side = WorkerSide(node, WorkerPlace(0, 0, 1, 1), LoadLimits(load_timeout_s, link_timeout_s, 2), self._log)
        with self._side.place_kv_cache(size):
            raw = torch.zeros(size, dtype=torch.int8, device="cpu")
        views = raw.view(torch.float32).view(len(LAYERS), NUM_BLOCKS, HEADS, TOKENS, CONTENT)
        self._tensors = dict(zip(LAYERS, views, strict=True))
        caches = describe_caches(self._tensors, [GROUP], ["full_attention"], NUM_BLOCKS, HeadShare(0, 1, HEADS))
        self._side.register(self._tensors, caches, _description([cache.description for cache in caches]))
        for number, name in enumerate(LAYERS):
            for block in range(NUM_BLOCKS):
                self._tensors[name][block] = _content(seed, number, block)
        self._attempts = 0

    def endpoint(self) -> Endpoint:
        return self._side.endpoint

    # -- P

    def hold(self, lease_s: float) -> RemoteLease:
        """Open a lease as a finished request does; what the ticket says of it."""
        self._attempts += 1
        key = RequestKey("p", self._attempts)
        self._side.start(StepWork(leases=[LeaseOpen(key, lease_s)]))
        return RemoteLease("engine", key, lease_s, (self._side.endpoint,))

    def freed(self, timeout_s: float) -> bool:
        """Whether vLLM is told within that time that the blocks are free."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if self._side.take_results().sent:
                return True
            threading.Event().wait(0.01)
        return False

    # -- D

    def load(self, remote: RemoteLease, seed: int, source: list[int], target: list[int], timeout_s: float) -> Loaded:
        """One load from begin to end. TimeoutError if it is never reported."""
        self._attempts += 1
        begun_s = time.monotonic()
        for name in LAYERS:
            self._tensors[name][target] = -1.0
        tables = BlockTables(tuple(source), tuple(target))
        job = LoadJob(RequestKey("d", self._attempts), remote, (tables,), 0, len(target) * TOKENS)
        self._side.start(StepWork(loads=[job]))
        while time.monotonic() < begun_s + timeout_s:
            for result in self._side.take_results().loads:
                seconds = time.monotonic() - begun_s
                if result.error is not None:
                    return Loaded(str(result.error), seconds)
                return Loaded("", seconds, not self._is_from(seed, source, target))
            threading.Event().wait(0.002)
        raise TimeoutError("the load was never reported")

    def limit_loads(self, load_timeout_s: float) -> None:
        """Those that begin from now on."""
        runner = self._side._runner
        assert runner is not None
        runner._limits = replace(runner._limits, load_timeout_s=load_timeout_s)

    def close(self) -> None:
        """Idempotent."""
        self._side.close()
        logging.getLogger("datadist_core").setLevel(logging.NOTSET)

    def holdings(self) -> WorkerHoldings:
        gc.collect()
        files: Counter[str] = Counter()
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                files[os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0]] += 1
        names = Counter(t.name for t in threading.enumerate() if not t.name.startswith(_BOUNDED))
        side = self._side
        return WorkerHoldings(
            side.leases.num_active, side._peers.num_peers(), side._renewals.num_watched(), files, names
        )

    def _is_from(self, seed: int, source: list[int], target: list[int]) -> bool:
        return all(
            bool((self._tensors[name][to] == _content(seed, number, block)).all())
            for number, name in enumerate(LAYERS)
            for block, to in zip(source, target, strict=True)
        )


def worker_in(namespace: str, host: str, port: int = 0, seed: int = 1, link_timeout_s: float = LINK_S) -> RemoteObject:
    """A `CaseWorker` in that namespace. The caller kills it."""
    arguments: tuple[Any, ...] = (namespace, CaseWorker, (host, port, seed, WORK_S, link_timeout_s))
    return RemoteObject(in_namespace, arguments, ANSWER_TIMEOUT_S)


def _content(seed: int, layer: int, block: int) -> torch.Tensor:
    first = float(seed * 1000 + layer * 100 + block + 1)
    return torch.full((HEADS, TOKENS, CONTENT), first) + torch.arange(CONTENT) / 128


def _description(caches: list[Any]) -> Description:
    return Description(
        version=PROTOCOL_VERSION, model="tiny", revision=None, quantization=None, dtype="float32", cache_dtype="auto",
        use_mla=False, speculative="none", tp_size=1, pp_size=1, tp_rank=0, pp_rank=0, model_config={}, caches=caches,
    )  # fmt: skip
