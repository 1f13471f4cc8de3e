# SPDX-License-Identifier: Apache-2.0
"""The STAND-IN for the vendor's package finds wrong calls: else the tests over it would say nothing of the backend."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

import datadist_core as ours
from datadist_core.testing import ascend_standin as standin
from datadist_core.testing import ascend_standin_types as types_
from datadist_core.testing.ascend_standin_types import NotPublished
from datadist_core.testing.ascend_standin_wire import Answer, Hello, receive, send
from datadist_core.testing.parallel import WAIT_S, eventually
from datadist_core.testing.ports import free_port

MINE, THEIRS = 11, 22
MEMORY_BYTES, BLOCK_BYTES = 1 << 16, 64


class End:
    """One LLMDataDist of the stand-in, with registered memory: what a correct caller does."""

    def __init__(self, package: standin.StandInPackage, cluster_id: int, timeout_ms: int = 30_000) -> None:
        self.package, self.cluster_id, self.port = package, cluster_id, free_port()
        self.memory = np.random.default_rng(cluster_id).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self.dist = package.LLMDataDist(package.LLMRole.MIX, cluster_id)
        config = package.LLMConfig()
        config.enable_cache_manager = True
        config.sync_kv_timeout = timeout_ms
        config.listen_ip_info = f"127.0.0.1:{self.port}"
        self.dist.init(config.generate_options())
        self.cache = self.register(1)

    def desc(self, **given: Any) -> Any:
        kind = self.package.DataType.DT_UINT8
        placement = self.package.Placement.HOST
        return self.package.CacheDesc(
            **{"num_tensors": 1, "shape": [MEMORY_BYTES // BLOCK_BYTES, BLOCK_BYTES], "data_type": kind,
               "placement": placement, **given}
        )  # fmt: skip

    def register(self, model_id: int, accessible: bool | None = True) -> Any:
        key = self.package.BlocksCacheKey(self.cluster_id, model_id)
        return self.manager.register_blocks_cache(self.desc(), [self.memory.ctypes.data], key, accessible)

    def fresh(self, cluster_id: int = 33) -> Any:
        """An object before its `init`."""
        return self.package.LLMDataDist(self.package.LLMRole.MIX, cluster_id)

    def at(self, addrs: list[Any], blocks_key: Any) -> Any:
        """Register other memory."""
        return self.manager.register_blocks_cache(self.desc(), addrs, blocks_key)

    @property
    def manager(self) -> Any:
        return self.dist.cache_manager

    def info(self, other: End) -> Any:
        info = self.package.LLMClusterInfo()
        info.remote_cluster_id = other.cluster_id
        info.append_local_ip_info("127.0.0.1", self.port)
        info.append_remote_ip_info("127.0.0.1", other.port)
        return info

    def link(self, other: End) -> list[str]:
        status, each = self.dist.link_clusters([self.info(other)], timeout=30_000)
        return [status.name, *(one.name for one in each)]


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Not linked yet."""
    standin.complaints.clear()
    package = standin.StandInPackage(one_per_process=False)
    with ExitStack() as stack:
        made = []
        for cluster_id in (MINE, THEIRS):
            made.append(End(package, cluster_id))
            stack.callback(made[-1].dist.finalize)
        yield made[0], made[1]


@pytest.fixture
def linked(ends: tuple[End, End]) -> tuple[End, End]:
    a, b = ends
    assert a.link(b) == ["LLM_SUCCESS", "LLM_SUCCESS"]
    return ends


def key(end: End, model_id: int = 1) -> Any:
    return end.package.BlocksCacheKey(end.cluster_id, model_id)


def pull(end: End, *args: Any, **kwargs: Any) -> None:
    end.manager.pull_blocks(*args, **{"tensor_num_per_layer": 1, **kwargs})


def push(end: End, *args: Any, **kwargs: Any) -> None:
    end.manager.push_blocks(*args, **{"tensor_num_per_layer": 1, **kwargs})


