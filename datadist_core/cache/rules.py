# SPDX-License-Identifier: Apache-2.0
"""What V1 (`kv_cache_manager`) and the options of `init` forbid. V2 allows both directions from both roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import ClosedError, FeatureNotEnabled, ParamInvalid, TimedOut
from ..settings import Settings
from ..types import Deadline, LLMRole, LLMStatusCode
from .args import deadline_arg
from .desc import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

T = TypeVar("T")
RemoteKey = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


class Rules:
    """One end's rules; the role may change while it lives."""

    def __init__(self, settings: Settings, role: Callable[[], LLMRole], check_open: Callable[[], None]) -> None:
        self._settings = settings
        self._role = role
        #: ClosedError after `finalize`.
        self.check_open = check_open

    def is_open(self) -> bool:
        try:
            self.check_open()
        except ClosedError:
            return False
        return True

    def check_may_pull(self) -> None:
        self._check_role(LLMRole.DECODER, "pull")

    def check_may_push(self) -> None:
        self._check_role(LLMRole.PROMPT, "push")

    def check_may_hold_keys(self, argument: str) -> None:
        if not self._settings.v2 and self._role() is LLMRole.DECODER:
            raise ParamInvalid(f"{argument}: in V1 only a PROMPT cluster may hold cache keys")

    def check_pull_key(self, key: RemoteKey) -> None:
        """With enable_remote_cache_accessible contiguous caches are named by id and index only."""
        if self._settings.remote_cache_accessible and isinstance(key, CacheKey):
            raise ParamInvalid(
                "cache_key: with enable_remote_cache_accessible a cache is pulled by CacheKeyByIdAndIndex only"
            )

    def check_address_configs_allowed(self) -> None:
        if self._settings.remote_cache_accessible:
            raise ParamInvalid("transfer_configs: with enable_remote_cache_accessible use TransferWithCacheKeyConfig")

    def in_time(self, deadline_s: float | None, move: Callable[[Deadline], T]) -> T:
        """What `move` returns, given its deadline; a TimedOut of it has the status code of this generation."""
        try:
            return move(self.deadline(deadline_s))
        except TimedOut as error:
            raise self.timed_out(error) from error

    def deadline(self, deadline_s: float | None) -> Deadline:
        """So long from now, or `sync_kv_timeout`. TimedOut if that is no time at all."""
        return deadline_arg(deadline_s, self._settings.sync_kv_timeout_s)

    def timed_out(self, error: TimedOut) -> TimedOut:
        """The same error with the status code of this generation."""
        if self._settings.v2:
            return error
        return TimedOut(str(error), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)

    def _check_role(self, role: LLMRole, what: str) -> None:
        if not self._settings.v2 and self._role() not in (role, LLMRole.MIX):
            raise FeatureNotEnabled(
                f"in V1 only a {role.name} cluster can {what}; this one is {self._role().name}",
                LLMStatusCode.LLM_PARAM_INVALID,
            )
