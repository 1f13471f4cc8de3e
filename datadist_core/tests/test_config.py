# SPDX-License-Identifier: Apache-2.0
"""Option strings: what LLMConfig writes, what Settings reads, what is refused by name."""

from __future__ import annotations

import logging
import re

import pytest

from datadist_core import LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Placement
from datadist_core.checks import HostPort, ip_text
from datadist_core.settings import Settings
from datadist_core.tests.argument_setters import PROPERTIES, Property

#: Where the text names the property in place of the option.
NAME_IN_TEXT = {"llm.TransferBackend": "(?i)transfer_?backend"}
#: Shell scripts pass these for "not set".
EMPTY_MEANS_UNSET = {"llm.SyncKvCacheWaitTime", "llm.LinkTotalTime", "llm.LinkRetryCount", "llm.HeartbeatInterval"}


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


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_property_default_options_and_strings(prop: Property):
    config = LLMConfig()
    assert getattr(config, prop.name) == prop.default
    assert config.generate_options() == {}
    for value, options in prop.good:
        config = LLMConfig()
        setattr(config, prop.name, value)
        assert getattr(config, prop.name) == value
        assert config.generate_options() == config.gen_options() == options
        Settings.from_options(options)


def test_every_property_has_an_entry():
    public = {name for name, member in vars(LLMConfig).items() if isinstance(member, property)}
    assert public == {prop.name for prop in PROPERTIES}


def refused_options() -> list[tuple[str, str]]:
    return [(key, text) for prop in PROPERTIES for key, texts in prop.bad_options.items() for text in texts]


@pytest.mark.parametrize(
    ("key", "text"), [(k, t) for k, t in refused_options() if t or k not in EMPTY_MEANS_UNSET], ids=repr
)
def test_a_bad_option_given_directly_is_refused_by_name(key: str, text: str):
    with LLMDataDist(LLMRole.MIX, 1) as end:
        with pytest.raises(LLMException, match=NAME_IN_TEXT.get(key, re.escape(key))) as caught:
            end.init({key: text})
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        end.init({})
        assert end.kv_cache_manager


def test_a_setting_that_failed_changes_nothing():
    config = LLMConfig()
    config.sync_kv_timeout = 77
    config.device_id = [3]
    for name, bad in (("sync_kv_timeout", 0), ("device_id", [-1])):
        with pytest.raises(ValueError, match=name):
            setattr(config, name, bad)
    assert config.generate_options() == {
        "llm.SyncKvCacheWaitTime": "77",
        "ge.exec.deviceId": "3",
        "ge.session_device_id": "3",
    }


def test_what_a_caller_does_to_its_list_later_does_not_matter():
    config, ids, options = LLMConfig(), [1, 2], {"ge.flowGraphMemMaxSize": "4096"}
    config.device_id, config.ge_options = ids, options
    ids.append(3)
    options["ge.flowGraphMemMaxSize"] = "x"
    config.ge_options["ge.other"] = "x"
    assert config.device_id == [1, 2]
    assert config.generate_options() == {
        "ge.exec.deviceId": "1;2",
        "ge.session_device_id": "1",
        "ge.flowGraphMemMaxSize": "4096",
    }


def test_what_options_mean():
    assert Settings.from_options({}) == Settings()
    assert Settings().sync_kv_timeout_s == 1.0
    assert (Settings().link_total_time_s, Settings().link_retry_count) == (0, 1)
    assert Settings.from_options({"llm.MemPoolConfig": '{"memory_size": 5}'}).pools[Placement.DEVICE].page_shift == 16
    assert not Settings().v2
    assert Settings.from_options({"llm.EnableCacheManager": "1"}).v2
    assert Settings.from_options({"llm.LocalCommRes": ""}).v2
    assert Settings.from_options({"llm.TransferBackend": "hixl"}) == Settings(transfer_backend="hixl")


def test_unknown_keys_are_ignored_with_one_log_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "datadist_core")
    assert Settings.from_options({"ge.somethingElse": "1", "llm.other": "x", "llm.LinkRetryCount": "1"}) == Settings()
    (record,) = caplog.records
    assert "ge.somethingElse, llm.other" in record.getMessage()
    assert "LinkRetryCount" not in record.getMessage()


def test_addresses():
    assert ip_text("::1") == "::1"
    assert ip_text(0x0100007F) == "127.0.0.1"
    assert str(HostPort.parse("[fe80::1]:7")) == "[fe80::1]:7"
    with pytest.raises(ValueError, match="ip="):
        ip_text(2**32)
    with pytest.raises(TypeError, match="ip"):
        ip_text(None)
