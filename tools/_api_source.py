# SPDX-License-Identifier: Apache-2.0
"""What `api_docs` reads out of the code: the parts of docstrings, signatures as text, the public members of a class."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

PACKAGE = "datadist_core"
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")
ITEM = re.compile(r"((?:\w+, )*\w+): (.*)")
LINE_LENGTH = 100
UINT64_MAX = 2**64 - 1


# -- docstrings


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a docstring: plain text (no title), or a titled section with items, or with text."""

    title: str
    text: str
    items: tuple[tuple[str, str], ...] = ()


def sections(docstring: str | None) -> list[Section]:
    """Split a Google-style docstring. Text that follows a section, not indented, is plain again."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(docstring or "").splitlines():
        if header := SECTION.fullmatch(line):
            parts.append((header[1], []))
            continue
        if parts[-1][0] and line and not line.startswith(" "):
            parts.append(("", []))
        parts[-1][1].append(line)
    made = [_section(title, inspect.cleandoc("\n" + "\n".join(lines))) for title, lines in parts]
    return [section for section in made if section.text or section.items]


def _section(title: str, text: str) -> Section:
    if title in ("", "Returns"):
        return Section(title, text)
    items: list[tuple[str, str]] = []
    for line in text.splitlines():
        if item := ITEM.fullmatch(line):
            items.append((item[1], item[2]))
        elif items and (line.startswith(" ") or not line):
            name, so_far = items[-1]
            items[-1] = (name, f"{so_far} {line.strip()}".rstrip())
        else:  # no list, but sentences
            return Section(title, text)
    return Section(title, "", tuple(items))


def described(docstring: str | None) -> dict[str, str]:
    """What the sections Args and Attributes say of each name."""
    found = {}
    for section in sections(docstring):
        if section.title in ("Args", "Attributes"):
            for names, text in section.items:
                found.update(dict.fromkeys(names.split(", "), text[:1].upper() + text[1:]))
    return found


def summary(docstring: str | None) -> str:
    """The first sentence, on one line."""
    text = next((s.text for s in sections(docstring) if not s.title), "")
    return re.split(r"(?<=\.)\s(?=[A-Z(])", one_line(text.split("\n\n")[0]))[0]


def one_line(text: str) -> str:
    return " ".join(text.split())


# -- signatures


def signature_text(name: str, target: Any) -> str:
    """`name(...)`, on one line if it fits, else with one argument per line; annotations as in the source."""
    signature = key_signature(target) or inspect.signature(target)
    scope = getattr(target, "__globals__", {})
    arguments = _arguments([p for p in signature.parameters.values() if p.name not in ("self", "cls")], scope)
    returns = "" if inspect.isclass(target) else _returns(signature.return_annotation, scope)
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def key_signature(target: Any) -> inspect.Signature | None:
    """Cache keys take anything, so as to refuse it in the original's words; what they want is in their fields."""
    fields = getattr(target, "_fields", None)
    if fields is None:
        return None
    defaults = target._defaults
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(f, kind, annotation="int", default=defaults.get(f, inspect.Parameter.empty)) for f in fields]
    )


def _arguments(parameters: Sequence[inspect.Parameter], scope: dict[str, Any]) -> list[str]:
    shown: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        text = f"{parameter.name}: {annotation_text(parameter.annotation, scope)}"
        if parameter.default is not parameter.empty:
            text += f" = {default_text(parameter.default)}"
        shown.append(text)
    return shown


def _returns(annotation: Any, scope: dict[str, Any]) -> str:
    return f" -> {annotation_text(annotation, scope)}"


def annotation_text(annotation: Any, scope: dict[str, Any]) -> str:
    """As written in the source, with union aliases spelled out."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def spelled_out(match: re.Match[str]) -> str:
        alias = scope.get(match[0])
        if not isinstance(alias, types.UnionType):
            return match[0]
        return " | ".join(member.__name__ for member in alias.__args__)

    return re.sub(r"\b\w+\b", spelled_out, text.replace("npt.", ""))


def default_text(value: object) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value == UINT64_MAX:
        return "2**64-1"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(default_text, value)))}}}"
    is_plain = value is None or isinstance(value, bool | int | float | str | bytes | tuple | dict)
    return repr(value) if is_plain else "..."


# -- what a class has


@dataclass(frozen=True, slots=True)
class Member:
    """A public member of a class. `target` is its function (also of a property), or None for a field."""

    name: str
    kind: str  # "field", "property", "settable property", "method", "class method", "abstract method"
    target: Any
    type_text: str
    default: str
    doc: str


def members(cls: type) -> list[Member]:
    """Public fields, properties and methods in the order of the source; those of private bases first."""
    found = fields_of(cls)
    for base in reversed(cls.__mro__):
        is_ours = base.__module__.split(".")[0] == PACKAGE
        if is_ours and (base is cls or base.__name__.startswith("_")):
            public = [(name, value) for name, value in vars(base).items() if not name.startswith("_")]
            found += [member for name, value in public if (member := _member(name, value))]
    return found


def fields_of(cls: type) -> list[Member]:
    """The fields of a dataclass, or the public slots of a class without properties."""
    about = described(cls.__doc__)
    if dataclasses.is_dataclass(cls):
        kept = dataclasses.fields(cls)
        return [Member(f.name, "field", None, str(f.type), _field_default(f), about.get(f.name, "")) for f in kept]
    given = inspect.signature(cls).parameters if cls.__init__ is not object.__init__ else {}  # type: ignore[misc]
    slots = [name for name, value in vars(cls).items() if inspect.ismemberdescriptor(value) and name in given]
    return [
        Member(name, "field", None, str(given[name].annotation), "", about.get(name, ""))
        for name in given
        if name in slots
    ]


def _field_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return default_text(field.default_factory())
    return "" if field.default is dataclasses.MISSING else default_text(field.default)


def _member(name: str, value: object) -> Member | None:
    if isinstance(value, property):
        kind = "settable property" if value.fset else "property"
        type_text = annotation_text(inspect.signature(value.fget).return_annotation, {})  # type: ignore[arg-type]
        return Member(name, kind, value.fget, type_text, "", value.__doc__ or "")
    if isinstance(value, classmethod | staticmethod):
        return Member(name, "class method", value.__func__, "", "", value.__func__.__doc__ or "")
    if inspect.isfunction(value):
        kind = "abstract method" if getattr(value, "__isabstractmethod__", False) else "method"
        return Member(name, kind, value, "", "", value.__doc__ or "")
    return None
