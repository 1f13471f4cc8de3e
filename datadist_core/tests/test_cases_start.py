# SPDX-License-Identifier: Apache-2.0
"""Starting where others have been killed, where a port is taken, where 16 start at once, and where memory is short."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from datadist_core import LLMDataDist, LLMRole
from datadist_core.errors import OutOfMemory, ParamInvalid
from datadist_core.testing.leaks import nothing_left_behind
from datadist_core.testing.parallel import eventually, require_all
from datadist_core.testing.remote import RemoteObject
from datadist_core.testing.soak_end import ANSWER_TIMEOUT_S, FIXED, EndSetup, Holdings, SoakEnd
from datadist_core.tests.core_ends import config, linked, make_end, must_link

SHM = "/dev/shm"
SHM_BYTES = 1 << 20
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 0x40000


def _must(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


class SmallShm:
    """A process in a mount namespace of its own, whose /dev/shm has 1 MiB."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        _must(libc.unshare(_CLONE_NEWNS), "unshare")
        _must(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "making mounts private")
        _must(libc.mount(b"tmpfs", SHM.encode(), b"tmpfs", 0, f"size={SHM_BYTES}".encode()), "mounting a tmpfs")

    def use(self) -> tuple[int, list[str]]:
        """Bytes in use, and the names."""
        found = os.statvfs(SHM)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, sorted(os.listdir(SHM))

    def fill(self) -> None:
        """Leave no byte free."""
        with open(f"{SHM}/full", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize)
        with open(f"{SHM}/more", "wb") as file, pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, 4096)
        os.unlink(f"{SHM}/more")

    def enter_by(self) -> str:
        return f"/proc/{os.getpid()}/ns/mnt"


def _end_inside(namespace: str, setup: EndSetup) -> SoakEnd:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    _must(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNS), "entering the mount namespace")
    os.close(descriptor)
    return SoakEnd(setup)


@pytest.fixture
def small_shm() -> Iterator[RemoteObject]:
    if os.geteuid() != 0:
        if os.environ.get("DATADIST_REQUIRE_ALL") == "1":
            pytest.fail("mount namespaces need root, and this run must skip nothing")
        pytest.skip("needs root")
    remote = RemoteObject(SmallShm, (), ANSWER_TIMEOUT_S, forkserver=True)
    yield remote
    remote.kill()


StartEnd = Callable[..., RemoteObject]


@pytest.fixture
def start_inside(small_shm: RemoteObject) -> Iterator[StartEnd]:
    """Starts ends that see the small /dev/shm, with pools far larger than it, and kills them all."""
    with ExitStack() as stack:

        def start(cluster_id: int, listen: str | None = None) -> RemoteObject:
            setup = EndSetup(cluster_id, cluster_id, "shm", listen, pool_bytes=64 << 20)
            end = RemoteObject(_end_inside, (small_shm.call("enter_by"), setup), ANSWER_TIMEOUT_S, forkserver=True)
            stack.callback(end.kill)
            return end

        yield start


@pytest.mark.slow
def test_b21_nothing_is_left_in_dev_shm_and_every_start_succeeds(
    small_shm: RemoteObject, start_inside: StartEnd
) -> None:
    """Memory is in files without a name, which live as long as somebody has them open: there is nothing to reclaim."""
    empty, d = small_shm.call("use"), start_inside(2)
    before: Holdings | None = None
    for number in [signal.SIGKILL] * 5 + [signal.SIGTERM] * 2:
        p = start_inside(1, "127.0.0.1:0")
        place = p.call("place")
        assert d.call("link", place)[0] == "LLM_SUCCESS"
        assert d.call("pull", place, list(FIXED)) == "LLM_SUCCESS"
        assert small_shm.call("use") == empty, "a pool took room in /dev/shm"
        os.kill(p.pid, number)
        assert eventually(lambda: d.call("holdings").num_links == 0)
        p.kill()
        assert small_shm.call("use") == empty
        before = before or d.call("holdings")
    assert eventually(lambda: not d.call("holdings").beyond(before)), d.call("holdings").beyond(before)


@pytest.mark.slow
def test_a_full_disk_under_dev_shm_stops_nothing(small_shm: RemoteObject, start_inside: StartEnd) -> None:
    """The size of /dev/shm does not limit what memfd_create makes."""
    small_shm.call("fill")
    p, d = start_inside(1, "127.0.0.1:0"), start_inside(2)
    place = p.call("place")
    assert d.call("link", place)[0] == "LLM_SUCCESS"
    assert d.call("backend", place) == "shm"
    assert d.call("pull", place, list(FIXED)) == "LLM_SUCCESS"


