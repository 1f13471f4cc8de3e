# SPDX-License-Identifier: Apache-2.0
"""A prefill server, a decode server and a plain one with the same model, and what tests ask of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.vllm_pd.servers import (
    Completion,
    VllmServer,
    completion,
    connector_config,
    metrics,
    metrics_by_label,
    pd_completion,
    start_all,
)

NUM_TOKENS = 12
CHUNK_TOKENS = 256
#: 0..255 are the bytes of the tiny models' tokenizer.
VOCABULARY = range(256)

REMOTE_TOKENS = "vllm:datadist_remote_tokens_total"
LOCAL_TOKENS = "vllm:datadist_local_tokens_total"
FAILED_LOADS = "vllm:datadist_failed_loads_total"
TRANSFER_BYTES = "vllm:datadist_transfer_bytes_total"
KV_USAGE = "vllm:kv_cache_usage_perc"


def random_prompt(num_tokens: int, seed: object) -> list[int]:
    return random.Random(str(seed)).choices(VOCABULARY, k=num_tokens)


@dataclass(frozen=True)
class Fleet:
    """What `single` says is right: it computes every prompt itself. It has no connector, or it is P asked directly."""

    single: VllmServer
    prefill: VllmServer
    decode: VllmServer
    block_size: int

    def expected(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        # The salt keeps this prompt apart from those that are handed off, also in a prefix cache they share.
        return completion(self.single.base_url, prompt, num_tokens, cache_salt="alone").token_ids

    def handed_off(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Completion:
        return pd_completion(self.prefill.base_url, self.decode.base_url, prompt, num_tokens)

    def check_exact(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        got, want = self.handed_off(prompt, num_tokens).token_ids, self.expected(prompt, num_tokens)
        assert got == want, f"{len(prompt)} prompt tokens"

    def remote_tokens(self) -> int:
        return int(metrics(self.decode.base_url).get(REMOTE_TOKENS, 0))

    @contextmanager
    def remote_tokens_grow_by(self, num_tokens: int) -> Iterator[None]:
        """The proof that the KV cache came from P, not from a silent prefill at D."""
        before = self.remote_tokens()
        yield
        grown = eventual_value(lambda: self.remote_tokens() - before, num_tokens)
        assert grown == num_tokens, f"{grown} tokens came from P, not {num_tokens}"

    def transfer_bytes(self) -> dict[str, float]:
        return metrics_by_label(self.decode.base_url, TRANSFER_BYTES, "backend")


def eventual_value(read, wanted: Any, seconds: float = 5.0) -> Any:
    """What `read` gives, waiting a bounded time for `wanted`: metrics follow a step behind the answer."""
    end = time.monotonic() + seconds
    while (value := read()) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return value


def wait_until_blocks_are_free(*servers: VllmServer, seconds: float = 20.0) -> None:
    for server in servers:
        usage = eventual_value(lambda server=server: metrics(server.base_url)[KV_USAGE], 0.0, seconds)
        assert usage == 0.0, f"{server.name} still holds {usage:.2%} of its KV blocks"


def config(role: str, extra: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    more = {"kv_connector_extra_config": dict(extra)} if extra else {}
    return connector_config(role, **more, **fields)


@contextmanager
def running_fleet(
    model: Path,
    block_size: int,
    log_dir: Path,
    extra: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    plain_single: bool = False,
    **fields: Any,
) -> Iterator[Fleet]:
    """P and D, started side by side. `fields` go into --kv-transfer-config, `extra` into its extra config.

    `plain_single`: a third server, without a connector, to compare with.
    """

    def server(name: str, transfer: dict[str, Any] | None) -> VllmServer:
        return VllmServer(
            model,
            kv_transfer_config=transfer,
            name=name,
            block_size=block_size,
            extra_args=["--max-num-batched-tokens", str(CHUNK_TOKENS), *args],
            env=env,
            log_dir=log_dir,
        )

    prefill = server("prefill", config("kv_producer", extra, **fields))
    decode = server("decode", config("kv_consumer", extra, **fields))
    single = server("single", None) if plain_single else prefill
    with start_all(list(dict.fromkeys([single, prefill, decode]))):
        yield Fleet(single, prefill, decode, block_size)
