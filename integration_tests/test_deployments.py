# SPDX-License-Identifier: Apache-2.0
"""Ways to run it: over tcp, without the plugin, both roles in one, routers, tensor parallel."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from examples.vllm_pd.servers import (
    ExampleProxy,
    Router,
    VllmServer,
    chat_stream,
    completion,
    free_port,
    pd_completion,
    start_all,
)
from integration_tests.fleet import (
    Fleet,
    alone,
    ask,
    config,
    handed_off,
    random_prompt,
    running_fleet,
    ticket_from,
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


def test_data_parallel_ranks_each_have_an_address_of_their_own(tcp_fleet: Fleet, models, tmp_path) -> None:
    """B25: two ranks of P with one base port; what each promises is fetched from it."""
    base = _two_free_ports()
    server = VllmServer(
        models("llama"),
        kv_transfer_config=config("kv_producer", {"transfer_backend": "tcp", "port": base}),
        extra_args=["--data-parallel-size", "2"],
        name="dp",
        log_dir=tmp_path,
    )
    with server:
        addresses = []
        for rank in (0, 1, 1, 0):
            prompt = random_prompt(3 * BLOCK + 1, ("dp", rank, len(addresses)))
            ticket = ticket_from(server, prompt, headers={"X-data-parallel-rank": str(rank)})
            addresses.append(ticket["remote_port"])
            with tcp_fleet.remote_tokens_grow_by(len(prompt)):
                assert ask(tcp_fleet.decode, prompt, kv_transfer_params=ticket).token_ids == tcp_fleet.expected(prompt)
        assert addresses == [base, base + 1, base + 1, base]
        wait_until_blocks_are_free(server, tcp_fleet.decode)


def _two_free_ports() -> int:
    """The first of two ports beside each other that were free a moment ago."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.socket() as second:
            second.bind(("0.0.0.0", first + 1))
            return first


#: vLLM takes any number of batched tokens >= 1, if it is not below `--max-num-seqs`.
CHUNKS = (1, 31, 32, 33)


def test_chunks_around_a_block(tcp_fleet: Fleet, models, tmp_path) -> None:
    """B28: P prefills in chunks whose last one may need no new block."""

    def server(chunk: int) -> VllmServer:
        return VllmServer(
            models("llama"),
            kv_transfer_config=config("kv_producer", {"transfer_backend": "tcp"}),
            extra_args=["--max-num-batched-tokens", str(chunk), "--max-num-seqs", "1"],
            name=f"chunk{chunk}",
            log_dir=tmp_path,
        )

    with start_all([server(chunk) for chunk in CHUNKS]) as servers:
        for num_tokens in (BLOCK, 36, 2 * BLOCK + 2):
            prompt = random_prompt(num_tokens, ("chunks", num_tokens))
            wanted = tcp_fleet.expected(prompt)
            for one in servers:
                # Else D has it from the one before.
                salted = {"cache_salt": one.name}
                with tcp_fleet.remote_tokens_grow_by(num_tokens):
                    got = ask(tcp_fleet.decode, prompt, kv_transfer_params=ticket_from(one, prompt, **salted), **salted)
                assert got.token_ids == wanted, (one.name, num_tokens)
        wait_until_blocks_are_free(*servers, tcp_fleet.decode)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_another_connector(models, tmp_path, ours_first: bool) -> None:
    """B44: in vLLM's MultiConnector, with its example of a shared storage (its offloading needs a GPU).

    Only the chosen one loads: ours if it comes first, else the other for all but a short prompt, which it does not
    store. P is released in any case.
    """
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path / "storage")}

    def server(name: str, role: str) -> VllmServer:
        children = [config(role), other]
        children = children if ours_first else children[::-1]
        transfer = {"kv_connector": "MultiConnector", "kv_role": role}
        transfer |= {"kv_connector_extra_config": {"connectors": children}}
        return VllmServer(models("llama"), kv_transfer_config=transfer, name=name, log_dir=tmp_path)

    with start_all([server("prefill", "kv_producer"), server("decode", "kv_consumer")]) as (first, second):
        for num_tokens in (BLOCK - 1, 3 * BLOCK + 1):
            prompt = random_prompt(num_tokens, ("multi", num_tokens))
            wanted = alone(first, prompt)
            for _ in range(2):
                assert handed_off(first, second, prompt).token_ids == wanted
            # Well before the leases end by themselves.
            wait_until_blocks_are_free(first, second, seconds=20.0)
        assert "shared_storage_path" in first.log_text()


@pytest.mark.parametrize("tp_size", [1, 2])
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
