# SPDX-License-Identifier: Apache-2.0
"""vLLM's own serving benchmark (`vllm bench serve`) over prompts of ours: what it sent, what came back, and when.

with ServingBenchmark(router.base_url, model, prompts, num_tokens=16, request_rate=4.0, directory=tmp) as running:
    ...
    outcomes = running.outcomes(timeout_s=120.0)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from examples.vllm_pd.process_tree import ProcessTree
from examples.vllm_pd.servers import CPU_DEFAULTS, VllmServer
from integration_tests.fleet import eventual_value

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """One request. Times are of this host's monotonic clock. `error` is "" if it went well.

    `end_s`: of one that went well, of the last piece of its answer.
    """

    index: int
    text: str
    error: str
    start_s: float
    end_s: float


class ServingBenchmark:
    """A run of the benchmark in a process of its own, from `with` on.

    Args:
        base_url: of a server or router.
        tokenizer: directory of the model.
        prompts: texts, sent in this order.
        num_tokens: to generate for each, greedily.
        request_rate: per second, at random intervals.
        directory: for its files.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: Path,
        prompts: Sequence[str],
        *,
        num_tokens: int,
        request_rate: float,
        directory: Path,
    ) -> None:
        self._prompts, self._directory = list(prompts), directory
        dataset = directory / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        options = {
            "--backend": "openai",
            "--base-url": base_url,
            "--endpoint": "/v1/completions",
            "--model": "model",
            "--tokenizer": tokenizer,
            "--dataset-name": "custom",
            "--dataset-path": dataset,
            "--custom-output-len": num_tokens,
            "--num-prompts": len(prompts),
            "--request-rate": request_rate,
            "--temperature": 0,
            "--result-dir": directory,
            "--result-filename": "result.json",
            "--ready-check-timeout-sec": 120,
        }
        flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed"]
        pairs = [str(part) for pair in options.items() for part in pair]
        self._command = [sys.executable, "-m", "integration_tests.serving_benchmark", *pairs, *flags]
        self._log = directory / "benchmark.log"

    def __enter__(self) -> ServingBenchmark:
        # Started like a server: a process that has imported vLLM already saves half a minute.
        env = {**CPU_DEFAULTS, **os.environ, "PYTHONPATH": str(ROOT)}
        self._tree: ProcessTree = VllmServer.tree_type(self._command, env, self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self._tree.stop(10.0)

    @property
    def has_ended(self) -> bool:
        return self._tree.exit_status() is not None

    def outcomes(self, timeout_s: float) -> list[Outcome]:
        """Wait for its end.

        Raises:
            RuntimeError: it failed as a whole, or takes too long; the text has the end of its log.
        """
        eventual_value(lambda: self._tree.exit_status() is not None, True, timeout_s)
        if self._tree.exit_status() != 0:
            log = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the benchmark's exit status is {self._tree.exit_status()} after {timeout_s} s: {log}")
        found = json.loads((self._directory / "result.json").read_text())
        return [
            Outcome(i, found["generated_texts"][i], found["errors"][i], start_s, start_s + _duration_s(found, i))
            for i, start_s in enumerate(found["start_times"])
        ]

    def summary(self) -> dict[str, float]:
        """The benchmark's own figures."""
        found = json.loads((self._directory / "result.json").read_text())
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _duration_s(found: dict[str, list], index: int) -> float:
    return float(found["ttfts"][index] or 0.0) + sum(found["itls"][index] or ())


def main() -> None:
    """What `vllm bench serve` does, whose command does not work in vLLM's CPU build.

    Its custom data sets are read by pandas, which nothing else here needs: so they are read here.
    """
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.get_samples = _samples
    for name, request in serve.ASYNC_REQUEST_FUNCS.items():
        serve.ASYNC_REQUEST_FUNCS[name] = partial(_timed, request)
    serve.main(parser.parse_args())


async def _timed(request: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
    """Of a request that fails the benchmark keeps only what it had before: here also how long it took to fail."""
    start_s = time.perf_counter()
    output = await request(*args, **keywords)
    if output.error:
        output.ttft, output.itl = time.perf_counter() - start_s, []
    return output


def _samples(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    from vllm.benchmarks.datasets import SampleRequest

    prompts = [json.loads(line)["prompt"] for line in Path(args.dataset_path).read_text().splitlines()]
    length = lambda prompt: len(tokenizer(prompt).input_ids)  # noqa: E731
    return [SampleRequest(one, length(one), args.custom_output_len, request_id=str(i)) for i, one in enumerate(prompts)]


if __name__ == "__main__":
    main()
