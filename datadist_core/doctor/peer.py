# SPDX-License-Identifier: Apache-2.0
"""`datadist doctor --connect`: the control path and every data path to a peer that is running, and what is wrong there.

The peer may be in production. It sees one link from a cluster id that nobody else has, a few questions, some reads of
its 64 test bytes, and an orderly unlink.

A dialling end has to say which cluster it means, so that an end that has taken over another one's address is noticed.
Who does not know the id asks first (`LLMDataDist.find_cluster`); no check is left out: the link itself is then asked
for by that id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..checks import HostPort
from ..cluster import LLMClusterInfo
from ..datadist import LLMDataDist
from ..errors import LLMException
from ..link.link import Link
from ..link.probe import BEACON_BYTES
from ..security import Security
from ..transfer.backend import Backend
from ..types import LLMStatusCode
from .dialling import Dialled, check_dial
from .findings import Finding, Level, fail, note, ok, warn
from .reading import Measured, Reader, control_round_trip_s, scratch_of
from .scratch import EndOptions, make_end

_V2_DIFFERS = "enable_cache_manager (V2) is"
_NO_DATA_PATH = "no transfer backend works"
_TCP_BLOCKED = re.compile(r"what does not work from this end: \{.*'tcp': ")
_SLOW_BYTES_PER_S, _SLOW_PART = 100e6, 0.2
_SLOW_REMEDY = (
    "look at the speed and MTU of the interfaces on the way and at lost packets (nstat TcpRetransSegs); over a long or "
    'lossy path set {"tcp": {"streams": 4}}; a busy processor at either end slows it, too'
)
_TCP_REMEDY = (
    'the tcp backend has a port of its own: fix it at the peer with the backend option {"tcp": {"port": NUMBER}} and '
    "allow it in the firewall; behind NAT set its advertise_host"
)
#: What a rejection's text says -> level, remedy. The texts of the backends name the cause, and mostly the remedy too.
_REJECTIONS = (
    ("on another host", Level.NOTE, ""),
    ("other process", Level.NOTE, ""),
    ("another process", Level.NOTE, ""),
    ("same process", Level.NOTE, ""),
    ("does not offer it", Level.NOTE, "open it at both ends (transfer_backend)"),
    ("network namespace", Level.WARN, "docker: --network container:OTHER or --network host for both"),
    ("pid namespace", Level.WARN, "docker: --pid container:OTHER or --pid host for both"),
    ("process namespace", Level.WARN, "docker: --pid container:OTHER or --pid host for both"),
    ("not permitted", Level.WARN, "docker: --cap-add SYS_PTRACE; same user and group for both"),
    ("ptrace", Level.WARN, "docker: --cap-add SYS_PTRACE; same user and group for both"),
)
_OPTIONAL = ("nixl", "mooncake", "cann")
_REFUSALS = (
    (
        "secret",
        "give --security with the secret that the peer has (secret_file or secret_env)",
    ),
    ("TLS", "set the same `tls` at both ends"),
    ("certificate", "both ends need certificates of the same authority, valid now"),
    ("protocol version", "install the same release of vllm-datadist on both"),
    (
        "remote_cluster_id",
        "leave --cluster-id out, or give the one named; old tickets name ended processes",
    ),
    ("limit", "the peer is at its limit of connections; end some, or raise security limits"),
    ("in time", "the peer is busy, stopped, or packets are lost; try again with a longer --timeout"),
)


@dataclass(frozen=True, slots=True)
class PeerCheck:
    """What to test. `cluster_id` None: find out. `as_engine`: measure a test end as if it were none."""

    address: HostPort
    cluster_id: int | None
    options: EndOptions
    security: Security
    timeout_s: float
    as_engine: bool = False


class PeerTest:
    """One test of one peer. `measured` holds what every backend reached, once `run` is through."""

    def __init__(self, check: PeerCheck) -> None:
        self._check = check
        self._dialled = Dialled()
        self.measured: list[Measured] = []
        self.is_test_end = False

    @property
    def on_this_host(self) -> bool:
        return self._dialled.local_host == self._dialled.remote_host

    def run(self) -> Iterator[Finding]:
        check = self._check
        yield from check_dial(check.address, check.security, check.timeout_s, self._dialled)
        if self._dialled.speaks:
            yield from self._linked(v2=True)

    def _linked(self, v2: bool) -> Iterator[Finding]:
        try:
            end = make_end(self._check.options, None, v2=v2)
        except (LLMException, TypeError, ValueError) as error:
            yield fail("own end", str(error), "choose other backends with --backends")
            return
        with end:
            try:
                link = self._link(end)
            except LLMException as error:
                if not (v2 and _V2_DIFFERS in str(error)):
                    yield _link_failed(error)
                    return
            else:
                yield from self._test(end, link)
                return
        yield from self._linked(v2=False)

    def _link(self, end: LLMDataDist) -> Link:
        """Raises what the peer refuses."""
        cluster_id = self._check.cluster_id
        if cluster_id is None:
            address = self._check.address
            cluster_id = end.find_cluster(address.host, address.port, self._check.timeout_s)
        self._must_link(end, cluster_id)
        return end._open().links.get(cluster_id)

    def _must_link(self, end: LLMDataDist, cluster_id: int) -> None:
        info = self._info(cluster_id)
        overall, _ = end.link_clusters([info], timeout=max(1, int(self._check.timeout_s * 1000)))
        if overall is not LLMStatusCode.LLM_SUCCESS:
            raise end.link_failure(cluster_id) or LLMException(f"no link: {overall.name}", overall)

    def _info(self, cluster_id: int) -> LLMClusterInfo:
        info = LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_remote_ip_info(self._check.address.host, self._check.address.port)
        return info

    def _test(self, end: LLMDataDist, link: Link) -> Iterator[Finding]:
        cluster_id = link.peer.cluster_id
        try:
            yield from self._test_paths(end, link)
        except LLMException as error:
            yield fail("link", f"it broke during the test: {error}", "look into the peer's log of this moment")
        overall, _ = end.unlink_clusters([self._info(cluster_id)], timeout=3000)
        if overall is not LLMStatusCode.LLM_SUCCESS:
            yield warn("unlink", f"the peer did not confirm it: {overall.name}", "look into the peer's log")

    def _test_paths(self, end: LLMDataDist, link: Link) -> Iterator[Finding]:
        check = self._check
        scratch = None if check.as_engine else scratch_of(end, link.peer.cluster_id, check.timeout_s)
        self.is_test_end = scratch is not None
        kind = "a test end" if scratch is not None else "an engine; its user's data is not touched"
        yield ok("link", f"made with cluster {link.peer.cluster_id}: {kind}", cluster_id=str(link.peer.cluster_id))
        seconds = control_round_trip_s(end, link.peer.cluster_id, check.timeout_s)
        yield ok("control", f"round trip {seconds * 1e3:.2f} ms (median)", round_trip_ms=seconds * 1e3)
        reader = Reader(end, link, scratch, 2 * check.timeout_s)
        try:
            for backend in list(link.backends):
                yield self._data_path(reader, backend)
        finally:
            reader.close()
        for name, reason in link.rejected.items():
            yield rejected(name, reason)

    def _data_path(self, reader: Reader, backend: Backend) -> Finding:
        try:
            measured = reader.measure(backend)
        except LLMException as error:
            return fail(backend.name, f"works at first, but then: {error}", "look into the peer's log of this moment")
        self.measured.append(measured)
        return path_finding(measured)


def path_finding(measured: Measured) -> Finding:
    text = (
        f"reads {BEACON_BYTES} bytes in {measured.latency_s * 1e6:.0f} us, and "
        f"{measured.bytes_per_s / 1e9:.2f} GB/s in pieces of {size_text(measured.piece_bytes)}"
    )
    if measured.piece_bytes == BEACON_BYTES:
        text += " (a lower bound; more shows with datadist doctor --listen there)"
    return ok(
        measured.backend,
        text,
        latency_us=measured.latency_s * 1e6,
        bytes_per_s=measured.bytes_per_s,
        piece_bytes=measured.piece_bytes,
    )


def rejected(name: str, reason: str) -> Finding:
    """A backend that both ends may have but that does not work between them."""
    for part, level, remedy in _REJECTIONS:
        if part in reason:
            return Finding(level, name, f"not used: {reason}", remedy)
    if name in _OPTIONAL:
        return note(name, f"not used: {reason}")
    return warn(name, f"not used: {reason}", _TCP_REMEDY if name == "tcp" else "see what it says; other backends work")


def compare(peer: Sequence[Measured], own: Sequence[Measured], on_this_host: bool) -> Iterator[Finding]:
    """The peer's tcp path against that within this host, measured alike."""
    reference = {measured.backend: measured.bytes_per_s for measured in own}
    for measured in peer:
        if measured.backend != "tcp" or "tcp" not in reference:
            continue
        part = measured.bytes_per_s / reference["tcp"]
        text = f"tcp reaches {part:.0%} of what it does within this host ({reference['tcp'] / 1e9:.2f} GB/s)"
        values = {"part": part}
        if measured.bytes_per_s < _SLOW_BYTES_PER_S or (on_this_host and part < _SLOW_PART):
            yield warn("bandwidth", text, _SLOW_REMEDY, **values)
        else:
            yield ok("bandwidth", text, **values)


def _link_failed(error: LLMException) -> Finding:
    text = str(error)
    if _NO_DATA_PATH in text or _TCP_BLOCKED.search(text):
        return fail("data path", f"the control connection works, but {text}", _TCP_REMEDY)
    for part, remedy in _REFUSALS:
        if part in text:
            return fail("link", text, remedy)
    return fail("link", f"{text} ({error.status_code.name})", "look into the peer's log of this moment")


def size_text(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes >= 1 << 10 else f"{num_bytes} bytes"
