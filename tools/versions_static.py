# SPDX-License-Identifier: Apache-2.0
"""Compares what the connector uses of vLLM with vLLM's Python files, without running either.

    python tools/versions_static.py                     the vLLM installed beside this Python
    python tools/versions_static.py DIRECTORY           the one in that directory, which contains vllm/

What is compared, each read from the connector's own source:
- every name that it imports from vLLM exists;
- every hook that it overrides exists, is of the same kind, and takes the arguments that vLLM declares; nothing abstract
  is left; calls of the base class fit;
- every attribute that it reads of a vLLM object exists, as far as types can be followed: from annotations, from the
  signatures of hooks, and from what parameters are called here (`PARAMETERS`, `PROTOCOLS`);
- states and kinds that it knows by their text exist.

Prints one line for each thing that is missing and ends with 1, or with 0 if nothing is. Attributes that are read with a
default (`getattr(request, "name", 0)`) and hooks that only some versions call are notes: no reason to fail.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from _vllm_attributes import CONNECTOR, PROTOCOLS, File, Findings, Names, check_attributes, lacks
from _vllm_source import ClassView, Member, Source, absolute

#: Classes of vLLM that the connector extends: None = all public methods are hooks, else only these.
HOOKS: dict[str, tuple[str, ...] | None] = {
    "KVConnectorBase_V1": None,
    "KVConnectorStats": ("reset", "aggregate", "reduce", "is_empty"),
    "KVConnectorPromMetrics": ("observe",),
}
#: Hooks that a version need not have, and what happens in one that lacks them.
LATE_HOOKS = {
    "get_mem_pool_context": "the connector places the KV cache unasked (since 0.31)",
    "get_loaded_kv_cache_group_ids": "that vLLM takes all groups as loaded (since 0.32)",
}
#: Texts by which the connector knows a member of an enumeration: (its class, prefix of the member's name, by value).
STATES = ("vllm.v1.request", "RequestStatus", "FINISHED_")
KINDS = ("vllm.v1.kv_cache_interface", "KVCacheSpecKind", "_SUPPORTED_KINDS")


def check(source: Source, connector: Path = CONNECTOR) -> Findings:
    """What that vLLM lacks of what the connector uses."""
    findings = Findings()
    files = [File(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(connector.rglob("*.py"))]
    imported: dict[str, tuple[str, str]] = {}
    for file in files:
        _check_imports(source, file, imported, findings)
    names = Names(source, imported, _functions(files))
    for file in files:
        _check_hooks(names, file, findings)
        _check_protocols(names, file, findings)
        check_attributes(names, file, findings)
        _check_states(names, file, findings)
    return findings


def _functions(files: Iterable[File]) -> dict[str, ast.FunctionDef]:
    """The connector's top-level functions by name."""
    return {node.name: node for file in files for node in file.tree.body if isinstance(node, ast.FunctionDef)}


# -- names ---------------------------------------------------------------------------------------------------------


def _check_imports(source: Source, file: File, imported: dict[str, tuple[str, str]], findings: Findings) -> None:
    for node in file.nodes:
        if isinstance(node, ast.Import) and any(one.name.split(".")[0] == "vllm" for one in node.names):
            findings.missing.append(file.at(node, "import vLLM's names one by one: from vllm.x import name"))
        if not isinstance(node, ast.ImportFrom) or absolute(node, "", False).split(".")[0] != "vllm":
            continue
        for one in node.names:
            imported[one.asname or one.name] = (node.module or "", one.name)
            findings.compared["names"] += 1
            if source.find(node.module or "", one.name) is None:
                findings.missing.append(file.at(node, f"{node.module} has no {one.name}"))


# -- hooks ---------------------------------------------------------------------------------------------------------


def _check_hooks(names: Names, file: File, findings: Findings) -> None:
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            bases = [names.class_called(base.id) for base in node.bases if isinstance(base, ast.Name)]
            known = [base for base in bases if base is not None and base.name != node.name]
            if known:
                _check_class(file, node, known, findings)


def _check_class(file: File, ours: ast.ClassDef, bases: list[ClassView], findings: Findings) -> None:
    theirs: dict[str, Member] = {}
    for base in reversed(bases):
        theirs.update(base.members)
    own = {node.name: node for node in ours.body if isinstance(node, ast.FunctionDef)}
    for name, member in theirs.items():
        if "abstractmethod" in member.decorators and name not in own:
            findings.missing.append(file.at(ours, f"{ours.name} does not implement the abstract {name}"))
    hooks = [HOOKS[base.name] for base in bases if base.name in HOOKS]
    for name, function in own.items():
        findings.compared["methods"] += name in theirs
        if name in theirs and not name.startswith("__"):
            findings.missing += [file.at(function, text) for text in _unlike(function, theirs[name])]
        elif name not in theirs and any(_is_hook(name, known) for known in hooks):
            if name in LATE_HOOKS:
                findings.notes.append(file.at(function, f"vLLM does not call {name}: {LATE_HOOKS[name]}"))
            else:
                findings.missing.append(file.at(function, f"{bases[0].name} has no hook {name}: it is never called"))
    for call in _calls_of_super(ours):
        findings.missing += [file.at(call, text) for text in _unfit(call, theirs)]


