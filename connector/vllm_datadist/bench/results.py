# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what it says to the bars. Times are in milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from datadist_core.bench.bars import Bar

from .contenders import NIXL_CONNECTOR, OUR_NAMES

BAR_TOKENS = 513
BAR_RATIO = 0.2
BAR_FIRST_MS = 200.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One hand-off.

    Attributes:
        request_ms: D's time to the first token with a ticket, the KV cache being at P.
        cached_ms: of the same request again, a few times, the KV cache being in D's own prefix cache.
        problem: why this sample does not count as right; "" if the text is P's and the KV cache came from P.
    """

    request_ms: float
    cached_ms: tuple[float, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one length: medians over its samples, `added_ms` with the smallest and largest.

    Attributes:
        kv_bytes: of all layers, of the prompt's tokens.
        added_ms: a sample's `request_ms` less the median of all samples' `cached_ms`.
        first_request_ms: `request_ms` of the first hand-off ever between these servers, at the one length where it was
            made. With several rounds the median of their first ones.
    """

    name: str
    tokens: int
    kv_bytes: int
    added_ms: float
    added_ms_min: float
    added_ms_max: float
    request_ms: float
    cached_ms: float
    first_request_ms: float | None
    num_samples: int
    verified: bool


@dataclass(slots=True)
class Results:
    """Attributes:
    bytes_over: by contender of ours, which backends moved bytes.
    skipped: contenders that could not be started, with the reason.
    failed: those that broke down, or whose samples were not right, with the first reason.
    """

    rows: list[Row] = field(default_factory=list)
    bytes_over: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def find(self, name: str, tokens: int) -> Row | None:
        return next((row for row in self.rows if (row.name, row.tokens) == (name, tokens)), None)

    def ratio(self, row: Row) -> float | None:
        """How many times NixlConnector's added time this row's is; None if that was not measured or is nothing."""
        theirs = self.find(NIXL_CONNECTOR, row.tokens)
        return None if theirs is None or theirs.added_ms <= 0 else row.added_ms / theirs.added_ms


def make_row(name: str, tokens: int, kv_bytes: int, samples: Sequence[Sample], first_ms: Sequence[float]) -> Row:
    """`samples`: one or more. `first_ms`: of each round, if the first hand-offs had this length."""
    cached_ms = statistics.median(each for sample in samples for each in sample.cached_ms)
    added = [sample.request_ms - cached_ms for sample in samples]
    return Row(
        name=name,
        tokens=tokens,
        kv_bytes=kv_bytes,
        added_ms=statistics.median(added),
        added_ms_min=min(added),
        added_ms_max=max(added),
        request_ms=statistics.median(sample.request_ms for sample in samples),
        cached_ms=cached_ms,
        first_request_ms=statistics.median(first_ms) if first_ms else None,
        num_samples=len(samples),
        verified=not any(sample.problem for sample in samples),
    )


def check_bars(results: Results) -> list[Bar]:
    """For what a user gets: `auto`, or the first of ours that was measured."""
    name = next((row.name for row in results.rows if row.name == "auto"), None)
    name = name or next((row.name for row in results.rows if row.name in OUR_NAMES), None)
    rows = [row for row in results.rows if row.name == name]
    return [_added_bar(results, rows), _first_bar(rows)]


def _added_bar(results: Results, rows: Sequence[Row]) -> Bar:
    """The worst length decides."""
    what = f"time that a hand-off adds at D, {BAR_TOKENS} tokens and more"
    needed = f"<= {BAR_RATIO:g} x NixlConnector's"
    ratios = {
        row.tokens: ratio for row in rows if row.tokens >= BAR_TOKENS and (ratio := results.ratio(row)) is not None
    }
    if not ratios:
        return Bar(what, needed, _why_missing(results), None)
    worst = max(ratios, key=lambda tokens: ratios[tokens])
    ours, theirs = (results.find(name, worst) for name in (rows[0].name, NIXL_CONNECTOR))
    if ours is None or theirs is None or not (ours.verified and theirs.verified):
        return Bar(what, needed, "a text was wrong, or the KV cache did not come from P", None)
    found = (
        f"{ratios[worst]:.2f} x: {ours.name} {ours.added_ms:.1f}, nixl {theirs.added_ms:.1f} ms ({worst} tokens; "
        f"smallest {ours.added_ms_min:.1f} and {theirs.added_ms_min:.1f})"
    )
    return Bar(what, needed, found, ratios[worst] <= BAR_RATIO)


def _first_bar(rows: Sequence[Row]) -> Bar:
    what = "first hand-off ever, link included, against later ones of the same length"
    needed = f"<= {BAR_FIRST_MS:g} ms more"
    for row in rows:
        if row.first_request_ms is not None:
            more_ms = row.first_request_ms - row.request_ms
            found = f"{more_ms:.0f} ms more: {row.name} {row.first_request_ms:.0f}, later {row.request_ms:.0f} ms"
            return Bar(what, needed, f"{found} ({row.tokens} tokens)", more_ms <= BAR_FIRST_MS)
    return Bar(what, needed, "not measured in this run", None)


def _why_missing(results: Results) -> str:
    for reasons in (results.skipped, results.failed):
        if NIXL_CONNECTOR in reasons:
            return f"not measured: nixl: {reasons[NIXL_CONNECTOR].splitlines()[0]}"
    return "not measured in this run"
