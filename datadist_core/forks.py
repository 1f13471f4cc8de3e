# SPDX-License-Identifier: Apache-2.0
"""What forked children do not share with their parent: its sockets, and the token that tells one process from another.

A child made by `os.fork` (as `multiprocessing` does by default) inherits every open socket. If this process then dies
and the child lives on, no peer sees a connection end, and nobody can listen at the same port again. So a child lets go
of these sockets as soon as it exists. Children that start another program never get them: Python's are close-on-exec.
"""

from __future__ import annotations

import os
import secrets
import weakref
from contextlib import suppress
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int:
        """Negative once it is closed."""
        ...


_kept_from_children: weakref.WeakKeyDictionary[object, tuple[HasFileno, ...]] = weakref.WeakKeyDictionary()


def keep_from_children(owner: object, *sockets: HasFileno) -> None:
    """Let no child that is forked from now on hold these sockets. Ends with their owner. Thread-safe."""
    _kept_from_children[owner] = sockets


def process_token() -> bytes:
    """16 random bytes of this process. A forked child has others, lest parent and child take each other for one."""
    return _process_token


def _renew_token() -> None:
    global _process_token
    _process_token = secrets.token_bytes(16)


def _let_go() -> None:
    """In the child. The numbers stay in use, by the null device: the child's copies of the objects may close them."""
    descriptors = [sock.fileno() for sockets in list(_kept_from_children.values()) for sock in sockets]
    with suppress(OSError):  # out of descriptors: nothing that a fork could report
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in descriptors:
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)


_process_token = secrets.token_bytes(16)
os.register_at_fork(after_in_child=_renew_token)
os.register_at_fork(after_in_child=_let_go)
