# SPDX-License-Identifier: Apache-2.0
"""vLLM's connector for P/D disaggregation over datadist_core.

Switched on by `--kv-transfer-config '{"kv_connector":"DataDistConnector","kv_role":"kv_producer"}'`: vLLM calls
`register` through the `vllm.general_plugins` entry point. With `"kv_connector_module_path":"vllm_datadist"` it is
found without the entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .connector import DataDistConnector

__all__ = ["DataDistConnector", "register"]

_NAME = "DataDistConnector"


def register() -> None:
    """Make the connector known to vLLM by its name. Idempotent; imports none of the connector yet."""
    from ._vllm import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, f"{__name__}.connector", _NAME)


def __getattr__(name: str) -> object:
    if name == _NAME:
        from .connector import DataDistConnector

        return DataDistConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
