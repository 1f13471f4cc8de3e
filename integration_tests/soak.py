# SPDX-License-Identifier: Apache-2.0
"""Servers are killed or frozen at random moments under load, for a fixed time: does anything go wrong for good?

    python -m integration_tests.soak --seconds 600 --seed 1

Two prefill and two decode servers, one of each at a time gets a SIGSTOP (and later a SIGCONT) or a SIGKILL (and is
started again on the same ports). All the time, clients send hand-offs of random prompts through random pairs. Each
request must end within its deadline: with the text that the model gives without any hand-off, or, if one of its two
servers was touched by a fault while it ran, with an error. At the end nothing goes on any more, every server answers
right, and all blocks are free. The seed decides which faults come when; the rest of a run depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from examples.vllm_pd.models import make_tiny_model
from examples.vllm_pd.servers import VllmServer, completion, free_port, start_all
from examples.vllm_pd.supervise import signal_each
from integration_tests.fleet import (
    KV_USAGE,
    NUM_TOKENS,
    PATIENCE_S,
    alone,
    config,
    eventual_value,
    handed_off,
    random_prompt,
)
from integration_tests.warm_start import warm_servers

BLOCK = 32
LEASE_S = 4.0
LOAD_TIMEOUT_S = 10.0
#: A request takes two steps of this length at most. A frozen server is woken well before.
STEP_DEADLINE_S = 90.0
MAX_FREEZE_S = 8.0
#: A run lasts until there were so many.
MIN_FREEZES, MIN_KILLS = 2, 1
#: Lengths around the block bounds, and some that take a while.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 8 * BLOCK, 500, 900)
NUM_PROMPTS = 12
NUM_CLIENTS = 3


@dataclass
class Summary:
    """What a run found. `excused`: failed within the deadline while one of its two servers was touched by a fault."""

    seed: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    right: int = 0
    excused: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    blocks_back: bool = False
    all_right_afterwards: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        no_problem = self.failed == self.wrong == self.hung == 0 and not self.problems
        return no_problem and self.right > 0 and self.blocks_back and self.all_right_afterwards


class Target:
    """One server that may be frozen or killed. Thread-safe."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._num_touches = 0
        self._is_touched = False

    @contextmanager
    def touched(self) -> Iterator[None]:
        with self._lock:
            self._num_touches += 1
            self._is_touched = True
        try:
            yield
        finally:
            with self._lock:
                self._is_touched = False

    def mark(self) -> tuple[int, bool]:
        """To tell later whether it was touched meanwhile."""
        with self._lock:
            return self._num_touches, self._is_touched

    def was_touched_since(self, mark: tuple[int, bool]) -> bool:
        return mark[1] or self.mark() != mark