# -- what is right works


def test_right_calls_move_the_bytes(linked: tuple[End, End]) -> None:
    a, b = linked
    for one, other in ((a, b), (b, a)):
        one.dist.check_link_status(other.cluster_id)
        source, target = (end.memory.reshape(-1, BLOCK_BYTES) for end in (other, one))
        pull(one, key(other), one.cache, [1, 2], [7, 5])
        assert np.array_equal(target[[7, 5]], source[[1, 2]])
        push(one, key(other), one.cache, [9, 3], [1, 4])
        assert np.array_equal(source[[1, 4]], target[[9, 3]])
    assert [one.name for one in a.dist.unlink_clusters([a.info(b)], timeout=30_000, force=False)[1]] == ["LLM_SUCCESS"]
    status_of(lambda: pull(a, key(b), a.cache, [1], [1]), "LLM_NOT_YET_LINK")
    assert eventually(lambda: b.dist._wire.num_links == 0)
    assert standin.complaints == []


# -- wrong calls, whose error no caller may count on: complained of

WRONG: dict[str, tuple[str, Callable[[End, End], object]]] = {
    "unknown-name": (r"KvCache is not published", lambda a, b: a.package.KvCache),
    "unknown-method": (r"get_links is not published", lambda a, b: a.dist.get_links()),
    "unknown-method-of-caches": (r"pull_bytes is not published", lambda a, b: a.manager.pull_bytes()),
    "unknown-property": (r"LLMConfig.timeout is not", lambda a, b: setattr(a.package.LLMConfig(), "timeout", 1)),
    "bad-property": (r"sync_kv_timeout=0", lambda a, b: setattr(a.package.LLMConfig(), "sync_kv_timeout", 0)),
    "unknown-argument": (r"timeout_ms", lambda a, b: a.dist.link_clusters([a.info(b)], timeout_ms=1)),
    "too-many-arguments": (r"too many positional", lambda a, b: a.dist.check_link_status(THEIRS, 100)),
    "keyword-only": (r"too many positional", lambda a, b: a.manager.pull_blocks(key(b), a.cache, [1], [1], range(1))),
    "missing-argument": (r"cluster_id", lambda a, b: a.package.BlocksCacheKey()),
    "our-role": (r"role=.*not LLMRole", lambda a, b: a.package.LLMDataDist(ours.LLMRole.MIX, 3)),
    "our-placement": (r"placement=.*not Placement", lambda a, b: a.desc(placement=ours.Placement.HOST)),
    "our-data-type": (r"data_type=.*not DataType", lambda a, b: a.desc(data_type=ours.DataType.DT_UINT8)),
    "our-key": (r"the key=.*not BlocksCacheKey", lambda a, b: pull(a, ours.BlocksCacheKey(2, 1), a.cache, [1], [1])),
    "our-cluster-info": (r"clusters=.*not LLMClusterInfo", lambda a, b: a.dist.link_clusters([ours.LLMClusterInfo()])),
    "no-tensor": (r"num_tensors=0", lambda a, b: a.desc(num_tensors=0)),
    "empty-dimension": (r"shape=0", lambda a, b: a.desc(shape=[0, 4])),
    "id-too-large": (r"cluster_id=18446744073709551616", lambda a, b: a.fresh(2**64)),
    "options-no-strings": (r"options.*is int", lambda a, b: a.fresh().init({"a": 1})),
    "first-generation": (r"V2 only", lambda a, b: a.fresh().init({})),
    "link-before-init": (r"link_clusters before init", lambda a, b: a.fresh().link_clusters([a.info(b)])),
    "caches-before-init": (r"cache_manager before init", lambda a, b: a.fresh().cache_manager),
    "one-cluster": (r"clusters=.*not list or tuple", lambda a, b: a.dist.link_clusters(a.info(b))),
    "no-cluster": (r"0 clusters", lambda a, b: a.dist.link_clusters([])),
    "17-clusters": (r"17 clusters", lambda a, b: a.dist.link_clusters([a.info(b)] * 17)),
    "no-time": (r"timeout=0", lambda a, b: a.dist.link_clusters([a.info(b)], timeout=0)),
    "float-time": (r"timeout=1.5", lambda a, b: a.dist.link_clusters([a.info(b)], timeout=1.5)),
    "force-no-bool": (r"force=1", lambda a, b: a.dist.unlink_clusters([a.info(b)], force=1)),
    "no-remote-address": (r"append_remote_ip_info", lambda a, b: a.dist.link_clusters([_without(a.info(b), "remote")])),
    "no-local-address": (r"append_local_ip_info", lambda a, b: a.dist.link_clusters([_without(a.info(b), "local")])),
    "no-id": (r"remote_cluster_id was not set", lambda a, b: a.package.LLMClusterInfo().remote_cluster_id),
    "ipv6": (r"::1", lambda a, b: a.package.LLMClusterInfo().append_remote_ip_info("::1", 5)),
    "name-of-host": (r"localhost", lambda a, b: a.package.LLMClusterInfo().append_remote_ip_info("localhost", 5)),
    "port-0": (r"port=0", lambda a, b: a.dist.switch_role(a.package.LLMRole.MIX, {"llm.listenIpInfo": "127.0.0.1:0"})),
    "key-of-another": (r"another cluster, or in use", lambda a, b: a.at([4096], key(b, 5))),
    "key-twice": (r"another cluster, or in use", lambda a, b: a.register(1)),
    "two-addresses": (r"2 addresses", lambda a, b: a.at([4096, 8192], key(a, 5))),
    "numpy-address": (r"addrs holds int64", lambda a, b: a.at([np.int64(4096)], key(a, 5))),
    "unregister-unknown": (r"is not registered", lambda a, b: a.manager.unregister_cache(a.cache.cache_id + 99)),
    "array-of-blocks": (r"ndarray", lambda a, b: pull(a, key(b), a.cache, np.array([1]), np.array([1]))),
    "numpy-blocks": (r"holds int64", lambda a, b: pull(a, key(b), a.cache, list(np.array([1])), [1])),
    "no-blocks": (r"not empty", lambda a, b: pull(a, key(b), a.cache, [], [])),
    "unequal-blocks": (r"equally many", lambda a, b: push(a, key(b), a.cache, [1, 2], [1])),
    "negative-block": (r"negative", lambda a, b: push(a, key(b), a.cache, [-1], [1])),
    "address-for-cache": (r"the cache=.*is int", lambda a, b: pull(a, key(b), a.memory.ctypes.data, [1], [1])),
    "unregistered-cache": (r"is not registered", lambda a, b: pull(a, key(b), _unregistered(a), [1], [1])),
    "layers": (r"all layers", lambda a, b: pull(a, key(b), a.cache, [1], [1], src_layer_range=range(1))),
    "default-layers": (r"tensor_num_per_layer=2", lambda a, b: a.manager.pull_blocks(key(b), a.cache, [1], [1])),
    "caches-of-another": (r"is not registered", lambda a, b: pull(a, key(b), b.cache, [1], [1])),
}  # fmt: skip


