# SPDX-License-Identifier: Apache-2.0
"""How both ends of a new connection prove that they belong to the link. Sans-IO.

Each end shows an HMAC that only who knows the link's key can make: over both ends' nonces, which are made anew for
every connection, so that nothing recorded on an earlier one is of use; over the role of who shows it, so that no end
can be made to answer its own question; and over what HELLO said, so that nobody on the way can change that.

The key is the link's token, which the two ends have agreed on over the control connection; with a shared secret it was
never sent there either, see `link.handshake`.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field

from ._tcp_frames import NONCE_BYTES, VERSION, Hello, Kind


@dataclass(frozen=True, slots=True)
class LinkKey:
    """What the two ends of one link know, and nobody else."""

    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What has been said on a new connection: HELLO, and the nonce that answered it."""

    hello: Hello
    nonce: bytes

    def prove(self, link_key: LinkKey, kind: Kind) -> bytes:
        """What PROOF (by the end that dialled) or WELCOME (by the other one) has to show."""
        said = self.hello
        numbers = bytes([VERSION, int(kind), said.stream, said.num_streams])
        message = b"datadist tcp" + numbers + said.instance + said.nonce + self.nonce  # all of fixed size
        return hmac.digest(link_key.key, message, "sha256")

    def is_proved(self, link_key: LinkKey, kind: Kind, proof: bytes) -> bool:
        """In constant time."""
        return hmac.compare_digest(self.prove(link_key, kind), proof)


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)
