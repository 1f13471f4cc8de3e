# SPDX-License-Identifier: Apache-2.0
"""A real language model answers through a prefill server P and a decode server D that share only our connector.

    python -m examples.vllm_pd.demo            (or: make demo)

It starts P, D and a router, asks a few questions through the router, and shows for each what D's own metrics say about
where the KV cache came from. Then it asks D alone, which has to compute everything itself, and compares the texts.
Exit status: 0 if all texts are identical and every prompt's KV cache came from P; 1 if not, or if something failed;
130 after Ctrl-C. Whatever happens, nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .client import Sample, chat_stream, metric_samples
from .servers import (
    ExampleProxy,
    HttpService,
    Progress,
    Router,
    ServerFailed,
    StartReport,
    VllmServer,
    connector_config,
    start_all,
)
from .steps import Steps

BLOCK_SIZE = 32
MAX_TOKENS = 32
METRICS_SETTLE_S = 20.0
#: More than the default: vLLM's processes poll, and on a few cores they keep one another waiting.
LINK_TIMEOUT_S = 60.0
ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|Traceback)\b")

# Long enough for several blocks each, and different from the start on, so that D's prefix cache is of no help.
QUESTIONS = (
    (
        "France is a country in western Europe with about 68 million people. It borders Belgium, Germany, Switzerland, "
        "Italy and Spain, and it is known for its food, its wine, its museums and the Alps. Many visitors come every "
        "year. What is the capital of France?"
    ),
    (
        "Japan is a country of islands in eastern Asia with about 125 million people. It is known for its trains, its "
        "gardens, its food and Mount Fuji, and every spring people come to see the cherry trees in bloom. What is the "
        "capital of Japan?"
    ),
    (
        "Water is a liquid at room temperature. When it gets colder than zero degrees Celsius it becomes ice, which is "
        "solid, and when it is heated to one hundred degrees Celsius it becomes steam, which is a gas. People use ice "
        "to keep their drinks cool in summer. What does water become when it freezes?"
    ),
    (
        "Our solar system has one star, the Sun, and eight planets that move around it. Mercury is the closest to the "
        "Sun, and Neptune is the farthest away. Jupiter is the largest of them, and Saturn has beautiful rings. Which "
        "planet is the largest?"
    ),
)


# -- what D says about transfers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """D's counters, or how much they grew. None: this connector does not export it.

    Attributes:
        remote_tokens: prompt tokens whose KV came from P.
        local_tokens: prompt tokens that D had in its own prefix cache.
        bytes_by_backend: bytes moved, by the backend that moved them.
        failed_loads: loads that failed, so that D had to fail or recompute the request.
    """

    remote_tokens: float | None
    local_tokens: float | None
    bytes_by_backend: Mapping[str, float] | None
    failed_loads: float | None

    @classmethod
    def read(cls, base_url: str) -> TransferCounts:
        """From /metrics of a decode server. vLLM's own count of external tokens serves connectors that have none."""
        samples = metric_samples(base_url)
        remote = _total(samples, "vllm:datadist_remote_tokens_total")
        return cls(
            remote_tokens=_total(samples, "vllm:external_prefix_cache_hits_total") if remote is None else remote,
            local_tokens=_total(samples, "vllm:prefix_cache_hits_total"),
            bytes_by_backend=_bytes_by_backend(samples),
            failed_loads=_total(samples, "vllm:datadist_failed_loads_total"),
        )

    def since(self, before: TransferCounts) -> TransferCounts:
        """The growth from `before` to now. A counter that appeared in between started at 0."""
        return TransferCounts(
            _growth(self.remote_tokens, before.remote_tokens),
            _growth(self.local_tokens, before.local_tokens),
            _growth_by_key(self.bytes_by_backend, before.bytes_by_backend),
            _growth(self.failed_loads, before.failed_loads),
        )


