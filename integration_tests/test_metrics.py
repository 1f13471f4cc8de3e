# SPDX-License-Identifier: Apache-2.0
"""/metrics of P and D after pulls and pushes, D's line per request, and the trace of a real pair."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connector.tests.test_trace import check_format
from examples.vllm_pd.servers import Completion, VllmServer, completion, free_port, metric_samples, start_all
from integration_tests.fleet import CHUNK_TOKENS, config, eventual_value, random_prompt, wait_until_blocks_are_free
from vllm_datadist.trace_report import RequestSummary, by_handoff, merge, read_directory, summarize

BLOCK = 32
PROMPT = 3 * BLOCK
OURS = "vllm:datadist_"


@dataclass(frozen=True)
class Pair:
    """P (pulls and pushes) and D (recomputes what it cannot load), both with a trace."""

    prefill: VllmServer
    decode: VllmServer
    port: int
    traces: Path
    bytes_per_token: int
    num_layers: int

    def p(self, prompt: list[int], **params: Any) -> Completion:
        asked = {"do_remote_decode": True, **params}
        return completion(self.prefill.base_url, prompt, 1, model="model", kv_transfer_params=asked)

    def d(self, prompt: list[int], params: dict[str, Any], **body: Any) -> Completion:
        return completion(self.decode.base_url, prompt, 2, model="model", kv_transfer_params=params, **body)

    def ticket(self, prompt: list[int]) -> dict[str, Any]:
        ticket = self.p(prompt).kv_transfer_params
        assert ticket
        return ticket

    def pull(self, prompt: list[int], at: list[int] | None = None, **body: Any) -> None:
        """`at`: what P prefills, if that is not all of it."""
        self.d(prompt, self.ticket(at or prompt), **body)

    def push(self, prompt: list[int], name: str) -> None:
        """P and D at the same time, as a router may ask them; P when D has reached it, so that they overlap."""
        ours = {"transfer_mode": "push", "transfer_id": name}
        at = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self.port}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.d, prompt, {**ours, **at})
            assert eventual_value(lambda: "await link" in self.events_of(name), True)
            self.p(prompt, **ours)
            asked.result()

    def events_of(self, key: str) -> Counter[str]:
        """What the traces say of a hand-off so far. They are written some times a second."""
        events = by_handoff(merge(read_directory(self.traces))).get(key, [])
        return Counter(event["name"] for event in events)

    def lines(self) -> list[str]:
        """D's lines of where tokens came from, without their beginnings."""
        return re.findall(r"request \S+: (\w+ \((?:pull|push)\): of \d+ prompt.*)", self.decode.log_path.read_text())


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model, logs, traces = models("llama"), tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("traces")
    port = free_port()

    def server(name: str, role: str, extra: dict[str, Any], **fields: Any) -> VllmServer:
        return VllmServer(
            model,
            kv_transfer_config=config(role, {"trace": str(traces), **extra}, **fields),
            name=name,
            block_size=BLOCK,
            extra_args=["--max-num-batched-tokens", str(CHUNK_TOKENS)],
            env={"VLLM_LOGGING_LEVEL": "DEBUG"} if name == "decode" else None,
            log_dir=logs,
        )

    prefill = server("prefill", "kv_producer", {"host": "127.0.0.1", "port": port})
    decode = server("decode", "kv_consumer", {}, kv_load_failure_policy="recompute")
    shape = json.loads((model / "config.json").read_text())
    layer_bytes = 2 * shape["num_key_value_heads"] * shape["head_dim"] * 4
    num_layers = shape["num_hidden_layers"]
    with start_all([prefill, decode]):
        yield Pair(prefill, decode, port, traces, num_layers * layer_bytes, num_layers)


class Numbers(Counter[str]):
    """Our counters, and the counts of our histograms: "name" or "name label=value,label=value"."""

    @classmethod
    def of(cls, server: VllmServer) -> Numbers:
        numbers = cls()
        for sample in metric_samples(server.base_url):
            if sample.name.startswith(OURS) and sample.name.endswith(("_total", "_count")):
                labels = {name: value for name, value in sample.labels.items() if name not in ("engine", "model_name")}
                shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                numbers[f"{sample.name.removeprefix(OURS)} {shown}".strip()] = int(sample.value)
        return numbers


def _grown(server: VllmServer, before: Numbers, wanted: dict[str, int]) -> dict[str, int]:
    """What has grown since, once it is what is wanted, or after a while."""
    return eventual_value(lambda: dict(Numbers.of(server) - before), wanted)


def _check(pair: Pair, act: Callable[[], None], at_p: dict[str, int], at_d: dict[str, int], line: str) -> None:
    """`act` makes our metrics grow by exactly this, and D write exactly this line."""
    p_before, d_before, num_lines = Numbers.of(pair.prefill), Numbers.of(pair.decode), len(pair.lines())
    act()
    assert _grown(pair.decode, d_before, at_d) == at_d
    assert _grown(pair.prefill, p_before, at_p) == at_p
    assert eventual_value(lambda: len(pair.lines()) - num_lines, 1) == 1
    assert pair.lines()[-1].startswith(line)


