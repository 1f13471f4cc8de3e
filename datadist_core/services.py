# SPDX-License-Identifier: Apache-2.0
"""Services: what the layer above a link answers to the same layer at the other end, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import ParamInvalid

Handler = Callable[[int, bytes], bytes]


class ServiceTable:
    """Handlers by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}

    def register(self, name: str, handler: Handler) -> None:
        with self._lock:
            self._handlers[name] = handler

    def serve(self, name: str, remote_cluster_id: int, body: bytes) -> bytes:
        with self._lock:
            handler = self._handlers.get(name)
        if handler is None:
            raise ParamInvalid(f"service {name!r} does not exist at this end")
        return handler(remote_cluster_id, body)
