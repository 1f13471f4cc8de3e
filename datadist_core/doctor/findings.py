# SPDX-License-Identifier: Apache-2.0
"""What a check has found, and how findings are shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

Value = str | int | float | bool | None

_WIDTH = 118
_INDENT = " " * 24


class Level(Enum):
    """NOTE says something worth knowing that is neither good nor bad. Only FAIL makes the exit status 1."""

    OK = "OK"
    NOTE = "NOTE"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what was looked at, in one or two words.
        text: what was found.
        remedy: what to do about it; "" if nothing has to be done.
        values: the same for machines, units in the names.
    """

    level: Level
    topic: str
    text: str
    remedy: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


def ok(topic: str, text: str, **values: Value) -> Finding:
    return Finding(Level.OK, topic, text, values=values)


def note(topic: str, text: str, remedy: str = "", **values: Value) -> Finding:
    return Finding(Level.NOTE, topic, text, remedy, values)


def warn(topic: str, text: str, remedy: str, **values: Value) -> Finding:
    return Finding(Level.WARN, topic, text, remedy, values)


def fail(topic: str, text: str, remedy: str, **values: Value) -> Finding:
    return Finding(Level.FAIL, topic, text, remedy, values)


def has_failed(sections: Iterable[Section]) -> bool:
    return any(finding.level is Level.FAIL for section in sections for finding in section.findings)


def as_text(section: Section) -> str:
    return "\n".join([f"== {section.title}", *(_lines(finding) for finding in section.findings), ""])


def summary(sections: Iterable[Section]) -> str:
    levels = [finding.level for section in sections for finding in section.findings]
    failed, warned = levels.count(Level.FAIL), levels.count(Level.WARN)
    if not failed and not warned:
        return "nothing to change"
    return f"{failed} FAIL, {warned} WARN: see each line's remedy"


def as_json(sections: Iterable[Section]) -> str:
    listed = [
        {
            "section": section.title,
            "level": finding.level.value,
            "topic": finding.topic,
            "text": finding.text,
            "remedy": finding.remedy,
            "values": dict(finding.values),
        }
        for section in sections
        for finding in section.findings
    ]
    return json.dumps({"ok": not any(f["level"] == "FAIL" for f in listed), "findings": listed}, indent=1)


def _lines(finding: Finding) -> str:
    head = f"{finding.level.value:<5} {finding.topic:<17} "
    lines = [_wrapped(head, finding.text)]
    if finding.remedy:
        lines.append(_wrapped(_INDENT + "-> ", finding.remedy))
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * max(len(_INDENT), len(head) if head.startswith(" ") else 0),
        break_long_words=False,
        break_on_hyphens=False,
    )
