# SPDX-License-Identifier: Apache-2.0
"""What all examples share, so that each of them shows only its flow.

Three things are here:

- the command line: with `--role` a process is one end, without it starts all ends and tells whether they were content;
- `End`: prints, compares bytes, gives a configuration with small pools;
- `Notes`: what two ends have to tell one another beside the KV cache, such as "it is filled". In a serving system the
  request router does that. Here it goes over the link itself, with the library's `register_service` and `call`.

Every wait ends at the latest after `--limit-s`. When one end fails, or Ctrl-C is pressed, all ends end: what a signal
raises can get lost where it arrives, so the waits look whether one has come (see `raise_if_signalled`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import logging
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import datadist_core as llm_datadist

from ._compare import Array, difference, num_bytes
from ._signals import on_signal, raise_if_signalled

#: Cluster ids where there is one end of each role. With several, prompts come first: 1, 2, ... and then decoders.
PROMPT, DECODER = 1, 2
POOL_CONFIG = '{"memory_size": 67108864}'
LISTENS_AT = re.compile(r"listens at (\S+); the other end")

POLL_S = 0.02
START_LIMIT_S = 100.0
BACKENDS = ["auto", "shm", "cma", "tcp"]
ALONE_LIMIT_S = 600.0
TOGETHER_LIMIT_S = 60.0
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here, because little is allowed between fork and exec


class Failed(Exception):
    """The flow did not do what it should. Ends this end with status 1 and this text."""


# -- one end -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class End:
    """One end of a flow: what the command line said, and how to talk to the user.

    Attributes:
        title: stands before each printed line.
        listen, connect: this end's own address ("ip:port", "" for none), and those of the prompts, in cluster id order.
        seed: the data that the prompt writes and the decoder expects.
    """

    program: str
    title: str
    cluster_id: int
    backend: str
    listen: str
    connect: tuple[llm_datadist.HostPort, ...]
    seed: int
    limit_s: float
    deadline: llm_datadist.Deadline
    num_checks: int = 0

    def say(self, text: str) -> None:
        """Print a line that shows which end it is from."""
        print(f"{self.title:<10}| {text}", flush=True)

    def config(self) -> llm_datadist.LLMConfig:
        """V2, the backend from the command line, a pool of 64 MiB for each placement, 10 s for a transfer."""
        config = llm_datadist.LLMConfig()
        config.enable_cache_manager = True
        config.transfer_backend = self.backend
        config.mem_pool_cfg = POOL_CONFIG
        config.host_mem_pool_cfg = POOL_CONFIG
        config.sync_kv_timeout = 10_000
        return config

    def check(self, what: str, got: object, want: object) -> None:
        """Compare arrays byte by byte, or other values with ==. Raises Failed if they differ."""
        problem = difference(got, want)
        if problem:
            raise Failed(f"{what}: {problem}")
        self.num_checks += 1
        size = f", {num_bytes(want)} bytes" if num_bytes(want) else ""
        self.say(f"checked: {what}{size}")

    def check_refused(self, what: str, code: llm_datadist.LLMStatusCode, call: Callable[[], object]) -> None:
        """Raises Failed unless `call` raises an LLMException with `code`."""
        try:
            call()
        except llm_datadist.LLMException as error:
            if error.status_code is not code:
                raise
            self.num_checks += 1
            self.say(f"checked: {what}: {code.name}: {error}")
            return
        raise Failed(f"{what}: this should have raised {code.name}")

    def must_succeed(self, what: str, statuses: tuple[Any, Sequence[Any]]) -> None:
        """Print what link_clusters or unlink_clusters returned. Raises Failed unless it is LLM_SUCCESS."""
        overall, each = statuses
        self.say(f"{what}: {overall.name} {[status.name for status in each]}")
        if overall is not llm_datadist.LLMStatusCode.LLM_SUCCESS:
            raise Failed(f"{what} gave {overall.name}")

    def notes(self, datadist: llm_datadist.LLMDataDist) -> Notes:
        """Begin to take notes from linked peers, and say where this end listens. Call it right after `init`."""
        notes = Notes(datadist, self.deadline)
        if datadist.listen_address is not None:
            self.say_listens(datadist.listen_address)
        return notes

    def say_listens(self, address: llm_datadist.HostPort) -> None:
        """Print where this end listens, for whoever starts the others."""
        self.say(f"listens at {address}; the other end: --role decoder --connect {address}")

    def run_role(self, role: str) -> int:
        """Run another role of this example in a process of its own, and return its exit status (-9: SIGKILL)."""
        addresses = [part for address in self.connect for part in ("--connect", str(address))]
        command = [sys.executable, "-m", self.program, "--role", role, "--backend", self.backend, *addresses]
        process = subprocess.Popen(command, preexec_fn=_die_with_parent)  # its lines appear among ours
        try:
            return process.wait(self.deadline.remaining_s())
        finally:
            _end_processes([process])


def cluster_info(cluster_id: int, address: llm_datadist.HostPort) -> llm_datadist.LLMClusterInfo:
    """Whom to link with."""
    info = llm_datadist.LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_remote_ip_info(address.host, address.port)
    return info


def free_address() -> llm_datadist.HostPort:
    """A free address of this host, for an end that has to name it before it listens there.

    Not one that the system picks: it may pick the same one for anybody's next connection.
    """
    for port in random.SystemRandom().sample(range(10_000, 20_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return llm_datadist.HostPort("127.0.0.1", port)
    raise Failed("no port is free")


def pattern(desc: llm_datadist.CacheDesc, seed: int) -> list[Array]:
    """One array of random float32 per tensor of `desc`: the same on every end for the same seed."""
    random = np.random.default_rng(seed)
    return [random.random(desc.shape, dtype=np.float32) for _ in range(desc.num_tensors)]


def fill(cache: llm_datadist.Cache, values: Sequence[Array]) -> None:
    """Write one array per tensor into the cache. The views end here, so they do not keep its memory."""
    for tensor, value in zip(cache.numpy(), values, strict=True):
        tensor[:] = value


# -- what the ends tell one another ------------------------------------------------------------------------------------


class Notes:
    """Named values from one linked cluster to another. Thread-safe."""

    def __init__(self, datadist: llm_datadist.LLMDataDist, deadline: llm_datadist.Deadline) -> None:
        self._datadist = datadist
        self._deadline = deadline
        self._arrived = threading.Condition()
        self._values: dict[tuple[int, str], Any] = {}
        datadist.register_service("examples.note", self._take)

    def tell(self, cluster_id: int, name: str, value: Any = None) -> None:
        """Give that cluster a note. Waits until it is linked."""
        self._wait_for(lambda: self._is_linked(cluster_id), f"cluster {cluster_id} to link")
        body = json.dumps([name, value]).encode()
        try:
            self._datadist.call(cluster_id, "examples.note", body, self._deadline.remaining_s())
        except llm_datadist.LLMException:
            # The other end may act on the note, and leave, before its answer to it is sent.
            if self._is_linked(cluster_id):
                raise

    def wait(self, cluster_id: int, name: str, may_leave: bool = False) -> Any:
        """The value of that cluster's note.

        Raises Failed if it was linked and leaves without having given it, unless it `may_leave` and come again.
        """
        key, was_linked = (cluster_id, name), False
        with self._arrived:
            while key not in self._values:
                is_linked = not may_leave and self._is_linked(cluster_id)
                if was_linked and not is_linked and key not in self._values:
                    raise Failed(f"cluster {cluster_id} left before it said {name!r}")
                was_linked = is_linked
                self._pause(f"cluster {cluster_id} to say {name!r}")
            return self._values.pop(key)

    def wait_unlinked(self, cluster_id: int) -> None:
        """Until the link to that cluster is gone."""
        self._wait_for(lambda: not self._is_linked(cluster_id), f"cluster {cluster_id} to unlink")

    def _take(self, cluster_id: int, body: bytes) -> bytes:
        name, value = json.loads(body)
        with self._arrived:
            self._values[cluster_id, name] = value
            self._arrived.notify_all()
        return b""

    def _is_linked(self, cluster_id: int) -> bool:
        try:
            self._datadist.link_info(cluster_id)
        except llm_datadist.LLMException as error:
            return error.status_code is llm_datadist.LLMStatusCode.LLM_LINK_BUSY  # on its way out, but not gone
        return True

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self._arrived:
            while not condition():
                self._pause(what)

    def _pause(self, what: str) -> None:
        raise_if_signalled()
        if self._deadline.expired:
            raise Failed(f"waited too long for {what}")
        self._arrived.wait(POLL_S)


# -- the command line --------------------------------------------------------------------------------------------------

Role = Callable[[End], None]


def main(
    doc: str | None, file: str, roles: Mapping[str, Role], ends: Sequence[str] = ("prompt", "decoder")
) -> NoReturn:
    """Run one end (`--role`), or all `ends` as processes. Never returns.

    Args:
        doc: the example's docstring, for --help.
        file: the example's `__file__`.
        roles: a function for each role. "prompt" listens, all others connect.
        ends: the roles to start, one process each; prompts come first.
    """
    program = f"examples.flows.{Path(file).stem}"
    options = _parser(doc, program, roles, ends).parse_args()
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        if options.role is None:
            status = _run_together(program, options, ends)
        else:
            status = _run_one(_end(program, options), roles[options.role])
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _parser(doc: str | None, program: str, roles: Mapping[str, Role], ends: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"python -m {program}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--role", choices=list(roles), help=f"be one end; without it {len(ends)} ends are started")
    add("--listen", metavar="IP:PORT", help="where this end listens (default for a prompt: any free port of 127.0.0.1)")
    add("--connect", metavar="IP:PORT", action="append", default=[], help="where a prompt listens; once per prompt")
    add("--cluster-id", type=int, help="of this end; prompts are 1, 2, ... in the order of --connect")
    add("--backend", choices=BACKENDS, default="auto", help="what moves the bytes (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the data; both ends must have the same (default: %(default)s)")
    add("--limit-s", type=float, help=f"default: {ALONE_LIMIT_S:.0f} with --role, {TOGETHER_LIMIT_S:.0f} without")
    return parser


def _end(program: str, options: argparse.Namespace) -> End:
    role = options.role
    if role != "prompt" and not options.connect:
        raise SystemExit(f"--role {role} needs --connect IP:PORT, the address that the prompt says it listens at")
    default_id = PROMPT if role == "prompt" else DECODER
    limit_s = ALONE_LIMIT_S if options.limit_s is None else options.limit_s
    return End(
        program=program,
        title=role if options.cluster_id is None else f"{role} {options.cluster_id}",
        cluster_id=default_id if options.cluster_id is None else options.cluster_id,
        backend=options.backend,
        listen=options.listen or ("127.0.0.1:0" if role == "prompt" else ""),
        connect=tuple(llm_datadist.HostPort.parse(text, "--connect") for text in options.connect),
        seed=options.seed,
        limit_s=limit_s,
        deadline=llm_datadist.Deadline.after(limit_s),
    )


def _run_one(end: End, role: Role) -> int:
    # The last resort, should a wait not end: shows where all threads are, and exits with status 1.
    faulthandler.dump_traceback_later(end.limit_s + GRACE_S, exit=True)
    # What the library has to report, in the same form as our own lines.
    logging.basicConfig(format=f"{end.title:<10}| %(levelname)s: %(message)s", stream=sys.stdout)
    try:
        role(end)
        raise_if_signalled()
    except (Failed, llm_datadist.LLMException) as error:
        code = f"{error.status_code.name}: " if isinstance(error, llm_datadist.LLMException) else ""
        end.say(f"FAILED: {code}{error}")
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    end.say(f"done, {end.num_checks} checks passed" if end.num_checks else "done")
    return 0


# -- all ends with one command -----------------------------------------------------------------------------------------


class _Process:
    """One end as a child process, whose lines are passed on."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.addresses: queue.Queue[str | None] = queue.Queue()
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_die_with_parent
        )
        self._relay = threading.Thread(target=self._pass_on, name=f"datadist-relay-{name}", daemon=True)
        self._relay.start()

    def _pass_on(self) -> None:
        for line in self.popen.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            if found := LISTENS_AT.search(line.rstrip()):
                self.addresses.put(found[1])
        self.addresses.put(None)

    def address(self) -> str:
        """Where it listens. Raises Failed if it ends or is silent instead."""
        try:
            address = self.addresses.get(timeout=START_LIMIT_S)
        except queue.Empty:
            address = None
        if address is not None:
            return address
        raise Failed(f"{self.name} did not start to listen")

    def close(self) -> None:
        """After the process has ended: its last lines."""
        self._relay.join(GRACE_S)


