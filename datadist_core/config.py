# SPDX-License-Identifier: Apache-2.0
"""`LLMConfig`: what users fill in. It writes the option strings that `settings.Settings` parses."""

from __future__ import annotations

from typing import Any

from .checks import UINT32_MAX, HostPort, check_range, check_type
from .settings import (
    INT64_MAX,
    PoolSettings,
    comm_res,
    is_digits,
    json_object,
    parse_backend,
    parse_integrity,
    parse_pools,
    parse_security,
)


class LLMConfig:
    """The options of an `LLMDataDist`, as properties. `generate_options()` gives what `init` takes.

    Setters raise TypeError for a wrong type and ValueError or ParamInvalid for a bad value, at once.
    """

    def __init__(self) -> None:
        self._options: dict[str, str] = {}
        self._ge_options: dict[str, str] = {}
        self._values: dict[str, Any] = {
            "device_id": None,
            "listen_ip_info": None,
            "sync_kv_timeout": 1000,
            "mem_pool_cfg": None,
            "host_mem_pool_cfg": None,
            "enable_cache_manager": False,
            "enable_remote_cache_accessible": False,
            "enable_switch_role": False,
            "local_comm_res": None,
            "transfer_backend": "auto",
            "global_resource_config": None,
            "link_total_time": 0,
            "link_retry_count": 1,
            "heartbeat_interval": 4000,
            "integrity": "off",
            "security": None,
            "rdma_traffic_class": None,
            "rdma_service_level": None,
            "mem_utilization": 0.95,
            "buf_pool_cfg": None,
            "deploy_res_path": None,
        }

    def generate_options(self) -> dict[str, str]:
        """The option strings for what was set. Options that were not set are left out."""
        return {**self._ge_options, **self._options}

    def gen_options(self) -> dict[str, str]:
        """Alias of `generate_options`."""
        return self.generate_options()

    def _set(self, name: str, value: Any, key: str, text: str) -> None:
        self._values[name] = value
        self._options[key] = text

    def _set_int(self, name: str, value: object, key: str, low: int, high: int, multiple: int = 1) -> None:
        check_type(name, value, int)
        number = int(value)  # type: ignore[call-overload]
        check_range(name, number, low, high)
        if number % multiple:
            raise ValueError(f"{name}={number} must be a multiple of {multiple}")
        self._set(name, number, key, str(number))

    def _set_text(self, name: str, value: object, key: str) -> None:
        check_type(name, value, str)
        self._set(name, value, key, str(value))

    def _set_flag(self, name: str, value: object, key: str) -> None:
        check_type(name, value, bool)
        self._set(name, value, key, "1" if value else "0")

    @property
    def device_id(self) -> int | list[int] | tuple[int, ...] | None:
        """Ids of accelerators: an int >= 0, or a list or tuple of them; default not set. For `cann` only."""
        return self._values["device_id"]  # type: ignore[no-any-return]

    @device_id.setter
    def device_id(self, value: int | list[int] | tuple[int, ...]) -> None:
        check_type("device_id", value, int, list, tuple)
        ids = [value] if isinstance(value, int) else list(value)
        for one in ids:
            check_type("device_id", one, int)
            check_range("device_id", one, 0, UINT32_MAX)
        if not ids:
            raise ValueError("device_id is an empty list; give at least one id")
        kept = list(ids) if isinstance(value, list) else value  # the caller may change its list later
        self._set("device_id", kept, "ge.exec.deviceId", ";".join(map(str, ids)))
        self._options["ge.session_device_id"] = str(ids[0])

    @property
    def listen_ip_info(self) -> str | None:
        """Where this end accepts links, "ip:port"; port 0 picks a free one. Default not set: it does not listen."""
        return self._values["listen_ip_info"]  # type: ignore[no-any-return]

    @listen_ip_info.setter
    def listen_ip_info(self, value: str) -> None:
        check_type("listen_ip_info", value, str)
        HostPort.parse(value, "listen_ip_info")
        self._set("listen_ip_info", value, "llm.listenIpInfo", value)

    @property
    def sync_kv_timeout(self) -> int | str:
        """Time limit of a pull or push, and of waiting for one layer: ms > 0, an int or digits as str; default 1000."""
        return self._values["sync_kv_timeout"]  # type: ignore[no-any-return]

    @sync_kv_timeout.setter
    def sync_kv_timeout(self, value: int | str) -> None:
        check_type("sync_kv_timeout", value, int, str)
        if not is_digits(str(value)) or not 0 < int(value) <= INT64_MAX:
            raise ValueError(f"sync_kv_timeout={value!r} must be a number of milliseconds greater than 0")
        self._set("sync_kv_timeout", value, "llm.SyncKvCacheWaitTime", str(value))

    @property
    def ge_options(self) -> dict[str, str]:
        """More options, str to str, merged as they are; default {}.

        `ge.flowGraphMemMaxSize`: bytes of the DEVICE pool, digits only, one pool.
        """
        return dict(self._ge_options)

    @ge_options.setter
    def ge_options(self, value: dict[str, str]) -> None:
        check_type("ge_options", value, dict)
        for key, text in value.items():
            check_type("ge_options key", key, str)
            check_type(f"ge_options[{key!r}]", text, str)
        parse_pools({k: v for k, v in value.items() if k == "ge.flowGraphMemMaxSize"})
        self._ge_options = dict(value)

    @property
    def mem_pool_cfg(self) -> str | None:
        """The DEVICE pool, as JSON {"memory_size": bytes > 0, "page_shift": 10..30}; default not set: no pool.

        Pages have `1 << page_shift` bytes, by default 64 KiB (16). Overrides `ge.flowGraphMemMaxSize`. An extension:
        "huge_pages": true puts the pool into huge pages of the system (vm.nr_hugepages must have enough of them),
        which makes copies of scattered blocks faster.
        """
        return self._values["mem_pool_cfg"]  # type: ignore[no-any-return]

    @mem_pool_cfg.setter
    def mem_pool_cfg(self, value: str) -> None:
        check_type("mem_pool_cfg", value, str)
        PoolSettings.parse(value, "mem_pool_cfg")
        self._set("mem_pool_cfg", value, "llm.MemPoolConfig", value)

    @property
    def host_mem_pool_cfg(self) -> str | None:
        """The HOST pool, as JSON like `mem_pool_cfg`; default not set: no pool."""
        return self._values["host_mem_pool_cfg"]  # type: ignore[no-any-return]

    @host_mem_pool_cfg.setter
    def host_mem_pool_cfg(self, value: str) -> None:
        check_type("host_mem_pool_cfg", value, str)
        PoolSettings.parse(value, "host_mem_pool_cfg")
        self._set("host_mem_pool_cfg", value, "llm.HostMemPoolConfig", value)

    @property
    def enable_cache_manager(self) -> bool:
        """Whether to be a V2 end (`cache_manager`): bool, default False. Both ends of a link set it alike."""
        return bool(self._values["enable_cache_manager"])

    @enable_cache_manager.setter
    def enable_cache_manager(self, value: bool) -> None:
        self._set_flag("enable_cache_manager", value, "llm.EnableCacheManager")

    @property
    def enable_remote_cache_accessible(self) -> bool:
        """Whether caches are pulled by id and index only, and sent layer by layer to keys only: bool, default False."""
        return bool(self._values["enable_remote_cache_accessible"])

    @enable_remote_cache_accessible.setter
    def enable_remote_cache_accessible(self, value: bool) -> None:
        self._set_flag("enable_remote_cache_accessible", value, "llm.EnableRemoteCacheAccessible")

    @property
    def enable_switch_role(self) -> bool:
        """Whether a V1 end may call `switch_role`: bool, default False. V2 ends always may."""
        return bool(self._values["enable_switch_role"])

    @enable_switch_role.setter
    def enable_switch_role(self, value: bool) -> None:
        self._set_flag("enable_switch_role", value, "llm.EnableSwitchRole")

    @property
    def local_comm_res(self) -> str | None:
        """A JSON object, or ""; default not set. Once set, also to "", the end is V2. Its content is for `cann`."""
        return self._values["local_comm_res"]  # type: ignore[no-any-return]

    @local_comm_res.setter
    def local_comm_res(self, value: str) -> None:
        check_type("local_comm_res", value, str)
        comm_res(value, "local_comm_res")
        self._set("local_comm_res", value, "llm.LocalCommRes", value)

    @property
    def transfer_backend(self) -> str:
        """What moves the bytes: a name, "module:Class", or several with commas; default "auto", the best that works.

        "hixl" is "auto" behind the engine of Huawei's own package, where that is installed.
        """
        return str(self._values["transfer_backend"])

    @transfer_backend.setter
    def transfer_backend(self, value: str) -> None:
        check_type("transfer_backend", value, str)
        self._set_text("transfer_backend", parse_backend(value, "transfer_backend"), "llm.TransferBackend")

    @property
    def global_resource_config(self) -> str | None:
        """Options per backend, as JSON, e.g. {"tcp": {"streams": 2}}; default not set."""
        return self._values["global_resource_config"]  # type: ignore[no-any-return]

    @global_resource_config.setter
    def global_resource_config(self, value: str) -> None:
        check_type("global_resource_config", value, str)
        json_object(value or "{}", "global_resource_config")
        self._set_text("global_resource_config", value, "llm.GlobalResourceConfig")

    @property
    def link_total_time(self) -> int:
        """Seconds that linking one cluster may take, 0..2**32-1; default 0: as long as the call's own timeout."""
        return int(self._values["link_total_time"])

    @link_total_time.setter
    def link_total_time(self, value: int) -> None:
        self._set_int("link_total_time", value, "llm.LinkTotalTime", 0, UINT32_MAX)

    @property
    def link_retry_count(self) -> int:
        """Attempts to link with a cluster that cannot be reached, 1..100; default 1."""
        return int(self._values["link_retry_count"])

    @link_retry_count.setter
    def link_retry_count(self, value: int) -> None:
        self._set_int("link_retry_count", value, "llm.LinkRetryCount", 1, 100)

    @property
    def heartbeat_interval(self) -> int:
        """Ms between two signs of life on a link, 100..60000; default 4000. (An extension.)

        A peer of which nothing comes for three of them is given up; of its own and this end's, the longer ones count.
        """
        return int(self._values["heartbeat_interval"])

    @heartbeat_interval.setter
    def heartbeat_interval(self, value: int) -> None:
        self._set_int("heartbeat_interval", value, "llm.HeartbeatInterval", 100, 60_000)

    @property
    def integrity(self) -> str:
        """Whether to check what was moved: "off" or "checksum"; default "off". (An extension.)

        "checksum": a pull or push of this end returns only when checksums of its blocks, made at both ends after the
        transfer, are the same; otherwise it raises IntegrityError, and the destination must not be used. It finds what
        hardware, drivers and software spoil, whatever the backend. It does not protect against a peer or a network that
        means to deceive. The peer's own setting does not matter. It costs both ends one more reading of the bytes, and
        a round trip.
        """
        return str(self._values["integrity"])

    @integrity.setter
    def integrity(self, value: str) -> None:
        check_type("integrity", value, str)
        self._set_text("integrity", parse_integrity(value, "integrity"), "llm.Integrity")

    @property
    def security(self) -> str | None:
        """Who may link, as JSON; default not set: whoever reaches the address. (An extension; see docs/security.md.)

        {"secret_file": PATH} or {"secret_env": NAME}: both ends of a link prove that they know the secret kept there,
        16 bytes or more; never the secret itself. {"tls": {"cert": PATH, "key": PATH, "ca": PATH}}: control
        connections and those of the backend `tcp` use TLS, and both ends show a certificate that `ca` has signed.
        {"limits": {"connections": 8192, "strangers": 1024}}: accepted control connections, in all and before a valid
        hello. All ends that link with one another set the same. The files are read now, and again by `init`.
        """
        return self._values["security"]  # type: ignore[no-any-return]

    @security.setter
    def security(self, value: str) -> None:
        check_type("security", value, str)
        parse_security(value, "security")
        self._set("security", value, "llm.Security", value)

    @property
    def rdma_traffic_class(self) -> int | None:
        """A multiple of 4 in 0..255; default not set. For the transfer backend `cann` only."""
        return self._values["rdma_traffic_class"]  # type: ignore[no-any-return]

    @rdma_traffic_class.setter
    def rdma_traffic_class(self, value: int) -> None:
        self._set_int("rdma_traffic_class", value, "llm.RdmaTrafficClass", 0, 255, multiple=4)

    @property
    def rdma_service_level(self) -> int | None:
        """0..7; default not set. For the transfer backend `cann` only."""
        return self._values["rdma_service_level"]  # type: ignore[no-any-return]

    @rdma_service_level.setter
    def rdma_service_level(self, value: int) -> None:
        self._set_int("rdma_service_level", value, "llm.RdmaServiceLevel", 0, 7)

    @property
    def mem_utilization(self) -> float:
        """Share of device memory, 0..1; default 0.95. No effect here."""
        return float(self._values["mem_utilization"])

    @mem_utilization.setter
    def mem_utilization(self, value: float) -> None:
        check_type("mem_utilization", value, int, float)
        check_range("mem_utilization", value, 0, 1)
        self._set("mem_utilization", value, "llm.MemoryUtilization", str(value))

    @property
    def buf_pool_cfg(self) -> str | None:
        """Any str; default not set. No effect here."""
        return self._values["buf_pool_cfg"]  # type: ignore[no-any-return]

    @buf_pool_cfg.setter
    def buf_pool_cfg(self, value: str) -> None:
        self._set_text("buf_pool_cfg", value, "llm.BufPoolCfg")

    @property
    def deploy_res_path(self) -> str | None:
        """Any str; default not set. No effect here."""
        return self._values["deploy_res_path"]  # type: ignore[no-any-return]

    @deploy_res_path.setter
    def deploy_res_path(self, value: str) -> None:
        self._set_text("deploy_res_path", value, "llm.deployResPath")


LlmConfig = LLMConfig
