# SPDX-License-Identifier: Apache-2.0
"""Added time over the prompt's length, as a picture. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .results import BAR_RATIO, Results, Row


def plot(results: Results, file: Path) -> None:
    """A PNG: milliseconds on the left, times NixlConnector's on the right if that was measured."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    _draw(left, results, "added at D, ms", lambda row: row.added_ms if row.added_ms > 0 else None)
    _draw(right, results, "times NixlConnector's", results.ratio)
    right.axhline(BAR_RATIO, color="grey", ls=":")
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="lower center", ncols=max(1, len(labels)), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, results: Results, unit: str, value: Callable[[Row], float | None]) -> None:
    for name in dict.fromkeys(row.name for row in results.rows):
        points = [(row.tokens, value(row)) for row in results.rows if row.name == name]
        shown = sorted((tokens, height) for tokens, height in points if height is not None)
        if shown:
            axis.plot(*zip(*shown, strict=True), marker="o", ms=4, label=name)
    tokens = sorted({row.tokens for row in results.rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [str(each) for each in tokens])
    axis.set_xlabel("prompt tokens")
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)
