# SPDX-License-Identifier: Apache-2.0
"""How much of a transfer push hides behind P's prefill, and what that costs the prefill.

    python -m vllm_datadist.bench.overlap

With real vLLM servers and a model with much KV cache, over tcp throttled to where moving a prompt's KV cache takes half
as long as its prefill. Three ways take turns, each with a prompt of its own:

    alone   P prefills, nobody wants the KV cache
    push    P and D are asked at the same time; P writes while it prefills
    pull    P prefills and gives a ticket; then D is asked, and reads

The prefill is what P's answer takes: one token, nothing else to do. P and D are machines of their own in what this
stands for, and P computes on a GPU of its own: so the thread that computes P's forward pass has a core to itself, and
everything else shares the others, above all vLLM's own processes of D, which poll while they wait for a load.
`--share-cores` leaves that to the system. The transfer is what P's and D's traces say
(`vllm_datadist.trace`): the time in which blocks were moved, and the part of it in which P was still computing. Times
on a busy machine mean little, ratios of one run more: the load of the machine is shown with them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..trace_report import RequestSummary, merge, read_directory, summarize
from .http_calls import HOST, complete
from .model import MOST_KV_HEADS, ServedModel, make_kv_heavy_model, read_model
from .servers import Server, ServerFailed, ServerSetup, free_port, running

BLOCK_TOKENS = 128
TRANSFER_SHARE = 0.5
WARM_UPS = 2
#: Traces are written some times a second.
TRACE_SETTLES_S = 1.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """`share`: of the prefill's time, what moving the KV cache takes; measured first, unless `bytes_per_s` is given.

    `num_kv_heads`: 8 KiB per token each; `own_core`: P's forward pass has one; `chunk_tokens`: per step of P; None =
    vLLM's default.
    """

    num_tokens: int = 2000
    repeats: int = 9
    num_kv_heads: int = MOST_KV_HEADS
    own_core: bool = True
    share: float = TRANSFER_SHARE
    chunk_tokens: int | None = None
    bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians of one run. Times in ms; `samples`: one list per way, in order.

    Attributes:
        push_hidden, pull_hidden: share of the transfer's time in which P was still computing.
        slowdown: of the prefill by push: the median of each turn's push / alone, less 1.
        after_ms: from P's answer to D's, by way: what of the transfer was left, and D's own step.
    """

    num_tokens: int
    num_bytes: int
    bytes_per_s: int
    alone_ms: float
    push_ms: float
    pull_ms: float
    transfer_ms: float
    push_hidden: float
    pull_hidden: float
    slowdown: float
    push_after_ms: float
    pull_after_ms: float
    load_average: tuple[float, float]
    samples: dict[str, list[float]] = field(default_factory=dict)


def run(plan: OverlapPlan, progress: Progress) -> Overlap:
    """Measure. Raises ServerFailed, RequestFailed."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vllm-datadist-overlap-") as scratch, _own_core(plan) as cores:
        folder = Path(scratch)
        progress("making a model with much KV cache")
        make_kv_heavy_model(folder / "kv-heavy", plan.num_kv_heads)
        model = read_model(folder / "kv-heavy")
        num_blocks = 8 * (plan.num_tokens // BLOCK_TOKENS + 2)
        setup = ServerSetup(model, BLOCK_TOKENS, num_blocks, plan.num_tokens + 64, plan.chunk_tokens)
        rate = plan.bytes_per_s or _rate(plan, setup, model, cores, folder, progress)
        turns = _turns(plan, setup, rate, cores, folder, progress)
        time.sleep(TRACE_SETTLES_S)  # the servers have ended by now; what their processes wrote is on disk
        found = {one.key: one for one in summarize(merge(read_directory(folder / "traces")))}
    return turns.result(plan, model, rate, found, (load_before, os.getloadavg()[0]))


def _rate(
    plan: OverlapPlan,
    setup: ServerSetup,
    model: ServedModel,
    cores: _Cores | None,
    folder: Path,
    progress: Progress,
) -> int:
    """Bytes per second with which moving takes its share of a prefill."""
    progress("how long a prefill takes")
    with running([lambda: _server("calibrating", setup, {}, folder, 0)], progress) as [server]:
        if cores is not None:
            cores.separate(server)
        times = [complete(server.port, _prompt(plan, ("rate", i)), 1).elapsed_ms for i in range(WARM_UPS + 5)]
    prefill_s = statistics.median(times[WARM_UPS:]) / 1000
    rate = int(plan.num_tokens * model.kv_bytes_per_token / (plan.share * prefill_s))
    progress(f"  {1000 * prefill_s:.0f} ms; the wire is throttled to {rate / 2**20:.1f} MiB/s")
    return rate


def _turns(
    plan: OverlapPlan, setup: ServerSetup, rate: int, cores: _Cores | None, folder: Path, progress: Progress
) -> _Turns:
    progress("starting P and D")
    port = free_port()
    extra = {
        "host": HOST,
        "transfer_backend": "tcp",
        "backend_options": {"tcp": {"max_bytes_per_s": rate}},
        "trace": str(folder / "traces"),
    }
    servers = [
        lambda: _server("prefill", setup, {**extra, "port": port}, folder, 0),
        lambda: _server("decode", setup, extra, folder, 1),
    ]
    with running(servers, progress) as [prefill, decode]:
        turns = _Turns(plan, prefill, decode, port)
        for number in range(-WARM_UPS, plan.repeats):
            if cores is not None:
                cores.separate(prefill, decode)
            turns.take(number)
            progress(f"  turn {number + 1} of {plan.repeats}")
    return turns


@dataclass(frozen=True, slots=True)
class _Cores:
    """`forward`: for the thread that computes P's forward pass; `others`: for everything else, this process too."""

    forward: int
    others: frozenset[int]

    def separate(self, prefill: Server, *others: Server) -> None:
        """Also what was started since the last time. Raises ServerFailed."""
        for server in (prefill, *others):
            server.use_cores(self.others)
        if not prefill.compute_on(self.forward):
            raise ServerFailed("which process of P computes is not known: no VLLM::Worker; measure with --share-cores")