class Soak:
    """See the module."""

    def __init__(self, model: Path, directory: Path, seconds: float, seed: int, max_kills: int) -> None:
        self.summary = Summary(seed, seconds)
        self._max_kills = max_kills
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._counts: Counter[str] = Counter()
        ports = {free_port() for _ in range(24)}
        self._prefills = [Target(_server(model, directory, "prefill", i, ports)) for i in range(2)]
        self._decodes = [Target(_server(model, directory, "decode", i, ports)) for i in range(2)]
        self._prompts = [random_prompt(LENGTHS[i % len(LENGTHS)], ("soak", i)) for i in range(NUM_PROMPTS)]
        self._right: list[list[int]] = []

    @property
    def _targets(self) -> list[Target]:
        return [*self._prefills, *self._decodes]

    def run(self) -> Summary:
        with start_all([target.server for target in self._targets]):
            self._right = [alone(self._prefills[0].server, prompt) for prompt in self._prompts]
            clients = [threading.Thread(target=self._load, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
            for client in clients:
                client.start()
            self._inject(time.monotonic() + self.summary.seconds)
            self._stop.set()
            for client in clients:
                client.join(2 * STEP_DEADLINE_S + 10)
                self._counts["hung"] += client.is_alive()
            self._check_afterwards()
        for name, count in self._counts.items():
            setattr(self.summary, name, count)
        return self.summary

    # --- faults -----------------------------------------------------------------------------------------------

    def _inject(self, end_s: float) -> None:
        kinds: Counter[str] = Counter()
        while time.monotonic() < end_s or not self._has_enough(kinds):
            target = self._random.choice(self._targets)
            may_kill = kinds["SIGKILL"] < self._max_kills
            kind = "SIGKILL" if may_kill and self._random.random() < 0.4 else "SIGSTOP"
            self._stop.wait(self._random.uniform(0.2, 4.0))
            with target.touched():
                if kind == "SIGKILL":
                    target.server.kill()
                    target.server.start()
                    target.server.wait_ready()
                else:
                    self._freeze(target.server, self._random.uniform(0.5, MAX_FREEZE_S))
            kinds[kind] += 1
            kinds[f"{kind} {target.server.name}"] += 1
        self.summary.faults = dict(sorted(kinds.items()))

    def _has_enough(self, kinds: Counter[str]) -> bool:
        """On a busy machine a restart takes so long that the time is over before much has been done."""
        return kinds["SIGSTOP"] >= MIN_FREEZES and kinds["SIGKILL"] >= min(MIN_KILLS, self._max_kills)

    def _freeze(self, server: VllmServer, seconds: float) -> None:
        pids = server.pids()
        try:
            signal_each(pids, signal.SIGSTOP)
            self._stop.wait(seconds)
        finally:
            signal_each(pids, signal.SIGCONT)

    # --- load -------------------------------------------------------------------------------------------------

    def _load(self, client: int) -> None:
        choose = random.Random(f"{self.summary.seed} {client}")
        while not self._stop.is_set():
            pair = (choose.choice(self._prefills), choose.choice(self._decodes))
            self._request(*pair, choose.randrange(NUM_PROMPTS))

    def _request(self, prefill: Target, decode: Target, index: int) -> None:
        marks = [(target, target.mark()) for target in (prefill, decode)]
        start_s = time.monotonic()
        try:
            found = _hand_off(prefill.server, decode.server, self._prompts[index])
            outcome, text = ("right", "") if found == self._right[index] else ("wrong", f"{found}")
        except httpx.TimeoutException as error:
            outcome, text = "hung", repr(error)
        except (httpx.HTTPError, AssertionError) as error:
            was_touched = any(target.was_touched_since(mark) for target, mark in marks)
            outcome, text = ("excused" if was_touched else "failed"), repr(error)
            self._stop.wait(0.2)
        pair = f"{prefill.server.name} -> {decode.server.name}"
        with self._lock:
            self._counts["requests"] += 1
            self._counts[outcome] += 1
            if outcome not in ("right", "excused"):
                took_s = time.monotonic() - start_s
                self.summary.problems.append(f"{outcome}: prompt {index}, {pair}, {took_s:.1f} s: {text[:300]}")

    # --- the end ----------------------------------------------------------------------------------------------

    def _check_afterwards(self) -> None:
        try:
            self.summary.all_right_afterwards = all(
                handed_off(prefill.server, decode.server, prompt).token_ids == right
                for prefill in self._prefills
                for decode in self._decodes
                for prompt, right in list(zip(self._prompts, self._right, strict=True))[:5]
            )
        except (httpx.HTTPError, AssertionError) as error:
            self.summary.problems.append(f"afterwards: {error!r}")
        usages = {target.server.name: _final_usage(target.server) for target in self._targets}
        self.summary.blocks_back = not any(usages.values())
        if not self.summary.blocks_back:
            self.summary.problems.append(f"blocks in use: {usages}")


def _hand_off(prefill: VllmServer, decode: VllmServer, prompt: Sequence[int]) -> list[int]:
    first = completion(
        prefill.base_url,
        prompt,
        1,
        model="model",
        timeout_s=STEP_DEADLINE_S,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )
    ticket = first.kv_transfer_params
    body = {"model": "model", "kv_transfer_params": ticket}
    return completion(decode.base_url, prompt, NUM_TOKENS, timeout_s=STEP_DEADLINE_S, **body).token_ids


def _final_usage(server: VllmServer) -> float:
    from examples.vllm_pd.servers import metrics

    seconds = LOAD_TIMEOUT_S + LEASE_S + PATIENCE_S
    return float(eventual_value(lambda: metrics(server.base_url)[KV_USAGE], 0.0, seconds))


def _server(model: Path, directory: Path, kind: str, index: int, ports: set[int]) -> VllmServer:
    extra = {"lease_s": LEASE_S, "load_timeout_s": LOAD_TIMEOUT_S, "port": ports.pop()}
    role = "kv_producer" if kind == "prefill" else "kv_consumer"
    return VllmServer(
        model,
        kv_transfer_config=config(role, extra, kv_load_failure_policy="recompute"),
        name=f"{kind}{index}",
        block_size=BLOCK,
        log_dir=directory,
        port=ports.pop(),
    )


def soak(seconds: float, seed: int, directory: Path, max_kills: int, model: Path | None = None) -> Summary:
    """Run it; servers come from a warm process if one is in use. Logs go to `directory`."""
    model = model or make_tiny_model("llama", directory / "model")
    return Soak(model, directory, seconds, seed, max_kills).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-kills", type=int, default=1_000_000)
    parser.add_argument("--logs", type=Path, default=None, help="default: a new temporary folder")
    options = parser.parse_args()
    directory = options.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    with warm_servers():
        summary = soak(options.seconds, options.seed, directory, options.max_kills)
    sys.stdout.write(json.dumps(asdict(summary), indent=2))
    sys.stdout.write(f"\n{'good' if summary.is_good else 'BAD'}; logs in {directory}\n")
    return 0 if summary.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
