# SPDX-License-Identifier: Apache-2.0
"""Pushes of models with sliding windows, P's and D's blocks of different sizes, with vLLM's real schedulers.

vLLM frees at P what has left the window when the prompt is computed; D, which has no ticket, wants the whole of its own
first block. Every element of a block is (request, position), so whatever comes from a block that has been given to
another request is seen. The push itself is a plan of the real planner, carried out here as late as P allows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector.tests.stepped_engine import _config
from connector.tests.test_description import OURS
from connector.tests.test_push_scheduler import _window_cache
from vllm_datadist.messages import Endpoint, OfferJob, StepWork, Table
from vllm_datadist.params import parse_ticket
from vllm_datadist.worker.planner import PlanError, plan_pair

pytestmark = pytest.mark.slow
WINDOW = 64
Content = tuple[str, int]


class WindowEngine:
    """One scheduler with a group of full attention and one with a window, and its KV cache in words."""

    def __init__(self, role: str, block: int, chunk: int = 2048, num_blocks: int = 120, caching: bool = True) -> None:
        self.block = block
        config = _config(role, chunk, caching, {}, {"max_num_seqs": 4})
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks, block
        spec: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(["layers.0"], FullAttentionSpec(**spec)),
            KVCacheGroupSpec(["layers.1"], SlidingWindowSpec(**spec, sliding_window=WINDOW)),
        ]
        page = FullAttentionSpec(**spec).page_size_bytes
        tensor = KVCacheTensor(
            size=num_blocks * page, layers=["layers.0", "layers.1"], layer_stride=0, block_stride=page
        )
        caches, manager = KVCacheConfig(num_blocks, [tensor], groups), StructuredOutputManager(config)
        self.scheduler = Scheduler(config, caches, manager, block_size=block, hash_block_size=block, log_stats=True)
        connector: Any = self.scheduler.connector
        connector.set_xfer_handshake_metadata({0: Endpoint(0, 0, "127.0.0.1", 5000, 1)})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block, sha256) if caching else None
        self.memory: dict[int, list[Content]] = {}
        self.tables: tuple[Table, ...] = ()
        self.offers: list[OfferJob] = []
        self.first_tables: tuple[tuple[int, ...], ...] = ()
        self.tickets: dict[str, dict[str, Any] | None] = {}
        self._prompts: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def submit(self, name: str, num_tokens: int, params: dict[str, Any] | None = None, max_tokens: int = 1) -> None:
        """Names that begin alike, up to a ":", have prompts that begin alike."""
        prompt = self._prompts.setdefault(name.split(":")[0], len(self._prompts))
        tokens = [prompt, *range(1, num_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params is not None else None
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=self._hasher))

    def step(self, sent: Collection[str] = (), received: Collection[str] = ()) -> StepWork:
        scheduled = self.scheduler.schedule()
        work: Any = scheduled.kv_connector_metadata
        for chunk in work.push_chunks:
            self.tables = chunk.tables
        for new in scheduled.scheduled_new_reqs:
            self.first_tables = self.first_tables or tuple(map(tuple, new.block_ids))
        self.offers += work.offers
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            self._compute(name, request.num_computed_tokens - scheduled.num_scheduled_tokens[name])
            sampled.append([] if request.is_prefill_chunk else [3])
        transfers = KVConnectorOutput(set(sent), set(received))
        index = {name: i for i, name in enumerate(names)}
        output = ModelRunnerOutput(names, index, sampled, kv_connector_output=transfers)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.tickets[one.request_id] = one.kv_transfer_params
        return work

    def _compute(self, name: str, start: int) -> None:
        for table in self.scheduler.kv_cache_manager.get_block_ids(name):
            for position in range(start, self.scheduler.requests[name].num_computed_tokens):
                if block_id := table[position // self.block]:
                    content = self.memory.setdefault(block_id, [("", 0)] * self.block)
                    content[position % self.block] = (name, position)

    def run(self) -> None:
        while self.scheduler.get_num_unfinished_requests():
            self.step()

    def scribble(self) -> None:
        """Another request gets every block that is free."""
        name = f"other-{len(self.tickets)}"
        num_tokens = (self.num_free - 1) // 2 * self.block
        self.submit(name, min(num_tokens, 1500))
        self.run()
        for block in self.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks():
            self.memory[block.block_id] = [("free", 0)] * self.block


def _pushed(p: WindowEngine, d: WindowEngine, job: OfferJob) -> None:
    """What P's worker sends to D's blocks. Raises PlanError."""
    ends = []
    for engine in (p, d):
        full = msgspec.structs.replace(_window_cache(engine.block, WINDOW), window=None, kind="full_attention")
        seen = msgspec.structs.replace(_window_cache(engine.block, WINDOW), group=1, model_id=1)
        layer = msgspec.structs.replace(seen.layers[0], layer_name="layers.1")
        ends.append(msgspec.structs.replace(OURS, caches=[full, msgspec.structs.replace(seen, layers=[layer])]))
    plan = plan_pair(*ends, by_layer=True)
    for move in plan.moves(p.tables, job.tables, job.first_token, job.end_token):
        meeting = plan.meetings[move.meeting]
        begin, into = meeting.offset % p.block, meeting.offset % d.block
        for source, target in zip(move.pairs.source, move.pairs.target, strict=True):
            content = d.memory.setdefault(target, [("", 0)] * d.block)
            content[into : into + meeting.num_tokens] = p.memory[source][begin : begin + meeting.num_tokens]


def _check(d: WindowEngine, job: OfferJob, name: str) -> None:
    """Each block of D's, from its first token on, is P's."""
    for table in job.tables:
        for place, block in enumerate(table):
            if block is not None:
                first, end = place * d.block, min((place + 1) * d.block, job.end_token)
                assert d.memory[block][: end - first] == [(name, position) for position in range(first, end)]


def _to_p(name: str) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_mode": "push", "transfer_id": name}


def _to_d(name: str) -> dict[str, Any]:
    address = {"remote_host": "127.0.0.1", "remote_port": 5000}
    return {"do_remote_prefill": True, "transfer_mode": "push", "transfer_id": name, **address}


def _is_refused_by_d(num_tokens: int, block: int) -> bool:
    """The last prompt token's query reaches into a block that vLLM does not keep at D for the next one."""
    return max(0, num_tokens - WINDOW) // block < max(0, num_tokens - WINDOW + 1) // block


