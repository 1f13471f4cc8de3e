# SPDX-License-Identifier: Apache-2.0
"""The model that is served: by default a random one that has much KV cache for little compute, made here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOAT32_BYTES = 4
MAX_POSITIONS = 8192
MOST_KV_HEADS = 16


class UnusableModel(ValueError):
    """The folder holds no model that can be measured. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`kv_bytes_per_token`: of all layers, in float32, as the servers are started."""

    path: Path
    vocab_size: int
    max_positions: int
    kv_bytes_per_token: int


def make_kv_heavy_model(directory: Path, num_kv_heads: int = MOST_KV_HEADS) -> None:
    """Raises UnusableModel if `num_kv_heads` does not divide the 16 heads."""
    if num_kv_heads < 1 or MOST_KV_HEADS % num_kv_heads:
        raise UnusableModel(f"{num_kv_heads} KV heads for {MOST_KV_HEADS} heads; use 1, 2, 4, 8 or 16")
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(kv_heavy_config(num_kv_heads), dtype=torch.float32).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def kv_heavy_config(num_kv_heads: int = MOST_KV_HEADS) -> Any:
    """8 KiB of float32 KV cache per token and KV head for little compute.

    `initializer_range` is large so that attention matters: with the usual small weights a wrong KV cache would go
    unseen in the text.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=MOST_KV_HEADS,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        initializer_range=0.3,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )


def byte_tokenizer() -> Any:
    """A byte-level BPE without merges: one token per byte, so that the length of a prompt is exact."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=MAX_POSITIONS
    )


def read_model(path: Path) -> ServedModel:
    """Raises UnusableModel naming the folder and what is missing there."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnusableModel(f"{path}: {error}; name a folder with a model in Hugging Face's format") from error
    try:
        return ServedModel(
            path.resolve(), config["vocab_size"], config["max_position_embeddings"], _kv_bytes_per_token(config)
        )
    except KeyError as error:
        raise UnusableModel(
            f"{file} has no {error.args[0]!r}; name a decoder-only model with MHA, GQA or MLA"
        ) from error


def _kv_bytes_per_token(config: dict[str, Any]) -> int:
    if config.get("kv_lora_rank"):  # MLA: one latent vector instead of K and V
        return int(config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * FLOAT32_BYTES)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    num_kv_heads = config.get("num_key_value_heads") or heads
    return int(config["num_hidden_layers"] * 2 * num_kv_heads * head_dim * FLOAT32_BYTES)
