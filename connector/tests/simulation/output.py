# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler tells the connector about a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .blocks import Request


def scheduler_output(scheduled: list[tuple[Request, int, int]]) -> Any:
    """As vLLM's `SchedulerOutput`, as far as it is read."""
    new, cached = [], []
    for request, first, _ in scheduled:
        if request.num_told is None:
            new.append(SimpleNamespace(
                req_id=request.request_id, num_computed_tokens=first, block_ids=(list(request.blocks),)
            ))  # fmt: skip
        else:
            cached.append((request, first))
    resumed = {request.request_id for request, _ in cached if request.was_preempted}
    output = SimpleNamespace(
        num_scheduled_tokens={request.request_id: end - first for request, first, end in scheduled},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request, _ in cached],
            new_block_ids=[
                (request.blocks[0 if request.was_preempted else request.num_told :],) for request, _ in cached
            ],
            num_computed_tokens=[first for _, first in cached],
            resumed_req_ids=resumed,
        ),
    )
    for request, _, _ in scheduled:
        request.num_told, request.was_preempted = len(request.blocks), False
    return output
