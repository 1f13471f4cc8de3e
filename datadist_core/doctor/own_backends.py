# SPDX-License-Identifier: Apache-2.0
"""Every backend of this host, really used: between this process and a child, and `loopback` within this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from ..checks import HostPort
from ..errors import LLMException
from ..security import Security
from ..testing.remote import RemoteObject
from ..transfer.registry import AUTO_ORDER, backend_names
from .findings import Finding, Level, fail, note, ok, warn
from .peer import PeerCheck, PeerTest, rejected
from .reading import Measured, plain_copy_bytes_per_s
from .scratch import EndOptions, TestEnd

HERE = HostPort("127.0.0.1", 0)
_START_S = 20.0
_LINK_S = 5.0
#: Backends over other engines: not in `auto`, and nobody misses them who has not installed them.
FOREIGN = ("nixl", "mooncake", "cann")
#: Topics of the self-test that say nothing about a backend.
_WAY = {"connection", "MTU", "protocol", "link", "control", "TLS", "name"}


def check_yama(scope: int, may_trace: bool) -> Finding:
    """Who may touch whose memory, which `cma` needs."""
    meaning = {
        0: "processes of one user may touch each other's memory",
        1: "a process must allow another one to touch its memory",
        2: "only CAP_SYS_PTRACE lets a process touch another one's memory",
    }.get(scope, "no process may touch another one's memory")
    text = f"kernel.yama.ptrace_scope={scope}: {meaning}; this process has {'' if may_trace else 'no '}CAP_SYS_PTRACE"
    if scope == 0 or (may_trace and scope < 3):
        return ok("ptrace", text, scope=scope, may_trace=may_trace)
    return warn(
        "ptrace",
        text,
        "for cma: --cap-add SYS_PTRACE (containers), its option allow_ptrace, or sysctl kernel.yama.ptrace_scope=0; "
        "shm does without",
        scope=scope,
        may_trace=may_trace,
    )


def tcp_within_this_host(options: EndOptions, as_engine: bool) -> list[Measured]:
    """What tcp reaches to a child process, measured as a peer was. Empty if that does not work."""
    options = replace(options, backends="tcp", security="")
    try:
        with closing(RemoteObject(TestEnd, (options, HERE), _START_S)) as child:
            check = PeerCheck(child.call("address"), child.call("cluster_id"), options, Security(), _LINK_S, as_engine)
            test = PeerTest(check)
            list(test.run())
            return test.measured
    except LLMException:
        return []


class OwnBackends:
    """The self-test."""

    def __init__(self, asked: str, backend_options: Mapping[str, object]) -> None:
        """Args:
        asked: backends that must work here, as in `transfer_backend`; "auto": the usual ones, the others are tried.
        """
        self._asked = backend_names(asked)
        self._tested = (*self._asked, *FOREIGN) if asked == "auto" else self._asked
        self._options = EndOptions(backend_options=dict(backend_options))

    def run(self) -> Iterator[Finding]:
        copy = plain_copy_bytes_per_s()
        yield ok("plain copy", f"{copy / 1e9:.1f} GB/s with one thread within this process", bytes_per_s=copy)
        usual = [name for name in self._tested if name in AUTO_ORDER and name != "loopback"]
        if usual:
            yield from self._between_processes(",".join(usual), usual)
        if "loopback" in self._tested:
            yield self._within_process()
        for name in self._tested:
            if name not in AUTO_ORDER:
                yield from self._between_processes(name, [name])

    def _between_processes(self, backends: str, names: Sequence[str]) -> Iterator[Finding]:
        options = replace(self._options, backends=backends)
        try:
            child = RemoteObject(TestEnd, (options, HERE), _START_S)
        except LLMException as error:
            yield from (self._unusable(name, str(error)) for name in names)
            return
        with closing(child):
            yield from self._to(child, options)

    def _to(self, child: RemoteObject, options: EndOptions) -> Iterator[Finding]:
        test = PeerTest(PeerCheck(child.call("address"), child.call("cluster_id"), options, Security(), _LINK_S))
        for finding in test.run():
            if finding.topic not in _WAY or finding.level is Level.FAIL:
                yield self._judged(finding)

    def _within_process(self) -> Finding:
        try:
            end = TestEnd(replace(self._options, backends="loopback"), HERE)
        except LLMException as error:
            return self._unusable("loopback", str(error))
        with closing(end):
            options = replace(self._options, backends="loopback")
            test = PeerTest(PeerCheck(end.address(), end.cluster_id(), options, Security(), _LINK_S))
            found = [finding for finding in test.run() if finding.topic not in _WAY or finding.level is Level.FAIL]
        return found[-1] if found else fail("loopback", "was not tested", "run it again")

    def _judged(self, finding: Finding) -> Finding:
        """Of a backend that does not work on this host: how bad it is depends on whether it was asked for."""
        if finding.level is Level.WARN and finding.topic in self._asked and finding.topic != "cma":
            return fail(finding.topic, finding.text, finding.remedy or "see what it says")
        return finding

    def _unusable(self, name: str, reason: str) -> Finding:
        if name in self._asked:
            return fail(name, reason, "see what it says, or leave it out of transfer_backend")
        reason = reason.removeprefix(f"transfer_backend={name!r} cannot be used here: ").strip("{}")
        return note(name, reason) if name in FOREIGN else rejected(name, reason)
