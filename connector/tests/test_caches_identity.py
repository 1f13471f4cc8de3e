# SPDX-License-Identifier: Apache-2.0
"""Two prompts with the same tokens need not have the same KV cache: what tells them apart is in a ticket's digest."""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.tests.test_scheduler import BLOCK, FACTS, WORKER, Request
from vllm_datadist.messages import StepWork
from vllm_datadist.scheduler.identity import kv_digest, kv_digests
from vllm_datadist.scheduler.side import SchedulerSide

NUM_TOKENS = 12
IMAGE = SimpleNamespace(modality="image", identifier="a1", mm_position=SimpleNamespace(offset=2, length=4))
LATER = SimpleNamespace(modality="image", identifier="b2", mm_position=SimpleNamespace(offset=NUM_TOKENS, length=4))
EMBEDS = torch.arange(16 * 8, dtype=torch.float32).view(16, 8).to(torch.bfloat16)
BASE: dict[str, Any] = {
    "request_id": "r",
    "all_token_ids": list(range(16)),
    "lora_request": SimpleNamespace(lora_name="poet", lora_path="/adapters/poet", lora_int_id=1),
    "cache_salt": "tenant",
    "mm_features": [IMAGE, LATER],
    "prompt_embeds": EMBEDS,
    "prompt_is_token_ids": [True] * 16,
}


def _request(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**BASE, **changes})


def _other(thing: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(thing), **changes})


def _embeds(row: int) -> torch.Tensor:
    changed = EMBEDS.clone()
    changed[row, 0] += 1
    return changed


def _tokens(position: int) -> list[int]:
    return [99 if i == position else i for i in range(16)]


#: Something else in the KV cache of the first tokens.
MATTERS: dict[str, dict[str, Any]] = {
    "first token": {"all_token_ids": _tokens(0)},
    "last token": {"all_token_ids": _tokens(NUM_TOKENS - 1)},
    "fewer tokens": {"all_token_ids": list(range(NUM_TOKENS - 1))},
    "no adapter": {"lora_request": None},
    "another adapter": {"lora_request": _other(BASE["lora_request"], lora_name="critic")},
    "a name that points to another adapter": {"lora_request": _other(BASE["lora_request"], lora_path="/adapters/2")},
    "another salt": {"cache_salt": "other"},
    "no salt": {"cache_salt": None},
    "another image": {"mm_features": [_other(IMAGE, identifier="c3"), LATER]},
    "no image": {"mm_features": [LATER]},
    "the image elsewhere": {"mm_features": [_other(IMAGE, mm_position=SimpleNamespace(offset=3, length=4)), LATER]},
    "a video": {"mm_features": [_other(IMAGE, modality="video"), LATER]},
    "one more image": {"mm_features": [IMAGE, _other(LATER, mm_position=SimpleNamespace(offset=11, length=4))]},
    "other embeddings": {"prompt_embeds": _embeds(NUM_TOKENS - 1)},
    "embeddings of another type": {"prompt_embeds": EMBEDS.view(torch.int16)},
    "no embeddings": {"prompt_embeds": None},
    "embeddings for other tokens": {"prompt_is_token_ids": [False] + [True] * 15},
}  # fmt: skip
SAME: dict[str, dict[str, Any]] = {
    "request id": {"request_id": "other"},
    "the adapter's number in this engine": {"lora_request": _other(BASE["lora_request"], lora_int_id=7)},
    "tokens behind": {"all_token_ids": _tokens(NUM_TOKENS)},
    "an image behind": {"mm_features": [IMAGE]},
    "embeddings behind": {"prompt_embeds": _embeds(NUM_TOKENS)},
}
BOTH = pytest.mark.parametrize(
    "digest", [lambda r: kv_digest(r, NUM_TOKENS), lambda r: kv_digests(r, (5, NUM_TOKENS))[-1]], ids=["one", "many"]
)


@BOTH
@pytest.mark.parametrize("change", MATTERS)
def test_what_the_kv_cache_depends_on_is_in_the_digest(digest: Callable[[Any], str], change: str) -> None:
    assert digest(_request(**MATTERS[change])) != digest(_request())


@BOTH
@pytest.mark.parametrize("change", SAME)
def test_what_it_does_not_depend_on_is_not(digest: Callable[[Any], str], change: str) -> None:
    assert digest(_request(**SAME[change])) == digest(_request())


def test_no_two_lists_of_parts_read_the_same() -> None:
    """A salt that looks like another part's bytes is still a salt."""
    digests = {
        kv_digest(_request(cache_salt=salt, lora_request=lora, mm_features=[], prompt_embeds=None), NUM_TOKENS)
        for salt in (None, "a", "ab", "5:4:lora_name")
        for lora in (None, SimpleNamespace(lora_name="b", lora_path=""), SimpleNamespace(lora_name="", lora_path="b"))
    }
    assert len(digests) == 12


def test_all_that_vllm_takes_into_its_block_hashes_is_read() -> None:
    """If a vLLM reads more of a request for its prefix cache than is known here, its KV cache depends on more."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("v1").joinpath("core", "kv_cache_utils.py").read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and (node.name.endswith("_extra_hash_keys") or node.name == "generate_block_hash_extra_keys")
    ]
    read = {
        f"{node.value.id}.{node.attr}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    known = {"request.mm_features", "request.lora_request", "request.cache_salt", "request.prompt_embeds"}
    known |= {"mm_feature.identifier", "mm_feature.mm_position", "last_pos.offset", "last_pos.length"}
    known |= {"lora_request.lora_name", "lora_request.lora_path"}
    assert known <= read
    helpers = {"request._prompt_embeds_per_block_hashes", "extra_keys.append", "hashlib.sha256"}
    assert read - known <= helpers, "vLLM's block hashes depend on something that tickets do not"


# --- a ticket for something else is refused -------------------------------------------------------------------------


def _hand_off(at_p: dict[str, Any], at_d: dict[str, Any]) -> tuple[tuple[int | None, bool], StepWork]:
    p, d = (SchedulerSide(FACTS, logging.getLogger("test")) for _ in "pd")
    p.set_workers([WORKER])
    prefilled = Request("p-1", NUM_TOKENS, {"do_remote_decode": True}, num_computed_tokens=NUM_TOKENS)
    vars(prefilled).update(at_p)
    _, ticket = p.request_finished(prefilled.finished(), [[101, 102, 103]])
    request = Request("d-1", NUM_TOKENS, ticket)
    vars(request).update(at_d)
    d.on_new_request(request)
    return d.num_new_matched_tokens(request, 0), d.take_work()


@pytest.mark.parametrize("field", ["lora_request", "cache_salt", "mm_features", "prompt_embeds"])
@pytest.mark.parametrize("side", ["p", "d"])
def test_the_same_tokens_with_something_else_are_prefilled_here(
    field: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert NUM_TOKENS % BLOCK == 0
    with_it: dict[str, Any] = {field: BASE[field]}
    count, work = _hand_off(with_it, with_it)
    assert (count, work.releases) == ((NUM_TOKENS, True), [])
    with caplog.at_level(logging.WARNING):
        count, work = _hand_off(with_it if side == "p" else {}, with_it if side == "d" else {})
    assert (count, len(work.releases)) == ((0, False), 1)
    assert "prompt_digest" in caplog.text
