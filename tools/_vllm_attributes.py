# SPDX-License-Identifier: Apache-2.0
"""The part of `versions_static` that follows types through the connector's functions to the attributes they read."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _vllm_source import ClassView, Definition, External, Member, Source, Type

ROOT = Path(__file__).resolve().parent.parent
CONNECTOR = ROOT / "connector" / "vllm_datadist"
#: Parameters that have one meaning everywhere in the connector, for those that are annotated as Any.
PARAMETERS = {
    "request": ("vllm.v1.request", "Request"),
    "scheduler_output": ("vllm.v1.core.sched.output", "SchedulerOutput"),
    "vllm_config": ("vllm.config", "VllmConfig"),
    "kv_cache_config": ("vllm.v1.kv_cache_interface", "KVCacheConfig"),
    "connector_output": ("vllm.v1.outputs", "KVConnectorOutput"),
}
#: What the connector's protocols stand for. One that nobody knows here is reported.
PROTOCOLS = {
    "RequestLike": ("vllm.v1.request", "Request"),
    "BlockLike": ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    "TransferOutput": ("vllm.v1.outputs", "KVConnectorOutput"),
}


@dataclass
class Findings:
    """`missing` is what breaks; `notes` is what the connector does without; `compared` counts, by kind."""

    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False)
class File:
    """One of the connector's."""

    path: Path
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path.relative_to(CONNECTOR.parent).as_posix()}:{getattr(node, 'lineno', 0)}: {text}"


@dataclass(frozen=True)
class Names:
    """What names in the connector's annotations and calls mean."""

    source: Source
    imported: Mapping[str, tuple[str, str]]
    functions: Mapping[str, ast.FunctionDef]

    def class_by(self, where: tuple[str, str] | None) -> ClassView | None:
        return None if where is None else self.source.class_named(*where)

    def class_called(self, name: str) -> ClassView | None:
        return self.class_by(PROTOCOLS.get(name) or self.imported.get(name))

    def typed(self, annotation: ast.expr | None) -> Value | None:
        """What one of our annotations means, if it means something of vLLM."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.typed(annotation.left)
        if isinstance(annotation, ast.Name):
            view = self.class_called(annotation.id)
            return None if view is None else Value(view=view)
        if isinstance(annotation, ast.Subscript):
            inside = annotation.slice
            item = self.typed(inside.elts[-1 if _is_mapping(annotation) else 0] if _is_tuple(inside) else inside)
            return None if item is None else Value(item=item)
        return None

    def value_of(self, kind: Type | None) -> Value | None:
        """What one of vLLM's annotations means."""
        view, item = self.source.class_of(kind), self.source.item_of(kind)
        if view is not None:
            return Value(view=view)
        return None if item is None else Value(item=self.value_of(item))


@dataclass(frozen=True)
class Value:
    """An object of a class of vLLM, or something that holds such objects."""

    view: ClassView | None = None
    item: Value | None = None


def _is_tuple(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple)


