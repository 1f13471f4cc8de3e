#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/api: the reference of everything public in datadist_core, from its signatures and docstrings.

    python tools/api_docs.py            write the pages
    python tools/api_docs.py --check    exit with 1, naming them, if any is not what would be written

Each page comes from a file in docs/api/_intro: what a person wrote (title, a few sentences, an example that a test
runs), with directives for what comes from the code:

    <!-- api: NAME -->                      a class, enum, function, or a module of exceptions
    <!-- api: NAME (no constructor) -->     a class that users get and do not make
    <!-- api: NAME (options) -->            a class of options: its properties with the option keys they set
    <!-- api-text: MODULE -->               the docstring of a module or class, without its first line
    <!-- api-index -->                      all names, with links

NAME is in datadist_core, or has the module in front. Every documented name has an anchor of its own, such as
`cache_manager.md#CacheManager.pull_cache`, and wherever text mentions a documented name, that becomes a link.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This tree's, also when another one is installed, and whoever runs or loads this file from wherever.
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

from _api_source import (  # noqa: E402
    Member,
    Section,
    default_text,
    described,
    fields_of,
    members,
    one_line,
    sections,
    signature_text,
    summary,
)

import datadist_core  # noqa: E402

PAGES = ROOT / "docs" / "api"
INTROS = PAGES / "_intro"
NOTICE = (
    "<!-- Made by tools/api_docs.py from docs/api/_intro/{name} and the docstrings: edit those, then `make docs`. -->"
)
DIRECTIVE = re.compile(r"<!-- (api(?:-text|-index)?)(?:: ([\w.]+))?(?: \(([\w ]+)\))? -->")
SECTION_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
CODE_SPAN = re.compile(r"(`[^`]*`)")
NAME_IN_CODE = re.compile(r"`([A-Za-z_][\w.]*)(\([^`]*\))?`")
#: Text may name their members without them.
OWNERS = ("LLMDataDist", "CacheManager", "LLMConfig", "LLMStatusCode")
#: Tried in turn on a property, to see which option keys it sets.
OPTION_SAMPLES: tuple[Any, ...] = (
    True,
    4,
    0.5,
    "127.0.0.1:0",
    '{"memory_size": 4096}',
    {"ge.flowGraphMemMaxSize": "1"},
    4000,
    "off",
    "{}",
)


# -- what there is, and where


@dataclass(frozen=True, slots=True)
class Entry:
    """A documented name. `name` is also its anchor on `page`."""

    name: str
    page: str
    summary: str


def resolve(path: str) -> Any:
    """The object of that name in datadist_core, or under that dotted path."""
    module, _, name = path.rpartition(".")
    if not module:
        return getattr(datadist_core, name)
    try:
        return importlib.import_module(path)
    except ImportError:
        return getattr(importlib.import_module(module), name)


def directives(intro: str) -> Iterator[tuple[str, str, str]]:
    """(verb, name, how) of all directives in a text."""
    for found in DIRECTIVE.finditer(intro):
        yield found[1], found[2] or "", found[3] or ""


def aliases(target: object) -> list[str]:
    """Other public names of the same class."""
    own = getattr(target, "__name__", "")
    return [name for name in datadist_core.__all__ if getattr(datadist_core, name) is target and name != own]


def error_classes(module: types.ModuleType) -> list[type]:
    """The exceptions of a module, in the order of the source."""
    return [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]


def entries_of(target: Any, page: str) -> list[Entry]:
    """What the directive for `target` documents."""
    if inspect.ismodule(target):
        name = target.__name__.rpartition(".")[2]
        classes = [Entry(c.__name__, page, summary(c.__doc__)) for c in error_classes(target)[1:]]
        return [Entry(name, page, summary(target.__doc__)), *classes]
    own = target.__name__
    found = [Entry(own, page, summary(target.__doc__))]
    found += [Entry(alias, page, f"Another name of `{own}`.") for alias in aliases(target)]
    if inspect.isclass(target):
        if issubclass(target, Enum):
            about = described(target.__doc__)
            found += [Entry(f"{own}.{n}", page, about.get(m.name, "")) for n, m in target.__members__.items()]
        found += [Entry(f"{own}.{m.name}", page, summary(m.doc)) for m in members(target)]
    return found


