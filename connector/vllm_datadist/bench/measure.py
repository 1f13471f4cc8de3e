# SPDX-License-Identifier: Apache-2.0
"""The measuring. From outside, over HTTP, and the same for every connector.

One sample is one hand-off of a prompt of k blocks and one token, so that a prefix cache can hold all but one token:

1. P is asked for one token, with the salt of 2., and gives a ticket. Not timed. Then D answers some other short
   prompt, not timed either: D is awake when the next request comes, as it is in 3.
2. D is asked for one token, with the ticket: `request_ms`. Its prefix cache does not have the prompt, because the
   request carries a cache salt that is new. D gets the KV cache from P and computes one token.
3. D is asked for the same, without a ticket and with the same salt, three times: `cached_ms`. The KV cache is now in
   D's own prefix cache, and D computes one token again.

request_ms less the median of all cached_ms of that length is what the hand-off adds. HTTP, scheduling and the forward
pass are in both, so that what is left is the connector's: the steps until it begins, the transfer, and the steps until
vLLM knows of it. Afterwards D continues the text from what it got, several tokens, which must be P's own; and D's
counters must say that the first request's tokens came from P, and the other ones' from its own cache.

P computes a prompt once and hands it off a few times, since prefill is what takes long. Both KV caches are small and
are gone through before anything counts, so that no page of theirs is touched for the first time in a sample.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .contenders import Contender, contenders_of
from .http_calls import Answer, Counters, RequestFailed, complete, read_counters
from .model import ServedModel, make_kv_heavy_model, read_model
from .results import Results, Sample, make_row
from .servers import Progress, Server, ServerFailed, ServerSetup, running

BLOCK_TOKENS = 128
"""vLLM's default on a CPU."""
CONTINUATION_TOKENS = 6
NUM_CACHED = 3
PROMPT_USES = 4
"""Samples per prompt that P computes."""
SPARE_BLOCKS = 3
NUM_WARM_UPS = 2
COUNTERS_TIMEOUT_S = 5.0
SHORT_PROMPT = (1, 2, 3, 4)
ASK_FOR_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        tokens: lengths of prompts, each a multiple of BLOCK_TOKENS, and one.
        repeats: samples per length, contender and round.
        rounds: how often each contender's servers are started.
        model: None = the KV-heavy one, made here.
    """

    backends: tuple[str, ...]
    peers: tuple[str, ...]
    tokens: tuple[int, ...]
    repeats: int
    rounds: int
    model: Path | None

    @property
    def first_tokens(self) -> int:
        """The length of the first hand-off."""
        return min(self.tokens)


@dataclass(slots=True)
class Record:
    """What one contender has done so far, over all rounds."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    first_ms: list[float] = field(default_factory=list)


def run(plan: Plan, progress: Progress) -> Results:
    """Measure everything that `plan` names. Raises UnusableModel, or OSError where no file can be written."""
    results = Results()
    contenders = contenders_of(plan.backends, plan.peers)
    records = {contender.name: Record() for contender in contenders}
    with tempfile.TemporaryDirectory(prefix="vllm-datadist-bench-") as scratch:
        model = _model(plan.model, Path(scratch), progress)
        for number in range(plan.rounds):
            for contender in contenders:
                if contender.name not in results.skipped and contender.name not in results.failed:
                    progress(f"{contender.name}: starting P and D (round {number + 1} of {plan.rounds})")
                    _measure(contender, plan, model, Path(scratch), records[contender.name], results, progress)
    for name, record in records.items():
        _add_rows(results, name, record, plan, model)
    return results


def _model(chosen: Path | None, scratch: Path, progress: Progress) -> ServedModel:
    if chosen is not None:
        return read_model(chosen)
    progress("making a model with much KV cache")
    make_kv_heavy_model(scratch / "kv-heavy")
    return read_model(scratch / "kv-heavy")


def _add_rows(results: Results, name: str, record: Record, plan: Plan, model: ServedModel) -> None:
    for tokens, samples in record.samples.items():
        first_ms = record.first_ms if tokens == plan.first_tokens else ()
        results.rows.append(make_row(name, tokens, tokens * model.kv_bytes_per_token, samples, first_ms))
        problem = next((sample.problem for sample in samples if sample.problem), None)
        if problem is not None:
            results.failed.setdefault(name, f"{tokens} tokens: {problem}")


# -- one contender


def _measure(
    contender: Contender,
    plan: Plan,
    model: ServedModel,
    scratch: Path,
    record: Record,
    results: Results,
    progress: Progress,
) -> None:
    """One round. What keeps the contender from being measured goes into `results`."""
    reason = contender.why_not_here()
    if reason:
        results.skipped[contender.name] = reason
        return
    try:
        with running(_servers(contender, plan, model, scratch), progress) as [prefill, decode]:
            pair = Pair(prefill.port, decode.port, model.vocab_size)
            try:
                _sample_all(contender.name, pair, plan, record, progress)
            except RequestFailed as error:
                results.failed[contender.name] = f"{error}\n{prefill.log_tail()}\n{decode.log_tail()}"
            else:
                results.bytes_over[contender.name] = tuple(read_counters(decode.port).bytes_by_backend)
    except ServerFailed as error:
        results.skipped[contender.name] = str(error)
    for reasons in (results.skipped, results.failed):
        if contender.name in reasons:
            progress(f"{contender.name}: {reasons[contender.name]}")


