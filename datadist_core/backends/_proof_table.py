# SPDX-License-Identifier: Apache-2.0
"""How an end of a link shows, in its own memory, that it belongs to the link.

For as long as it has the link up, a slot of the table holds an HMAC under the link's token, which only the two ends
know. The other end reads the table through the very path that the transfers will take: whoever finds the proof knows
that it reads the right memory, and that data gets through.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from ..errors import Unreachable

PROOF_BYTES = 32
_EMPTY = bytes(PROOF_BYTES)


class ProofTable:
    """The proofs that this end shows, of at most `num_slots` links at a time over `backend` (a name, for errors).

    Thread-safe. It is read by peers at any time, without notice. It begins on a page.
    """

    def __init__(self, backend: str, num_slots: int) -> None:
        memory = mmap.mmap(-1, num_slots * PROOF_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._backend = backend
        self._slots = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, PROOF_BYTES)
        self._lock = threading.Lock()
        self._free = list(range(num_slots))[::-1]
        self.address = int(self._slots.ctypes.data)

    def show(self, proof: bytes) -> int:
        """Put a proof into a slot and return its number. Raises Unreachable if all are taken."""
        with self._lock:
            if not self._free:
                raise Unreachable(f"this end has {len(self._slots)} links over {self._backend} already")
            slot = self._free.pop()
            self._write(slot, proof)
        return slot

    def withdraw(self, slot: int) -> None:
        """Once for each slot."""
        with self._lock:
            self._write(slot, _EMPTY)
            self._free.append(slot)

    def _write(self, slot: int, value: bytes) -> None:
        self._slots[slot] = np.frombuffer(value, dtype=np.uint8)