class Inventory:
    """All entries of all pages, and the links to them."""

    def __init__(self, intros: dict[str, str]) -> None:
        self.entries: dict[str, Entry] = {}
        for page, intro in intros.items():
            for verb, name, _ in directives(intro):
                for entry in entries_of(resolve(name), page) if verb == "api" else []:
                    self._add(entry)
        bare = [c.__name__ for c in error_classes(datadist_core.errors)] + list(datadist_core.LLMStatusCode.__members__)
        self._bare = re.compile(rf"(?<![\w`.\[])({'|'.join(bare)})(?!\w|`|\.\w)")

    def _add(self, entry: Entry) -> None:
        if entry.name in self.entries:
            raise SystemExit(f"{entry.name} is documented twice: {self.entries[entry.name].page} and {entry.page}")
        self.entries[entry.name] = entry

    def link(self, name: str, shown: str, page: str) -> str:
        """A Markdown link to an entry; just `shown` where there is none."""
        entry = self.entries.get(name)
        if entry is None:
            return shown
        return f"[{shown}]({'' if entry.page == page else entry.page}#{name})"

    def linked(self, text: str, page: str, owner: str = "") -> str:
        """`text` with links to what it names, and with what Markdown would take for markup escaped."""
        pieces = CODE_SPAN.split(text)
        pieces[0::2] = [self._link_bare(piece.replace("*", r"\*"), page) for piece in pieces[0::2]]
        pieces[1::2] = [self._link_code(piece, page, owner) for piece in pieces[1::2]]
        return "".join(pieces)

    def _link_bare(self, text: str, page: str) -> str:
        def link(match: re.Match[str]) -> str:
            name = match[1]
            return self.link(f"LLMStatusCode.{name}" if name.startswith("LLM_") else name, name, page)

        return self._bare.sub(link, text)

    def _link_code(self, code: str, page: str, owner: str) -> str:
        found = NAME_IN_CODE.fullmatch(code)
        if found is None or found[1] == owner:
            return code
        names = [found[1], *(f"{cls}.{found[1]}" for cls in (owner, *OWNERS))]
        name = next((n for n in names if n in self.entries), "")
        return self.link(name, code, page)


# -- pages