def _total(samples: Sequence[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else None


def _bytes_by_backend(samples: Sequence[Sample]) -> dict[str, float] | None:
    moved: dict[str, float] = {}
    for sample in samples:
        if sample.name == "vllm:datadist_transfer_bytes_total":
            backend = sample.labels.get("backend", "?")
            moved[backend] = moved.get(backend, 0.0) + sample.value
        elif sample.name == "vllm:nixl_bytes_transferred_sum":
            moved["nixl"] = moved.get("nixl", 0.0) + sample.value
    return moved or None


def _growth(now: float | None, before: float | None) -> float | None:
    return None if now is None else now - (before or 0.0)


def _growth_by_key(now: Mapping[str, float] | None, before: Mapping[str, float] | None) -> dict[str, float] | None:
    if now is None:
        return None
    grown = {key: value - (before or {}).get(key, 0.0) for key, value in now.items()}
    return {key: value for key, value in grown.items() if value}


# -- asking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer through the router, and D's account of it."""

    question: str
    text: str
    first_token_s: float
    counts: TransferCounts
    alone_text: str | None = None

    @property
    def from_p(self) -> bool:
        """Whether KV came from P, and no load failed."""
        return bool(self.counts.remote_tokens) and not self.counts.failed_loads

    @property
    def identical(self) -> bool:
        """Whether D alone says the same."""
        return self.text == self.alone_text


def ask(url: str, question: str, on_text: Progress | None = None, **body: str) -> tuple[str, float]:
    """The whole answer and the time to its first token in seconds. `on_text` is shown the answer as it grows."""
    text, first_token_s = "", float("nan")
    for piece in chat_stream(url, question, MAX_TOKENS, model="model", **body):
        first_token_s = first_token_s if text else piece.elapsed_s
        text += piece.text
        if on_text is not None:
            on_text(" ".join(text.split()))
    return text, first_token_s


def ask_through_router(router: HttpService, decode: HttpService, question: str, on_text: Progress) -> Answer:
    """Ask, and account for the KV by the growth of D's counters (nothing else runs on D meanwhile)."""
    before = TransferCounts.read(decode.base_url)
    text, first_token_s = ask(router.base_url, question, on_text)
    return Answer(question, text, first_token_s, _settled_growth(decode.base_url, before))


def _settled_growth(base_url: str, before: TransferCounts) -> TransferCounts:
    """The counters are published a moment after the answer: wait for them, but not for ever."""
    deadline = time.monotonic() + METRICS_SETTLE_S
    while True:
        growth = TransferCounts.read(base_url).since(before)
        if (growth.remote_tokens and growth.bytes_by_backend) or time.monotonic() >= deadline:
            return growth
        time.sleep(0.2)


def ask_decode_alone(decode: HttpService, answer: Answer, salt: str) -> Answer:
    """Ask D itself, without a ticket.

    D's prefix cache may hold the KV that came from P. A cache salt makes it useless for this request, so D computes
    the whole prompt. That it really did is checked, or the comparison would prove nothing.
    """
    before = TransferCounts.read(decode.base_url)
    text, _ = ask(decode.base_url, answer.question, cache_salt=salt)
    growth = TransferCounts.read(decode.base_url).since(before)
    if growth.remote_tokens or growth.local_tokens:
        raise RuntimeError(f"D was to compute the prompt alone, but took KV from elsewhere: {growth}")
    return Answer(answer.question, answer.text, answer.first_token_s, answer.counts, text)


# -- showing ---------------------------------------------------------------------------------------------------------


def results_table(answers: Sequence[Answer]) -> Table:
    """One row per question."""
    table = Table(show_lines=True)
    table.add_column("question and answer", ratio=1)
    for title in ("first token", "KV from P", "bytes moved", "backend", "identical"):
        table.add_column(title, justify="right", no_wrap=True)
    for answer in answers:
        moved = answer.counts.bytes_by_backend
        table.add_row(
            f"[dim]{escape(_last_sentence(answer.question))}[/dim]\n{escape(answer.text.strip())}",
            f"{answer.first_token_s:.2f} s",
            _tokens(answer.counts.remote_tokens),
            "n/a" if moved is None else _bytes(sum(moved.values())),
            "n/a" if moved is None else ", ".join(sorted(moved)) or "none",
            "yes" if answer.identical else "[red]no[/red]",
        )
    return table


def _last_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", text)[-1]


def _tokens(count: float | None) -> str:
    return "n/a" if count is None else f"{count:.0f} tokens"


def _bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def curl_command(url: str) -> str:
    """A command line for people who keep the servers up."""
    body = {"model": "model", "messages": [{"role": "user", "content": "What is the capital of Italy?"}]}
    text = json.dumps(body | {"max_tokens": MAX_TOKENS, "stream": True})
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(text)}"


# -- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    router: str
    connector: str
    keep: bool
    model: Path | None
    log_dir: Path


class Demo:
    """The steps in order; `run` is the story."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._steps = Steps(console)
        self._services: list[HttpService] = []

    def run(self) -> bool:
        """True if all went well: KV from P everywhere, texts identical."""
        model = self._options.model or self._prepare_model()
        prefill, decode = self._server(model, "kv_producer", "prefill"), self._server(model, "kv_consumer", "decode")
        with self._started("Starting the prefill and the decode server", [prefill, decode]):
            router = self._router(prefill.base_url, decode.base_url)
            with self._started(f"Starting the router ({self._options.router})", [router]):
                good = self._compare(router, decode)
                if self._options.keep:
                    self._keep(router, prefill, decode)
        return good

    def show_failure(self, error: BaseException) -> None:
        """The error and, unless it has it already, the end of the log that most likely explains it."""
        self._console.print(f"\n[bold red]The demo failed.[/bold red] {escape(str(error))}", highlight=False)
        if isinstance(error, ServerFailed):
            return
        for service in self._suspects():
            self._console.print(f"\n--- end of {service.log_path}\n{escape(service.log_tail())}", highlight=False)
        self._console.print(f"\nRemedy: read the logs in {self._options.log_dir}, then run again.", highlight=False)

    def _suspects(self) -> list[HttpService]:
        return [service for service in self._services if ERROR_LINE.search(service.log_text())] or self._services[-1:]

    def _prepare_model(self) -> Path:
        with self._steps.step("Preparing SmolLM2-135M-Instruct"):
            # In a process of its own, so that the memory for the conversion is free again when the servers start.
            command = [sys.executable, "-m", "examples.vllm_pd.models", "smollm2"]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            return Path(self._follow(child))

    def _follow(self, child: subprocess.Popen[str]) -> str:
        lines = []
        try:
            for line in child.stderr or ():
                lines.append(line)
                self._steps.detail = line.strip()
            output = child.stdout.read() if child.stdout else ""
            if child.wait() != 0:
                raise RuntimeError("The model could not be prepared:\n" + "".join(lines[-20:]))
            return output.strip().splitlines()[-1]
        finally:
            child.terminate()
            child.wait()

    def _server(self, model: Path, role: str, name: str) -> VllmServer:
        extra = {"kv_connector_extra_config": {"link_timeout_s": LINK_TIMEOUT_S}}
        ours = extra if self._options.connector == "DataDistConnector" else {}
        config = connector_config(role, self._options.connector, **ours)
        return VllmServer(
            model, kv_transfer_config=config, name=name, block_size=BLOCK_SIZE, log_dir=self._options.log_dir
        )

    def _router(self, prefill_url: str, decode_url: str) -> HttpService:
        kind = Router if self._options.router == "vllm-router" else ExampleProxy
        return kind([prefill_url], [decode_url], log_dir=self._options.log_dir)

    @contextmanager
    def _started(self, title: str, services: Sequence[HttpService]) -> Iterator[None]:
        self._services += services
        starting = start_all(services, on_progress=self._show_progress)
        with self._steps.step(title):
            starting.__enter__()
        try:
            yield
        finally:
            with self._steps.step(f"Stopping {' and '.join(service.name for service in services)}"):
                starting.__exit__(None, None, None)

    def _show_detail(self, text: str) -> None:
        self._steps.detail = text

    def _show_progress(self, report: StartReport) -> None:
        line = re.sub(r"\x1b\[[0-9;]*m", "", report.last_line)
        self._steps.detail = f"{report.service.name}: {'ready' if report.ready else line}"

    def _compare(self, router: HttpService, decode: HttpService) -> bool:
        answers = [self._ask(router, decode, question) for question in QUESTIONS]
        salt = f"alone-{time.time_ns()}"
        with self._steps.step("Asking the decode server alone, without KV from P"):
            answers = [ask_decode_alone(decode, answer, f"{salt}-{n}") for n, answer in enumerate(answers)]
        self._console.print(results_table(answers))
        return self._verdict(answers)

    def _ask(self, router: HttpService, decode: HttpService, question: str) -> Answer:
        with self._steps.step(f"Asking through P and D: {_last_sentence(question)}"):
            answer = ask_through_router(router, decode, question, self._show_detail)
        self._console.print(f"     {escape(' '.join(answer.text.split()))}", highlight=False)
        return answer

    def _verdict(self, answers: Sequence[Answer]) -> bool:
        identical = all(answer.identical for answer in answers)
        from_p = all(answer.from_p for answer in answers)
        self._console.print(f"KV cache came from P for every prompt = {'yes' if from_p else 'no'}", highlight=False)
        self._console.print(f"[bold]identical = {'yes' if identical else 'no'}[/bold]", highlight=False)
        return identical and from_p

    def _keep(self, *services: HttpService) -> None:
        self._console.print("\nThe servers stay up. Try (Ctrl-C stops all):\n", highlight=False)
        print(curl_command(services[0].base_url), flush=True)
        try:
            while all(service.running for service in services):
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
        raise RuntimeError("A server ended by itself.")


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.vllm_pd.demo", description="P/D demo with a real model.")
    parser.add_argument("--router", choices=["vllm-router", "proxy"], default="vllm-router")
    parser.add_argument("--connector", default="DataDistConnector", help="another vLLM KV connector, to compare")
    parser.add_argument("--keep", action="store_true", help="keep the servers up until Ctrl-C")
    parser.add_argument("--model", type=Path, help="a local model folder instead of SmolLM2")
    parser.add_argument("--log-dir", type=Path, default=Path("logs/demo"))
    parsed = parser.parse_args(arguments)
    if parsed.model is not None and not (parsed.model / "config.json").is_file():
        parser.error(f"--model {parsed.model}: this folder has no config.json")
    return Options(
        parsed.router,
        parsed.connector,
        parsed.keep,
        parsed.model and parsed.model.absolute(),
        parsed.log_dir.absolute(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; see the head of this file for the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _as_interrupt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    demo = Demo(parse_options(arguments), console)
    try:
        return 0 if demo.run() else 1
    except KeyboardInterrupt:
        console.print("\nInterrupted; everything is stopped.")
        return 130
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        demo.show_failure(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
