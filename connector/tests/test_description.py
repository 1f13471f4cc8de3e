# SPDX-License-Identifier: Apache-2.0
"""Two descriptions fit, or the refusal names the field and both values (B35, B37)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_datadist.description import (
    PROTOCOL_VERSION,
    CacheDescription,
    Description,
    Incompatible,
    ModelLayer,
    check_compatible,
    decode,
    encode,
)
from vllm_datadist.worker.topology import LayerDescription, Strip, plain

LAYER = LayerDescription("layers.0", 0, 0, 0, 2, 2, 2, 4096, plain(128, 128))
CACHE = CacheDescription(
    model_id=0, group=0, kind="full_attention", window=None, chunk=None, is_state=False, block_tokens=32,
    pages_per_block=1, page_bytes=8192, num_pages=100, num_tensors=1, layers=[LAYER],
)  # fmt: skip
TOKEN_MAJOR = {"head_stride_bytes": 128, "strips": plain(256, 128)}
OURS = Description(
    version=PROTOCOL_VERSION,
    model="tiny",
    revision="main",
    quantization=None,
    dtype="torch.float32",
    cache_dtype="auto",
    use_mla=False,
    speculative="none",
    tp_size=1,
    pp_size=1,
    tp_rank=0,
    pp_rank=0,
    model_config={"hidden_size": "256", "rope_theta": "10000.0"},
    caches=[CACHE],
)


def _with(**changes: Any) -> Description:
    return msgspec.structs.replace(OURS, **changes)


def _with_layer(**changes: Any) -> Description:
    layer = msgspec.structs.replace(LAYER, **changes)
    return _with(caches=[msgspec.structs.replace(CACHE, layers=[layer])])


def _with_cache(**changes: Any) -> Description:
    return _with(caches=[msgspec.structs.replace(CACHE, **changes)])


def test_equal_engines_fit_over_the_wire() -> None:
    check_compatible(OURS, decode(encode(OURS)))
    layers = (ModelLayer(0, 2, 2), ModelLayer(1, 1, 8))
    assert decode(encode(_with(model_layers=layers))).model_layers == layers


@pytest.mark.parametrize(
    "theirs",
    [
        _with(revision=None),
        _with(tp_size=2, tp_rank=1),
        _with(pp_size=2, pp_rank=1, stages=(0, 1)),
        _with(dp_rank=3),
        _with(caches=[CACHE, CACHE]),
        _with(caches=[]),
        _with_cache(num_pages=7),
        _with_cache(block_tokens=64, page_bytes=16384),
        _with_cache(model_id=5),
        _with_layer(layer_name="layers.9"),
        _with_layer(num_heads=1),
        _with_layer(**TOKEN_MAJOR),
    ],
)
def test_what_may_differ(theirs: Description) -> None:
    """The cut of the cache, its layout, and layers that only one end has."""
    check_compatible(OURS, decode(encode(theirs)))


@pytest.mark.parametrize(
    ("theirs", "field", "ours_value", "theirs_value"),
    [
        (_with(model="other"), "model", "'tiny'", "'other'"),
        (_with(revision="v2"), "revision", "'main'", "'v2'"),
        (_with(quantization="awq"), "quantization", "None", "'awq'"),
        (_with(dtype="torch.bfloat16"), "dtype", "'torch.float32'", "'torch.bfloat16'"),
        (_with(cache_dtype="fp8"), "cache_dtype", "'auto'", "'fp8'"),
        (_with(use_mla=True), "use_mla", "False", "True"),
        (_with(speculative="eagle:draft"), "speculative", "'none'", "'eagle:draft'"),
        (
            _with(model_config={**OURS.model_config, "rope_theta": "5e5"}),
            "model config rope_theta",
            "'10000.0'",
            "'5e5'",
        ),
        (_with(model_config={"hidden_size": "256"}), "model config rope_theta", "'10000.0'", "None"),
        (_with_cache(group=1), "layer layers.0: group", "0", "1"),
        (_with_cache(kind="sliding_window"), "layer layers.0: kind", "'full_attention'", "'sliding_window'"),
        (_with_cache(window=128), "layer layers.0: window", "None", "128"),
        (_with_cache(chunk=64), "layer layers.0: chunk", "None", "64"),
        (_with_cache(is_state=True), "layer layers.0: is_state", "False", "True"),
        (_with_layer(total_heads=4), "layer layers.0: total_heads", "2", "4"),
        (_with_layer(strips=plain(128, 64)), "layer layers.0: content_bytes", "128", "64"),
        (_with_layer(packing="x"), "layer layers.0: packing", "''", "'x'"),
    ],
)
def test_what_may_not_differ(theirs: Description, field: str, ours_value: str, theirs_value: str) -> None:
    """B35."""
    with pytest.raises(Incompatible) as caught:
        check_compatible(OURS, theirs)
    text = str(caught.value)
    assert f"{field} is {ours_value}" in text
    assert (
        f"here and {theirs_value}" in text.replace("'10000.0'", "10000").replace("'5e5'", "5e5") or theirs_value in text
    )


def test_ranks_whose_heads_nobody_can_number_must_be_equally_many() -> None:
    ours = _with_layer(total_heads=0)
    check_compatible(ours, ours)
    with pytest.raises(Incompatible, match=r"layer layers\.0: tp_size is 1 here and 2 at the peer, and which heads"):
        check_compatible(ours, msgspec.structs.replace(ours, tp_size=2))


def test_many_differences_are_cut_short() -> None:
    config = {f"field{i}": "1" for i in range(100)}
    with pytest.raises(Incompatible, match="and 94 more"):
        check_compatible(OURS, _with(model_config=config))


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_named_even_if_the_rest_cannot_be_read(version: int) -> None:
    """B37."""
    body = msgspec.msgpack.encode({"version": version, "something": "else"})
    with pytest.raises(Incompatible, match=f"version is {PROTOCOL_VERSION} here and {version} at the peer"):
        decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80\x04\x95",
        b"\x00" * 64,
        b"\xff" * 9,
        msgspec.msgpack.encode({"version": PROTOCOL_VERSION}),
        encode(_with(tp_rank=1)),
        encode(_with(tp_size=1 << 40)),
        encode(_with(dp_rank=-1)),
        encode(_with_cache(block_tokens=0)),
        encode(_with_layer(offset_bytes=8192)),
        encode(_with(model_layers=((0, 2),))),
        encode(_with(model_layers=(("0", 2, 2),))),
    ],
)
def test_what_is_no_description_is_refused(body: bytes) -> None:
    """B39."""
    with pytest.raises(Incompatible, match="cannot be read"):
        decode(body)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 1, "rank_heads": 1, "head_stride_bytes": 1 << 63},
        {"strips": (Strip(0, 1, (1 << 64) - 1, 128, 128),)},
        {"strips": (Strip(0, 1, 128, 1 << 49, 128),)},
    ],
    ids=str,
)
def test_a_distance_of_nothing_is_limited_too(changes: dict[str, Any]) -> None:
    """Planning calculates with it: in 64 bits."""
    layer = msgspec.structs.replace(LAYER, num_heads=1, rank_heads=1)
    layer = msgspec.structs.replace(layer, **changes)
    cache = msgspec.structs.replace(CACHE, block_tokens=1, layers=[layer])
    with pytest.raises(Incompatible, match=r"layer layers\.0: strides .* are more than \d+ bytes"):
        decode(encode(_with(caches=[cache])))
