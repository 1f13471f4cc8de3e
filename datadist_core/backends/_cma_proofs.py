# SPDX-License-Identifier: Apache-2.0
"""How two ends show each other, in their own memory, that they belong to one link.

For as long as an end has a link up, a slot in its memory holds an HMAC under the link's token, which only the two
ends know. The other end looks for it where `Identity.proofs_address` says. Whoever finds it knows that the process
with that number is the right one, that it still runs the same program, and that its end of the link is up; which is
why every later call checks it again, see `_copy.cma`.
"""

from __future__ import annotations

import hmac

from .._copy.cma import PROOF_BYTES, read_remote

NUM_SLOTS = 1024  # links at a time
_TABLE_BYTES = NUM_SLOTS * PROOF_BYTES


def prove(token: bytes, identity: bytes) -> bytes:
    """What the end with that identity shows the other end of a link."""
    return hmac.digest(token, b"datadist cma" + identity, "sha256")


def find_proof(pid: int, table_address: int, proof: bytes) -> int | None:
    """Where in the table of a process the proof is; None if it is not there (yet). Raises OSError."""
    offset = read_remote(pid, table_address, _TABLE_BYTES).find(proof)
    return table_address + offset if offset >= 0 and offset % PROOF_BYTES == 0 else None