def _without(info: Any, what: str) -> Any:
    getattr(info, what).clear()
    return info


def _unregistered(end: End) -> Any:
    end.manager.unregister_cache(end.cache.cache_id)
    return end.cache


@pytest.mark.parametrize(("text", "call"), WRONG.values(), ids=WRONG)
def test_wrong_calls_are_complained_of(ends: tuple[End, End], text: str, call: Callable[[End, End], object]) -> None:
    with pytest.raises(NotPublished, match=text):
        call(*ends)
    assert len(standin.complaints) == 1
    standin.complaints.clear()


def test_two_calls_at_once_are_complained_of() -> None:
    """The backend promises not to make them, because nothing is published about them."""
    package = standin.StandInPackage()
    end, silent = End(package, MINE, timeout_ms=2000), SilentPeer()
    try:
        silent.be_linked(end)
        waiting = threading.Thread(target=lambda: outcome(lambda: pull_from_silent(end)), daemon=True)
        waiting.start()
        assert silent.asked.wait(WAIT_S)
        with pytest.raises(NotPublished, match="another call is under way"):
            end.manager.unregister_cache(end.cache.cache_id)
        waiting.join(WAIT_S)
    finally:
        silent.close()
        end.dist.finalize()
        standin.complaints.clear()


# -- what the page says the vendor answers


