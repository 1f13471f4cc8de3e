# SPDX-License-Identifier: Apache-2.0
"""Transfers: the plan, the backend contract, the engine that drives backends."""

from .backend import Backend, BackendContext, Capabilities, Completion, CompletionStatus, ServedGrid
from .plan import Batch, CopyList, GridPair, Op, Slice, expand, whole_item

__all__ = [
    "Backend",
    "BackendContext",
    "Batch",
    "Capabilities",
    "Completion",
    "CompletionStatus",
    "CopyList",
    "GridPair",
    "Op",
    "ServedGrid",
    "Slice",
    "expand",
    "whole_item",
]