@dataclass(frozen=True, slots=True)
class Writer:
    """Turns one intro into one page."""

    inventory: Inventory
    page: str

    def write(self, intro: str) -> str:
        """The page. Code blocks, headings and links of the intro stay as they are."""
        out, in_code = [NOTICE.format(name=self.page), ""], False
        for line in intro.splitlines():
            in_code ^= line.startswith("```")
            if found := DIRECTIVE.fullmatch(line):
                out.append(self._directive(found[1], found[2] or "", found[3] or ""))
            elif in_code or line.startswith(("```", "#")) or "](" in line:
                out.append(line)
            else:
                out.append(self._linked(line))
        return "\n".join(out).rstrip() + "\n"

    def _directive(self, verb: str, name: str, how: str) -> str:
        if verb == "api-index":
            return self._index()
        target = resolve(name)
        if verb == "api-text":
            rest = inspect.cleandoc(target.__doc__).partition("\n")[2]
            return "\n\n".join(self._sections(rest))
        if inspect.ismodule(target):
            return "\n\n".join(self._errors(target))
        if not inspect.isclass(target):
            return "\n\n".join(self._function(target, target.__name__, "##", target.__name__, path=name))
        return "\n\n".join(self._class(target, name, how))

    def _class(self, cls: type, path: str, how: str) -> Iterator[str]:
        own = cls.__name__
        yield self._heading("##", own, [own, *aliases(cls)])
        yield from self._import(path)
        if aliases(cls):
            yield f"Also: {', '.join(f'`{alias}`' for alias in aliases(cls))}."
        has_constructor = how != "no constructor" and not issubclass(cls, Enum) and not inspect.isabstract(cls)
        if has_constructor:
            yield self._code(signature_text(own, cls))
        hidden = self._hidden_sections(cls, has_constructor)
        yield from self._sections(cls.__doc__, own, hidden)
        if issubclass(cls, Enum):
            yield self._enum_table(cls)
        yield from self._members(cls, how)

    def _hidden_sections(self, cls: type, has_constructor: bool) -> Set[str]:
        """Sections whose text stands in a table of the page, or is about a constructor that is not shown."""
        in_table = issubclass(cls, Enum) or bool(fields_of(cls))
        return {"Attributes", "Args"} if in_table else set() if has_constructor else {"Args"}

    def _members(self, cls: type, how: str) -> Iterator[str]:
        own, all_members = cls.__name__, members(cls)
        fields = [m for m in all_members if m.kind == "field"]
        properties = [m for m in all_members if "property" in m.kind]
        if fields:
            yield self._table(["field", "type", "default", "meaning"], [self._field_row(own, m) for m in fields])
        if properties and how == "options":
            rows = [self._option_row(cls, m) for m in properties]
            yield self._table(["property", "type", "default", "option key", "meaning"], rows)
        elif properties:
            yield self._table(["property", "type", "meaning"], [self._property_row(own, m) for m in properties])
        for m in all_members:
            if "method" in m.kind:
                shown = f"{own}.{m.name}" if m.kind == "class method" else m.name
                label = f" ({m.kind})" if m.kind != "method" else ""
                yield from self._function(m.target, shown, "###", f"{own}.{m.name}", label)

    def _import(self, path: str) -> Iterator[str]:
        """How to get at what is not in datadist_core itself."""
        module, _, own = path.rpartition(".")
        if module:
            yield f"`from {module} import {own}`"

    def _function(
        self, target: Any, shown: str, level: str, name: str, label: str = "", path: str = ""
    ) -> Iterator[str]:
        owner, _, own = name.rpartition(".")
        yield self._heading(level, own, [name], label)
        yield from self._import(path)
        yield self._code(signature_text(shown, target))
        yield from self._sections(target.__doc__, owner)

    def _sections(self, doc: str | None, owner: str = "", hidden: Set[str] = frozenset()) -> Iterator[str]:
        for section in sections(doc):
            if section.title in hidden:
                continue
            text = self._linked(section.text, owner) if section.text else self._items(section, owner)
            yield f"**{SECTION_TITLES[section.title]}**\n\n{text}" if section.title else text

    def _items(self, section: Section, owner: str) -> str:
        is_raises = section.title == "Raises"
        shown = [n if is_raises else ", ".join(f"`{one}`" for one in n.split(", ")) for n, _ in section.items]
        texts = [self._linked(text, owner) for _, text in section.items]
        heads = [self._linked(head, owner) if is_raises else head for head in shown]
        return "\n".join(f"- {head}: {text}" for head, text in zip(heads, texts, strict=True))

    def _field_row(self, own: str, m: Member) -> list[str]:
        default = f"`{m.default}`" if m.default else ""
        return [self._anchored(own, m.name), f"`{m.type_text}`", default, self._cell(m.doc, own)]

    def _property_row(self, own: str, m: Member) -> list[str]:
        settable = " Settable." if m.kind == "settable property" else ""
        return [self._anchored(own, m.name), f"`{m.type_text}`", self._cell(m.doc, own) + settable]

    def _option_row(self, cls: type, m: Member) -> list[str]:
        default = getattr(cls(), m.name)
        keys = "<br>".join(f"`{key}`" for key in option_keys(cls, m.name))
        type_text = m.type_text.removesuffix(" | None")
        shown = "not set" if default is None else f"`{default_text(default)}`"
        return [self._anchored(cls.__name__, m.name), f"`{type_text}`", shown, keys, self._cell(m.doc, cls.__name__)]

    def _enum_table(self, cls: type[Enum]) -> str:
        about = described(cls.__doc__)
        rows = []
        for member in cls:
            names = [name for name, m in cls.__members__.items() if m is member]
            shown = ", ".join(self._anchored(cls.__name__, name) for name in names)
            rows.append([shown, f"`{member.value!r}`", self._cell(about.get(member.name, ""), cls.__name__)])
        return self._table(["member", "value", "meaning"], rows)

    def _errors(self, module: types.ModuleType) -> Iterator[str]:
        name = module.__name__.rpartition(".")[2]
        yield self._heading("##", name, [name])
        yield from self._sections(module.__doc__.partition("\n")[2])  # type: ignore[union-attr]
        classes = error_classes(module)[1:]  # the first is their base, which has a section of its own
        yield self._table(["exception", "is a", "status code", "means"], [self._error_row(c) for c in classes])

    def _error_row(self, cls: Any) -> list[str]:
        name = f'<a id="{cls.__name__}"></a>`{cls.__name__}`'
        base, code = self._linked(cls.__mro__[1].__name__), self._linked(cls.default_code.name)
        return [name, base, code, self._cell(cls.__doc__)]

    def _index(self) -> str:
        """Two tables, each in the order of the alphabet: what is at the top level, and what is in it."""
        entries = sorted(self.inventory.entries.values(), key=lambda e: [p.lower() for p in e.name.split(".")[::-1]])
        head = ["name", "page", "what it is"]
        top = [self._index_row(e) for e in entries if "." not in e.name]
        inner = [self._index_row(e) for e in entries if "." in e.name]
        parts = ["## Classes, functions and exceptions", self._table(head, top)]
        return "\n\n".join([*parts, "## Methods, properties, fields and members", self._table(head, inner)])

    def _index_row(self, entry: Entry) -> list[str]:
        owner, _, own = entry.name.rpartition(".")
        name = self.inventory.link(entry.name, f"`{own}`", self.page) + (f" of `{owner}`" if owner else "")
        return [name, f"[{entry.page.removesuffix('.md')}]({entry.page})", entry.summary.replace("*", r"\*")]

    # -- Markdown

    def _linked(self, text: str, owner: str = "") -> str:
        return self.inventory.linked(text, self.page, owner)

    def _cell(self, doc: str, owner: str = "") -> str:
        return self._linked(one_line(doc), owner)

    def _anchored(self, owner: str, name: str) -> str:
        return f'<a id="{owner}.{name}"></a>`{name}`'

    def _heading(self, level: str, name: str, anchors: Sequence[str], label: str = "") -> str:
        return "".join(f'<a id="{a}"></a>' for a in anchors) + f"\n\n{level} `{name}`{label}"

    def _code(self, text: str) -> str:
        return f"```py\n{text}\n```"

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """Without the columns that have nothing in them."""
        used = [i for i in range(len(head)) if any(row[i] for row in rows)]
        head, rows = [head[i] for i in used], [[row[i] for i in used] for row in rows]
        lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def option_keys(cls: Any, name: str) -> list[str]:
    """Which keys setting a property writes, found by doing it."""
    for sample in OPTION_SAMPLES:
        config = cls()
        try:
            setattr(config, name, sample)
        except (TypeError, ValueError, datadist_core.LLMException):
            continue
        return list(config.generate_options())
    raise SystemExit(f"{cls.__name__}.{name} takes none of the sample values; add one to OPTION_SAMPLES")


def make_pages() -> dict[str, str]:
    """File name -> text of every page."""
    intros = {path.name: path.read_text(encoding="utf-8") for path in sorted(INTROS.glob("*.md"))}
    inventory = Inventory(intros)
    return {page: Writer(inventory, page).write(intro) for page, intro in intros.items()}


def stale_pages(pages: dict[str, str], folder: Path) -> list[str]:
    """Which files of `folder` are missing, different, or no page."""
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in there.keys() | pages.keys() if there.get(name) != pages.get(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/api, or check that it is current.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--folder", type=Path, default=PAGES, help="where the pages are (default: docs/api)")
    args = parser.parse_args(argv)
    pages = make_pages()
    stale = stale_pages(pages, args.folder)
    if args.check:
        for name in stale:
            print(f"stale: {args.folder / name}; run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in pages:
            (args.folder / name).write_text(pages[name], encoding="utf-8")
        else:
            (args.folder / name).unlink()
        print(f"{'wrote' if name in pages else 'removed'} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