def status_of(call: Callable[[], object], status: str) -> None:
    with pytest.raises(types_.LLMException) as caught:
        call()
    assert caught.value.status_code.name == status, caught.value


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except types_.LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"


def test_statuses(linked: tuple[End, End]) -> None:
    a, b = linked
    status_of(lambda: pull(a, key(b, 77), a.cache, [1], [1]), "LLM_KV_CACHE_NOT_EXIST")
    status_of(lambda: pull(a, key(b), a.cache, [1 << 20], [1]), "LLM_PARAM_INVALID")
    status_of(lambda: pull(a, key(b), a.cache, [1], [1 << 20]), "LLM_PARAM_INVALID")
    status_of(lambda: pull(a, a.package.BlocksCacheKey(33, 1), a.cache, [1], [1]), "LLM_NOT_YET_LINK")
    status_of(lambda: a.dist.check_link_status(33), "LLM_NOT_YET_LINK")
    status_of(lambda: a.register(2), "LLM_FAILED")  # only before linking
    status_of(lambda: b.register(2), "LLM_FAILED")
    status_of(lambda: a.dist.switch_role(a.package.LLMRole.DECODER), "LLM_EXIST_LINK")
    assert a.link(b) == ["LLM_FAILED", "LLM_ALREADY_LINK"]
    other = a.info(b)
    other.remote_cluster_id = 33
    assert [one.name for one in a.dist.unlink_clusters([other])[1]] == ["LLM_NOT_YET_LINK"]
    assert a.dist.link_clusters([other])[1][0].name == "LLM_LINK_FAILED"  # another cluster is there
    assert standin.complaints == []


def test_statuses_after_the_end(ends: tuple[End, End]) -> None:
    a, b = ends
    b.dist.finalize()
    b.dist.finalize()
    status_of(lambda: b.dist.link_clusters([b.info(a)]), "LLM_ENGINE_FINALIZED")
    status_of(lambda: b.manager, "LLM_ENGINE_FINALIZED")
    assert a.link(b) == ["LLM_FAILED", "LLM_LINK_FAILED"]


def test_memory_that_is_not_for_peers(ends: tuple[End, End]) -> None:
    a, b = ends
    b.register(2, accessible=False)
    b.register(3, accessible=None)  # HOST: not for peers
    a.link(b)
    for model_id in (2, 3):
        status_of(lambda m=model_id: pull(a, key(b, m), a.cache, [1], [1]), "LLM_KV_CACHE_NOT_EXIST")  # type: ignore[misc]


