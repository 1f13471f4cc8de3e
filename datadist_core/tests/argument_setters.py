# SPDX-License-Identifier: Apache-2.0
"""Rows for the properties of LLMConfig and for LLMClusterInfo, and what each property stands for in the options."""

from __future__ import annotations

import os
from dataclasses import dataclass

from datadist_core import LLMClusterInfo, LLMConfig
from datadist_core.tests.argument_rows import (
    NOT_BOOL,
    NOT_DICT,
    NOT_INT,
    NOT_LIST,
    NOT_STR,
    Callee,
    Fault,
    Row,
    Where,
    flat,
)

UINT32_END, UINT64_END = 2**32, 2**64


@dataclass(frozen=True, slots=True)
class Property:
    """A property of LLMConfig.

    Attributes:
        default: what it reads as before it is set.
        good: values to set, with what `generate_options` gives for them.
        bad_options: texts that `init` has to refuse when the option is given directly, by option key.
    """

    name: str
    default: object
    good: tuple[tuple[object, dict[str, str]], ...]
    bad_options: dict[str, tuple[str, ...]]


def _plain(name: str, default: object, key: str, good: dict[object, str], *bad: str) -> Property:
    return Property(name, default, tuple((value, {key: text}) for value, text in good.items()), {key: bad})


_POOL = '{"memory_size": 4096, "page_shift": 12}'
_BAD_POOLS = (
    "{", "[]", "5", "{}", '{"memory_size": 0}', '{"memory_size": -1}', '{"memory_size": "1"}', '{"memory_size": true}',
    '{"memory_size": 1.5}', '{"memory_size": 1, "page_shift": 9}', '{"memory_size": 1, "page_shift": 31}',
    '{"memory_size": 1, "page_shift": "16"}', f'{{"memory_size": {2**63}}}',
)  # fmt: skip
_BAD_ADDRESSES = (
    "nohost", "h:", ":1", "h:x", "h:-1", "h:65536", "h: 1", "a b:1", "[]:1", "[::1:1", "300.1.1.1:1", "1.2.3:1",
    "1::2::3:1",
)  # fmt: skip
_BAD_SIZES = ("", "0", "1G", "1;2", "-1", "1.5", "²", "9" * 19 + "0")
#: Good where the tests run: `conftest.py` has no part in it, as the rows are made before fixtures.
os.environ.setdefault("DATADIST_TESTS_SECRET", "not secret at all")
SECRET_IN_ENVIRONMENT = '{"secret_env": "DATADIST_TESTS_SECRET"}'
_BAD_SECURITY = (
    "{", "[]", "5", '{"secret": "in the open, 16 bytes"}', '{"secret_file": "/no/such/file"}', '{"secret_file": 5}',
    '{"secret_file": "/"}', '{"secret_file": ""}', '{"secret_env": "DATADIST_TESTS_NOT_SET"}', '{"unknown": 1}',
    '{"secret_file": "/x", "secret_env": "X"}', '{"tls": true}', '{"tls": {}}', '{"tls": {"cert": "/x", "key": "/x"}}',
    '{"tls": {"cert": "/no/such", "key": "/no/such", "ca": "/no/such"}}', '{"limits": 5}', '{"limits": {"x": 1}}',
    '{"limits": {"connections": 0}}', '{"limits": {"strangers": true}}', '{"limits": {"strangers": 1.5}}',
)  # fmt: skip
_BAD_FLAGS = ("", "yes", "True", "2")