def _loaded(mode: str, num_tokens: int = PROMPT, num_cached: int = 0) -> dict[str, int]:
    grown = {
        f"requests_total mode={mode},outcome=loaded": 1,
        f"remote_tokens_total mode={mode}": num_tokens - num_cached,
        f"load_seconds_count mode={mode}": 1,
        f"wait_seconds_count awaited=blocks,mode={mode},rank=scheduler": 1,
        f"wait_seconds_count awaited=link,mode={mode},rank=0": 1,
    }
    return grown | ({"cached_tokens_total": num_cached, "local_tokens_total": num_cached} if num_cached else {})


def _handed_off(mode: str, outcome: str = "released") -> dict[str, int]:
    return {f"handoffs_total mode={mode},outcome={outcome}": 1, f"lease_seconds_count mode={mode}": 1}


def _pulled(pair: Pair, num_tokens: int) -> dict[str, int]:
    return {
        "transfer_bytes_total backend=shm,mode=pull,rank=0": num_tokens * pair.bytes_per_token,
        "transfer_seconds_count mode=pull,rank=0": 1,
        "wait_seconds_count awaited=thread,mode=pull,rank=0": 1,
        "wait_seconds_count awaited=confirmation,mode=pull,rank=0": 1,
    }


def test_a_pull_and_what_is_cached(pair: Pair) -> None:
    prompt = random_prompt(PROMPT, "metrics pull")
    _check(
        pair,
        lambda: pair.pull(prompt),
        _handed_off("pull"),
        _loaded("pull") | _pulled(pair, PROMPT),
        f"loaded (pull): of {PROMPT} prompt tokens {PROMPT} from P ",
    )
    longer = prompt + random_prompt(BLOCK, "metrics tail")
    _check(
        pair,
        lambda: pair.pull(longer),
        _handed_off("pull"),
        _loaded("pull", PROMPT + BLOCK, PROMPT) | _pulled(pair, BLOCK),
        f"loaded (pull): of {PROMPT + BLOCK} prompt tokens {BLOCK} from P ",
    )
    line = pair.lines()[-1]
    num_bytes = BLOCK * pair.bytes_per_token
    assert f"{PROMPT} cached here, 0 computed here; " in line
    assert f" {num_bytes} bytes in " in line
    assert f" over shm from 127.0.0.1:{pair.port}, waited " in line


def test_a_push(pair: Pair) -> None:
    prompt = random_prompt(PROMPT, "metrics push")
    pushed = {
        "transfer_bytes_total backend=shm,mode=push,rank=0": PROMPT * pair.bytes_per_token,
        "transfer_seconds_count mode=push,rank=0": 1,
    }
    _check(
        pair,
        lambda: pair.push(prompt, "metrics-push"),
        _handed_off("push") | pushed,
        _loaded("push") | {"wait_seconds_count awaited=prefill,mode=push,rank=0": 1},
        f"loaded (push): of {PROMPT} prompt tokens {PROMPT} from P ",
    )


def test_gauges(pair: Pair) -> None:
    def gauges(server: VllmServer) -> dict[str, float]:
        samples = metric_samples(server.base_url)
        return {
            s.name.removeprefix(OURS): s.value for s in samples if s.name in (f"{OURS}links", f"{OURS}active_leases")
        }

    wait_until_blocks_are_free(pair.prefill)
    for server in (pair.prefill, pair.decode):
        wanted = {"links": 1.0, "active_leases": 0.0}
        assert eventual_value(lambda server=server: gauges(server), wanted) == wanted, server.name
    ticket = pair.ticket(random_prompt(PROMPT, "metrics lease"))
    held = {"links": 1.0, "active_leases": 1.0}
    assert eventual_value(lambda: gauges(pair.prefill), held) == held
    pair.d(random_prompt(BLOCK, "another prompt"), ticket)  # refused, which lets P go
    assert eventual_value(lambda: gauges(pair.prefill), wanted) == wanted


def _computed(mode: str, outcome: str, reason: str, num_tokens: int, num_cached: int = 0) -> dict[str, int]:
    grown = {
        f"requests_total mode={mode},outcome={outcome}": 1,
        f"recomputed_tokens_total reason={reason}": num_tokens - num_cached,
        "local_tokens_total": num_tokens,
        f"wait_seconds_count awaited=blocks,mode={mode},rank=scheduler": 1,
    }
    return grown | ({"cached_tokens_total": num_cached} if num_cached else {})


