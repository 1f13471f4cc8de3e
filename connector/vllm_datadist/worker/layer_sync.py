# SPDX-License-Identifier: Apache-2.0
"""How far the engine's forward pass is, for those who send layers while it goes on.

vLLM calls `save_kv_layer` in the engine's thread when a layer has been computed; in CPU memory its keys and values are
in their blocks then. All that thread does is to note the layer's name: it waits for nobody. `wait_for_save` ends the
step and releases every layer that has not been named: layers that share another one's cache, or whose hook does not
come. Where one forward pass comes to a layer several times (drafting models, micro-batches), the first call says
nothing, so no layer is released before the step's end (`is_layerwise`).

A step that ends by an error releases nothing: what its layers hold is not known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from datadist_core import LayerSynchronizer
from datadist_core.types import Deadline

from .load_book import LayerSpans


class StepLayers:
    """The layers of one step. Thread-safe; only waiting for it takes time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computed: set[str] = set()
        self._num_waiting = 0
        self._has_ended = False
        self._has_failed = False

    def computed(self, layer_name: str) -> None:
        """The layer's blocks hold what this step computes. Called by the engine's thread."""
        with self._changed:
            self._computed.add(layer_name)
            if self._num_waiting:
                self._changed.notify_all()

    def end(self, has_failed: bool = False) -> None:
        """All layers are computed, or none of the others ever will be. Only the first call counts."""
        with self._changed:
            if not self._has_ended:
                self._has_ended, self._has_failed = True, has_failed
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether all layers are in their blocks."""
        with self._changed:
            return self._has_ended and not self._has_failed

    def wait(self, layer_name: str, timeout_s: float | None) -> bool:
        """Wait for a layer. False if the time is over, or if the step has failed."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: self._has_ended or layer_name in self._computed, timeout_s)
            finally:
                self._num_waiting -= 1
            return not self._has_failed and (self._has_ended or layer_name in self._computed)


class LayerProgress:
    """Which step is under way. The engine's thread calls all but `current`.

    Args:
        is_layerwise: False: layers are released by the end of their step only.
    """

    def __init__(self, is_layerwise: bool = True) -> None:
        self._is_layerwise = is_layerwise
        self._step: StepLayers | None = None

    def begin(self) -> StepLayers:
        """A step with something to send. One that has not ended has failed."""
        self.end(has_failed=True)
        self._step = StepLayers()
        return self._step

    def computed(self, layer_name: str) -> None:
        step = self._step
        if step is not None and self._is_layerwise:
            step.computed(layer_name)

    def end(self, has_failed: bool = False) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end(has_failed)


class CacheLayers(LayerSynchronizer):
    """Layers of one blocks cache, for `transfer_cache_async`.

    Args:
        step: who computes them.
        tensors: of the cache, one per layer.
        layer_names: of these.
        is_wanted: asked after each wait: False ends the transfer.
        spans: is told when each layer's move begins, and that the one before has arrived.
        deadline: of the whole transfer. A layer may take longer to compute than the core's time for moving one.
    """

    def __init__(
        self,
        step: StepLayers,
        tensors: range,
        layer_names: Sequence[str],
        is_wanted: Callable[[], bool],
        deadline: Deadline,
        spans: LayerSpans | None = None,
    ) -> None:
        self._step = step
        self._layer_names = dict(zip(tensors, layer_names, strict=True))
        self._spans = spans
        self._is_wanted = is_wanted
        self._deadline = deadline

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        name = self._layer_names[layer_index]
        if self._spans is not None:
            self._spans.end()
        if not self._step.wait(name, self._deadline.timeout()) or not self._is_wanted():
            return False
        if self._spans is not None:
            self._spans.begin(name)
        return True