PROPERTIES = [
    Property(
        "device_id",
        None,
        tuple(
            (value, {"ge.exec.deviceId": text, "ge.session_device_id": first})
            for value, text, first in ((0, "0", "0"), (7, "7", "7"), ([0, 1], "0;1", "0"), ((3,), "3", "3"))
        ),
        {"ge.exec.deviceId": ("x", "-1", "0;", "0,1"), "ge.session_device_id": ("x", "-1")},
    ),
    _plain(
        "listen_ip_info", None, "llm.listenIpInfo",
        {text: text for text in ("10.0.0.1:26000", "[::1]:26000", "::1:26000", "host.example:0", "0.0.0.0:65535")},
        *_BAD_ADDRESSES,
    ),
    _plain(
        "sync_kv_timeout", 1000, "llm.SyncKvCacheWaitTime", {1: "1", 2500: "2500", "30": "30"}, "0", "-1", "x", "1.5",
        "²", "9" * 20,
    ),
    Property(
        "ge_options",
        {},
        tuple((options, options) for options in ({}, {"ge.flowGraphMemMaxSize": "1048576"}, {"ge.other": ""})),
        {"ge.flowGraphMemMaxSize": _BAD_SIZES},
    ),
    _plain("mem_pool_cfg", None, "llm.MemPoolConfig", {_POOL: _POOL}, *_BAD_POOLS),
    _plain("host_mem_pool_cfg", None, "llm.HostMemPoolConfig", {_POOL: _POOL}, *_BAD_POOLS),
    _plain("enable_cache_manager", False, "llm.EnableCacheManager", {True: "1", False: "0"}, *_BAD_FLAGS),
    _plain(
        "enable_remote_cache_accessible", False, "llm.EnableRemoteCacheAccessible", {True: "1", False: "0"},
        *_BAD_FLAGS,
    ),
    _plain("enable_switch_role", False, "llm.EnableSwitchRole", {True: "1", False: "0"}, *_BAD_FLAGS),
    _plain("local_comm_res", None, "llm.LocalCommRes", {"": "", '{"a": 1}': '{"a": 1}'}, "x", "[]", "5"),
    _plain(
        "transfer_backend", "auto", "llm.TransferBackend",
        {name: name for name in ("auto", "shm", "cma", "tcp", "nixl", "mooncake", "hixl", "package.module:Class")},
        "", "a b", "nosuch",
    ),
    _plain(
        "global_resource_config", None, "llm.GlobalResourceConfig", {'{"tcp": {}}': '{"tcp": {}}', "": ""}, "5", "[1]",
        "{",
    ),
    _plain(
        "link_total_time", 0, "llm.LinkTotalTime", {0: "0", UINT32_END - 1: str(UINT32_END - 1)}, "-1", "x",
        str(UINT32_END),
    ),
    _plain("link_retry_count", 1, "llm.LinkRetryCount", {1: "1", 100: "100"}, "0", "101", "x"),
    _plain("heartbeat_interval", 4000, "llm.HeartbeatInterval", {100: "100", 60000: "60000"}, "99", "60001", "x"),
    _plain("integrity", "off", "llm.Integrity", {"off": "off", "checksum": "checksum"}, "", "on", "Checksum", "1"),
    _plain(
        "security", None, "llm.Security",
        {text: text for text in ("{}", "", SECRET_IN_ENVIRONMENT, '{"limits": {"connections": 1, "strangers": 9}}')},
        *_BAD_SECURITY,
    ),
    _plain("rdma_traffic_class", None, "llm.RdmaTrafficClass", {0: "0", 252: "252"}, "-4", "256", "3", "x"),
    _plain("rdma_service_level", None, "llm.RdmaServiceLevel", {0: "0", 7: "7"}, "-1", "8", "x"),
    _plain(
        "mem_utilization", 0.95, "llm.MemoryUtilization", {0: "0", 1: "1", 0.5: "0.5"}, "-0.1", "1.5", "nan", "x",
    ),
    _plain("buf_pool_cfg", None, "llm.BufPoolCfg", {"{}": "{}", "": ""}),
    _plain("deploy_res_path", None, "llm.deployResPath", {"/a/b": "/a/b", "": ""}),
]  # fmt: skip


def setter_rows() -> list[Row]:
    return flat(_types(), _texts(), _numbers(), _cluster_info())


def _setter(name: str) -> Callee:
    return Callee(
        f"LLMConfig.{name}", lambda w: lambda value: setattr(LLMConfig(), name, value), lambda w: {}, Where.NOWHERE
    )


