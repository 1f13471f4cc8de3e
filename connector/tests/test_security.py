# SPDX-License-Identifier: Apache-2.0
"""The connector's `security`: it reaches the core, and workers with other secrets are told why they get no link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from connector.tests.patience import LINK_S
from datadist_core.errors import LinkFailed, ParamInvalid
from vllm_datadist.config import ConfigError, ConnectorConfig
from vllm_datadist.messages import Endpoint
from vllm_datadist.worker.node import DataDistNode

SECRET = {"secret_env": "TEST_SECRET"}


@contextmanager
def node(security: Mapping[str, Any]) -> Iterator[DataDistNode]:
    config = ConnectorConfig.from_extra_config({"security": security})
    made = DataDistNode("127.0.0.1", 0, "shm", 0, security=config.security)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def secrets_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SECRET", "0123456789abcdef")
    monkeypatch.setenv("TEST_OTHER_SECRET", "fedcba9876543210")


def endpoint(of: DataDistNode) -> Endpoint:
    return Endpoint(0, 0, of.host, of.port, of.cluster_id)


def test_workers_with_one_secret_link_and_others_are_told_what_to_set() -> None:
    """B39."""
    with (
        node(SECRET) as prompt,
        node(SECRET) as decode,
        node({}) as bare,
        node({"secret_env": "TEST_OTHER_SECRET"}) as other,
    ):
        assert decode.link(endpoint(prompt), LINK_S) == "over shm"
        with pytest.raises(LinkFailed, match=r'requires a shared secret.*"security" in kv_connector_extra_config'):
            bare.link(endpoint(prompt), LINK_S)
        with pytest.raises(LinkFailed, match="secrets of the two ends differ"):
            other.link(endpoint(prompt), LINK_S)


def test_a_secret_in_the_configuration_itself_is_refused_and_not_repeated() -> None:
    for security in ({"secret": "0123456789abcdef"}, {"secret_file": "/no/such/file"}):
        with pytest.raises(ParamInvalid, match=r"^security.*secret_file") as caught, node(security):
            pass
        assert "0123456789abcdef" not in str(caught.value)
    with pytest.raises(ConfigError, match="security must be an object") as refused:
        ConnectorConfig.from_extra_config({"security": "0123456789abcdef"})
    assert "0123456789abcdef" not in str(refused.value)
