# SPDX-License-Identifier: Apache-2.0
"""The connector's settings: `kv_connector_extra_config`, checked and typed. Everything has a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .address import address_error

#: As in the core's `LLMConfig.integrity`.
INTEGRITY_KINDS = ("off", "checksum")
TRANSFER_MODES = ("pull", "push")


class ConfigError(ValueError):
    """A setting in `kv_connector_extra_config` has a name or a value that cannot work."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a user may set.

    Attributes:
        host: address to listen on and to publish in tickets; "" = the address vLLM finds for this host.
        port: 0 = any free port, which tickets then carry. Another value is the port of this engine's first
            worker; the others take the ports behind it.
        transfer_mode: "pull": D reads P's blocks after the prefill. "push": P writes D's blocks while it prefills. For
            requests that name neither; both engines need the same.
        transfer_backend: "auto" = the best one that both ends can really use.
        backend_options: per backend, what the core's `global_resource_config` takes, e.g. {"tcp": {"streams": 2}}.
        lease_s: how long P holds blocks that nobody renews; with renewals 20 times as long at most.
        link_timeout_s: longest time for one attempt to link with a peer.
        load_timeout_s: longest time from the start of a load to its end, whatever happens.
        push_timeout_s: longest time from when D has reserved blocks for a push to its end; P's queue and its prefill
            fall into it.
        load_threads: how many loads of one worker run at the same time.
        push_threads: how many pushes of one worker are sent at the same time, as P; each waits for the engine's layers
            in a thread of its own. More take turns, behind the engine.
        drain_timeout_s: after SIGTERM, how long hand-offs may go on; 0 = as long as vLLM's --shutdown-timeout allows,
            which must be set, less the 3 s it takes to close.
        integrity: "off", or "checksum": a load succeeds only if checksums of its blocks at P and here are the same.
        security: the core's `security`, e.g. {"secret_file": "/run/secrets/datadist"}: who may link, and TLS. The same
            for all engines; never the secret itself. See docs/security.md.
        trace: directory for trace files, one per process: see `vllm_datadist.trace`. "" = none are written.
        huge_pages: put the KV cache into huge pages of the system (CPU workers; vm.nr_hugepages must have enough).
    """

    host: str = ""
    port: int = 0
    transfer_mode: str = "pull"
    transfer_backend: str = "auto"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 30.0
    link_timeout_s: float = 10.0
    load_timeout_s: float = 60.0
    push_timeout_s: float = 120.0
    load_threads: int = 4
    push_threads: int = 16
    drain_timeout_s: float = 0.0
    integrity: str = "off"
    security: Mapping[str, Any] = field(default_factory=dict)
    trace: str = ""
    huge_pages: bool = False

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Raises ConfigError naming the setting, its value and what is accepted."""
        known = [one.name for one in fields(cls)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has unknown settings {', '.join(unknown)}; known are: {', '.join(known)}"
            )
        return cls(**{name: _CHECKS[name](name, value) for name, value in extra.items()})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"kv_connector_extra_config: {name} must be a string, not {value!r}")
    return value


def _host(name: str, value: Any) -> str:
    host = _text(name, value)
    if host and (why := address_error(host, 1)):
        raise ConfigError(
            f"kv_connector_extra_config: {name} is {value!r}: {why}. It goes into tickets: name the address, or "
            "the name in ASCII, at which peers reach this host, or leave it out"
        )
    return host


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"kv_connector_extra_config: {name} must be a whole number {low}..{high}, not {value!r}")
    return value


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 86400:
        raise ConfigError(f"kv_connector_extra_config: {name} must be seconds > 0 and <= 86400, not {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"kv_connector_extra_config: {name} must be true or false, not {value!r}")
    return value


def _one_of(name: str, value: Any, accepted: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in accepted:
        raise ConfigError(f"kv_connector_extra_config: {name} must be one of {', '.join(accepted)}, not {value!r}")
    return value


def _options(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
        raise ConfigError(f"kv_connector_extra_config: {name} must be an object of objects by backend, not {value!r}")
    return value


def _security(name: str, value: Any) -> Mapping[str, Any]:
    """Its content is for the core to check. The text does not show it: it may hold a secret by mistake."""
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'kv_connector_extra_config: {name} must be an object like {{"secret_file": PATH}}, not a '
            f"{type(value).__name__}"
        )
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "host": _host,
    "port": lambda name, value: _whole(name, value, 0, 65535),
    "transfer_mode": lambda name, value: _one_of(name, value, TRANSFER_MODES),
    "transfer_backend": _text,
    "backend_options": _options,
    "lease_s": _seconds,
    "link_timeout_s": _seconds,
    "load_timeout_s": _seconds,
    "push_timeout_s": _seconds,
    "load_threads": lambda name, value: _whole(name, value, 1, 256),
    "push_threads": lambda name, value: _whole(name, value, 1, 256),
    "drain_timeout_s": lambda name, value: 0.0 if value in (0, 0.0) else _seconds(name, value),
    "integrity": lambda name, value: _one_of(name, value, INTEGRITY_KINDS),
    "security": _security,
    "trace": _text,
    "huge_pages": _flag,
}