def _types() -> list[Row]:
    wrong = {
        "device_id": ("0", 1.5, True, [True], ["0"], (1.5,), [None], {0}, None),
        "sync_kv_timeout": (1.5, True, b"1", [1], None),
        "ge_options": (*NOT_DICT, {1: "a"}, {"a": 1}, {"a": None}, None),
        "mem_utilization": ("0.5", True, [0.5], None),
    }
    for name in ("enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role"):
        wrong[name] = (*NOT_BOOL, None)
    times_and_counts = ("link_total_time", "link_retry_count", "heartbeat_interval")
    for name in (*times_and_counts, "rdma_traffic_class", "rdma_service_level"):
        wrong[name] = (*NOT_INT, None)
    texts = [prop.name for prop in PROPERTIES if prop.name not in wrong]
    wrong |= dict.fromkeys(texts, (*NOT_STR, None))
    return flat(*(_setter(name).type_rows("value", *bad, text=rf"\b{name}\b") for name, bad in wrong.items()))


def _texts() -> list[Row]:
    bad = {
        "listen_ip_info": _BAD_ADDRESSES,
        "mem_pool_cfg": _BAD_POOLS,
        "host_mem_pool_cfg": _BAD_POOLS,
        "local_comm_res": ("x", "[]", "5"),
        "transfer_backend": ("", " ", "a b"),
        "integrity": ("", "on", "Checksum", "off "),
        "security": _BAD_SECURITY,
        "global_resource_config": ("5", "[1]", "{"),
    }
    rows = [_setter(n).refused("value", Fault.CONTENT, v, rf"\b{n}\b") for n, values in bad.items() for v in values]
    ge = _setter("ge_options")
    sizes = [{"ge.flowGraphMemMaxSize": size} for size in _BAD_SIZES]
    return rows + [ge.refused("value", Fault.CONTENT, size, "ge.flowGraphMemMaxSize") for size in sizes]


def _numbers() -> list[Row]:
    bad = {
        "device_id": (-1, [0, -1], UINT32_END, [], ()),
        "sync_kv_timeout": (0, -1, "0", "-1", "x", "", "1.5", "²", 2**63),
        "link_total_time": (-1, UINT32_END),
        "link_retry_count": (0, 101),
        "heartbeat_interval": (99, 60_001),
        "rdma_traffic_class": (-4, 3, 256),
        "rdma_service_level": (-1, 8),
        "mem_utilization": (-0.1, 1.5, float("nan"), float("inf")),
    }
    return [_setter(n).range_row("value", v, rf"\b{n}\b") for n, values in bad.items() for v in values]


def _cluster_info() -> list[Row]:
    cluster_id = Callee(
        "LLMClusterInfo.remote_cluster_id",
        lambda w: lambda value: setattr(LLMClusterInfo(), "remote_cluster_id", value),
        lambda w: {},
        Where.NOWHERE,
    )
    local, remote = (
        Callee(
            f"LLMClusterInfo.{name}",
            lambda w, name=name: getattr(LLMClusterInfo(), name),
            lambda w: {"ip": "127.0.0.1", "port": 26000},
            Where.NOWHERE,
        )
        for name in ("append_local_ip_info", "append_remote_ip_info")
    )
    name = r"\bremote_cluster_id\b"
    return flat(
        cluster_id.type_rows("value", *NOT_INT, None, text=name),
        [cluster_id.range_row("value", value, name) for value in (-1, UINT64_END)],
        *(_address_rows(one) for one in (local, remote)),
        remote.range_row("port", 0),
    )


def _address_rows(append: Callee) -> list[Row]:
    bad = ("", "  ", "a b", "1.2.3", "300.1.1.1", "127.0.0.1:80", "[::1", "1::2::3", "http://h")
    return flat(
        append.type_rows("ip", True, 1.5, b"127.0.0.1", ["127.0.0.1"], None),
        [append.range_row("ip", value) for value in (-1, UINT32_END)],
        [append.refused("ip", Fault.CONTENT, value) for value in bad],
        append.type_rows("port", *NOT_INT, *NOT_LIST[2:], None),
        [append.range_row("port", value) for value in (-1, 65536)],
    )
