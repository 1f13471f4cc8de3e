# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's KV cache groups are handed off, what is refused at start-up, what two engines must have in common.

Slow only because it imports vLLM.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import Phi3Config
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.tests.test_description import OURS
from vllm_datadist.description import Description, Incompatible, ModelLayer, check_compatible
from vllm_datadist.engine import (
    UnsupportedModel,
    _by_context,
    _kv_scales,
    _speculative,
    check_caches,
    check_parallel,
    group_content,
    head_share,
    model_layers,
    transfer_groups,
    why_no_push,
)
from vllm_datadist.handoff.desk import WorkerPlace

pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
MAMBA: dict[str, Any] = {"block_size": 2048, "shapes": ((3, 320), (4, 64, 32)), "dtypes": (torch.float32,) * 2}
HANDED_OFF: dict[str, tuple[KVCacheSpec, dict[str, Any]]] = {
    "full_attention": (FullAttentionSpec(**SIZES), {"block_tokens": 32}),
    "mla_attention": (MLAAttentionSpec(**SIZES | {"num_kv_heads": 1, "head_size": 576}), {"block_tokens": 32}),
    "sliding_window": (SlidingWindowSpec(**SIZES, sliding_window=128), {"window": 128}),
    "chunked_local_attention": (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64), {"chunk": 64}),
    "mamba": (MambaSpec(**MAMBA), {"is_state": True, "block_tokens": 2048, "table_tokens": 1}),
}
REFUSED: dict[str, KVCacheSpec] = {
    "sliding_window_mla": SlidingWindowMLASpec(**SIZES, sliding_window=128),
    "sink_full_attention": SinkFullAttentionSpec(**SIZES, sink_len=4),
    "encoder_only_attention": EncoderOnlyAttentionSpec(**SIZES),
    "cross_attention": CrossAttentionSpec(**SIZES),
    "unknown": UniformTypeKVCacheSpecs(32, {"a": FullAttentionSpec(**SIZES), "b": CrossAttentionSpec(**SIZES)}),
}


def _config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def _vllm(**cache_config: Any) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto", **cache_config))


def test_every_kind_that_vllm_has_is_handed_off_or_refused() -> None:
    assert {kind.value for kind in KVCacheSpecKind} == {*HANDED_OFF, *REFUSED}


@pytest.mark.parametrize("kind", HANDED_OFF)
def test_kinds_that_are_handed_off(kind: str) -> None:
    spec, wanted = HANDED_OFF[kind]
    _, group = transfer_groups(_config(FullAttentionSpec(**SIZES), spec))
    assert (group.index, group.layer_names) == (1, ("layers.1",))
    assert {name: getattr(group, name) for name in wanted} == wanted


@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_are_refused_at_start_up_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"KV cache group 1 \(layers\.1, \.\.\.\) is {kind}; supported are: "):
        transfer_groups(_config(FullAttentionSpec(**SIZES), REFUSED[kind]))


def test_states_that_a_block_does_not_hold_are_refused_at_start_up() -> None:
    with pytest.raises(UnsupportedModel, match=r"use_replayssm=True: .* without --use-replayssm"):
        check_caches(_vllm(use_replayssm=True), _config(MambaSpec(**MAMBA)))
    with pytest.raises(UnsupportedModel, match="speculative decoding of a model with Mamba-like state"):
        check_caches(_vllm(), _config(MambaSpec(**MAMBA, num_speculative_blocks=3)))
    check_caches(_vllm(use_replayssm=False), _config(MambaSpec(**MAMBA), FullAttentionSpec(**SIZES)))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MambaSpec(**MAMBA), {"shapes": ((3, 320), (4, 32, 64))}),
        (MambaSpec(**MAMBA), {"dtypes": (torch.float32, torch.bfloat16)}),
        (MambaSpec(**MAMBA), {"mamba_type": SimpleNamespace(name="SHORT_CONV")}),
    ],
)
def test_what_a_blocks_bytes_mean_is_compared(ours: Any, theirs: dict[str, Any]) -> None:
    other = type(ours)(**{name: getattr(ours, name) for name in ours.__dataclass_fields__} | theirs)
    assert group_content(_config(ours), 0) != group_content(_config(other), 0)


def test_the_longest_request_is_not_compared_but_the_layout_of_the_convolution_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = group_content(_config(MambaSpec(**MAMBA)), 0)
    assert group_content(_config(MambaSpec(**MAMBA | {"block_size": 4096, "mamba_cache_mode": "align"})), 0) == ours
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert group_content(_config(MambaSpec(**MAMBA)), 0) != ours


# --- at link time ---------------------------------------------------------------------------------------------------


