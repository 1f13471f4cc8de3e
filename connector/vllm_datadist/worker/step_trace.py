# SPDX-License-Identifier: Apache-2.0
"""What a trace shows of a worker's forward passes: P's chunks, and each layer as it is computed.

Only of steps that compute something to be pushed: a decode engine makes many steps, of which there is nothing to say.
The engine's thread calls it; while tracing is off, only `begin` does anything, which is to look.
"""

from __future__ import annotations

import time

from .. import trace
from ..messages import PushChunk, RequestKey, StepWork


class ForwardTrace:
    """One worker's."""

    def __init__(self) -> None:
        self._transfer_ids: dict[RequestKey, str] = {}
        self._chunks: tuple[PushChunk, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._begun_s: float | None = None
        self._layer_begun_s = 0.0

    def begin(self, work: StepWork) -> None:
        """A step begins, before its forward pass."""
        self._begun_s = None
        if not trace.is_on():
            return
        self._transfer_ids.update((opened.key, opened.transfer_id) for opened in work.push_opens)
        self._chunks = tuple(work.push_chunks)
        self._keys = tuple(self._key(chunk) for chunk in self._chunks)
        for ended in work.push_ends:
            self._transfer_ids.pop(ended.key, None)
        if self._chunks:
            self._begun_s = self._layer_begun_s = time.monotonic()

    def layer(self, layer_name: str) -> None:
        """That layer's KV is in the blocks. Each layer's span begins where the one before ended."""
        if self._begun_s is not None:
            now_s = time.monotonic()
            trace.record("layer", self._keys, self._layer_begun_s, now_s, layer=layer_name)
            self._layer_begun_s = now_s

    def end(self) -> None:
        """The forward pass is over."""
        if self._begun_s is None:
            return
        now_s = time.monotonic()
        for chunk, key in zip(self._chunks, self._keys, strict=True):
            args = {"request": chunk.key.request_id, "first_token": chunk.first_token, "end_token": chunk.end_token}
            trace.record("chunk", key, self._begun_s, now_s, "chunks", **args)
        self._begun_s = None

    def _key(self, chunk: PushChunk) -> str:
        return self._transfer_ids.get(chunk.key, chunk.key.request_id)
