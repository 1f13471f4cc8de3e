# SPDX-License-Identifier: Apache-2.0
"""How an attention kernel keeps K and V within a block: found out by having it write one.

The shape of vLLM's KV cache views says [block, head, token, content], but what is in a head of a block is the kernel's
own affair. vLLM's CPU attention keeps K there with the tokens side by side, each of its dimensions a row, and V behind
it; with AMX both are packed into tiles. Blocks of one size can be moved whole without knowing. To move tokens between
blocks of different sizes, one has to know where each number lies.

So the kernel writes a block of numbers that say which they are, in as many digits as its data type can tell apart, and
each is looked for. What lies at regular distances is described by `Strip`s; anything else is a packing with a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from .kv_layout import Interior
from .topology import MAX_STRIPS, Strip

#: Digits 0 .. 7 are exact in every floating-point type, fp8 too.
BASE = 8
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

#: Writes keys and values, [token, head, dimension], as tokens 0, 1, ... of one block.
Write = Callable[[torch.Tensor, torch.Tensor], None]
_Found = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trial:
    """One block to write to.

    Attributes:
        block: [1, head, token, content], K's dimensions before V's in the content.
        dtype: of keys and values.
        key_unit, value_unit: what a digit is multiplied with, so that it is exact in a quantized cache.
        name: of the kernel, for a packing.
    """

    block: torch.Tensor
    num_key_items: int
    dtype: torch.dtype
    key_unit: float
    value_unit: float
    name: str


def find_interior(trial: Trial, write: Write) -> Interior | None:
    """Where the kernel keeps what it writes; None if that is where the view's shape says."""
    _, _, tokens, content = trial.block.shape
    found = _find(trial, write)
    if found is None:
        return Interior((), f"{trial.name}, unknown")
    item_bytes = trial.block.element_size()
    places = found.reshape(tokens, content) * item_bytes
    if np.array_equal(places.ravel(), np.arange(places.size) * item_bytes):
        return None
    strips = _strips(places, item_bytes)
    if strips is None:
        return Interior((), f"{trial.name}, {blake2b(places.tobytes(), digest_size=8).hexdigest()}")
    return Interior(strips)


def _find(trial: Trial, write: Write) -> _Found | None:
    """For each item of each token, token by token, its place in the head's part of the block, in items.

    None: it is not each once, or not alike for all heads.
    """
    _, heads, tokens, content = trial.block.shape
    index = torch.arange(tokens * content)
    number = np.zeros((heads, tokens * content), dtype=np.int64)
    codes = np.array([_written(trial, write, torch.full_like(index, digit))[0, 0] for digit in range(BASE)])
    digits, place = np.argsort(codes), 1
    codes = codes[digits]
    while place < tokens * content:
        raw = _written(trial, write, index // place % BASE)
        found = np.minimum(np.searchsorted(codes, raw), BASE - 1)
        if (codes[found] != raw).any():
            return None
        number += digits[found] * place
        place *= BASE
    is_each_once = np.array_equal(np.sort(number[0]), np.arange(tokens * content))
    return np.argsort(number[0]) if is_each_once and (number == number[0]).all() else None


def _written(trial: Trial, write: Write, digits: torch.Tensor) -> _Found:
    """[head, item of the block], as the kernel leaves them, after it has written these digits."""
    _, heads, tokens, content = trial.block.shape
    values = digits.to(torch.float32).view(tokens, 1, content).expand(tokens, heads, content)
    keys, rest = values[..., : trial.num_key_items], values[..., trial.num_key_items :]
    write((keys * trial.key_unit).to(trial.dtype).contiguous(), (rest * trial.value_unit).to(trial.dtype).contiguous())
    raw = trial.block.contiguous().view(_RAW[trial.block.element_size()])
    return raw.reshape(heads, tokens * content).numpy().astype(np.int64)


def _strips(places: _Found, item_bytes: int) -> tuple[Strip, ...] | None:
    """[token, item] of byte offsets as strips; None if tokens do not lie at regular distances."""
    steps = np.diff(places, axis=0)
    if len(steps) == 0 or (steps != steps[0]).any() or (steps[0] < item_bytes).any():
        return None
    strips: list[Strip] = []
    first, num_items = 0, places.shape[1]
    while first < num_items:
        end = _end_of_strip(places[0], steps[0], first)
        strips.append(_strip(places[0], int(steps[0][first]), first, end, item_bytes))
        if strips[-1] is None or len(strips) > MAX_STRIPS:
            return None
        first = end
    return tuple(strips)


def _end_of_strip(offsets: _Found, steps: _Found, first: int) -> int:
    """Items at equal distances, with equal steps from token to token."""
    end = first + 1
    while (
        end < len(offsets)
        and steps[end] == steps[first]
        and offsets[end] - offsets[end - 1] == offsets[min(first + 1, end)] - offsets[first] > 0
    ):
        end += 1
    return end


def _strip(offsets: _Found, step: int, first: int, end: int, item_bytes: int) -> Strip:
    distance = int(offsets[first + 1] - offsets[first]) if end > first + 1 else item_bytes
    if distance == item_bytes:  # side by side: one item
        size = (end - first) * item_bytes
        return Strip(int(offsets[first]), 1, size, step, size)
    return Strip(int(offsets[first]), end - first, distance, step, item_bytes)