def _is_hook(name: str, known: tuple[str, ...] | None) -> bool:
    return not name.startswith("_") if known is None else name in known


def _unlike(ours: ast.FunctionDef, member: Member) -> Iterator[str]:
    """Why vLLM's calls of the base class' method would not fit ours."""
    if member.function is None:
        yield f"{ours.name} is a value in vLLM, a method here"
        return
    for kind in ("classmethod", "staticmethod", "property"):
        if (kind in member.decorators) != (kind in Member("", member.module, function=ours).decorators):
            yield f"{ours.name}: only one of vLLM's and ours is a {kind}"
    mine, theirs = ours.args, member.function.args
    names = [one.arg for one in (*mine.posonlyargs, *mine.args)]
    wanted = [one.arg for one in (*theirs.posonlyargs, *theirs.args)]
    if names[: len(wanted)] != wanted and mine.vararg is None:
        yield f"{ours.name}: vLLM passes ({', '.join(wanted)}), ours takes ({', '.join(names)})"
    elif len(names) - len(mine.defaults) > len(wanted):
        yield f"{ours.name}: vLLM passes ({', '.join(wanted)}), ours requires ({', '.join(names)})"
    by_name = {one.arg for one in theirs.kwonlyargs} - {one.arg for one in mine.kwonlyargs} - set(names)
    if mine.kwarg is None and (by_name or theirs.kwarg is not None):
        yield f"{ours.name}: vLLM passes by name {', '.join(sorted(by_name)) or '**' + str(theirs.kwarg)}"


def _calls_of_super(node: ast.ClassDef) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            receiver = call.func.value
            if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name) and receiver.func.id == "super":
                yield call


def _unfit(call: ast.Call, theirs: Mapping[str, Member]) -> Iterator[str]:
    """Why our call of the base class' method would fail."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    member = theirs.get(name)
    if member is None or member.function is None:
        if name != "__init__":  # a dataclass has one, whatever its fields
            yield f"the base class has no {name} to call"
        return
    takes = [one.arg for one in member.function.args.args][1:]
    num_required = len(takes) - len(member.function.args.defaults)
    given = [*takes[: len(call.args)], *(one.arg or "" for one in call.keywords)]
    if len(call.args) > len(takes) or not set(takes[:num_required]) <= set(given):
        yield f"super().{name} takes ({', '.join(takes)}), ours passes {len(call.args)} and {given[len(call.args) :]}"


def _check_protocols(names: Names, file: File, findings: Findings) -> None:
    for node in file.nodes:
        if not isinstance(node, ast.ClassDef) or node.name not in PROTOCOLS:
            continue
        view = names.class_called(node.name)
        if view is None:
            findings.missing.append(file.at(node, f"{'.'.join(PROTOCOLS[node.name])} does not exist"))
            continue
        wanted = [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        wanted += [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
        findings.missing += [file.at(node, lacks(view, name)) for name in wanted if name not in view.members]


# -- texts ---------------------------------------------------------------------------------------------------------


def _check_states(names: Names, file: File, findings: Findings) -> None:
    module, enumeration, prefix = STATES
    states = names.source.class_named(module, enumeration)
    for node in file.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(prefix):
            if states is None or node.value not in states.members:
                findings.missing.append(file.at(node, f"{enumeration} has no {node.value}"))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == KINDS[2]:
            known = _values(names.source.class_named(*KINDS[:2]))
            texts = [one for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            wanted = [one for one in texts if one.value not in known]
            findings.missing += [file.at(one, f"{KINDS[1]} has no {one.value}") for one in wanted]


def _values(view: ClassView | None) -> set[object]:
    nodes = [] if view is None else [node for node in view.node.body if isinstance(node, ast.Assign)]
    return {node.value.value for node in nodes if isinstance(node.value, ast.Constant)}


# -- the program ---------------------------------------------------------------------------------------------------


def installed() -> Path:
    """The directory that has the vLLM of this Python. Raises FileNotFoundError."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise FileNotFoundError("this Python has no vllm; name a directory that contains vllm/")
    return Path(found.origin).parent.parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare what the connector uses with vLLM's source.")
    parser.add_argument("directory", type=Path, nargs="?", help="what contains vllm/ (default: the installed one)")
    parsed = parser.parse_args(arguments)
    try:
        source = Source(parsed.directory or installed())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if report(source) else 1


def report(source: Source) -> bool:
    """Print what was found; whether nothing is missing."""
    findings = check(source)
    for text in findings.notes:
        print(f"note: {text}")
    for text in findings.missing:
        print(f"MISSING: {text}")
    compared = ", ".join(f"{count} {kind}" for kind, count in findings.compared.items())
    print(f"{source.root}: compared {compared}: {len(findings.missing)} missing, {len(findings.notes)} notes")
    return not findings.missing


if __name__ == "__main__":
    sys.exit(main())
