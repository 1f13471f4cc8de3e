# SPDX-License-Identifier: Apache-2.0
"""How the descriptors of memory files get from their owner to a peer, and to nobody else.

Every backend has one `RegionServer`: an abstract Unix socket with a random name and one thread behind it. The name
exists only as long as the socket, so nothing is left behind after SIGKILL. A peer dials it and keeps the connection
for the life of the link; when one end dies, the other sees it there.

    peer                           server
    Hello(proof of the token)  ->             kept until the server's own end has called `connect`, too
                               <-  Welcome(its proof)
    Fetch(region)              ->
                               <-  Granted(region) + descriptor, or Refused(region, reason)
    Bye                        ->             an orderly end; without it the peer was lost

A proof is an HMAC under the link's token, which only the two ends know: neither a stranger who finds the name nor
one who took over the name of a dead process gets anywhere, and the token itself is never sent. The user id of the
peer does not matter: whoever knows the token has it from us, over the control channel.

Packets are msgpack in SOCK_SEQPACKET: the kernel keeps their boundaries, and a descriptor stays with its packet.
"""

from __future__ import annotations

import hmac

import msgspec

from ..errors import ProtocolError

MAX_PACKET_BYTES = 2048
MAX_REASON_CHARS = 1000


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    region_id: int


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    region_id: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    region_id: int
    reason: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    pass


Message = Hello | Welcome | Fetch | Granted | Refused | Bye
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(packet: bytes) -> Message:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(packet)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"malformed packet of {len(packet)} bytes: {error}") from error


def prove(token: bytes, side: type[Hello] | type[Welcome], address: bytes) -> bytes:
    """What the sender of a `side` message to, or from, the server at `address` shows; compare with hmac."""
    return hmac.digest(token, b"datadist shm " + side.__name__.encode() + address, "sha256")
