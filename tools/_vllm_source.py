# SPDX-License-Identifier: Apache-2.0
"""vLLM's Python files, read and not run: which names a module has, which members a class, of which types.

Only what `versions_static` asks for. Types are annotations together with the module in which their names mean
something. A name that comes from outside vLLM is known to exist (`External`), and nothing else is known of it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "vllm"
_CONTAINERS = ("list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Iterator", "Collection")
_MAPPINGS = ("dict", "Mapping", "defaultdict")
_WRAPPERS = ("Optional", "Final", "ClassVar", "Annotated", "SkipValidation", "InitVar")


@dataclass(frozen=True)
class Alias:
    """A name that an import binds; `name` is "" for a whole module."""

    module: str
    name: str


@dataclass(frozen=True)
class External:
    """Something of another package."""


@dataclass(frozen=True, eq=False)
class Definition:
    """A class, a function, or the statement that assigns a name."""

    module: Module
    node: ast.stmt


@dataclass(frozen=True, eq=False)
class Type:
    """An annotation, as written in `module`."""

    module: Module
    annotation: ast.expr


@dataclass(frozen=True, eq=False)
class Member:
    """Of a class: a method, or a value with its annotation if there is one."""

    name: str
    module: Module
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    annotation: ast.expr | None = None

    @property
    def decorators(self) -> set[str]:
        return set() if self.function is None else {_last_name(one) for one in self.function.decorator_list}

    @property
    def is_value(self) -> bool:
        return self.function is None or any("property" in name for name in self.decorators)

    @property
    def type(self) -> Type | None:
        """Of the value; of what is returned, if it is a method."""
        annotation = self.annotation if self.function is None else self.function.returns
        return None if annotation is None else Type(self.module, annotation)


@dataclass(eq=False)
class Module:
    """`names` at run time; `type_names` for type checkers only; `lazy` if it has a `__getattr__` of its own."""

    source: Source
    name: str
    is_package: bool
    tree: ast.Module
    names: dict[str, Alias | ast.stmt] = field(default_factory=dict)
    type_names: dict[str, Alias | ast.stmt] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read(self.tree.body, self.names)

    @functools.cached_property
    def lazy(self) -> set[str]:
        """Names that its `__getattr__` may answer: all texts of the file."""
        if not isinstance(self.names.get("__getattr__"), ast.FunctionDef):
            return set()
        texts = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        return {text for text in texts if isinstance(text, str)}

    def _read(self, body: list[ast.stmt], names: dict[str, Alias | ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names.update(dict.fromkeys(_assigned(node), node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._read_import(node, names)
            elif isinstance(node, ast.If):
                is_for_types = "TYPE_CHECKING" in ast.unparse(node.test)
                self._read(node.body, self.type_names if is_for_types else names)
                self._read(node.orelse, names)
            elif isinstance(node, ast.Try):
                for part in (node.body, *(handler.body for handler in node.handlers), node.orelse):
                    self._read(part, names)

    def _read_import(self, node: ast.Import | ast.ImportFrom, names: dict[str, Alias | ast.stmt]) -> None:
        if isinstance(node, ast.Import):
            for one in node.names:
                names[one.asname or one.name.split(".")[0]] = Alias(
                    one.name if one.asname else one.name.split(".")[0], ""
                )
            return
        origin = absolute(node, self.name, self.is_package)
        for one in node.names:
            if one.name == "*":
                self.stars.append(origin)
            else:
                names[one.asname or one.name] = Alias(origin, one.name)


class Source:
    """The files under `root`/vllm. Files are read when they are asked for, once; `files` are those read so far.

    Args:
        root: the directory that contains the package vllm, as site-packages does.

    Raises:
        FileNotFoundError: there is no vllm in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[Path] = []
        self._modules: dict[str, Module | None] = {}
        if self.module(PACKAGE) is None:
            raise FileNotFoundError(f"{root} has no {PACKAGE}/__init__.py")

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        path = self.root.joinpath(*name.split("."))
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.is_file():
                self.files.append(file)
                return Module(self, name, is_package, ast.parse(file.read_text(encoding="utf-8")))
        return None

    def find(self, module: str, name: str, for_types: bool = False) -> Definition | External | None:
        """What `from module import name` gives, through any number of re-exports; None if it does not exist."""
        return self._find(module, name, for_types, frozenset())

    def _find(
        self, module_name: str, name: str, for_types: bool, seen: frozenset[tuple[str, str]]
    ) -> Definition | External | None:
        if module_name.split(".")[0] != PACKAGE:
            return External()
        module = self.module(module_name)
        if module is None or (module_name, name) in seen:
            return None
        seen |= {(module_name, name)}
        found = module.names.get(name)
        if found is None and (for_types or name in module.lazy):
            found = module.type_names.get(name)
        if isinstance(found, Alias):
            return External() if not found.name else self._find(found.module, found.name, for_types, seen)
        if found is not None:
            return Definition(module, found)
        if name in module.lazy or self.module(f"{module_name}.{name}") is not None:
            return External()
        starred = (self._find(star, name, for_types, seen) for star in module.stars)
        return next((one for one in starred if isinstance(one, Definition)), None)

    def class_named(self, module: str, name: str) -> ClassView | None:
        found = self.find(module, name, for_types=True)
        if isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
            return ClassView(found.module, found.node)
        return None

    def class_of(self, kind: Type | None) -> ClassView | None:
        """The class of vLLM that an annotation means, alone or `| None`."""
        name = None if kind is None else _plain(kind.annotation)
        if kind is None or not isinstance(name, ast.Name | ast.Attribute):
            return None
        return self.class_named(kind.module.name, _last_name(name))

    def item_of(self, kind: Type | None) -> Type | None:
        """What iterating over, or subscribing, a value of this type gives."""
        annotation = None if kind is None else _plain(kind.annotation)
        if kind is None or not isinstance(annotation, ast.Subscript):
            return None
        container, inside = _last_name(annotation.value), annotation.slice
        if container in _MAPPINGS and isinstance(inside, ast.Tuple):
            return Type(kind.module, inside.elts[1])
        if container in _CONTAINERS:
            return Type(kind.module, inside.elts[0] if isinstance(inside, ast.Tuple) else inside)
        return None