def _offer_of(d: WindowEngine, name: str, num_tokens: int) -> OfferJob | None:
    d.offers.clear()
    d.submit(name, num_tokens, _to_d(name))
    d.step()
    return d.offers[0] if d.offers else None


def _end(d: WindowEngine, name: str, job: OfferJob | None) -> None:
    if job is not None:
        d.step(received={name})
    d.run()


def _lengths(blocks: tuple[int, int]) -> Collection[int]:
    """Around the bounds of the window, and of each block behind it, until it all repeats."""
    return (1, 15, 16, 17, *range(WINDOW - 2, WINDOW + max(blocks) + 18))


CASES = [(16, 32, 2048), (16, 32, 23), (16, 128, 100), (48, 32, 23), (32, 16, 2048)]


@pytest.mark.parametrize(("of_p", "of_d", "chunk"), CASES)
def test_a_push_of_any_length_is_exact_however_late_it_is_sent(of_p: int, of_d: int, chunk: int) -> None:
    p, d = WindowEngine("kv_producer", of_p, chunk), WindowEngine("kv_consumer", of_d)
    num_free, num_loaded = (p.num_free, d.num_free), 0
    for num_tokens in _lengths((of_p, of_d)):
        name = f"t-{num_tokens}"
        p.submit(name, num_tokens, _to_p(name))
        p.run()
        p.step()  # tells the workers that the request has ended
        p.scribble()
        job = _offer_of(d, name, num_tokens)
        assert (job is None) is _is_refused_by_d(num_tokens, d.block), num_tokens
        if job is not None:
            num_loaded += 1
            _pushed(p, d, job)
            _check(d, job, name)
            ticket = parse_ticket(p.tickets[name] or {})
            wanted = [i * d.block // p.block for i, block in enumerate(job.tables[1]) if block is not None]
            assert all(ticket.block_ids[1][position] for position in wanted), "a D that has the ticket can use it too"
        _end(d, name, job)
        p.step(sent={name})
        assert (p.num_free, d.num_free) == num_free, "all that was kept is given back"
    assert num_loaded > 0.8 * len(_lengths((of_p, of_d)))


def test_negative_control_without_what_is_kept_half_of_the_lengths_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_datadist.scheduler.pins.LARGEST_TARGET_BLOCK", 1)
    p, d = WindowEngine("kv_producer", 16), WindowEngine("kv_consumer", 32)
    assert _outcomes(p, d, range(160, 192)).count("refused") == 16


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_p_has_from_its_prefix_cache_is_exact_or_refused(is_gone: bool) -> None:
    """Of a prompt that P has had before, vLLM gives a request no blocks that have left the window already."""
    p, d = WindowEngine("kv_producer", 16), WindowEngine("kv_consumer", 32)
    p.submit("same:0", 192)
    p.run()
    if is_gone:  # tokens 96..111; D's first block begins there, and the window of P's next request behind them
        p.scheduler.kv_cache_manager.block_pool.evict_blocks({p.first_tables[1][96 // p.block]})
    outcomes = _outcomes(p, d, range(177, 190) if is_gone else range(160, 192), "same:")
    assert set(outcomes) == {"refused" if is_gone else "exact"}


def _outcomes(p: WindowEngine, d: WindowEngine, lengths: Collection[int], prefix: str = "t") -> list[str]:
    """Of a push of each length that D wants loaded."""
    outcomes = []
    for num_tokens in lengths:
        name = f"{prefix}{num_tokens}"
        p.submit(name, num_tokens, _to_p(name))
        p.run()
        job = _offer_of(d, f"{num_tokens}/{name}", num_tokens)
        if job is not None:
            try:
                _pushed(p, d, job)
            except PlanError as error:
                outcomes.append("refused" if "the source has none" in str(error) else str(error))
            else:
                _check_positions(d, job)
                outcomes.append("exact")
        _end(d, f"{num_tokens}/{name}", job)
        p.step(sent={name})
    return outcomes


def _check_positions(d: WindowEngine, job: OfferJob) -> None:
    """As `_check`, of a prompt that several requests have computed."""
    for table in job.tables:
        for place, block in enumerate(table):
            if block is not None:
                first, end = place * d.block, min((place + 1) * d.block, job.end_token)
                assert [position for _, position in d.memory[block][: end - first]] == [*range(first, end)]


@pytest.mark.parametrize("how", ["finished", "aborted", "preempted", "preempted and aborted", "lost its window"])
def test_blocks_that_are_kept_are_given_back_whatever_happens(how: str) -> None:
    p = WindowEngine("kv_producer", 16, chunk=50)
    num_free, pool = p.num_free, p.scheduler.kv_cache_manager.block_pool
    p.submit("t-1", 200, _to_p("t-1"), max_tokens=40 if how == "lost its window" else 1)
    while not p.tables or len(p.tables[0]) < 10:
        p.step()
    kept = [block for block in p.tables[1] if block is not None]
    assert any(pool.blocks[block].ref_cnt == 2 for block in kept)
    if how.startswith("preempted"):
        p.scheduler._preempt_request(p.scheduler.running.pop(), 0.0)
        p.step()
        assert all(pool.blocks[block].ref_cnt <= 1 for block in kept), "once is enough: not kept again"
    if how.endswith("aborted"):
        p.scheduler.finish_requests("t-1", RequestStatus.FINISHED_ABORTED)
    p.run()
    if p.tickets.get("t-1"):
        assert p.num_free < num_free
        p.step(sent={"t-1"})
    p.step()
    assert p.num_free == num_free
    assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
