# SPDX-License-Identifier: Apache-2.0
"""`LLMDataDist`: the public face. Methods stand in the order of its life: init, link, use, unlink, finalize."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from .cache.manager import CacheManager
from .checks import HostPort, check_range, check_type, ip_text
from .cluster import UINT64_MAX, LLMClusterInfo
from .config import LLMConfig
from .errors import ClosedError, FeatureNotEnabled, LinkExists, LLMException, ParamInvalid
from .link.link import LinkInfo
from .link.manager import Target
from .parts import Parts
from .settings import Settings
from .types import Deadline, LLMRole, LLMStatusCode, RegisterMemStatus

logger = logging.getLogger(__name__)

CHECK_LINK_TIMEOUT_S = 3.0
_LISTEN_KEYS = ("llm.listenIpInfo", "listen_ip_info")


class LLMDataDist:
    """One end of KV-cache transfers. Several may live in one process.

    Args:
        role: PROMPT, DECODER or MIX. Enforced in V1 (`kv_cache_manager`), informative in V2 (`cache_manager`).
        cluster_id: uint64, unique among all that link with one another.

    Thread-safe. Also a context manager that finalizes.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_type("role", role, LLMRole)
        check_type("cluster_id", cluster_id, int)
        check_range("cluster_id", cluster_id, 0, UINT64_MAX)
        self._role = role
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._parts: Parts | None = None
        self._finalized = False

    @property
    def role(self) -> LLMRole:
        """Its role now; `switch_role` changes it."""
        return self._role

    @property
    def cluster_id(self) -> int:
        """The id it was made with."""
        return self._cluster_id

    # -- init

    def init(self, options: dict[str, str] | LLMConfig) -> None:
        """Map the pools, open the backends, start to listen if `listen_ip_info` is set. Idempotent.

        Raises:
            TypeError: options is neither a dict of str nor an LLMConfig.
            ParamInvalid: an option has a bad value (it is named), or the listen address cannot be bound.
        """
        check_type("options", options, dict, LLMConfig)
        settings = Settings.from_options(options.generate_options() if isinstance(options, LLMConfig) else options)
        with self._lock:
            if self._finalized:
                raise ClosedError("this LLMDataDist was finalized; make a new one")
            if self._parts is None:
                self._parts = Parts(self._cluster_id, settings, lambda: self._role, self._check_open)

    def __enter__(self) -> LLMDataDist:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finalize()

    @property
    def listen_address(self) -> HostPort | None:
        """Where this end accepts links (the real port, also when 0 was asked for), or None."""
        return self._open().links.listeners.address

    # -- link

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link with clusters that listen, all at the same time, within `timeout` ms for the whole call.

        Returns:
            (LLM_SUCCESS if all succeeded, else the first other status; one status per cluster, in order). A cluster
            that failed leaves nothing behind; `link_failure` tells why. A cluster that the list names again gets
            LLM_PARAM_INVALID in that place; its first place counts.
        """
        parts = self._open()
        deadline = _deadline_ms(timeout)
        self._check_v1_dials(parts)
        targets = [_target(i, cluster) for i, cluster in enumerate(_clusters(clusters))]
        statuses = parts.links.link(targets, deadline)
        return _overall(statuses), statuses

    def find_cluster(self, host: str, port: int, timeout_s: float) -> int:
        """The id of the cluster that listens there, to link with it; nothing is linked by this. (An extension.)

        Asked like any dialling end, with the secret and TLS of this one, so that a stranger's question is refused. What
        answers is only a name: link to it to know that it is so.

        Args:
            host, port: where it listens (a name, IPv4 or IPv6; 1 to 65535).
            timeout_s: for the whole call, in seconds.

        Raises:
            PeerLost: nothing listens there, or something else than an end of ours. TimedOut: no answer.
            LinkFailed: the other end refuses, such as one with another secret or protocol version.
        """
        parts = self._open()
        check_type("host", host, str)
        check_type("port", port, int)
        check_range("port", port, 1, 65535)
        return parts.links.find_cluster(HostPort(ip_text(host, "host"), port), _deadline_s(timeout_s))

    def link_failure(self, remote_cluster_id: int) -> LLMException | None:
        """Why the last link to that cluster failed or broke; None if it did not. (An extension.)"""
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        return parts.links.failure(remote_cluster_id)

    def link_info(self, remote_cluster_id: int) -> LinkInfo:
        """Which backend a link uses, and why not a better one. NotYetLinked without a link. (An extension.)"""
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        return parts.links.get(remote_cluster_id).info()

    def link_id(self, remote_cluster_id: int) -> int | None:
        """Which link to that cluster is up; None without one. (An extension.)

        No two links of this end have the same id: one that was lost and made anew is told from the one before by it.
        `CacheManager.push_blocks` and `CacheManager.transfer_cache_async` take it, to go over no other link.
        """
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        link = parts.links.peek(remote_cluster_id)
        return link.link_id if link is not None and link.is_up else None

    @property
    def num_links(self) -> int:
        """How many links are up, whichever end dialled; 0 before `init` and after `finalize`. (An extension.)"""
        parts = self._parts
        return 0 if parts is None else sum(link.is_up for link in parts.links.links())

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Read a few bytes of the peer over the data path.

        Raises:
            NotYetLinked, TimedOut, or LinkFailed / PeerLost (LLM_LINK_FAILED).
        """
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        link = parts.links.get(remote_cluster_id)
        beacon = link.peer.beacon
        with link.transferring():
            if beacon is not None:
                deadline = Deadline.after(CHECK_LINK_TIMEOUT_S)
                parts.beacon_memory.read(parts.engine, link.backends[0], link.link_id, beacon, deadline)

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link 2 to 4 clusters pairwise; each of them calls this, from any role. Returns at once.

        The lowest rank hosts: it listens at its device_ip while the communicator exists (or where it listens already,
        if that is the same address), and the others come to it. The time limit is `link_total_time`, else 120 s.

        Args:
            comm_name: 1 to 127 characters, the same at all members; one communicator of a name at a time.
            cluster_rank_info: {cluster id: rank} of all members, ranks in ascending order.
            rank_table: JSON {"server_list": [{"device": [{"device_id", "device_ip", "rank_id"}]}]}; numbers may be
                strings. `host_ip` of a server stands in for a missing device_ip. `port` of the lowest rank's device
                (an extension) is where it hosts; without it the port follows from comm_name and its cluster id,
                20000 to 31999.

        Returns:
            An id > 0 for `query_register_mem_status` and `unlink`.

        Raises:
            TypeError, or ParamInvalid naming argument, value and remedy.
        """
        return self._open().communicators.link(comm_name, cluster_rank_info, rank_table)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """PREPARING until all members have joined and are linked pairwise, then OK.

        FAILED if that did not come about (nothing of the attempt is left then), or if a member has died or left
        since; `link_failure` of the other members, and the log, have the reason. ParamInvalid for an unknown id.
        """
        return self._open().communicators.status(comm_id)

    def unlink(self, comm_id: int) -> None:
        """End a communicator, with the links that it made and no other one uses; cancels it while PREPARING.

        It is FAILED at the other members then, which call `unlink` too. ParamInvalid for an unknown id.
        """
        self._open().communicators.unlink(comm_id)

    # -- use

    @property
    def cache_manager(self) -> CacheManager:
        """The V2 manager: both directions from both roles."""
        parts = self._open()
        if not parts.settings.v2:
            raise FeatureNotEnabled("cache_manager needs enable_cache_manager = True (or local_comm_res) before init")
        return parts.cache_manager

    @property
    def kv_cache_manager(self) -> CacheManager:
        """The V1 manager: roles are enforced."""
        parts = self._open()
        if parts.settings.v2:
            raise FeatureNotEnabled("kv_cache_manager is V1; with enable_cache_manager use cache_manager")
        return parts.cache_manager

    def register_service(self, name: str, handler: Callable[[int, bytes], bytes]) -> None:
        """Answer calls of linked peers: `handler(remote_cluster_id, body) -> reply`. (An extension.)

        The handler runs in a worker thread; an LLMException it raises reaches the caller with its code and text.
        Names that begin with "datadist_core." are the library's own: ParamInvalid.
        """
        parts = self._open()
        check_type("name", name, str)
        if name.startswith("datadist_core."):
            raise ParamInvalid(f'name={name!r} must not begin with "datadist_core."; choose another prefix')
        _check_callable("handler", handler)
        parts.services.register(name, handler)

    def call(self, remote_cluster_id: int, name: str, body: bytes, timeout_s: float) -> bytes:
        """Call a service of a linked peer. Raises NotYetLinked, PeerLost, TimedOut, RemoteError. (An extension.)"""
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        check_type("name", name, str)
        check_type("body", body, bytes, bytearray, memoryview)  # checked here: the peer would close the link over it
        check_type("timeout_s", timeout_s, int, float)
        return parts.links.get(remote_cluster_id).call(name, body, Deadline.after(timeout_s))

    def on_link_lost(self, callback: Callable[[int, LLMException], None]) -> None:
        """Have `callback(remote_cluster_id, error)` called when a link breaks. (An extension.)"""
        parts = self._open()
        _check_callable("callback", callback)
        parts.on_link_lost.append(callback)

    # -- unlink, finalize

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links within `timeout` ms. Shape of the result as for `link_clusters`.

        Not forced: running transfers end first, the peer is told and cleans up its end too. Forced: this end only,
        without waiting for the peer. All are unlinked at the same time: a dead one costs the others nothing.
        """
        parts = self._open()
        deadline = _deadline_ms(timeout)
        check_type("force", force, bool)
        ids = [cluster.remote_cluster_id for cluster in _clusters(clusters)]
        statuses = parts.links.unlink(ids, deadline, force)
        return _overall(statuses), statuses

    def wait_fenced(self, remote_cluster_id: int, timeout_s: float) -> bool:
        """Whether the peer of every former link to that cluster can write to our memory no more. (An extension.)

        A link may be gone while its peer's process is only stopped, in the middle of a copy to memory of ours: it goes
        on with it when it goes on. Memory that it was told of may be given another use once this is True. A link that
        is up is not a former one, whatever the peer does over it.

        Args:
            timeout_s: how long to wait for that, in seconds; 0 looks once.

        Returns:
            True: the peers' own ends of those links, or their processes, have ended, and what this end itself moved
            over them has, too (also a pull that was under way). True also if there never was a link. With `tcp` it is
            this end that receives everything: True as soon as its end of the connection is closed. `nixl` and
            `mooncake` cannot tell: they are True as soon as this end of the link is down, and a peer that was stopped,
            or its network card, may still write what had begun. False: not within `timeout_s`.
        """
        parts = self._open()
        check_type("remote_cluster_id", remote_cluster_id, int)
        return parts.links.wait_fenced(remote_cluster_id, _deadline_s(timeout_s, low=0))

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Change the role while no link exists; start, move or stop the listener.

        Args:
            switch_options: {"llm.listenIpInfo": "ip:port"} listens there; without it this end stops listening.

        Raises:
            FeatureNotEnabled: V1 without enable_switch_role.
            LinkExists: there are links, or `link` is still making some.
            ParamInvalid: the address cannot be bound; role and listener are as they were.
        """
        check_type("role", role, LLMRole)
        parts = self._open()
        listen = _listen_option(switch_options)
        if not parts.settings.v2 and not parts.settings.switch_role_enabled:
            raise FeatureNotEnabled("switch_role needs enable_switch_role = True before init")
        with self._lock:
            if parts.links.links() or parts.communicators.preparing:
                raise LinkExists("switch_role is possible only without links; unlink_clusters (or unlink) first")
            parts.links.listeners.move(listen)
            self._role = role

    def finalize(self) -> None:
        """Close links, free everything. Idempotent; afterwards every call raises LLM_ENGINE_FINALIZED."""
        with self._lock:
            parts, self._parts, self._finalized = self._parts, None, True
        if parts is not None:
            parts.close()

    def _open(self) -> Parts:
        parts = self._parts
        if parts is None:
            self._check_open()
            raise LLMException("call init first")
        return parts

    def _check_open(self) -> None:
        if self._finalized:
            raise ClosedError("this LLMDataDist was finalized")

    def _check_v1_dials(self, parts: Parts) -> None:
        if not parts.settings.v2 and self._role is LLMRole.PROMPT:
            raise ParamInvalid("in V1 the DECODER cluster calls link_clusters; this one is PROMPT")


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be callable, not {type(value).__name__}")


def _clusters(clusters: object) -> list[LLMClusterInfo]:
    check_type("clusters", clusters, list, tuple)
    found: list[LLMClusterInfo] = []
    for i, cluster in enumerate(clusters):  # type: ignore[var-annotated, arg-type]
        check_type(f"clusters[{i}]", cluster, LLMClusterInfo)
        found.append(cluster)
    if not found:
        raise ParamInvalid("clusters is empty; name at least one")
    return found


def _target(index: int, cluster: LLMClusterInfo) -> Target:
    if not cluster.remote_addresses:
        raise ParamInvalid(f"clusters[{index}] has no remote address; use append_remote_ip_info")
    local = cluster.local_addresses
    return Target(cluster.remote_cluster_id, cluster.remote_addresses, local[0].host if local else None)


def _deadline_ms(timeout: int) -> Deadline:
    check_type("timeout", timeout, int)
    if timeout <= 0:
        raise ParamInvalid(f"timeout={timeout} must be a number of milliseconds greater than 0")
    return Deadline.after(timeout / 1000)


def _deadline_s(timeout_s: float, low: float = 1e-6) -> Deadline:
    check_type("timeout_s", timeout_s, int, float)
    if not timeout_s >= low:
        raise ParamInvalid(f"timeout_s={timeout_s} must be a number of seconds {'of 0 or more' if not low else '> 0'}")
    return Deadline.after(timeout_s)


def _overall(statuses: Sequence[LLMStatusCode]) -> LLMStatusCode:
    return next((s for s in statuses if s is not LLMStatusCode.LLM_SUCCESS), LLMStatusCode.LLM_SUCCESS)


def _listen_option(options: dict[str, str] | None) -> HostPort | None:
    if options is None:
        return None
    check_type("switch_options", options, dict)
    for key, value in options.items():
        check_type(f"a key of switch_options ({key!r})", key, str)
        check_type(f"switch_options[{key!r}]", value, str)
    unknown = sorted(set(options) - set(_LISTEN_KEYS))
    if unknown:
        logger.info("switch_options without a meaning here are ignored: %s", ", ".join(unknown))
    return next((HostPort.parse(options[k], f"switch_options[{k!r}]") for k in _LISTEN_KEYS if k in options), None)
