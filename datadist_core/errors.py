# SPDX-License-Identifier: Apache-2.0
"""The whole exception tree.

Every error that leaves this package is an `LLMException` with the documented status code (or the built-in
TypeError / ValueError that LLM-DataDist raises for a wrong type or range of an argument). The name of a class
says whose fault it is: `ClosedError` is yours, `PeerLost` is theirs.
"""

from __future__ import annotations

from .types import LLMStatusCode


class LLMException(RuntimeError):
    """Base of every error here.

    Args:
        message: what went wrong: the argument, its value, the limit, the remedy.
        status_code: overrides the class's own code where one class serves two (V1 and V2 time-outs).
    """

    default_code = LLMStatusCode.LLM_FAILED

    def __init__(self, message: str = "", status_code: LLMStatusCode | None = None) -> None:
        super().__init__(message)
        self._status_code = LLMStatusCode(self.default_code if status_code is None else status_code)

    @property
    def status_code(self) -> LLMStatusCode:
        """What went wrong, as a documented status code."""
        return self._status_code


class ParamInvalid(LLMException):
    """An argument or an option has a value that cannot work."""

    default_code = LLMStatusCode.LLM_PARAM_INVALID


class OutOfMemory(LLMException):
    """The pool of that placement has no free range that is large enough."""

    default_code = LLMStatusCode.LLM_OUT_OF_MEMORY


class CacheNotExist(LLMException):
    """The cache or key is unknown to its owner. Harmless; may be retried."""

    default_code = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class NotYetLinked(LLMException):
    """There is no link to that cluster."""

    default_code = LLMStatusCode.LLM_NOT_YET_LINK


class AlreadyLinked(LLMException):
    """A healthy link to that cluster exists."""

    default_code = LLMStatusCode.LLM_ALREADY_LINK


class LinkFailed(LLMException):
    """The link could not be made, or the peer refused it."""

    default_code = LLMStatusCode.LLM_LINK_FAILED


class LinkBusy(LLMException):
    """The link is being unlinked, which excludes this call."""

    default_code = LLMStatusCode.LLM_LINK_BUSY


class LinkExists(LLMException):
    """Not possible while links exist."""

    default_code = LLMStatusCode.LLM_EXIST_LINK


class FeatureNotEnabled(LLMException):
    """Needs an option that was not set at `init`."""

    default_code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


class TimedOut(LLMException):
    """The deadline passed first. The destination of a transfer is undefined."""

    default_code = LLMStatusCode.LLM_TIMEOUT


class ClosedError(LLMException):
    """You closed it: `finalize`, `close` or `unlink` came before or during the operation."""

    default_code = LLMStatusCode.LLM_ENGINE_FINALIZED


class PeerLost(LLMException):
    """The other side died, was unreachable, or closed the link."""

    default_code = LLMStatusCode.LLM_LINK_FAILED


class ProtocolError(LLMException):
    """The other side sent something that this protocol does not allow."""

    default_code = LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


class RemoteError(LLMException):
    """The other side could not carry out what we asked; its own text follows."""

    default_code = LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


class Unreachable(LLMException):
    """A backend cannot reach this peer or this region; the text is the reason shown to users."""

    default_code = LLMStatusCode.LLM_LINK_FAILED


class IntegrityError(LLMException):
    """What was moved is not what the source holds: with `integrity = "checksum"`. The destination must not be used."""

    default_code = LLMStatusCode.LLM_FAILED


class Cancelled(LLMException):
    """The operation was cancelled. The destination of a transfer is undefined."""

    default_code = LLMStatusCode.LLM_FAILED
