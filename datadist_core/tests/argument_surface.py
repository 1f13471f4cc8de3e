# SPDX-License-Identifier: Apache-2.0
"""The public callables and their parameters, read from the package, so that the table cannot forget one.

What needs no row is listed here by name, with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType

import datadist_core

#: Public names that are not called with a user's arguments.
NOT_CALLED_BY_USERS = {
    "CacheTask": "made by transfer_cache_async; its methods have rows",
    "Cache": "made by the managers; create_cpu_cache has rows",
    "CacheManager": "made by init; its methods have rows",
    "KvCacheManager": "made by init; its methods have rows",
    "Deadline": "a value for callers inside",
    "HostPort": "a value that the library returns; what parses text into it has rows",
    "LayerSynchronizer": "implemented by users, called by the library",
    "LinkInfo": "a value that the library returns",
    "PoolStats": "a value that the library returns",
    "Tensor": "a value that the library returns",
    "TransferReport": "a value that the library returns",
    "errors": "its classes are made like LLMException",
}
#: Methods (and parameters) without a bad argument.
NO_ROW = {
    "LLMConfig": "takes nothing",
    "LLMConfig.generate_options": "takes nothing, cannot fail",
    "LLMConfig.gen_options": "takes nothing, cannot fail",
    "LLMClusterInfo": "takes nothing",
    "LLMDataDist.finalize": "takes nothing, idempotent: test_finalize_is_idempotent",
    "LLMException.message": "any text",
    "Cache.invalidate": "takes nothing; for the cache table",
    "Cache.numpy": "takes nothing; freed caches: test_a_freed_cache_has_no_views",
    "Cache.tensors": "takes nothing; freed caches: test_a_freed_cache_has_no_views",
    "CacheManager.is_initialized": "takes nothing, tells instead of failing: test_is_initialized_tells",
    "CacheDesc.check_usable": "takes nothing; its errors are those of allocate_cache and register_cache",
}
#: Parameters for which a wrong type is not a TypeError.
ANY_TYPE = {
    "LLMException.status_code": "converted like an enum: ValueError",
    "LLMException.message": "any text",
}
#: Not refused after finalize.
WORKS_AFTER_FINALIZE = {
    "LLMDataDist.finalize": "idempotent",
    "LLMDataDist.role": "a value",
    "LLMDataDist.cluster_id": "a value",
    "LLMDataDist.num_links": "0 then",
    "CacheManager.is_initialized": "False then",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of one public callable. `annotation` is its text, "" where there is none."""

    callee: str
    name: str
    annotation: str

    def __str__(self) -> str:
        return f"{self.callee}.{self.name}"

    @property
    def takes_none(self) -> bool:
        return "None" in self.annotation.replace("|", " ").split()

    @property
    def takes_a_list(self) -> bool:
        words = self.annotation.replace("[", " [ ").split()
        return bool(words) and words[0] in ("list", "tuple", "Sequence")


def public_callables() -> dict[str, list[Parameter]]:
    """Parameters by qualified name of the callable."""
    found: dict[str, list[Parameter]] = {}
    for name in datadist_core.__all__:
        found |= dict(_callables_of(name, getattr(datadist_core, name)))
    return {name: params for name, params in found.items() if name not in NO_ROW | NOT_CALLED_BY_USERS}


def public_parameters() -> list[Parameter]:
    return [p for params in public_callables().values() for p in params if str(p) not in NO_ROW]


def living_methods() -> set[str]:
    """All that has to say so after finalize: methods and properties of the ends and of their managers."""
    classes = (datadist_core.LLMDataDist, datadist_core.CacheManager, datadist_core.KvCacheManager)
    names = {
        f"{owner.__name__}.{name}"
        for cls in classes
        for owner in _our_classes(cls)
        for name, value in vars(owner).items()
        if not name.startswith("_") and isinstance(value, FunctionType | property)
    }
    return names - set(WORKS_AFTER_FINALIZE)


def stale_exceptions() -> list[str]:
    """Exceptions for what is not there (any more)."""
    return [name for name in NO_ROW | ANY_TYPE | WORKS_AFTER_FINALIZE | NOT_CALLED_BY_USERS if not _exists(name)]


def _exists(name: str) -> bool:
    owner_name, _, member = name.partition(".")
    owner = getattr(datadist_core, owner_name, None)
    return owner is not None and (not member or hasattr(owner, member) or member in inspect.signature(owner).parameters)


def _callables_of(name: str, value: object) -> Iterator[tuple[str, list[Parameter]]]:
    if isinstance(value, ModuleType) or (isinstance(value, type) and issubclass(value, Enum)):
        return
    if not isinstance(value, type):
        yield name, _parameters(name, value)
        return
    if name not in NOT_CALLED_BY_USERS:
        yield value.__name__, _constructor_parameters(value)
    for owner in _our_classes(value):
        yield from _methods_of(owner)


def _our_classes(cls: type) -> Iterable[type]:
    return [c for c in cls.__mro__ if c.__module__.startswith("datadist_core")]


def _methods_of(cls: type) -> Iterator[tuple[str, list[Parameter]]]:
    if cls.__name__ in ("Deadline", "HostPort", "LayerSynchronizer", "Tensor"):
        return
    for name, member in vars(cls).items():
        qualified = f"{cls.__name__}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            if member.fset is not None:
                yield qualified, _parameters(qualified, member.fset, skip=1)
        elif isinstance(member, classmethod | staticmethod | FunctionType):
            yield qualified, _parameters(qualified, getattr(cls, name), skip=isinstance(member, FunctionType))


def _constructor_parameters(cls: type) -> list[Parameter]:
    fields = getattr(cls, "_fields", None)
    if fields is not None:  # keys take *args and **kwargs, for their documented texts
        aliases = getattr(cls, "_aliases", {})
        return [Parameter(cls.__name__, name, "int") for name in (*fields, *aliases)]
    if cls.__init__ is object.__init__:
        return []
    return _parameters(cls.__name__, cls.__init__, skip=1)


def _parameters(callee: str, function: Callable[..., object], skip: int = 0) -> list[Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [
        Parameter(callee, p.name, "" if p.annotation is p.empty else str(p.annotation))
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
