# SPDX-License-Identifier: Apache-2.0
"""Throughput and ratios over the block size, as a picture. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import size_text
from .results import Results, Row

INSTALL = 'pip install "vllm-datadist[plot]"'
_COLUMN_INCHES, _ROW_INCHES = 4.6, 3.8
_DASHED = ("stream", "memcpy", "socket")


def can_plot() -> bool:
    try:
        return importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # it is marked as absent
        return False


def plot(results: Results, file: Path) -> None:
    """A PNG: a column for each operation and pattern, GB/s above, times the yardstick below."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    shades = pyplot.get_cmap("tab20")  # there are more contenders than usual colours
    colours = {name: shades(i % 20) for i, name in enumerate(dict.fromkeys(row.name for row in results.rows))}
    kinds = list(dict.fromkeys((row.op, row.pattern) for row in results.rows))
    size = (_COLUMN_INCHES * len(kinds), 2 * _ROW_INCHES)
    figure, axes = pyplot.subplots(2, len(kinds), figsize=size, squeeze=False, sharex=True)
    yardstick = _yardstick(results)
    for column, (op, pattern) in enumerate(kinds):
        rows = [row for row in results.rows if (row.op, row.pattern) == (op, pattern)]
        _draw(axes[0][column], f"{op}, {pattern}", "GB/s", rows, colours, lambda row: row.gb_per_s)
        _draw(axes[1][column], "", f"times {yardstick}", rows, colours, lambda row: row.ratios.get(yardstick))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=7, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)


def _yardstick(results: Results) -> str:
    names = {row.name for row in results.rows}
    return next((name for name in ("stream", "memcpy", "socket") if name in names), "stream")


def _draw(
    axis: Any,
    title: str,
    unit: str,
    rows: list[Row],
    colours: dict[str, Any],
    value: Callable[[Row], float | None],
) -> None:
    for name, colour in colours.items():
        points = [(row.block_bytes, value(row)) for row in rows if row.name == name]
        shown = [(size, height) for size, height in points if height is not None]
        if shown:
            axis.plot(
                *zip(*shown, strict=True), "--" if name in _DASHED else "-", color=colour, marker="o", ms=3, label=name
            )
    sizes = sorted({row.block_bytes for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [size_text(size) for size in sizes])
    axis.set_title(title)
    axis.set_ylabel(unit)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