def _with_speculation(method: str | None) -> Description:
    spec = None if method is None else SimpleNamespace(method=method, model="/models/draft")
    text = _speculative(SimpleNamespace(speculative_config=spec))
    return Description(**{name: getattr(OURS, name) for name in OURS.__struct_fields__} | {"speculative": text})


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_guesses_without_a_kv_cache_are_each_engines_own_affair(method: str) -> None:
    check_compatible(_with_speculation(method), _with_speculation(None))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "dflash", "extract_hidden_states"])
def test_layers_of_a_draft_are_at_both_ends_or_the_link_is_refused(method: str) -> None:
    """B35: P has no KV cache for the drafting layers of D."""
    check_compatible(_with_speculation(method), _with_speculation(method))
    with pytest.raises(Incompatible, match=f"speculative is '{method}:draft' here and 'none' at the peer"):
        check_compatible(_with_speculation(method), _with_speculation(None))
    with pytest.raises(Incompatible, match=f"speculative is 'ngram' here and|'none' here and '{method}:draft'"):
        check_compatible(_with_speculation("ngram"), _with_speculation(method))


def _with_scales(cache_dtype: str, **scales: float) -> Description:
    context = {"layers.0": SimpleNamespace(**{f"_{name}_scale_float": value for name, value in scales.items()})}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )
    model_config = OURS.model_config | _kv_scales(config, OURS.caches)
    return Description(
        **{name: getattr(OURS, name) for name in OURS.__struct_fields__} | {"model_config": model_config}
    )


def test_the_scales_of_a_quantized_cache_are_the_same_at_both_ends() -> None:
    ours = _with_scales("fp8", k=1.0, v=0.5)
    check_compatible(ours, _with_scales("fp8", k=1.0, v=0.5))
    refusal = r"layer layers\.0: K and V scales is '\[1\.0, 0\.5\]' here and '\[1\.0, 0\.25\]' at the peer"
    with pytest.raises(Incompatible, match=refusal):
        check_compatible(ours, _with_scales("fp8", k=1.0, v=0.25))
    elsewhere = msgspec.structs.replace(ours, model_config=OURS.model_config | {"layer layers.9: K and V scales": "2"})
    check_compatible(ours, elsewhere)
    check_compatible(_with_scales("auto", k=1.0, v=0.5), _with_scales("auto", k=1.0, v=0.25))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_name(name: str) -> None:
    check_parallel(SimpleNamespace(parallel_config=SimpleNamespace(**{name: 1})))
    with pytest.raises(UnsupportedModel, match=f"{name}=2: the connector does not support context parallelism"):
        check_parallel(SimpleNamespace(parallel_config=SimpleNamespace(**{name: 2})))


# --- what max_model_len changes -----------------------------------------------------------------------------------


def _phi3() -> Phi3Config:
    """Of 64 tokens, or 256 with the long factors."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return Phi3Config(
        hidden_size=64, num_attention_heads=4, vocab_size=128, max_position_embeddings=256, pad_token_id=0,
        original_max_position_embeddings=64, rope_parameters=rope | factors,
    )  # fmt: skip


def test_a_longer_context_that_changes_every_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layer says when it does; its own cosines show that it matters to the first tokens too."""
    model = SimpleNamespace(hf_text_config=_phi3(), original_max_model_len=None, max_model_len=0)
    config = SimpleNamespace(model_config=model)
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: config)
    rope = model.hf_text_config.rope_parameters
    fields: dict[int, dict[str, str]] = {}
    is_long, keys = {}, {}
    for model.max_model_len in (48, 64, 65, 256):
        layer = phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding(
            16, 16, 256, 64, 10000.0, True, torch.float32, rope["short_factor"], rope["long_factor"]
        )
        fields[model.max_model_len], is_long[model.max_model_len] = _by_context(model), layer.use_long_rope
        keys[model.max_model_len] = layer(torch.tensor([1]), torch.ones(1, 16), torch.ones(1, 16))[1]
    assert is_long == {48: False, 64: False, 65: True, 256: True}
    assert not torch.equal(keys[64], keys[65]), "of token 1"
    ours = {length: msgspec.structs.replace(OURS, model_config=some) for length, some in fields.items()}
    check_compatible(ours[48], ours[64])
    check_compatible(ours[65], ours[256])
    name = "model config longrope: max_model_len > 64 is 'false' here and 'true' at the peer"
    with pytest.raises(Incompatible, match=name):
        check_compatible(ours[64], ours[65])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_model_len": 32768}, ["false"]),
        ({"max_model_len": 32769}, ["true"]),
        ({"max_model_len": 9000, "original_max_model_len": -1}, ["true"]),  # made to fit when the model was there
        ({"max_model_len": 9000, "original_max_model_len": 9000}, ["false"]),
    ],
)
def test_llama4_tunes_its_attention_for_long_contexts(fields: dict[str, Any], expected: list[str]) -> None:
    config = SimpleNamespace(model_type="llama4_text", rope_parameters={"rope_type": "llama3"})
    model = SimpleNamespace(hf_text_config=config, get_and_verify_max_len=lambda wanted: 131072, **fields)
    assert list(_by_context(model).values()) == expected


