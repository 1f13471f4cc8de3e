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
    check_compatible,
    decode,
    encode,
)
from vllm_datadist.worker.topology import LayerDescription

LAYER = LayerDescription("layers.0", 100, 32, 8192, 0, 2, 4096, 128, 128)
CACHE = CacheDescription(0, 0, "full_attention", 32, None, [LAYER])
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


@pytest.mark.parametrize("theirs", [_with(revision=None), _with_layer(num_blocks=7)])
def test_what_may_differ(theirs: Description) -> None:
    check_compatible(OURS, theirs)


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
        (_with(tp_size=2), "tp_size", "1", "2"),
        (_with(pp_rank=1), "pp_rank", "0", "1"),
        (
            _with(model_config={**OURS.model_config, "rope_theta": "5e5"}),
            "model config rope_theta",
            "'10000.0'",
            "'5e5'",
        ),
        (_with(model_config={"hidden_size": "256"}), "model config rope_theta", "'10000.0'", "None"),
        (_with(caches=[CACHE, CACHE]), "number of caches", "1", "2"),
        (_with_cache(kind="sliding_window"), "group 0: kind", "'full_attention'", "'sliding_window'"),
        (_with_cache(window=128), "group 0: window", "None", "128"),
        (_with_cache(block_tokens=64), "group 0: block_tokens", "32", "64"),
        (_with_cache(layers=[LAYER, LAYER]), "group 0: number of layers", "1", "2"),
        (_with_layer(layer_name="layers.9"), "layer layers.0: layer_name", "'layers.0'", "'layers.9'"),
        (_with_layer(num_heads=4), "layer layers.0: num_heads", "2", "4"),
        (_with_layer(content_bytes=256), "layer layers.0: content_bytes", "128", "256"),
        (_with_layer(head_stride_bytes=128), "layer layers.0: head_stride_bytes", "4096", "128"),
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
    "body", [b"", b"\x80\x04\x95", b"\x00" * 64, b"\xff" * 9, msgspec.msgpack.encode({"version": PROTOCOL_VERSION})]
)
def test_what_is_no_description_is_refused(body: bytes) -> None:
    """B39."""
    with pytest.raises(Incompatible, match="cannot be read"):
        decode(body)
