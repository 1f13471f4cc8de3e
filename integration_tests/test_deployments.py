# SPDX-License-Identifier: Apache-2.0
"""Ways to run it: over tcp, without the plugin, both roles in one, routers, tensor parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from examples.vllm_pd.servers import (
    ExampleProxy,
    Router,
    VllmServer,
    chat_stream,
    completion,
    pd_completion,
    start_all,
)
from integration_tests.fleet import (
    Fleet,
    config,
    random_prompt,
    running_fleet,
    wait_until_blocks_are_free,
)

BLOCK = 32


@pytest.fixture(scope="module")
def tcp_fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No plugin is loaded: vLLM finds the connector by kv_connector_module_path. Only tcp may be used."""
    with running_fleet(
        models("llama"),
        BLOCK,
        tmp_path_factory.mktemp("logs"),
        extra={"transfer_backend": "tcp"},
        env={"VLLM_PLUGINS": ""},
        kv_connector_module_path="vllm_datadist.connector",
    ) as running:
        yield running


def test_over_tcp_and_by_module_path(tcp_fleet: Fleet) -> None:
    for num_tokens in (1, BLOCK, 3 * BLOCK + 1, 1500):
        with tcp_fleet.remote_tokens_grow_by(num_tokens):
            tcp_fleet.check_exact(random_prompt(num_tokens, ("tcp", num_tokens)))
    assert set(tcp_fleet.transfer_bytes()) == {"tcp"}
    wait_until_blocks_are_free(tcp_fleet.prefill, tcp_fleet.decode)


@pytest.mark.parametrize("frontend", [Router, ExampleProxy])
def test_behind_a_router(tcp_fleet: Fleet, frontend, tmp_path) -> None:
    with frontend([tcp_fleet.prefill.base_url], [tcp_fleet.decode.base_url], log_dir=tmp_path) as router:
        prompt = random_prompt(3 * BLOCK + 9, frontend.__name__)
        with tcp_fleet.remote_tokens_grow_by(len(prompt)):
            got = completion(router.base_url, prompt, 12, model="model")
        assert got.token_ids == tcp_fleet.expected(prompt)
        question = f"{frontend.__name__} says a few words, long enough for two blocks of the cache"
        wanted = "".join(p.text for p in chat_stream(tcp_fleet.single.base_url, question, 12, cache_salt="alone"))
        pieces = list(chat_stream(router.base_url, question, 12, model="model"))
        assert "".join(p.text for p in pieces) == wanted
    wait_until_blocks_are_free(tcp_fleet.prefill, tcp_fleet.decode)


def test_a_client_that_leaves_frees_everything(tcp_fleet: Fleet, tmp_path) -> None:
    with ExampleProxy([tcp_fleet.prefill.base_url], [tcp_fleet.decode.base_url], log_dir=tmp_path) as proxy:
        body = {"model": "model", "prompt": random_prompt(900, "leaver"), "max_tokens": 2000, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{proxy.base_url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            next(answer.iter_lines())
        wait_until_blocks_are_free(tcp_fleet.prefill, tcp_fleet.decode)
        tcp_fleet.check_exact(random_prompt(70, "after the leaver"))


TENSOR_PARALLEL = pytest.param(
    2,
    marks=pytest.mark.skipif(
        (os.cpu_count() or 1) < 4, reason="4 tensor parallel workers that spin need at least 4 cores to meet a deadline"
    ),
)


@pytest.mark.parametrize("tp_size", [1, TENSOR_PARALLEL])
def test_both_roles_in_one_engine(models, tmp_path, tp_size: int) -> None:
    """kv_both at each end: whichever prefills, the other decodes; rank to rank when tensor parallel."""
    servers = [
        VllmServer(
            models("llama"),
            kv_transfer_config=config("kv_both"),
            name=name,
            extra_args=["--tensor-parallel-size", str(tp_size)],
            log_dir=tmp_path,
        )
        for name in ("one", "two")
    ]
    with start_all(servers):
        urls = [server.base_url for server in servers]
        for num_tokens in (BLOCK - 1, 3 * BLOCK + 1):
            for first, second in (urls, reversed(urls)):
                prompt = random_prompt(num_tokens, ("both", num_tokens, first))
                wanted = completion(first, prompt, 12, cache_salt="alone").token_ids
                assert pd_completion(first, second, prompt, 12).token_ids == wanted
        wait_until_blocks_are_free(*servers)
