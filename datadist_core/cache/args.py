# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of transfers and copies: layer ranges, block lists, batch indices and sizes.

What is wrong with a type is a TypeError, everything else a ParamInvalid; both name the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..checks import check_type
from ..errors import ParamInvalid, TimedOut
from ..memory.layout import CacheLayout
from ..transfer.plan import Items
from ..types import Deadline

#: Key and value.
DEFAULT_TENSORS_PER_LAYER = 2
#: `size` of a whole batch entry.
WHOLE_ENTRY = -1


@dataclass(frozen=True, slots=True)
class Layers:
    """A range of layers as it was asked for; `layers` None means all."""

    name: str
    layers: range | None
    tensors_per_layer: int

    def tensors(self, layout: CacheLayout) -> range:
        """The tensors of a cache that this names. ParamInvalid if it has not that many."""
        num_tensors = len(layout.grids)
        if self.layers is None:
            return range(num_tensors)
        if num_tensors % self.tensors_per_layer:
            raise ParamInvalid(
                f"tensor_num_per_layer={self.tensors_per_layer} does not divide num_tensors={num_tensors}"
            )
        if self.layers.stop * self.tensors_per_layer > num_tensors:
            raise ParamInvalid(
                f"{self.name}={self.layers} is out of range: the cache has "
                f"{num_tensors // self.tensors_per_layer} layers"
            )
        return range(self.layers.start * self.tensors_per_layer, self.layers.stop * self.tensors_per_layer)


def layers_arg(name: str, layers: range | None, tensors_per_layer: int) -> Layers:
    """Checked as far as possible without the cache."""
    check_type("tensor_num_per_layer", tensors_per_layer, int)
    if tensors_per_layer < 1:
        raise ParamInvalid(f"tensor_num_per_layer={tensors_per_layer} must be at least 1")
    if layers is not None:
        check_type(name, layers, range)
        if layers.step != 1 or not 0 <= layers.start < layers.stop:
            raise ParamInvalid(f"{name}={layers} must be a non-empty range with step 1")
    return Layers(name, layers, tensors_per_layer)


def check_tensors_per_layer(tensors_per_layer: int, layout: CacheLayout) -> None:
    """At most the tensors of the cache, also where no range makes it matter; but the default fits every cache."""
    most = max(DEFAULT_TENSORS_PER_LAYER, len(layout.grids))
    if tensors_per_layer > most:
        raise ParamInvalid(
            f"tensor_num_per_layer={tensors_per_layer} is out of range 1..{len(layout.grids)}, the cache's num_tensors"
        )


def block_items(name: str, blocks: Sequence[int], may_be_empty: bool = False) -> Items:
    """Block indices as an array. TypeError / ParamInvalid naming the argument for anything else."""
    if isinstance(blocks, np.ndarray):
        items = blocks
    else:
        check_type(name, blocks, list, tuple)
        items = _as_array(name, blocks)
    if items.ndim != 1 or items.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold ints only")
    if len(items) == 0:
        if not may_be_empty:
            raise ParamInvalid(f"{name} is empty; name at least one block")
        return np.empty(0, dtype=np.int64)
    if np.minimum.reduce(items) < 0:
        raise ParamInvalid(f"{name} holds the negative index {int(items.min())}")
    return np.ascontiguousarray(items, dtype=np.int64)


def _as_array(name: str, blocks: Sequence[int]) -> Items:
    # Few types, whatever the length: a set of them is cheap where a check of each index would not be.
    if any(kind is bool or not issubclass(kind, (int, np.integer)) for kind in set(map(type, blocks))):
        raise TypeError(f"{name} must hold ints only")
    try:
        return np.array(blocks, dtype=np.int64)
    except OverflowError as error:
        raise ParamInvalid(f"{name} holds an index that is out of range") from error


def check_equally_long(first_name: str, first: Items, second_name: str, second: Items) -> None:
    if len(first) != len(second):
        raise ParamInvalid(
            f"{first_name} has {len(first)} indices but {second_name} has {len(second)}; they must be equally long"
        )


def check_batch_index(name: str, batch_index: int, batch_size: int) -> None:
    if not 0 <= batch_index < batch_size:
        raise ParamInvalid(f"{name}={batch_index} is out of range 0..{batch_size - 1}")


def deadline_arg(deadline_s: float | None, default_s: float) -> Deadline:
    """That many seconds from now. TimedOut if that is no time at all: then nothing moves, on any backend."""
    if deadline_s is None:
        return Deadline.after(default_s)
    check_type("deadline_s", deadline_s, int, float)
    if deadline_s <= 0:
        raise TimedOut(f"deadline_s={deadline_s} leaves no time")
    return Deadline.after(deadline_s)


def check_size(size: int) -> None:
    check_type("size", size, int)
    if size != WHOLE_ENTRY and size < 1:
        raise ParamInvalid(f"size={size} must be a number of bytes greater than 0, or -1 for a whole batch entry")