# --- memory ---------------------------------------------------------------------------------------------------------


class Limited:
    """A process that may map, or have files of, only so much."""

    def why_no_pool(self, limit: int, limit_bytes: int) -> str:
        resource.setrlimit(limit, (limit_bytes, resource.RLIM_INFINITY))
        end = LLMDataDist(LLMRole.MIX, 1)
        made = config()
        made.host_mem_pool_cfg = f'{{"memory_size": {64 << 30}}}'
        with pytest.raises(OutOfMemory) as caught:
            end.init(made)
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with nothing_left_behind():
            end.init(config())  # this very end can still be started
            end.finalize()
        return str(caught.value)


def test_a_pool_that_the_system_refuses_names_its_size_and_the_remedy() -> None:
    child = RemoteObject(Limited, (), ANSWER_TIMEOUT_S, forkserver=True)
    try:
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
            text = child.call("why_no_pool", limit, 8 << 30)
            assert "memory_size" in text
            assert re.search(r"pool of 687\d{8} bytes: .*; ask for less", text), text
    finally:
        child.kill()


# --- ports ----------------------------------------------------------------------------------------------------------


def test_b22_a_taken_control_port_is_named_and_the_end_can_start_elsewhere() -> None:
    with linked():
        pass  # what a process starts once and keeps is there now
    with nothing_left_behind(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        end = LLMDataDist(LLMRole.MIX, 1)
        with pytest.raises(ParamInvalid, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*port 0"):
            end.init(config(listen=f"127.0.0.1:{port}"))
        end.init(config(listen="127.0.0.1:0"))
        with end, make_end() as decoder:
            must_link(decoder, end)


def test_b22_a_taken_data_port_is_named() -> None:
    with nothing_left_behind(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = config("tcp", "127.0.0.1:0")
        made.global_resource_config = f'{{"tcp": {{"port": {port}}}}}'
        with pytest.raises(ParamInvalid, match=str(port)):
            LLMDataDist(LLMRole.MIX, 1).init(made)


class Starter:
    """Starts and ends one end per round, at a free port."""

    def __init__(self, cluster_id: int) -> None:
        self._cluster_id = cluster_id
        self._end: LLMDataDist | None = None

    def start(self) -> int:
        self._end = LLMDataDist(LLMRole.MIX, self._cluster_id)
        self._end.init(config("tcp", "127.0.0.1:0"))
        address = self._end.listen_address
        assert address is not None
        return address.port

    def end(self) -> None:
        assert self._end is not None
        self._end.finalize()

    def num_files(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_b23_sixteen_processes_that_start_at_once_get_sixteen_ports() -> None:
    """Control and data listeners both bind and then say where: nobody looks for a free port first. Two rounds."""
    with ExitStack() as stack:
        starters = [RemoteObject(Starter, (i,), ANSWER_TIMEOUT_S, forkserver=True) for i in range(16)]
        for starter in starters:
            stack.callback(starter.kill)
        before: list[int] = []
        for round_number in range(2):
            ports: list[int] = []
            require_all([partial(_append, ports, starter, "start") for starter in starters])
            assert len(set(ports)) == 16, sorted(ports)
            require_all([partial(starter.call, "end") for starter in starters])
            before = before or [starter.call("num_files") for starter in starters]
            for starter, most in zip(starters, before, strict=True):
                assert eventually(lambda s=starter, most=most: s.call("num_files") <= most), f"round {round_number}"


def _append(found: list[Any], remote: RemoteObject, method: str) -> None:
    found.append(remote.call(method))


# --- forks ----------------------------------------------------------------------------------------------------------


def test_forked_processes_do_not_take_each_other_for_one(tmp_path: Any) -> None:
    """Both are forked from one that has imported the library; `loopback` is for one process only."""
    with ExitStack() as stack:
        p = RemoteObject(SoakEnd, (EndSetup(1, 1, "auto", "127.0.0.1:0"),), ANSWER_TIMEOUT_S, forkserver=True)
        stack.callback(p.kill)
        d = RemoteObject(SoakEnd, (EndSetup(2, 2, "auto"),), ANSWER_TIMEOUT_S, forkserver=True)
        stack.callback(d.kill)
        place = p.call("place")
        assert d.call("link", place)[0] == "LLM_SUCCESS"
        assert d.call("backend", place) == "shm"
        assert "another process" in d.call("rejected", place)["loopback"]
        assert d.call("pull", place, list(FIXED)) == "LLM_SUCCESS"