def test_other_models_may_have_any_length() -> None:
    ropes = {"full_attention": {"rope_type": "yarn", "original_max_position_embeddings": 64}, "sliding": None}
    for rope in (None, {"rope_type": "default"}, ropes):
        config = SimpleNamespace(model_type="llama", rope_parameters=rope)
        assert _by_context(SimpleNamespace(hf_text_config=config, max_model_len=100)) == {}


@pytest.mark.parametrize(
    ("method", "num_stages", "text"),
    [("eagle", 2, "eagle.*pipeline_parallel_size=2"), ("ngram", 2, "ngram"), ("eagle", 1, ""), (None, 2, "")],
)
def test_drafts_and_pipeline_stages_together_cannot_be_pushed(method: str | None, num_stages: int, text: str) -> None:
    spec = None if method is None else SimpleNamespace(method=method)
    parallel = SimpleNamespace(pipeline_parallel_size=num_stages)
    why = why_no_push(SimpleNamespace(speculative_config=spec, parallel_config=parallel))
    assert bool(why) is bool(text)
    assert re.search(text, why)


# --- whose layers have how many heads ---------------------------------------------------------------------------------


def _arch(total_heads: list[int]) -> ModelArchitectureConfig:
    """Of a model whose layers have so many KV heads."""
    fields: dict[str, Any] = {
        "architectures": [], "model_type": "llama", "text_model_type": None, "hidden_size": 64, "head_size": 8,
        "total_num_hidden_layers": len(total_heads), "total_num_attention_heads": 8, "vocab_size": 100,
        "num_experts": 0, "num_experts_per_token": 0, "quantization_config": None, "is_deepseek_mla": False,
        "is_mm_prefix_lm": False, "rswa_window": None, "derived_max_model_len_and_key": (100.0, None),
    }  # fmt: skip
    layers = [ModelArchitectureConfig(**fields, total_num_kv_heads=total) for total in total_heads]
    return ModelArchitectureConfig.from_layers(layers)


def _model_of(*total_heads: int, use_mla: bool = False) -> Any:
    arch = _arch([*total_heads])
    return SimpleNamespace(
        use_mla=use_mla, model_arch_config=arch, get_total_num_hidden_layers=lambda: arch.total_num_hidden_layers,
        get_total_num_kv_heads=lambda: arch.total_num_kv_heads,
    )  # fmt: skip


def _parallel(model: Any, tp_size: int, pp_size: int, draft: Any = None, names: tuple[str, ...] = ()) -> Any:
    spec = None if draft is None else SimpleNamespace(method="eagle3", draft_model_config=draft)
    return SimpleNamespace(
        model_config=model, speculative_config=spec,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names)),
    )  # fmt: skip


def test_every_worker_knows_the_heads_of_all_stages_and_alone_those_here() -> None:
    model = _model_of(8, 2, 8, 2)
    assert model_layers(_parallel(model, 4, 1)) == ()
    cut = ((8, 2, 2), (2, 1, 2), (8, 2, 2), (2, 1, 2))
    assert model_layers(_parallel(model, 4, 2)) == tuple(
        ModelLayer(number, rank_heads, total) for number, (total, rank_heads, _) in enumerate(cut)
    )
    assert model_layers(_parallel(_model_of(3, 3), 2, 2))[1].total_heads == 0, "no even cut: nobody knows which"
    assert {one.total_heads for one in model_layers(_parallel(_model_of(8, 8, use_mla=True), 4, 2))} == {1}
    with_draft = model_layers(_parallel(model, 4, 2, _model_of(16)))
    assert with_draft[4:] == (ModelLayer(4, 4, 16),)


def test_a_layer_has_the_heads_of_its_own_model() -> None:
    """Four of a draft's eight heads are not all four of the model's: D would take wrong ones from other ranks."""
    names = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn", "draft_model.model.layers.0.attn")
    vllm = _parallel(_model_of(4, 2), 2, 1, _model_of(8), names)
    share = head_share(vllm, WorkerPlace(0, 1, 2, 2))
    assert [share.total_of(name, count) for name, count in zip(names, (2, 1, 4, 4), strict=True)] == [4, 2, 8, 8]
    assert [share.first_of(name, count) for name, count in zip(names, (2, 1, 4, 4), strict=True)] == [2, 1, 4, 4]
