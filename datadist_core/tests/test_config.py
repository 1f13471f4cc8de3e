# SPDX-License-Identifier: Apache-2.0
"""Option strings: what LLMConfig writes, what Settings reads, what is refused by name."""

from __future__ import annotations

import pytest

from datadist_core import LLMConfig, LLMException, Placement
from datadist_core.config import HostPort, Settings, ip_text


def test_options_survive_the_way_through_strings():
    config = LLMConfig()
    config.device_id = [0, 1]
    config.listen_ip_info = "[::1]:26000"
    config.sync_kv_timeout = "2500"
    config.ge_options = {"ge.flowGraphMemMaxSize": "1048576"}
    config.host_mem_pool_cfg = '{"memory_size": 4096, "page_shift": 12}'
    config.enable_remote_cache_accessible = True
    config.local_comm_res = ""
    config.transfer_backend = "tcp"
    config.global_resource_config = '{"tcp": {"streams": 2}}'
    config.link_retry_count = 5
    options = config.generate_options()
    assert options["ge.exec.deviceId"] == "0;1"
    assert all(isinstance(v, str) for v in options.values())
    settings = Settings.from_options(options)
    assert settings.listen == HostPort("::1", 26000)
    assert settings.sync_kv_timeout_s == 2.5
    assert settings.pools[Placement.DEVICE].memory_size_bytes == 1 << 20
    assert settings.pools[Placement.HOST].page_shift == 12
    assert settings.v2  # local_comm_res is set, even if to ""
    assert settings.transfer_backend == "tcp"
    assert settings.backend_options == {"tcp": {"streams": 2}}


def test_unknown_keys_are_ignored():
    assert Settings.from_options({"ge.somethingElse": "1"}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("device_id", -1, ValueError),
        ("device_id", "0", TypeError),
        ("device_id", [], ValueError),
        ("listen_ip_info", "nohost", LLMException),
        ("listen_ip_info", "h:99999", LLMException),
        ("listen_ip_info", 5, TypeError),
        ("sync_kv_timeout", 0, ValueError),
        ("sync_kv_timeout", "x", ValueError),
        ("sync_kv_timeout", 1.5, TypeError),
        ("ge_options", {"ge.flowGraphMemMaxSize": "1G"}, LLMException),
        ("ge_options", {"a": 1}, TypeError),
        ("mem_pool_cfg", "{", LLMException),
        ("mem_pool_cfg", '{"memory_size": 0}', LLMException),
        ("host_mem_pool_cfg", '{"memory_size": 1, "page_shift": 9}', LLMException),
        ("enable_cache_manager", 1, TypeError),
        ("local_comm_res", "[]", LLMException),
        ("transfer_backend", "", LLMException),
        ("global_resource_config", "5", LLMException),
        ("link_total_time", -1, ValueError),
        ("link_retry_count", 0, ValueError),
        ("link_retry_count", 101, ValueError),
        ("rdma_traffic_class", 3, ValueError),
        ("rdma_service_level", 8, ValueError),
        ("mem_utilization", 1.5, ValueError),
    ],
)
def test_setters_refuse_by_name(name, value, error):
    with pytest.raises(error, match=name if name != "ge_options" else "ge"):
        setattr(LLMConfig(), name, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llm.listenIpInfo", "x"),
        ("llm.SyncKvCacheWaitTime", "-1"),
        ("ge.flowGraphMemMaxSize", "1;2"),
        ("llm.EnableCacheManager", "yes"),
        ("llm.LinkRetryCount", "0"),
        ("llm.GlobalResourceConfig", "[1]"),
    ],
)
def test_bad_option_strings_are_refused_by_name(key, value):
    with pytest.raises(LLMException, match=key):
        Settings.from_options({key: value})


def test_addresses():
    assert ip_text("::1") == "::1"
    assert ip_text(0x0100007F) == "127.0.0.1"
    assert str(HostPort.parse("[fe80::1]:7")) == "[fe80::1]:7"
    with pytest.raises(ValueError, match="ip="):
        ip_text(2**32)
    with pytest.raises(TypeError, match="ip"):
        ip_text(None)
