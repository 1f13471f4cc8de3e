# SPDX-License-Identifier: Apache-2.0
"""`python -m datadist_core.bench`: options in, a table (and JSON) out."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import LLMException
from .blocks import PATTERNS, WORD_BYTES
from .contenders import CONTENDERS, OPS
from .measure import Plan, Progress, Results, Row, run

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 4 << 10, 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_JSON_ROW = (
    "name", "op", "block_bytes", "num_blocks", "pattern", "gb_per_s", "gb_per_s_min", "gb_per_s_max", "verified",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if bytes were wrong or a contender failed; 2 for bad options."""
    options = _parser().parse_args(arguments)
    plan = Plan(
        options.backends, options.op, options.pattern, options.block_bytes, options.total_bytes, options.seconds
    )
    try:
        results = run(plan, _progress())
    except (LLMException, OSError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    for title, columns, rows in _tables(results):
        _write_table(title, columns, rows)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(results), indent=1) + "\n")
    return 0 if results.verified else 1


def to_json(results: Results) -> dict[str, Any]:
    rows = [asdict(row) for row in results.rows]
    return {
        "rows": [{key: row[key] for key in _JSON_ROW} for row in rows],
        "latency": [asdict(row) for row in results.latency],
        "link_ms": results.link_ms,
    }


# -- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m datadist_core.bench",
        description="Throughput and latency of pull and push, in turns with plain references. Lists take commas.",
    )
    add = parser.add_argument
    add("--backends", type=_names(CONTENDERS), default=tuple(CONTENDERS), help=_known(CONTENDERS))
    add("--block-bytes", type=_block_sizes, default=_block_sizes("4K,16K,64K,256K"), help="e.g. 4K,1M; 4K to 1M each")
    add("--pattern", type=_names(PATTERNS), default=tuple(PATTERNS), help=_known(PATTERNS))
    add("--op", type=_names(OPS), default=OPS, help=_known(OPS))
    add("--seconds", type=_seconds, default=1.0, help="per row (default 1)")
    add("--total-bytes", type=_total_bytes, default=64 << 20, help="per transfer (default 64M)")
    add("--json", type=_output_file, metavar="FILE", help="write the numbers there, too")
    return parser


def _known(known: Collection[str]) -> str:
    return f"of {', '.join(known)}; default all"


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
        return names

    return parse


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?)(iB|B)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 65536, 64K or 64KiB")
    return int(found[1]) * _UNITS[found[2]]


def _block_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(_bytes(part) for part in text.split(",")))
    for size in sizes:
        if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES or size % WORD_BYTES:
            raise argparse.ArgumentTypeError(f"{size} must be 4K to 1M and a multiple of {WORD_BYTES}")
    return sizes


def _total_bytes(text: str) -> int:
    size = _bytes(text)
    if size < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds greater than 0, at most 3600")
    return seconds


def _output_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


# -- output


def _progress() -> Progress:
    started_s = time.monotonic()

    def progress(text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started_s:5.0f} s] {text}\n")
        sys.stderr.flush()

    return progress


def _tables(results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    throughput = ["op", "pattern", "blocks", "name", "GB/s", "min", "max", "ratio", "verified"]
    latency = [[row.name, _size(row.block_bytes), f"{row.p50_us:.1f}", f"{row.p99_us:.1f}"] for row in results.latency]
    links = [[name, f"{ms:.2f}"] for name, ms in results.link_ms.items()]
    return [
        ("Throughput (median; ratio in the same round)", throughput, [_cells(row) for row in results.rows]),
        ("pull_blocks of one block", ["name", "block", "p50 us", "p99 us"], latency),
        ("link_clusters", ["name", "median ms"], links),
    ]


def _cells(row: Row) -> list[str]:
    blocks = f"{row.num_blocks} x {_size(row.block_bytes)}"
    speeds = [f"{speed:.2f}" for speed in (row.gb_per_s, row.gb_per_s_min, row.gb_per_s_max)]
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} {row.reference}"
    return [row.op, row.pattern, blocks, row.name, *speeds, ratio, "yes" if row.verified else "NO"]


def _size(num_bytes: int) -> str:
    for unit in ("M", "K"):
        if num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]} {unit}iB"
    return f"{num_bytes} B"


def _write_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    if not rows:
        return
    try:
        rich_console = importlib.import_module("rich.console")
        rich_table = importlib.import_module("rich.table")
    except ImportError:
        sys.stdout.write(plain_table(title, columns, rows))
        return
    table = rich_table.Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 120
    rich_console.Console(width=width).print(table)


def plain_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """The table as text with aligned columns."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([title, *(line.rstrip() for line in lines), "", ""])


if __name__ == "__main__":
    sys.exit(main())