@contextmanager
def _own_core(plan: OverlapPlan) -> Iterator[_Cores | None]:
    """None: the system decides. Raises ServerFailed where there is no core to spare."""
    cores = os.sched_getaffinity(0)
    if not plan.own_core:
        yield None
        return
    if len(cores) < 2:
        raise ServerFailed("a core for P's forward pass alone needs two; measure with --share-cores")
    split = _Cores(min(cores), frozenset(cores - {min(cores)}))
    os.sched_setaffinity(0, split.others)
    try:
        yield split
    finally:
        os.sched_setaffinity(0, cores)


def _server(name: str, setup: ServerSetup, extra: Mapping[str, object], folder: Path, is_decode: int) -> Server:
    transfer = {
        "kv_connector": "DataDistConnector",
        "kv_role": "kv_consumer" if is_decode else "kv_producer",
        "kv_connector_module_path": "vllm_datadist",
        "kv_connector_extra_config": extra,
    }
    return Server(name, setup, transfer, {}, folder / f"{name}.log")


def _prompt(plan: OverlapPlan, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(range(256), k=plan.num_tokens)


class _Turns:
    """Asks, and keeps what it took."""

    def __init__(self, plan: OverlapPlan, prefill: Server, decode: Server, port: int) -> None:
        self._plan = plan
        self._prefill = prefill
        self._decode = decode
        self._port = port
        self._p_ms: dict[str, list[float]] = {"alone": [], "push": [], "pull": []}
        self._after_ms: dict[str, list[float]] = {"push": [], "pull": []}
        self._keys: dict[str, list[str]] = {"push": [], "pull": []}

    def take(self, number: int) -> None:
        """One of each; the order changes, so that nobody always comes after the same. Below 0: not counted."""
        ways = [self._alone, self._push, self._pull]
        shift = number % 3
        for way in (*ways[shift:], *ways[:shift]):
            way(number)

    def _alone(self, number: int) -> None:
        answer = complete(self._prefill.port, _prompt(self._plan, ("alone", number)), 1)
        self._note(number, "alone", answer.elapsed_ms)

    def _push(self, number: int) -> None:
        prompt, name = _prompt(self._plan, ("push", number)), f"push-{number}"
        ours = {"transfer_mode": "push", "transfer_id": name}
        at = {"remote_host": HOST, "remote_port": self._port}
        with ThreadPoolExecutor(2) as pool:
            begun_s = time.perf_counter()
            d = pool.submit(complete, self._decode.port, prompt, 1, ticket={**ours, **at, "do_remote_prefill": True})
            p = pool.submit(complete, self._prefill.port, prompt, 1, ticket={**ours, "do_remote_decode": True})
            p_ms = p.result().elapsed_ms
            d.result()
            total_ms = 1000 * (time.perf_counter() - begun_s)
        self._note(number, "push", p_ms, total_ms - p_ms, name)

    def _pull(self, number: int) -> None:
        prompt = _prompt(self._plan, ("pull", number))
        answer = complete(self._prefill.port, prompt, 1, ticket={"do_remote_decode": True})
        ticket = answer.ticket or {}
        after_ms = complete(self._decode.port, prompt, 1, ticket=ticket).elapsed_ms
        self._note(number, "pull", answer.elapsed_ms, after_ms, str(ticket.get("remote_request_id")))

    def _note(self, number: int, way: str, p_ms: float, after_ms: float | None = None, key: str = "") -> None:
        if number < 0:
            return
        self._p_ms[way].append(p_ms)
        if after_ms is not None:
            self._after_ms[way].append(after_ms)
            self._keys[way].append(key)

    def result(
        self,
        plan: OverlapPlan,
        model: ServedModel,
        rate: int,
        found: dict[str, RequestSummary],
        load: tuple[float, float],
    ) -> Overlap:
        pairs = zip(self._p_ms["push"], self._p_ms["alone"], strict=True)
        shares = {
            way: [found[key].hidden_share or 0.0 for key in keys if key in found] for way, keys in self._keys.items()
        }
        moved = [found[key].transfer_ms or 0.0 for key in self._keys["push"] if key in found]
        middle = statistics.median
        return Overlap(
            num_tokens=plan.num_tokens,
            num_bytes=plan.num_tokens * model.kv_bytes_per_token,
            bytes_per_s=rate,
            alone_ms=middle(self._p_ms["alone"]),
            push_ms=middle(self._p_ms["push"]),
            pull_ms=middle(self._p_ms["pull"]),
            transfer_ms=middle(moved or [0.0]),
            push_hidden=middle(shares["push"] or [0.0]),
            pull_hidden=middle(shares["pull"] or [0.0]),
            slowdown=middle(push / alone for push, alone in pairs) - 1,
            push_after_ms=middle(self._after_ms["push"]),
            pull_after_ms=middle(self._after_ms["pull"]),
            load_average=load,
            samples={**{f"{way} P ms": ms for way, ms in self._p_ms.items()},
                     **{f"{way} after ms": ms for way, ms in self._after_ms.items()},
                     **{f"{way} hidden": values for way, values in shares.items()}},
        )  # fmt: skip


def report(result: Overlap) -> str:
    """For people."""
    r = result
    wire = f"{r.num_bytes / 2**20:.0f} MiB over tcp at {r.bytes_per_s / 2**20:.1f} MiB/s"
    load = f"load average {r.load_average[0]:.1f} before and {r.load_average[1]:.1f} after, {os.cpu_count()} cores"
    moving = f"moving took {r.transfer_ms:.0f} ms, {r.transfer_ms / r.alone_ms:.0%} of a prefill alone"
    lines = (
        f"{r.num_tokens} tokens, {wire}; {load}",
        f"{'':22}{'alone':>10}{'push':>10}{'pull':>10}",
        f"{'prefill, ms':22}{r.alone_ms:10.0f}{r.push_ms:10.0f}{r.pull_ms:10.0f}",
        f"{'after it, ms':22}{'':10}{r.push_after_ms:10.0f}{r.pull_after_ms:10.0f}",
        f"{'hidden':22}{'':10}{r.push_hidden:10.1%}{r.pull_hidden:10.1%}",
        f"push: {moving}; the prefill was slowed by {r.slowdown:.1%} (median of {len(r.samples['push P ms'])} turns)",
    )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_datadist.bench.overlap",
        description="The share of a transfer that push hides behind the prefill, and what it costs the prefill.",
    )
    parser.add_argument("--tokens", type=int, default=2000, help="length of a prompt (default 2000)")
    parser.add_argument("--repeats", type=int, default=9, help="turns that count (default 9)")
    parser.add_argument("--chunk", type=int, help="tokens per step of P; default: vLLM's")
    parser.add_argument("--mib-per-s", type=float, help="the wire's speed; default: such that moving takes half")
    parser.add_argument(
        "--kv-heads",
        type=int,
        choices=(1, 2, 4, 8, 16),
        default=MOST_KV_HEADS,
        help="8 KiB per token each (default 16)",
    )
    parser.add_argument("--share-cores", action="store_true", help="P's forward pass gets no core of its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options = parser.parse_args(arguments)
    rate = None if options.mib_per_s is None else int(options.mib_per_s * 2**20)
    plan = OverlapPlan(
        options.tokens,
        options.repeats,
        options.kv_heads,
        not options.share_cores,
        chunk_tokens=options.chunk,
        bytes_per_s=rate,
    )
    result = run(plan, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    print(report(result))  # noqa: T201
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
