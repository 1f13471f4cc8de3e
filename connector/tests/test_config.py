# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, unknown names and bad values are named."""

from __future__ import annotations

import pytest

from vllm_datadist.config import ConfigError, ConnectorConfig


def test_defaults_need_nothing() -> None:
    config = ConnectorConfig.from_extra_config({})
    assert (config.port, config.transfer_backend, config.lease_s, config.load_threads) == (0, "auto", 30.0, 4)


def test_values_are_taken() -> None:
    config = ConnectorConfig.from_extra_config({"host": "10.0.0.7", "port": 7000, "lease_s": 5, "load_threads": 2})
    assert (config.host, config.port, config.lease_s, config.load_threads) == ("10.0.0.7", 7000, 5.0, 2)


def test_unknown_settings_are_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown settings lease, speed; known are: host, port, .*lease_s"):
        ConnectorConfig.from_extra_config({"speed": 1, "lease": 3, "port": 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", 7),
        ("host", "münchen"),
        ("host", "10.0.0"),
        ("host", "a host"),
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("port", True),
        ("transfer_backend", None),
        ("lease_s", 0),
        ("lease_s", float("nan")),
        ("lease_s", "30"),
        ("link_timeout_s", -1),
        ("load_timeout_s", 1e9),
        ("load_threads", 0),
        ("load_threads", 2.0),
        ("integrity", "on"),
        ("integrity", True),
        ("huge_pages", 1),
        ("huge_pages", "true"),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        ConnectorConfig.from_extra_config({name: value})
    assert repr(value) in str(caught.value)