def _servers(contender: Contender, plan: Plan, model: ServedModel, scratch: Path) -> list[Callable[[], Server]]:
    longest = max(plan.tokens) + CONTINUATION_TOKENS
    num_blocks = math.ceil(longest / BLOCK_TOKENS) + SPARE_BLOCKS
    setup = ServerSetup(model, BLOCK_TOKENS, num_blocks, longest)

    def maker(name: str, role: str) -> Callable[[], Server]:
        log = scratch / f"{contender.name}-{name}.log"
        transfer = contender.transfer_config(role)
        return lambda: Server(f"{contender.name} {name}", setup, transfer, contender.make_env(), log)

    return [maker("P", "kv_producer"), maker("D", "kv_consumer")]


def _sample_all(name: str, pair: Pair, plan: Plan, record: Record, progress: Progress) -> None:
    progress(f"{name}: first hand-off, warm-up")
    # What vLLM itself does only once is no part of the first hand-off.
    ordinary = pair.new_prompt(plan.first_tokens)
    complete(pair.prefill_port, ordinary.token_ids, 1)
    complete(pair.decode_port, ordinary.token_ids, 1)
    record.first_ms.append(pair.hand_off(pair.new_prompt(plan.first_tokens), new_salt()).elapsed_ms)
    longest = pair.new_prompt(max(plan.tokens))
    for _ in range(NUM_WARM_UPS):
        pair.hand_off(longest, new_salt())
    for tokens in plan.tokens:
        samples = record.samples.setdefault(tokens, [])
        prompts = [pair.new_prompt(tokens) for _ in range(0, plan.repeats, PROMPT_USES)]
        for number in range(plan.repeats):
            samples.append(pair.sample(prompts[number // PROMPT_USES]))
            made = samples[-1]
            progress(
                f"{name}: {tokens} tokens, {number + 1}/{plan.repeats}: {made.request_ms:.0f} ms, "
                f"from D's own cache {min(made.cached_ms):.0f}{' WRONG' if made.problem else ''}"
            )


# -- one sample


@dataclass(slots=True, eq=False)
class Prompt:
    """`continuation`: P's own, once it has been asked for it."""

    token_ids: list[int]
    continuation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """P and D."""

    prefill_port: int
    decode_port: int
    vocab_size: int

    def new_prompt(self, num_tokens: int) -> Prompt:
        return Prompt(random.choices(range(min(256, self.vocab_size)), k=num_tokens))

    def hand_off(self, prompt: Prompt, salt: str) -> Answer:
        """D's answer, of one token. Raises RequestFailed."""
        ticket = complete(self.prefill_port, prompt.token_ids, 1, salt=salt, ticket=ASK_FOR_TICKET).ticket
        if ticket is None:
            raise RequestFailed("P gave no ticket (kv_transfer_params)")
        complete(self.decode_port, SHORT_PROMPT, 1)
        return complete(self.decode_port, prompt.token_ids, 1, salt=salt, ticket=ticket)

    def sample(self, prompt: Prompt) -> Sample:
        """Raises RequestFailed."""
        before, salt = read_counters(self.decode_port), new_salt()
        answer = self.hand_off(prompt, salt)
        cached = [complete(self.decode_port, prompt.token_ids, 1, salt=salt) for _ in range(NUM_CACHED)]
        text = complete(self.decode_port, prompt.token_ids, CONTINUATION_TOKENS, salt=salt).token_ids
        if not prompt.continuation:
            prompt.continuation = complete(self.prefill_port, prompt.token_ids, CONTINUATION_TOKENS).token_ids
        problem = why_wrong_text(prompt.continuation, answer.token_ids, text) or self._why_wrong_source(
            before, len(prompt.token_ids)
        )
        return Sample(answer.elapsed_ms, tuple(each.elapsed_ms for each in cached), problem)

    def _why_wrong_source(self, before: Counters, num_tokens: int) -> str:
        """Counters follow a step behind the answer, so they are waited for."""
        stop_s = time.monotonic() + COUNTERS_TIMEOUT_S
        while True:
            problem = why_wrong_source(before, read_counters(self.decode_port), num_tokens)
            if not problem or time.monotonic() > stop_s:
                return problem
            time.sleep(0.02)


def why_wrong_text(right: Sequence[int], first: Sequence[int], text: Sequence[int]) -> str:
    """`first`: D's answer to the hand-off. `text`: what D made of the KV cache that it got. "" if both are P's."""
    if tuple(text) != tuple(right) or tuple(first) != tuple(right[: len(first)]) or not first:
        return f"D's text is wrong: {list(first)} and {list(text)}, P's own is {list(right)}"
    return ""


def why_wrong_source(before: Counters, after: Counters, num_tokens: int) -> str:
    """One request's KV cache came from P, all others' from D's prefix cache: "" if D has counted just that."""
    external = after.external_tokens - before.external_tokens
    local = after.local_tokens - before.local_tokens
    whole_blocks = (NUM_CACHED + 1) * ((num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    if external not in (num_tokens - 1, num_tokens) or local != whole_blocks:
        return f"D had {external:g} tokens from P and {local:g} in its cache, not {num_tokens} and {whole_blocks}"
    return ""


def new_salt() -> str:
    return f"{random.getrandbits(64):016x}"
