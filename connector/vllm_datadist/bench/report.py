# SPDX-License-Identifier: Apache-2.0
"""Results as a table, with the bars, and as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from datadist_core.bench.report import Table, bars_table, size_text, write_table

from .results import Results, Row, check_bars

_COLUMNS = [
    "tokens", "KV cache", "name", "added ms", "min", "max", "x nixl", "request", "own cache", "first ever", "verified",
]  # fmt: skip


def to_json(results: Results) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in results.rows],
        "bytes_over": {name: list(backends) for name, backends in results.bytes_over.items()},
        "skipped": results.skipped,
        "failed": results.failed,
    }


def write_report(results: Results) -> None:
    """On standard output."""
    write_table(results_table(results))
    sys.stdout.write("\n".join([*_facts(results), "", ""]))
    write_table(bars_table(check_bars(results)))


def results_table(results: Results) -> Table:
    rows = sorted(results.rows, key=lambda row: row.tokens)  # stable: contenders keep their order
    return Table(
        "Time that a hand-off adds at D (median; all times in ms; x: times NixlConnector's)",
        _COLUMNS,
        [_cells(results, row) for row in rows],
    )


def _cells(results: Results, row: Row) -> list[str]:
    ratio = results.ratio(row)
    times = [f"{ms:.1f}" for ms in (row.added_ms, row.added_ms_min, row.added_ms_max)]
    whole = [f"{ms:.1f}" for ms in (row.request_ms, row.cached_ms)]
    first = "" if row.first_request_ms is None else f"{row.first_request_ms:.0f}"
    return [
        str(row.tokens),
        size_text(row.kv_bytes),
        row.name,
        *times,
        "" if ratio is None else f"{ratio:.2f}",
        *whole,
        first,
        "yes" if row.verified else "NO",
    ]


def _facts(results: Results) -> list[str]:
    return [
        *(f"{name}: bytes moved over {', '.join(over)}." for name, over in results.bytes_over.items() if over),
        *(f"Skipped {name}: {reason}" for name, reason in results.skipped.items()),
        *(f"FAILED {name}: {reason}" for name, reason in results.failed.items()),
    ]
