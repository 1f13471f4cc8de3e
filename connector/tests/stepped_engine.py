# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler with the real scheduler half of the connector, and a toy in place of model and worker.

What a server takes seconds for, a test does here in milliseconds, step by step: chunk sizes, preemption, priorities,
async scheduling (which vLLM's CPU servers switch off), aborts at a chosen step, loads that fail or wait. The toy model
computes one number per token from all numbers before it, which it reads through the request's block table, and chooses
the next token by it: any wrong, missing or overwritten entry changes the text. The toy worker copies what a `LoadJob`
says from P's memory to D's, and answers for the leases at once, or when the test says so.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_datadist.messages import Endpoint, LoadJob, RequestKey, StepWork

BLOCK = 16
VOCABULARY = 251
_PRIME = 2**61 - 1
MAX_STEPS = 5000


def toy_text(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What is right: the toy model without any engine."""
    tokens, entries = list(prompt), []
    for _ in range(num_tokens):
        entries += _compute(entries, tokens[len(entries) :])
        tokens.append(_sample(entries))
    return tokens[len(prompt) :]


def _compute(before: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The KV entries of `tokens`, which come after those whose entries are `before`."""
    state = 7
    for entry in before:
        state = (state * 1_000_003 + entry) % _PRIME
    entries = []
    for token in tokens:
        entries.append((state * 31 + token * 7919 + 11) % _PRIME)
        state = (state * 1_000_003 + entries[-1]) % _PRIME
    return entries


def _sample(entries: Sequence[int]) -> int:
    return (sum(entries) + entries[-1] // 7) % VOCABULARY


@cache
def _model_dir() -> str:
    from transformers import LlamaConfig

    directory = tempfile.TemporaryDirectory(prefix="toy-model-")
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=2000)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory.name)
    _model_dir.keep = directory  # type: ignore[attr-defined]
    return directory.name


@dataclass
class Answer:
    """What a client has of a request so far."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    params: dict[str, Any] | None = None


@dataclass
class _Step:
    """One step that the toy has executed, and vLLM has not been told of."""

    scheduled: Any
    req_ids: list[str]
    sampled: list[list[int]]


class Engine:
    """One engine. Loads read from `peers`, engines by their cluster id.

    Args:
        role: kv_producer, kv_consumer or kv_both.
        peers: shared by all engines of a test.
        num_blocks: of its KV cache, one of which is vLLM's null block.
        chunk: most tokens per step (max_num_batched_tokens).
        is_async: schedule a step before the one before it has been answered, as vLLM does on GPUs.
        transfer: further fields of the kv_transfer_config.
        scheduling: further fields of the scheduler's config.
    """

    def __init__(
        self,
        role: str,
        peers: dict[int, Engine],
        *,
        num_blocks: int = 200,
        chunk: int = 64,
        is_async: bool = False,
        prefix_caching: bool = True,
        transfer: dict[str, Any] | None = None,
        **scheduling: Any,
    ) -> None:
        self.peers, self.cluster_id = peers, len(peers) + 1
        peers[self.cluster_id] = self
        config = _config(role, chunk, prefix_caching, transfer or {}, scheduling)
        config.scheduler_config.async_scheduling = is_async  # which the CPU platform has switched off
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        page = spec.page_size_bytes
        tensor = KVCacheTensor(size=num_blocks * page, layers=["layer"], layer_stride=page, block_stride=page)
        caches = KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)])
        make = AsyncScheduler if is_async else Scheduler
        manager = StructuredOutputManager(config)
        self.scheduler = make(config, caches, manager, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True)
        self.connector: Any = self.scheduler.connector
        worker = Endpoint(0, 0, "127.0.0.1", 5000 + self.cluster_id, self.cluster_id)
        self.connector.set_xfer_handshake_metadata({0: worker})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.memory = [[-1] * BLOCK for _ in range(num_blocks)]
        self.answers: dict[str, Answer] = {}
        self.leases: dict[RequestKey, bool] = {}
        self.loads: dict[RequestKey, LoadJob] = {}
        self.num_loaded_tokens = 0
        self.num_preemptions = 0
        self.holds_loads = False
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._sampled: dict[tuple[str, int], int] = {}
        self._pending: deque[_Step] = deque()
        self._depth = 2 if is_async else 1

    # --- what a client does -----------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        stop_at: int | None = None,
    ) -> Answer:
        stops = [] if stop_at is None else [stop_at]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, stop_token_ids=stops)
        sampling.extra_args = {"kv_transfer_params": dict(params)} if params is not None else None
        hasher = self._hasher if self.scheduler.cache_config.enable_prefix_caching else None
        request = Request(
            name, list(prompt), sampling, None, priority=priority, cache_salt=cache_salt, block_hasher=hasher
        )
        for key in [key for key in self._sampled if key[0] == name]:
            del self._sampled[key]
        self.answers[name] = Answer(list(prompt))
        self.scheduler.add_request(request)
        return self.answers[name]

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def prefill(self, name: str, prompt: Sequence[int], **params: Any) -> dict[str, Any]:
        """A whole request to P: the ticket."""
        answer = self.submit(name, prompt, 1, {"do_remote_decode": True, **params})
        self.run()
        assert answer.params is not None
        return answer.params

    def decode(self, name: str, prompt: Sequence[int], num_tokens: int, params: dict[str, Any] | None) -> Answer:
        """A whole request to D."""
        answer = self.submit(name, prompt, num_tokens, params)
        self.run()
        assert answer.finish_reason is not None
        return answer

    # --- what the engine does ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule and execute one step; deliver the oldest one as soon as `is_async` lets it wait no longer."""
        scheduled = self.scheduler.schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        self.work(scheduled.kv_connector_metadata)
        self._pending.append(self._execute(scheduled))
        self.after_execute(scheduled.kv_connector_metadata)
        if len(self._pending) >= self._depth:
            self._deliver(self._pending.popleft())

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until nothing is left to do, or `until` holds."""
        is_done = until or (lambda: not self._has_work())
        for _ in range(MAX_STEPS):
            if is_done():
                return
            self.step()
        raise AssertionError(f"no end after {MAX_STEPS} steps: {self.scheduler.requests}")

    def _has_work(self) -> bool:
        reports = self._sent or self._received
        steps_under_way = any(step.req_ids for step in self._pending)
        unfinished = self.scheduler.get_num_unfinished_requests() > 0
        return bool(reports or steps_under_way or unfinished or self.connector.has_pending_push_work())

    @property
    def num_held_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def _execute(self, scheduled: Any) -> _Step:
        step = _Step(scheduled, [], [])
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens  # counted when the step was scheduled
            token = self._forward(request, end - count, end)
            is_last = not request.is_prefill_chunk
            if is_last:
                self._sampled[name, end] = token
            step.req_ids.append(name)
            step.sampled.append([token] if is_last else [])
        return step

    def _forward(self, request: Request, start: int, end: int) -> int:
        table = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        before = [self.memory[table[i // BLOCK]][i % BLOCK] for i in range(start)]
        entries = _compute(before, [self._token(request, i) for i in range(start, end)])
        for position, entry in zip(range(start, end), entries, strict=True):
            self.memory[table[position // BLOCK]][position % BLOCK] = entry
        return _sample(before + entries)

    def _token(self, request: Request, position: int) -> int:
        known = request.all_token_ids
        return known[position] if position < len(known) else self._sampled[request.request_id, position]

    def _deliver(self, step: _Step) -> None:
        meta = self.take_worker_meta()
        transfers = KVConnectorOutput(
            self._sent, self._received, failed_recving=self._failed, kv_connector_worker_meta=meta
        )
        self._sent, self._received, self._failed = set(), set(), set()
        index = {name: i for i, name in enumerate(step.req_ids)}
        output = ModelRunnerOutput(step.req_ids, index, step.sampled, kv_connector_output=transfers)
        for outputs in self.scheduler.update_from_output(step.scheduled, output).values():
            for one in outputs.outputs:
                self._note(one)

    def _note(self, output: Any) -> None:
        answer = self.answers[output.request_id]
        answer.tokens += output.new_token_ids
        if output.finish_reason is not None:
            answer.finish_reason, answer.params = str(output.finish_reason), output.kv_transfer_params

    # --- what the worker does ---------------------------------------------------------------------------------

    def after_execute(self, metadata: Any) -> None:
        """For a worker that does something with what the step has computed."""

    def take_worker_meta(self) -> Any:
        """What a worker tells its connector's scheduler half beside the ends of transfers."""
        return None

    def received(self, names: Iterable[str]) -> None:
        """Loads of these requests have ended well."""
        self._received.update(names)

    def work(self, work: StepWork) -> None:
        """What the connector told the workers with this step; before it is executed."""
        for lease in work.leases:
            self.leases[lease.key] = True
        for load in work.loads:
            self.loads[load.key] = load
        for release in work.releases:
            self._peer(release.remote.workers[0]).end_lease(release.remote.key)
        for key in work.ended:
            if key in self.loads and not self.holds_loads:
                self.end_load(key, failed=True)
        if not self.holds_loads:
            for key in list(self.loads):
                self.end_load(key)

    def end_lease(self, key: RequestKey) -> bool:
        """Released, or over. Whether it was in force. P's next step opens it: D may be faster."""
        if key not in self.leases and self.connector.has_pending_push_work():
            self.step()
        if self.leases.pop(key, None):
            self._sent.add(key.request_id)
            return True
        return False

    def end_load(self, key: RequestKey, failed: bool = False) -> None:
        """Copy, release, report: or report only that nothing came."""
        load = self.loads.pop(key)
        peer = self._peer(load.remote.workers[0])
        if not failed:
            self._copy(load, peer)
        was_held = peer.end_lease(load.remote.key)
        self._received.add(key.request_id)
        if failed or not was_held:
            self._failed.add(key.request_id)

    def _copy(self, load: LoadJob, peer: Engine) -> None:
        tables = load.groups[0]
        for position in range(load.first_token, load.end_token):
            source, target = tables.source[position // BLOCK], tables.target[position // BLOCK]
            assert source is not None
            assert target is not None
            self.memory[target][position % BLOCK] = peer.memory[source][position % BLOCK]
        self.num_loaded_tokens += load.end_token - load.first_token

    def _peer(self, worker: Endpoint) -> Engine:
        return self.peers[worker.cluster_id]


@cache
def _model() -> ModelConfig:
    return ModelConfig(model=_model_dir(), tokenizer=_model_dir(), skip_tokenizer_init=True, dtype="float32")


def _config(
    role: str, chunk: int, prefix_caching: bool, transfer: dict[str, Any], scheduling: dict[str, Any]
) -> VllmConfig:
    fields = {"kv_connector": "DataDistConnector", "kv_role": role} | transfer
    fields.setdefault("kv_connector_module_path", "vllm_datadist.connector")
    scheduler = {"max_num_seqs": min(chunk, 16), "max_num_batched_tokens": chunk} | scheduling
    return VllmConfig(
        model_config=_model(),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_model_len=2048, enable_chunked_prefill=True, is_encoder_decoder=False, **scheduler
        ),
        kv_transfer_config=KVTransferConfig(**fields),
    )
