# SPDX-License-Identifier: Apache-2.0
"""Results as text: tables, what was found besides, the bars. And as JSON."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .bars import Bar, check_bars
from .results import YARDSTICKS, Findings, Group, Results, Row, group_of

_JSON_ROW = (
    "name", "op", "block_bytes", "num_blocks", "pattern", "gb_per_s", "gb_per_s_min", "gb_per_s_max", "verified",
)  # fmt: skip
_VERDICTS = {True: "met", False: "MISSED", None: "-"}


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]


def to_json(results: Results) -> dict[str, Any]:
    rows = [asdict(row) for row in results.rows]
    return {
        "rows": [{key: row[key] for key in _JSON_ROW} for row in rows],
        "latency": [asdict(row) for row in results.latency],
        "link_ms": results.link_ms,
    }


def write_report(results: Results) -> None:
    """On standard output."""
    for table in [*_throughput_tables(results), *_other_tables(results)]:
        write_table(table)
    sys.stdout.write("\n".join([*_facts(results), "", ""]))
    write_table(bars_table(check_bars(results)))


def plain_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """The table as text with aligned columns."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([title, *(line.rstrip() for line in lines), "", ""])


def size_text(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


# -- tables


def _throughput_tables(results: Results) -> list[Table]:
    """One for each operation and pattern."""
    yardsticks = [name for name in YARDSTICKS if any(name in row.ratios for row in results.rows)]
    columns = ["blocks", "name", "GB/s", "min", "max", *(f"x {name}" for name in yardsticks), "verified"]
    kinds = dict.fromkeys((group.op, group.pattern) for group in results.groups())
    return [
        Table(
            f"{op}, {pattern} (median; x: how many times faster, in the same rounds)",
            columns,
            [_cells(row, yardsticks) for row in results.rows if (row.op, row.pattern) == (op, pattern)],
        )
        for op, pattern in kinds
    ]


def _cells(row: Row, yardsticks: Iterable[str]) -> list[str]:
    speeds = [f"{speed:.2f}" for speed in (row.gb_per_s, row.gb_per_s_min, row.gb_per_s_max)]
    ratios = [f"{row.ratios[name]:.2f}" if name in row.ratios else "" for name in yardsticks]
    return [_blocks(group_of(row)), row.name, *speeds, *ratios, "yes" if row.verified else "NO"]


def _blocks(group: Group) -> str:
    return f"{group.num_blocks} x {size_text(group.block_bytes)}"


def _other_tables(results: Results) -> list[Table]:
    latency = [
        [row.name, size_text(row.block_bytes), f"{row.p50_us:.1f}", f"{row.p99_us:.1f}"] for row in results.latency
    ]
    links = [[name, f"{ms:.2f}"] for name, ms in results.link_ms.items()]
    found = results.findings
    owners = [[each.name, f"{100 * each.pulled:.2f}", f"{100 * each.idle:.2f}"] for each in found.owner_cpu]
    memory = [[each.name, f"{each.kib:.0f}", f"{each.threads:g}", f"{each.files:g}"] for each in found.link_memory]
    tables = [
        Table("Pull of one block", ["name", "block", "p50 us", "p99 us"], latency),
        Table("link_clusters", ["name", "median ms"], links),
        Table("Processor time of the owner's process, % of a core", ["name", "pulled from", "not pulled from"], owners),
        Table("One more link, at the end that dialled it", ["name", "KiB", "threads", "open files"], memory),
    ]
    return [table for table in tables if table.rows]


def bars_table(bars: Iterable[Bar]) -> Table:
    return Table(
        "Bars",
        ["", "bar", "needed", "found"],
        [[_VERDICTS[bar.met], bar.what, bar.needed, bar.found] for bar in bars],
    )


def write_table(table: Table) -> None:
    try:
        rich_console = importlib.import_module("rich.console")
        rich_table = importlib.import_module("rich.table")
    except ImportError:
        sys.stdout.write(plain_table(table.title, table.columns, table.rows))
        return
    drawn = rich_table.Table(*table.columns)
    for row in table.rows:
        drawn.add_row(*row)
    console = rich_console.Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table.title)  # as a part of the table it would be folded to its width
    console.print(drawn)


# -- what else was found


def _facts(results: Results) -> list[str]:
    found = results.findings
    return [
        f"Copy kernel: {found.kernel}.",
        *([f"auto uses {found.auto_uses}."] if found.auto_uses else []),
        *_copy_facts(found),
        *_memory_facts(found),
        *(f"Skipped {name}: {reason}" for name, reason in results.skipped.items()),
        *(f"FAILED {name}: {reason}" for name, reason in results.failed.items()),
    ]


def _copy_facts(found: Findings) -> list[str]:
    return [
        f"pull_blocks of {each.num_blocks} x {size_text(each.block_bytes)} over {each.name}: {each.pull_ms:.2f} ms, "
        f"of which {100 * each.share:.1f} % is not the copy ({each.copy_ms:.2f} ms alone)."
        for each in found.outside_copy
    ] + [
        f"A contiguous run over {each.name}: {each.gb_per_s:.2f} GB/s, {each.ratio:.2f} x one {each.copy} of the same."
        for each in found.single_copy
    ]


def _memory_facts(found: Findings) -> list[str]:
    return [
        f"Per million blocks of a cache: {each.held_mib:.2f} MiB held; per million blocks in one pull_blocks: "
        f"{each.pull_mib:.0f} MiB while it runs ({each.name}, this end, measured with {each.num_blocks} blocks)."
        for each in found.block_memory
    ]