def _is_mapping(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("dict", "Mapping")


def lacks(view: ClassView, name: str) -> str:
    return f"{view.name} has no attribute {name}"


# -- attributes ----------------------------------------------------------------------------------------------------


def check_attributes(names: Names, file: File, findings: Findings) -> None:
    for holder in file.nodes:
        if isinstance(holder, ast.Module | ast.ClassDef):
            bases = [names.class_called(one.id) for one in getattr(holder, "bases", []) if isinstance(one, ast.Name)]
            base = next((one for one in bases if one is not None), None)
            own = set() if base is None else _own_names(holder)
            for node in holder.body:
                if isinstance(node, ast.FunctionDef):
                    Reader(names, file, findings, base, own).read(node)


class Reader:
    """Follows types through one function, in the order of its lines.

    Args:
        base: the class of vLLM that the function's class extends.
        own: what that class has of its own.
    """

    def __init__(self, names: Names, file: File, findings: Findings, base: ClassView | None, own: set[str]) -> None:
        self._names, self._file, self._findings = names, file, findings
        self._base, self._own = base, own
        self._known: dict[str, Value | None] = {}

    def read(self, function: ast.FunctionDef) -> None:
        theirs = None if self._base is None else self._base.members.get(function.name)
        for one in (*function.args.args, *function.args.kwonlyargs):
            self._known[one.arg] = self._parameter(one, theirs)
        for node in _in_order(function.body):
            self._bind(node)
            self._look(node)

    def _parameter(self, one: ast.arg, theirs: Member | None) -> Value | None:
        """By its annotation; else by vLLM's, if the function is a hook; else by its name."""
        value = self._names.typed(one.annotation)
        is_any = one.annotation is None or (isinstance(one.annotation, ast.Name) and one.annotation.id == "Any")
        if value is not None or not is_any:
            return value
        if theirs is not None and theirs.function is not None:
            annotations = {arg.arg: arg.annotation for arg in theirs.function.args.args}
            annotation = annotations.get(one.arg)
            value = None if annotation is None else self._names.value_of(Type(theirs.module, annotation))
        view = self._names.class_by(PARAMETERS.get(one.arg))
        return value or (None if view is None else Value(view=view))

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_to(target, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._known[node.target.id] = self._names.typed(node.annotation)
        elif isinstance(node, ast.For | ast.comprehension):
            value = self._value(node.iter)
            if isinstance(node.target, ast.Name):
                self._known[node.target.id] = None if value is None else value.item

    def _bind_to(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._known[target.id] = self._value(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                self._bind_to(one, part)

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            value = self._value(node.value)
            view = None if value is None else value.view
            if _is_self(node.value) and node.attr not in self._own:
                view = self._base
            self._findings.compared["attributes"] += view is not None
            if view is not None and view.member(node.attr) is None and not _is_given(view, node.attr):
                self._findings.missing.append(self._file.at(node, lacks(view, node.attr)))
        elif isinstance(node, ast.Call) and (asked := _asked_by_name(node)):
            value = self._value(node.args[0])
            view = None if value is None else value.view
            if view is not None and view.member(asked) is None:
                self._findings.notes.append(self._file.at(node, lacks(view, asked) + ": done without"))

    def _value(self, node: ast.expr) -> Value | None:
        names = self._names
        if isinstance(node, ast.Name):
            return self._known[node.id] if node.id in self._known else self._imported(node.id)
        if isinstance(node, ast.Attribute):
            member = self._member(node)
            return None if member is None or not member.is_value else names.value_of(member.type)
        if isinstance(node, ast.Subscript):
            value = self._value(node.value)
            return None if value is None else value.item
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            member = self._member(node.func)
            return None if member is None else names.value_of(member.type)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._returned(node.func.id)
        if isinstance(node, ast.BoolOp):
            return self._value(node.values[0])
        return None

    def _member(self, node: ast.Attribute) -> Member | None:
        if _is_self(node.value) and self._base is not None:
            return None if node.attr in self._own else self._base.members.get(node.attr)
        value = self._value(node.value)
        return None if value is None or value.view is None else value.view.member(node.attr)

    def _imported(self, name: str) -> Value | None:
        """An object that was imported, such as current_platform; a class is looked at like its objects."""
        where = self._names.imported.get(name)
        found = None if where is None else self._names.source.find(*where, for_types=True)
        if not isinstance(found, Definition):
            return None
        if isinstance(found.node, ast.ClassDef):
            return Value(view=ClassView(found.module, found.node))
        if isinstance(found.node, ast.AnnAssign):
            return self._names.value_of(Type(found.module, found.node.annotation))
        return None

    def _returned(self, name: str) -> Value | None:
        where = self._names.imported.get(name)
        found: Definition | External | None = None if where is None else self._names.source.find(*where)
        if isinstance(found, Definition) and isinstance(found.node, ast.FunctionDef) and found.node.returns:
            return self._names.value_of(Type(found.module, found.node.returns))
        ours = self._names.functions.get(name)
        return None if ours is None else self._names.typed(ours.returns)


def _in_order(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes, a comprehension's loops before what they make."""
    for node in body:
        yield from _walk(node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    children = list(ast.iter_child_nodes(node))
    children.sort(key=lambda child: not isinstance(child, ast.comprehension))
    if isinstance(node, ast.Assign | ast.For | ast.comprehension | ast.AnnAssign):
        yield node
    for child in children:
        yield from _walk(child)
    if not isinstance(node, ast.Assign | ast.For | ast.comprehension | ast.AnnAssign):
        yield node


def _asked_by_name(call: ast.Call) -> str:
    """ "x" of getattr(value, "x", default)."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3
    name = call.args[1] if is_getattr else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _own_names(holder: ast.Module | ast.ClassDef) -> set[str]:
    """What a class of ours has of its own."""
    nodes = list(ast.walk(holder))
    methods = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    set_here = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return methods | set_here


def _is_given(view: ClassView, name: str) -> bool:
    """What Python gives to every object, and to members of enumerations."""
    return name.startswith("__") or (view.is_enum and name in ("name", "value"))
