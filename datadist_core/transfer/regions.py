# SPDX-License-Identifier: Apache-2.0
"""The table of this side's regions, registered with every open backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ParamInvalid
from ..memory.region import Region
from .backend import Backend


@dataclass(frozen=True, slots=True)
class ExportedRegion:
    """A region with, per backend name, what a peer needs to attach it. A backend that cannot export it is absent."""

    region: Region
    descriptors: dict[str, bytes]


class RegionTable:
    """Regions by id. Thread-safe."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)
        self._lock = threading.Lock()
        self._exported: dict[int, ExportedRegion] = {}

    def add(self, region: Region) -> ExportedRegion:
        """Register with every backend. Raises what a backend raises; then nothing stays registered."""
        descriptors: dict[str, bytes] = {}
        try:
            for backend in self._backends:
                descriptor = backend.register(region)
                if descriptor is not None:
                    descriptors[backend.name] = descriptor
        except BaseException:
            self._unregister(region.region_id)
            raise
        exported = ExportedRegion(region, descriptors)
        with self._lock:
            self._exported[region.region_id] = exported
        return exported

    def remove(self, region_id: int) -> None:
        with self._lock:
            self._exported.pop(region_id, None)
        self._unregister(region_id)

    def get(self, region_id: int) -> ExportedRegion:
        with self._lock:
            exported = self._exported.get(region_id)
        if exported is None:
            raise ParamInvalid(f"memory region {region_id} is not registered (any more)")
        return exported

    def region(self, region_id: int) -> Region:
        return self.get(region_id).region

    def _unregister(self, region_id: int) -> None:
        for backend in self._backends:
            backend.unregister(region_id)
