# SPDX-License-Identifier: Apache-2.0
"""How two ends show each other, in their own memory, that they belong to one link.

For as long as an end has a link up, a slot in its memory holds an HMAC under the link's token, which only the two
ends know. The other end looks for it where `Identity.proofs_address` says. Whoever finds it knows that the process
with that number is the right one, that it still runs the same program, and that its end of the link is up; which is
why every later call checks it again, see `_copy.cma`.
"""

from __future__ import annotations

import hmac
import mmap
import threading

import numpy as np

from .._copy.cma import PROOF_BYTES, read_remote
from ..errors import Unreachable

NUM_SLOTS = 1024  # links at a time
_TABLE_BYTES = NUM_SLOTS * PROOF_BYTES
_EMPTY = bytes(PROOF_BYTES)


def prove(token: bytes, identity: bytes) -> bytes:
    """What the end with that identity shows the other end of a link."""
    return hmac.digest(token, b"datadist cma" + identity, "sha256")


class ProofTable:
    """The proofs that this end shows. Thread-safe. It is read by other processes at any time, without notice."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _TABLE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_SLOTS, PROOF_BYTES)
        self._lock = threading.Lock()
        self._free = list(range(NUM_SLOTS))[::-1]
        self.address = int(self._slots.ctypes.data)

    def show(self, proof: bytes) -> int:
        """Put a proof into a slot and return its number. Raises Unreachable if all are taken."""
        with self._lock:
            if not self._free:
                raise Unreachable(f"this end has {NUM_SLOTS} links over cma already")
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


def find_proof(pid: int, table_address: int, proof: bytes) -> int | None:
    """Where in the table of a process the proof is; None if it is not there (yet). Raises OSError."""
    offset = read_remote(pid, table_address, _TABLE_BYTES).find(proof)
    return table_address + offset if offset >= 0 and offset % PROOF_BYTES == 0 else None