def _die_with_parent() -> None:
    """In the child before it becomes an end: the kernel ends it if its parent is killed."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_together(program: str, options: argparse.Namespace, ends: Sequence[str]) -> int:
    limit_s = TOGETHER_LIMIT_S if options.limit_s is None else options.limit_s
    deadline = llm_datadist.Deadline.after(limit_s)
    started: list[_Process] = []
    try:
        _start_all(program, options, ends, limit_s, started)
        _wait_for_all(started, deadline)
    except Failed as error:
        print(f"{program}: {error}")
    finally:
        _end_processes([process.popen for process in started])
        for process in started:
            process.close()
    failed = [f"{p.name} (exit status {p.popen.returncode})" for p in started if p.popen.returncode]
    is_ok = not failed and len(started) == len(ends)
    print(f"{program}: " + ("OK" if is_ok else f"FAILED: {', '.join(failed) or 'not all ends started'}"), flush=True)
    return 0 if is_ok else 1


def _start_all(
    program: str, options: argparse.Namespace, ends: Sequence[str], limit_s: float, started: list[_Process]
) -> None:
    common = ["--backend", options.backend, "--seed", str(options.seed), "--limit-s", str(limit_s)]
    many = len(ends) > len(set(ends))
    addresses: list[str] = []
    for cluster_id, role in enumerate(ends, 1):
        own = ["--cluster-id", str(cluster_id)] if many else []
        if role != "prompt":
            addresses = addresses or [process.address() for process in started]
            own += [part for address in addresses for part in ("--connect", address)]
        command = [sys.executable, "-m", program, "--role", role, *own, *common]
        started.append(_Process(f"{role} {cluster_id}" if many else role, command))


def _wait_for_all(started: Sequence[_Process], deadline: llm_datadist.Deadline) -> None:
    """Until all have ended. Once one has failed, the others get a little time to notice it themselves."""
    while any(process.popen.poll() is None for process in started):
        raise_if_signalled()
        if deadline.expired:
            raise Failed("not all ends ended in time")
        if any(process.popen.poll() for process in started):
            deadline = deadline.earlier(GRACE_S)
        time.sleep(POLL_S)


def _end_processes(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """SIGTERM, some time to end in order, SIGKILL. Does nothing to those that have ended."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = llm_datadist.Deadline.after(GRACE_S)
    for process in processes:
        try:
            process.wait(deadline.remaining_s())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
