# SPDX-License-Identifier: Apache-2.0
"""Options of the nixl backend, checked, and what they become for NIXL's plugin.

Settings of UCX are handed to the plugin and not put into the environment: they hold for our agents only, not for
whatever else uses UCX in this process or in its children, and a `UCX_...` variable that the user has set wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ParamInvalid

#: Settings of ours, each for a reason that was measured or seen with UCX 1.23 as it comes with NIXL 1.5.1:
#: segments: UCX's TCP reads by active messages, of 8 KiB unless told otherwise; with these, reading one block of
#:   64 KiB took some 36 us instead of 60. For long reads nothing could be told on a busy machine. Other transports do
#:   not look at them.
#: keepalive: with it (every 20 s by default), the process that is read from over TCP crashed (SIGSEGV) when its reader
#:   was killed, in 6 of 9 runs of ten such kills with NIXL alone; without it in none of 9. It does not prevent the
#:   other way to crash, see `_nixl_agent`. Who is alive is known from the control channel.
UCX_SETTINGS = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k", "KEEPALIVE_INTERVAL": "inf"}

_MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """Attributes:
    plugin: which of NIXL's plugins moves the bytes. It must reach host memory and send notifications.
    num_threads: of the UCX plugin, which spread the blocks of one batch; 0 leaves that to the thread that posts.
    ucx: settings of UCX without their prefix, e.g. {"TLS": "tcp"}, over those in `UCX_SETTINGS`. The environment
        variables `UCX_<name>` come first.
    params: further parameters of the plugin, as its documentation names them.
    """

    plugin: str = "UCX"
    num_threads: int = 0
    ucx: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)

    def plugin_params(self) -> dict[str, str]:
        """What NIXL's `create_backend` gets."""
        if self.plugin != "UCX":
            return dict(self.params)
        ucx = {**UCX_SETTINGS, **self.ucx}
        params = {"engine_config": ",".join(f"{name}={value}" for name, value in ucx.items())}
        if self.num_threads:
            params["num_threads"] = str(self.num_threads)
        return {**params, **self.params}


def parse_options(options: Mapping[str, Any]) -> NixlOptions:
    """Raises ParamInvalid naming the option."""
    known = {"plugin", "num_threads", "ucx", "params"}
    for name in options:
        if name not in known:
            raise ParamInvalid(f"nixl option {name!r} is unknown; there are {', '.join(sorted(known))}")
    plugin = options.get("plugin", "UCX")
    if not isinstance(plugin, str) or not plugin:
        raise ParamInvalid(f"nixl option plugin={plugin!r} must be the name of a NIXL plugin, such as 'UCX'")
    threads = options.get("num_threads", 0)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= _MAX_THREADS:
        raise ParamInvalid(f"nixl option num_threads={threads!r} must be an integer in 0..{_MAX_THREADS}")
    ucx = _strings("ucx", options.get("ucx", {}))
    for name, value in ucx.items():
        if "," in value or "=" in name:
            raise ParamInvalid(
                f"nixl option ucx[{name!r}]={value!r} cannot be handed to NIXL, which separates settings by commas; "
                f"set the environment variable UCX_{name} instead"
            )
    return NixlOptions(plugin, threads, ucx, _strings("params", options.get("params", {})))


def _strings(option: str, value: object) -> dict[str, str]:
    """A JSON object with plain values, as strings."""
    if not isinstance(value, dict):
        raise ParamInvalid(f"nixl option {option}={value!r} must be a JSON object")
    for name, setting in value.items():
        if isinstance(setting, bool) or not isinstance(setting, (str, int, float)):
            raise ParamInvalid(f"nixl option {option}[{name!r}]={setting!r} must be a string or a number")
    return {str(name).removeprefix("UCX_"): str(setting) for name, setting in value.items()}