def test_blocks_of_another_size_do_not_match(ends: tuple[End, End]) -> None:
    a, b = ends
    wide = b.desc(shape=[MEMORY_BYTES // 128, 128])
    b.manager.register_blocks_cache(wide, [b.memory.ctypes.data], key(b, 2), remote_accessible=True)
    a.link(b)
    status_of(lambda: push(a, key(b, 2), a.cache, [1], [1]), "LLM_PARAM_INVALID")


def test_the_limits_of_the_original() -> None:
    package = standin.StandInPackage()
    end = End(package, MINE)
    try:
        status_of(lambda: End(package, THEIRS), "LLM_FAILED")  # one per process
        for number in range(standin.MAX_ADDRESSES - 1):
            end.register(2 + number)
        status_of(lambda: end.register(1000), "LLM_FAILED")
    finally:
        end.dist.finalize()
    End(package, THEIRS).dist.finalize()


class SilentPeer:
    """Links, then never answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="datadist-test-silent", daemon=True)
        self._thread.start()

    def be_linked(self, end: End) -> None:
        info = end.package.LLMClusterInfo()
        info.remote_cluster_id = THEIRS
        info.append_local_ip_info("127.0.0.1", end.port)
        info.append_remote_ip_info("127.0.0.1", self._listener.getsockname()[1])
        assert end.dist.link_clusters([info])[0].name == "LLM_SUCCESS"

    def _run(self) -> None:
        for _ in range(2):
            made, _ = self._listener.accept()
            made.settimeout(WAIT_S)
            self._kept.append(made)
            msgspec.msgpack.decode(receive(made)[0], type=Hello)
            send(made, Answer("LLM_SUCCESS"))
        receive(self._kept[0])
        self.asked.set()

    def close(self) -> None:
        self._listener.close()
        for one in self._kept:
            one.close()
        self._thread.join(WAIT_S)


def pull_from_silent(end: End) -> None:
    pull(end, end.package.BlocksCacheKey(THEIRS, 1), end.cache, [1], [1])


def test_a_link_is_of_no_use_after_a_transfer_that_timed_out() -> None:
    end, silent = End(standin.StandInPackage(), MINE, timeout_ms=50), SilentPeer()
    try:
        silent.be_linked(end)
        status_of(lambda: pull_from_silent(end), "LLM_TIMEOUT")
        status_of(lambda: pull_from_silent(end), "LLM_LINK_FAILED")
    finally:
        silent.close()
        end.dist.finalize()


# -- its signatures are those of the published API, as our own implementation of it has them

#: Arguments that our own API has beyond the published one.
EXTENSIONS = {"slices", "deadline_s", "link_id"}


@pytest.mark.parametrize(
    ("theirs", "of_ours"),
    [
        *((getattr(standin.LLMDataDist, name), getattr(ours.LLMDataDist, name)) for name in (
            "__init__", "init", "finalize", "link_clusters", "unlink_clusters", "check_link_status", "switch_role",
        )),
        *((getattr(standin.CacheManager, name), getattr(ours.CacheManager, name)) for name in (
            "register_blocks_cache", "unregister_cache", "pull_blocks", "push_blocks",
        )),
        (types_.CacheDesc.__init__, ours.CacheDesc.__init__),
        (types_.LLMClusterInfo.append_local_ip_info, ours.LLMClusterInfo.append_local_ip_info),
        (types_.LLMClusterInfo.append_remote_ip_info, ours.LLMClusterInfo.append_remote_ip_info),
        (types_.LLMConfig.generate_options, ours.LLMConfig.generate_options),
    ],
    ids=lambda function: function.__qualname__,
)  # fmt: skip
def test_signatures_are_the_published_ones(theirs: Callable[..., object], of_ours: Callable[..., object]) -> None:
    def plain(function: Callable[..., object]) -> list[tuple[str, str, object]]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind.name, _plain(p.default)) for p in found if p.name not in EXTENSIONS]

    assert plain(theirs) == plain(of_ours)


def _plain(default: object) -> object:
    """Enums of the stand-in are types of their own."""
    return getattr(default, "name", default)


@pytest.mark.parametrize("name", ["LLMRole", "Placement", "LLMStatusCode", "DataType"])
def test_enums_are_the_published_ones(name: str) -> None:
    theirs, of_ours = getattr(types_, name), getattr(ours, name)
    assert theirs is not of_ours
    assert {one.name: one.value for one in theirs}.items() <= {one.name: one.value for one in of_ours}.items()
    assert len(theirs) >= len(of_ours) - 2  # the fp8 types are ours
