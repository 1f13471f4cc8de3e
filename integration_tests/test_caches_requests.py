# SPDX-License-Identifier: Apache-2.0
"""The same tokens, another KV cache: LoRA adapters, salts, prompts as embeddings. And what D may have that P has not.

One pair of servers has it all at once: K and V in fp8; two LoRA adapters; prompts as embeddings; P keeps a prefix cache
and D does not; D guesses tokens (n-gram speculation) and P does not.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples.vllm_pd.models import make_tiny_adapter
from examples.vllm_pd.servers import metrics, prefill
from integration_tests.fleet import (
    Fleet,
    ask,
    eventual_value,
    random_prompt,
    running_fleet,
    ticket_from,
    wait_until_blocks_are_free,
)

BLOCK = 32
ADAPTERS = ("poet", "critic")
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [make_tiny_adapter(folder / name, seed=seed) for seed, name in enumerate(ADAPTERS)]
    adapters = [f"{name}={path}" for name, path in zip(ADAPTERS, paths, strict=True)]
    common = ["--kv-cache-dtype", "fp8", "--enable-prompt-embeds", "--max-num-seqs", "8"]
    common += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters]
    only_d = ["--no-enable-prefix-caching", "--speculative-config", json.dumps(SPECULATION)]
    logs = tmp_path_factory.mktemp("logs")
    with running_fleet(models("llama"), BLOCK, logs, args=common, decode_args=only_d) as running:
        yield running


def test_guessed_tokens_are_checked_against_the_kv_cache_from_p(fleet: Fleet) -> None:
    """n-gram speculation at D only. Only two tokens are allowed, so that many guesses are right."""
    few: dict[str, Any] = {"allowed_token_ids": [65, 66]}
    before = metrics(fleet.decode.base_url).get(ACCEPTED, 0)
    for length in (BLOCK, 3 * BLOCK + 1):
        prompt = random_prompt(length, ("guesses", length))
        wanted = ask(fleet.single, prompt, 24, cache_salt="alone", **few).token_ids
        ticket = ticket_from(fleet.prefill, prompt)
        with fleet.remote_tokens_grow_by(length):
            assert ask(fleet.decode, prompt, 24, kv_transfer_params=ticket, **few).token_ids == wanted
    assert eventual_value(lambda: metrics(fleet.decode.base_url)[ACCEPTED] > before, True)


def test_an_adapters_kv_cache_is_taken_over_by_the_same_adapter_alone(fleet: Fleet) -> None:
    prompt = random_prompt(3 * BLOCK + 5, "adapters")
    texts = {name: ask(fleet.single, prompt, cache_salt="alone", model=name).token_ids for name in ("model", *ADAPTERS)}
    assert len({tuple(text) for text in texts.values()}) == 3, "the adapters change the text"
    pairs = [("poet", "poet"), ("critic", "critic"), ("poet", "critic"), ("poet", "model"), ("model", "poet")]
    for at_p, at_d in pairs:
        ticket = prefill(fleet.prefill.base_url, prompt, model=at_p).kv_transfer_params
        with fleet.remote_tokens_grow_by(len(prompt) if at_p == at_d else 0):
            got = ask(fleet.decode, prompt, model=at_d, kv_transfer_params=ticket).token_ids
        assert got == texts[at_d], f"prefilled by {at_p}"
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def test_a_salt_is_kept_across_engines(fleet: Fleet) -> None:
    prompt = random_prompt(2 * BLOCK + 3, "salt")
    wanted = fleet.expected(prompt)
    for salt, is_taken in (("a", True), ("b", False), (None, False)):
        ticket = ticket_from(fleet.prefill, prompt, cache_salt="a")
        body: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        with fleet.remote_tokens_grow_by(len(prompt) if is_taken else 0):
            assert ask(fleet.decode, prompt, kv_transfer_params=ticket, **body).token_ids == wanted
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def test_prompts_as_embeddings_are_known_by_their_bytes(fleet: Fleet) -> None:
    embeds = torch.randn(2 * BLOCK + 3, 256, generator=torch.Generator().manual_seed(0)) * 0.3
    other = embeds.clone()
    other[5] *= -1
    bodies = [{"prompt_embeds": _encoded(tensor)} for tensor in (embeds, other)]
    texts = [ask(fleet.single, [], cache_salt="alone", **body).token_ids for body in bodies]
    assert texts[0] != texts[1]
    for asked, is_taken in ((0, True), (1, False)):
        ticket = ticket_from(fleet.prefill, [], **bodies[0])
        with fleet.remote_tokens_grow_by(len(embeds) if is_taken else 0):
            assert ask(fleet.decode, [], kv_transfer_params=ticket, **bodies[asked]).token_ids == texts[asked]
    wait_until_blocks_are_free(fleet.prefill, fleet.decode)


def _encoded(tensor: torch.Tensor) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()
