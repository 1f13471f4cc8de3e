# SPDX-License-Identifier: Apache-2.0
"""Who may touch whose memory: why the kernel says no, and what may be done about it.

The kernel asks the same for one process touching another's memory as for attaching a debugger. Plain Linux wants
both to have the same user and groups and the touched one not to be protected. Where the Yama module is active
(Ubuntu and others) there is `kernel.yama.ptrace_scope` as well: 0 adds nothing; 1 wants the touched process to have
named the other one as its tracer; 2 wants CAP_SYS_PTRACE; 3 forbids it to everybody.

With 1, this side can name the peer (PR_SET_PTRACER), if told so by the option `allow_ptrace`. It is off by default,
because it gives away more than memory: whoever is named, and every process it starts, may attach to this process
like a debugger, and so make it do anything its user may do. Yama is there to keep other processes of the same user
from exactly that, and the link by itself does not prove much more about the peer than that it is one. A process can
name one tracer at a time, so one peer at a time can have this.
"""

from __future__ import annotations

import ctypes
import os
import threading

from ..errors import Unreachable
from ._cma_host import CAP_SYS_PTRACE, credentials, yama_scope

_PR_SET_PTRACER = 0x59616D61
_NEEDS_CAPABILITY = "give both ends CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"
_FILTER = "a seccomp filter, usually that of the container, forbids process_vm_readv"


def why_forbidden_here() -> str:
    """Why a process may not even touch its own memory that way."""
    return f"{_FILTER}; allow it there (docker: --cap-add SYS_PTRACE, or a seccomp profile that has it)"


def why_refused(pid: int) -> str:
    """Why the kernel does not let this process touch the memory of process `pid`, and the remedy."""
    reason = _by_credentials(pid) or _by_yama() or "a security module of this host (SELinux, AppArmor) forbids it"
    return f"not permitted to touch the memory of process {pid}: {reason}"


def _by_credentials(pid: int) -> str | None:
    try:
        mine, theirs = credentials("self"), credentials(pid)
        owner = os.stat(f"/proc/{pid}/status").st_uid  # root's for a protected process
    except (OSError, KeyError, ValueError):
        return "it has ended, or this process may not see it"
    if mine.effective >> CAP_SYS_PTRACE & 1:
        return None
    for name, here, there in (("user", mine.user_ids, theirs.user_ids), ("group", mine.group_ids, theirs.group_ids)):
        if set(there) != {here[0]}:
            return f"it runs with {name} ids {there}, this process with {here}; start both as the same {name}"
    if beyond := theirs.permitted & ~mine.permitted:
        return f"it has capabilities ({beyond:#x}) that this process has not; give both the same"
    if owner != theirs.user_ids[1]:
        return "it is protected (PR_SET_DUMPABLE, or started from a file with capabilities or a set-user-ID bit)"
    return None


def _by_yama() -> str | None:
    scope = yama_scope()
    if scope == 1:
        return (
            "kernel.yama.ptrace_scope=1 wants its consent; set the option allow_ptrace of cma at both ends (see "
            f"what that means there), {_NEEDS_CAPABILITY}, or set kernel.yama.ptrace_scope=0"
        )
    if scope == 2:
        return f"kernel.yama.ptrace_scope=2 wants a capability; {_NEEDS_CAPABILITY}, or set ptrace_scope=0"
    if scope >= 3:
        return f"kernel.yama.ptrace_scope={scope} forbids it to everybody until the next boot with another setting"
    return None


class Consent:
    """The one tracer that this process names. Thread-safe; there is one of it per process, as the kernel has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._holders: set[object] = set()

    def give(self, holder: object, pid: int) -> None:
        """Name process `pid`, until `withdraw` was called for each holder. Raises Unreachable if another is named."""
        with self._lock:
            if self._holders and self._pid != pid:
                raise Unreachable(
                    f"kernel.yama.ptrace_scope=1: this process lets process {self._pid} touch its memory and can "
                    f"not name {pid} as well; {_NEEDS_CAPABILITY}, or set kernel.yama.ptrace_scope=0"
                )
            if not self._holders:
                _name_tracer(pid)
            self._pid = pid
            self._holders.add(holder)

    def withdraw(self, holder: object) -> None:
        """Holders that have none are a no-op."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)
                if not self._holders:
                    _name_tracer(0)


consent = Consent()


def _name_tracer(pid: int) -> None:
    """Raises Unreachable."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.restype, prctl.argtypes = ctypes.c_int, [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_PR_SET_PTRACER, pid, 0, 0, 0):
        raise Unreachable(f"cannot let process {pid} touch this one's memory: {os.strerror(ctypes.get_errno())}")