@dataclass(frozen=True, eq=False)
class ClassView:
    """A class with what it inherits within vLLM."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @functools.cached_property
    def bases(self) -> list[ClassView]:
        names = (_plain(base) for base in self.node.bases)
        found = (self.module.source.class_of(Type(self.module, name)) for name in names)
        return [base for base in found if base is not None]

    @property
    def is_enum(self) -> bool:
        own = any("Enum" in _last_name(base) for base in self.node.bases)
        return own or any(base.is_enum for base in self.bases)

    @functools.cached_property
    def members(self) -> dict[str, Member]:
        """Also those that methods set on `self`."""
        found: dict[str, Member] = {}
        for base in reversed(self.bases):
            found.update(base.members)
        for method in self.node.body:
            found.update((one.name, one) for one in self._set_on_self(method) if one.name not in found)
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                member = Member(node.name, self.module, function=node)
                if not member.decorators & {"setter", "deleter", "overload"}:
                    found[node.name] = member
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
                found.update((name, Member(name, self.module, annotation=annotation)) for name in _assigned(node))
        return found

    def member(self, name: str) -> Member | None:
        """Of this class, or of one that extends it in the same file: which it is, is asked at run time."""
        found = self.members.get(name)
        return found or next((one.members[name] for one in self.extensions if name in one.members), None)

    @functools.cached_property
    def extensions(self) -> list[ClassView]:
        others = [ClassView(self.module, node) for node in self.module.tree.body if isinstance(node, ast.ClassDef)]
        return [one for one in others if self.node in one.ancestors]

    @functools.cached_property
    def ancestors(self) -> set[ast.ClassDef]:
        return {base.node for base in self.bases}.union(*(base.ancestors for base in self.bases))

    def _set_on_self(self, method: ast.AST) -> Iterator[Member]:
        if not isinstance(method, ast.FunctionDef):
            return
        parameters = {one.arg: one.annotation for one in (*method.args.args, *method.args.kwonlyargs)}
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and _last_name(target.value) == "self":
                    yield Member(target.attr, self.module, annotation=_annotation_of(node, parameters))


def _annotation_of(node: ast.Assign | ast.AnnAssign, parameters: dict[str, ast.expr | None]) -> ast.expr | None:
    if isinstance(node, ast.AnnAssign):
        return node.annotation
    if isinstance(node.value, ast.Name):
        return parameters.get(node.value.id)
    if isinstance(node.value, ast.Call):
        return node.value.func  # of a class; a function's name resolves to no class
    if isinstance(node.value, ast.Attribute):  # a member of an enumeration
        return node.value.value
    return None


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The full name of the module that is imported from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [one.id for one in names if isinstance(one, ast.Name)]


def _plain(annotation: ast.expr) -> ast.expr:
    """Without quotes, `| None` and wrappers such as Optional."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _plain(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        sides = [annotation.left, annotation.right]
        kept = [side for side in sides if not (isinstance(side, ast.Constant) and side.value is None)]
        return _plain(kept[0]) if len(kept) == 1 else annotation
    if isinstance(annotation, ast.Subscript) and _last_name(annotation.value) in _WRAPPERS:
        inside = annotation.slice
        return _plain(inside.elts[0] if isinstance(inside, ast.Tuple) else inside)
    return annotation


def _last_name(node: ast.expr) -> str:
    """`c` of a.b.c, also if it is called or subscribed."""
    if isinstance(node, ast.Call | ast.Subscript):
        return _last_name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