def test_reasons_for_computing_here(pair: Pair) -> None:
    prompt = random_prompt(PROMPT, "metrics reasons")
    ticket = pair.ticket(prompt)
    other = random_prompt(PROMPT, "metrics other")
    refused = _computed("pull", "refused", "ticket_prompt", PROMPT)
    line = f"refused (pull): of {PROMPT} prompt tokens 0 from P "
    _check(pair, lambda: pair.d(other, ticket), _handed_off("pull"), refused, line)
    broken = {**ticket, "remote_num_tokens": "many"}
    unread = _computed("pull", "refused", "ticket_malformed", PROMPT)
    third = random_prompt(PROMPT, "metrics third")
    _check(pair, lambda: pair.d(third, broken), {}, unread, f"refused (pull): of {PROMPT} prompt tokens 0 from P, ")
    had = random_prompt(2 * BLOCK, "metrics had")
    pair.d([*had, 7], {})
    nothing = _computed("pull", "not_needed", "beyond_ticket", len(had) + 3, len(had))
    line = f"not_needed (pull): of {len(had) + 3} prompt tokens 0 from P "
    _check(pair, lambda: pair.pull([*had, 1, 2, 3], at=had), _handed_off("pull"), nothing, line)


def test_several_answers_have_a_line_each(pair: Pair) -> None:
    prompt = random_prompt(PROMPT, "metrics several")
    before, num_lines, p_before = Numbers.of(pair.decode), len(pair.lines()), Numbers.of(pair.prefill)
    pair.pull(prompt, n=2, temperature=1.0, seed=5)
    wanted = Numbers(_loaded("pull")) + Numbers(_pulled(pair, PROMPT))
    wanted += Numbers(_computed("pull", "followed", "follower", PROMPT, PROMPT - BLOCK))
    assert _grown(pair.decode, before, dict(wanted)) == dict(wanted)
    assert _grown(pair.prefill, p_before, _handed_off("pull")) == _handed_off("pull")
    outcomes = lambda: sorted(line.split()[0] for line in pair.lines()[num_lines:])  # noqa: E731
    assert eventual_value(outcomes, ["followed", "loaded"]) == ["followed", "loaded"]


def test_a_load_that_fails_is_counted_by_kind_and_recomputed(pair: Pair) -> None:
    prompt = random_prompt(PROMPT, "metrics link")
    ticket = json.loads(json.dumps(pair.ticket(prompt)))
    [worker] = ticket["datadist"]["workers"]
    worker["cluster_id"] = "77"  # as if P had been started again at its port
    wanted = _computed("pull", "failed", "load_failed_link", PROMPT) | {
        "failed_loads_total mode=pull": 1,
        "transfer_failures_total kind=link,mode=pull,rank=0": 1,
        "load_seconds_count mode=pull": 1,
        "wait_seconds_count awaited=thread,mode=pull,rank=0": 1,
        "wait_seconds_count awaited=link,mode=pull,rank=0": 1,
    }
    _check(pair, lambda: pair.d(prompt, ticket), {}, wanted, f"failed (pull): of {PROMPT} prompt tokens 0 from P ")


def test_the_trace_of_the_pair(pair: Pair) -> None:
    """Everything above is in it, on one timeline."""
    prompt = random_prompt(7 * CHUNK_TOKENS + 5, "metrics trace")
    pair.push(prompt, "metrics-trace")
    at_d = {"queued": 1, "load": 1, "first scheduled": 1}
    at_p = {"chunk scheduled": 8, "prefill": 1, "lease": 1}
    at_ps_worker = {"chunk": 8, "layer": 8 * pair.num_layers}
    num_bytes = -(-len(prompt) // BLOCK) * BLOCK * pair.bytes_per_token
    wanted = ({**at_d, **at_p, **at_ps_worker}, num_bytes)

    def traced() -> tuple[dict[str, int], int]:
        """Each process writes a file of its own, some times a second: what happened first may be written last."""
        names = pair.events_of("metrics-trace")
        summaries = {one.key: one for one in summarize(merge(read_directory(pair.traces)))}
        return {name: names[name] for name in wanted[0]}, summaries["metrics-trace"].num_bytes

    assert eventual_value(traced, wanted) == wanted
    events = merge(read_directory(pair.traces))
    check_format(events)
    found = {one.key: one for one in summarize(events)}
    pushed = found["metrics-trace"]
    assert isinstance(pushed, RequestSummary)
    assert pushed.hidden_share is not None
    assert 0 < pushed.hidden_share <= 1
    chunks = [event["args"] for event in by_handoff(events)["metrics-trace"] if event["name"] == "chunk"]
    assert sum(chunk["end_token"] - chunk["first_token"] for chunk in chunks) == len(prompt)
    pulls = [one for one in found.values() if one.transfer_ms and one.key.startswith("cmpl")]
    assert pulls
    assert all(one.hidden_share == 0 for one in pulls), "a pull begins when P has ended"
    arrows = Counter(event["ph"] for event in events if event["ph"] in "sf")
    assert arrows["s"] == arrows["f"] > 0
