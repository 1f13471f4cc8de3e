# SPDX-License-Identifier: Apache-2.0
"""Who a peer is: what it says of itself, and what the kernel says of it.

A peer could claim any process number, and have us read or overwrite the memory of a process that it could never
touch itself. So the number comes from the kernel: every backend listens on an abstract Unix socket with a random
name, and whoever dials it is told by the kernel which process, of which user, began to listen there. Nothing is ever
sent over these sockets. The name goes with the process, so nothing is left behind after SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct

import msgspec

from ..errors import ProtocolError, Unreachable
from ._attached import decode_identity_as
from ._host import Host

_VERSION = 1
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")  # struct ucred
_MAX_ADDRESS = 1 << 62


class Identity(msgspec.Struct, frozen=True):
    """What an end says of itself.

    Attributes:
        door: address of its `Door`.
        proofs_address: of its `ProofTable`, in its own memory.
        traces_all: it has CAP_SYS_PTRACE.
        allows_ptrace: it names the peer as its tracer where that is asked for.
    """

    version: int
    boot_id: str
    pid_namespace: str
    network_namespace: str
    door: bytes
    proofs_address: int
    traces_all: bool
    allows_ptrace: bool


def encode_identity(host: Host, door: bytes, proofs_address: int, traces_all: bool, allows_ptrace: bool) -> bytes:
    return msgspec.msgpack.encode(
        Identity(
            _VERSION,
            host.boot_id,
            host.pid_namespace,
            host.network_namespace,
            door,
            proofs_address,
            traces_all,
            allows_ptrace,
        )
    )


def decode_identity(identity: bytes) -> Identity:
    """Raises ProtocolError."""
    decoded = decode_identity_as(Identity, identity, "cma")
    if not 0 < decoded.proofs_address < _MAX_ADDRESS:
        raise ProtocolError(f"the peer's cma backend names an impossible address, {decoded.proofs_address:#x}")
    return decoded


def check_same_host(here: Host, peer: Identity) -> None:
    """Raises Unreachable with the reason."""
    if peer.version != _VERSION:
        raise Unreachable(f"the peer's cma backend speaks version {peer.version}, this one {_VERSION}")
    if peer.boot_id != here.boot_id:
        raise Unreachable(f"the peer is on another host (boot id {peer.boot_id}, here {here.boot_id})")
    for kind, there, mine in (
        ("process", peer.pid_namespace, here.pid_namespace),
        ("network", peer.network_namespace, here.network_namespace),
    ):
        if there != mine:
            raise Unreachable(
                f"the peer is in another {kind} namespace ({there}, here {mine}); start both containers in the same "
                "one to let them touch each other's memory"
            )


class Door:
    """A socket to be recognised by. Thread-safe."""

    def __init__(self) -> None:
        """Raises Unreachable if this host has no such sockets."""
        self.address = b"\0datadist-cma-" + secrets.token_hex(16).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(self.address)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise Unreachable(f"cannot listen on an abstract Unix socket: {error}") from error

    def clear(self) -> None:
        """Drop whoever has knocked: they know by now who we are, and their places are needed."""
        with contextlib.suppress(OSError):  # nobody is left, or `close` was called
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


def process_behind(door: bytes) -> int | None:
    """The number of the process behind a `Door`; None if too many others are dialling it right now.

    Raises Unreachable if there is none, or it is not ours to touch.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setblocking(False)
            sock.connect(door)
            said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except BlockingIOError:
        return None
    except OSError as error:
        raise _dial_error(error) from error
    pid: int
    pid, user_id, _ = _CREDENTIALS.unpack(said)
    if pid <= 0:
        raise Unreachable("the peer is in a process namespace that this process cannot see")
    # The kernel would let us touch more than the peer could touch itself, if we are root. The peer must gain nothing.
    if user_id != os.geteuid():
        raise Unreachable(
            f"the peer runs as another user (user id {user_id}, here {os.geteuid()}); cma works within one user only"
        )
    return pid


def _dial_error(error: OSError) -> Unreachable:
    if isinstance(error, ConnectionRefusedError):
        return Unreachable("nobody listens on the peer's cma socket: its process or backend has ended")
    return Unreachable(f"the peer's cma socket cannot be reached: {error}")
