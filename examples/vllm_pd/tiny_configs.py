# SPDX-License-Identifier: Apache-2.0
"""The configurations of the random tiny models: one for each kind of KV cache.

Their attention really matters, hence the large `initializer_range`: see `models`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_datadist.bench.model import MAX_POSITIONS, kv_heavy_config


def _tiny(config: Callable[..., Any], **own: Any) -> Any:
    """With what all have: the byte tokenizer's 256 characters, <s> and </s>."""
    return config(
        vocab_size=258,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        initializer_range=0.3,
        max_position_embeddings=MAX_POSITIONS,
        **own,
    )


def _llama_config() -> Any:
    from transformers import LlamaConfig

    return _tiny(
        LlamaConfig,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )


def _qwen3_config() -> Any:
    from transformers import Qwen3Config

    return _tiny(
        Qwen3Config,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )


def _gemma3_hybrid_config() -> Any:
    """Three sliding-window layers and one full one: vLLM keeps their blocks in different KV cache groups."""
    from transformers import Gemma3TextConfig

    return _tiny(
        Gemma3TextConfig,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=128,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=False,
    )


def _deepseek_mla_config() -> Any:
    """One latent vector per token instead of K and V. The sizes are the only ones vLLM's CPU MLA kernel takes."""
    from transformers import DeepseekV2Config

    return _tiny(
        DeepseekV2Config,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        # vLLM's CPU MLA does not agree with itself: the logprobs of a prompt's tokens change with what follows them, so
        # that from the second layer on even one engine does not reproduce its own text from its own prefix. The KV
        # cache of the first layer depends on each token alone, and there P/D and a single engine mostly agree.
        num_hidden_layers=1,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        tie_word_embeddings=False,
    )


def _granite_hybrid_config() -> Any:
    """Mamba2 layers, whose state remembers all of a prompt, between attention layers."""
    from transformers import GraniteMoeHybridConfig

    return _tiny(
        GraniteMoeHybridConfig,
        hidden_size=128,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=False,
    )


def _lfm2_config() -> Any:
    """Short convolutions, whose state is the last two tokens', between attention layers."""
    from transformers import Lfm2Config

    return _tiny(
        Lfm2Config,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        conv_dim=256,  # vLLM reads these two, which published models of this kind have
        block_dim=256,
        conv_bias=False,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    )


def _gemma3n_config() -> Any:
    """The last two layers have no KV cache of their own: they read those of the layers before them."""
    from transformers import Gemma3nTextConfig

    return _tiny(
        Gemma3nTextConfig,
        vocab_size_per_layer_input=258,
        hidden_size=256,
        hidden_size_per_layer_input=32,
        intermediate_size=512,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=128,
        activation_sparsity_pattern=[0.0] * 6,
        laurel_rank=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


def _llama4_chunked_config() -> Any:
    """Three layers that look back to the last multiple of 64 tokens, and a full one."""
    from transformers import Llama4TextConfig

    return _tiny(
        Llama4TextConfig,
        hidden_size=256,
        intermediate_size=512,
        intermediate_size_mlp=512,
        num_hidden_layers=4,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=8,  # none of these layers
        moe_layers=[],
        attn_temperature_tuning=False,
        tie_word_embeddings=False,
    )


TINY_MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama_config,
    "gemma3_hybrid": _gemma3_hybrid_config,
    "deepseek_mla": _deepseek_mla_config,
    "qwen3": _qwen3_config,
    "granite_hybrid": _granite_hybrid_config,
    "lfm2": _lfm2_config,
    "gemma3n": _gemma3n_config,
    "llama4_chunked": _llama4_chunked_config,
    "kv_heavy": kv_heavy_config,
}
