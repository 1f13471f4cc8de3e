# SPDX-License-Identifier: Apache-2.0
"""The shape of the argument table: one row per bad argument of a public callable, and what has to come of it.

`Callee` knows arguments that work, so that a row only says which one of them it spoils, and how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from types import FunctionType
from typing import Any

from datadist_core import LLMException, LLMStatusCode
from datadist_core.tests.argument_world import World

INVALID = LLMStatusCode.LLM_PARAM_INVALID
UNKNOWN_KEY = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
#: The text for a freed cache names it.
FREED = r"cache_id=\d+"
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK


class Where(Enum):
    """The kind of `World` that a row needs."""

    V2 = auto()
    V1 = auto()
    #: V2 with enable_remote_cache_accessible.
    BY_ID_ONLY = auto()
    #: No world at all: constructors and setters.
    NOWHERE = auto()
    #: Ends without init, and ends after finalize.
    FRESH = auto()
    ENDED = auto()


class Fault(Enum):
    """What is wrong with the argument, or with the object."""

    TYPE = "wrong type"
    NONE = "None"
    RANGE = "out of range"
    LENGTH = "wrong length"
    CONTENT = "bad content"
    KIND = "wrong kind of cache or key"
    UNKNOWN = "unknown key"
    MISSING = "missing"
    FREED = "freed cache"
    UNLINKED = "unlinked peer"
    ROLE = "not this role's call"
    STATE = "not in this state"
    NOT_INIT = "before init"
    FINALIZED = "after finalize"


@dataclass(frozen=True, slots=True)
class Row:
    """One bad call.

    Attributes:
        callee: qualified name of the public callable, e.g. "CacheManager.pull_cache".
        parameter: the one that is bad; "" where the object is.
        error: exception type, `code` its status code (None: a TypeError or ValueError has none).
        text: regular expression that the message has to match.
    """

    callee: str
    parameter: str
    fault: Fault
    call: Callable[[Any], object]
    error: type[Exception]
    code: LLMStatusCode | None
    text: str
    where: Where
    label: str = ""

    def __str__(self) -> str:
        parts = (self.where.name, self.callee, self.parameter, self.fault.name, self.label or self.text)
        return "-".join(part for part in parts if part)

    def check(self, world: World | None) -> None:
        """Make the call (`world` None: it needs none); AssertionError unless it fails as the row says."""
        try:
            result = self.call(world)
        except Exception as error:
            self._check_error(error)
        else:
            raise AssertionError(f"{self} was accepted and returned {result!r}")

    def _check_error(self, error: Exception) -> None:
        shown = f"{self} raised {error!r}"
        if not isinstance(error, self.error) or _is_about_the_signature(error):
            raise AssertionError(shown) from error
        assert re.search(self.text, str(error)), shown
        if isinstance(error, LLMException):
            assert error.status_code is not LLMStatusCode.LLM_SUCCESS, shown
            assert self.code is None or error.status_code is self.code, f"{shown} with {error.status_code!r}"


def _is_about_the_signature(error: Exception) -> bool:
    """Python's own TypeError for a parameter that is not there (it too names the parameter)."""
    return bool(re.search("unexpected keyword|positional argument|keyword-only argument|multiple values", str(error)))


Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Callee:
    """A public callable with arguments that work.

    Attributes:
        bind: finds the callable, e.g. `lambda w: w.d.pull_cache`.
        good: arguments by name; a function of the world gives those that live there.
    """

    name: str
    bind: Callable[[World], Callable[..., object]]
    good: Callable[[World], Arguments]
    where: Where = Where.V2

    def arguments(self, world: World, **changed: object) -> Arguments:
        """Good arguments, some of them changed. A function as argument is asked, with the world."""
        kept = world.kept.get(self.name) if isinstance(world, World) else None
        arguments = (self.good(world) if kept is None else kept) | changed
        return {name: v(world) if isinstance(v, FunctionType) else v for name, v in arguments.items()}

    def call(self, world: World, **changed: object) -> object:
        return self.bind(world)(**self.arguments(world, **changed))

    def type_rows(self, parameter: str, *bad: object, text: str | None = None) -> Iterator[Row]:
        """A TypeError naming the parameter for each of `bad`; None among them counts as such."""
        for value in bad:
            fault = Fault.NONE if value is None else Fault.TYPE
            yield self.row(parameter, fault, value, TypeError, text or rf"\b{parameter}\b")

    def range_row(self, parameter: str, value: object, text: str | None = None) -> Row:
        """ValueError: what constructors and setters raise for a number out of range."""
        return self.row(parameter, Fault.RANGE, value, ValueError, text or rf"\b{parameter}\b")

    def refused(
        self, parameter: str, fault: Fault, value: object, text: str | None = None, code: LLMStatusCode = INVALID
    ) -> Row:
        """An LLMException with `code`."""
        return self.row(parameter, fault, value, LLMException, text or rf"\b{parameter}\b", code)

    def row(
        self,
        parameter: str,
        fault: Fault,
        value: object,
        error: type[Exception],
        text: str,
        code: LLMStatusCode | None = None,
    ) -> Row:
        call = lambda w: self.call(w, **{parameter: value})  # noqa: E731
        return Row(self.name, parameter, fault, call, error, code, text, self.where, _label(value))

    def with_arguments(
        self, parameter: str, fault: Fault, text: str, code: LLMStatusCode = INVALID, /, **changed: object
    ) -> Row:
        """Like `refused`, where it takes several arguments to make one of them wrong."""
        call = lambda w: self.call(w, **changed)  # noqa: E731
        return Row(self.name, parameter, fault, call, LLMException, code, text, self.where)

    def state_row(self, fault: Fault, code: LLMStatusCode | None, text: str = "", where: Where | None = None) -> Row:
        """Good arguments, but the object is not in a state for them."""
        return Row(self.name, "", fault, lambda w: self.call(w), LLMException, code, text, where or self.where)


def _label(value: object) -> str:
    return "" if isinstance(value, FunctionType) else re.sub(r" at 0x\w+", "", repr(value))[:60]


#: What is not an int, a str, ... for `type_rows`; None comes on top where it is no legal value.
NOT_INT = (True, 1.5, "1")
NOT_STR = (5, b"x", True)
NOT_BOOL = (1, "1")
NOT_LIST = (5, "ab", {0})
NOT_DICT = (5, "x", [0])
NOT_RANGE = (5, [0], (0, 1), True)
NOT_CALLABLE = (5, "x", True)
#: Not an object of one of our classes.
NOT_OURS = (5, "x", True, [])


def statuses_raised(result: object) -> object:
    """Raise the first bad status of `link_clusters` or `unlink_clusters`, which return them, as an LLMException."""
    overall, each = result  # type: ignore[misc]
    assert isinstance(each, list)
    if overall is not LLMStatusCode.LLM_SUCCESS:
        assert overall in each
        raise LLMException(f"returned {[status.name for status in each]}", overall)
    return result


def flat(*groups: Row | Iterable[Row]) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        rows.extend([group] if isinstance(group, Row) else group)
    return rows
