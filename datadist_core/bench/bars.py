# SPDX-License-Identifier: Apache-2.0
"""The bars: what the transfers are meant to reach, and what one run of the bench says to that.

All are ratios of numbers of the same run. Where a bar holds for several sizes, patterns or directions, the worst one
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .contenders import ONE_THREAD, SAME_HOST_NAMES
from .results import Group, Results, Row, group_of

_KIB = 1 << 10
SCATTERED = ("random", "runs")
NOISE_OF_A_CORE = 0.01
"""Of processor time; what a process uses that does nothing varies by about that."""
GAINS = 1.1
AS_FAST = 0.95
"""Less is slower; so much lies between two runs of the same copy."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `met` is None if this run does not tell, and `found` says why."""

    what: str
    needed: str
    found: str
    met: bool | None


def check_bars(results: Results) -> list[Bar]:
    return [
        *_same_host_bars(results),
        _helpers_bar(results),
        _single_copy_bar(results),
        *_tcp_bars(results),
        _latency_bar(results),
        _link_bar(results),
        _outside_copy_bar(results),
        _owner_cpu_bar(results),
        _python_path_bar(results),
    ]


def _same_host_bars(results: Results) -> list[Bar]:
    def best(names: Sequence[str], group: Group, reference: str) -> Row | None:
        rows = [row for name in names if (row := results.find(name, group)) and reference in row.ratios]
        return max(rows, key=lambda row: row.ratios[reference], default=None)

    def bar(what: str, names: Sequence[str], reference: str, needed: float, wanted: Callable[[Group], bool]) -> Bar:
        rows = [row for group in results.groups() if wanted(group) and (row := best(names, group, reference))]
        return _ratio_bar(results, what, reference, needed, rows)

    one, any_of_ours = (ONE_THREAD, "cma"), SAME_HOST_NAMES
    return [
        bar("one copying thread, scattered, 16 KiB and more", one, "stream", 0.85, lambda g: _is_scattered(g, 16)),
        bar("one copying thread, scattered, 4 KiB", one, "stream", 0.7, lambda g: _is_scattered(g, 4, 4)),
        *(
            bar(f"best same-host backend, random, {kib} KiB", any_of_ours, peer, needed, _random_of(kib))
            for peer in ("nixl-default", "nixl")
            for kib, needed in ((64, 5), (4, 8))
        ),
    ]


def _helpers_bar(results: Results) -> Bar:
    """Two rows of the same rounds, scattered blocks; the worst group decides."""
    what, needed = "more copying threads, when processors are idle", f">= {GAINS:g} x one"
    pairs = [
        (several.gb_per_s / one.gb_per_s, several, one)
        for group in results.groups()
        if group.pattern in SCATTERED
        and (several := results.find("shm", group) or results.find("auto", group))
        and (one := results.find(ONE_THREAD, group))
    ]
    if not pairs:
        return Bar(what, needed, "not measured in this run", None)
    ratio, several, one = min(pairs, key=lambda pair: pair[0])
    group = group_of(several)
    found = (
        f"{ratio:.2f} x: {several.name} {several.gb_per_s:.2f}, {one.name} {one.gb_per_s:.2f} GB/s "
        f"({group.op} {group.pattern} {group.block_bytes // _KIB} KiB)"
    )
    return Bar(what, needed, found, ratio >= GAINS)


def _tcp_bars(results: Results) -> list[Bar]:
    def bar(what: str, reference: str, needed: float, patterns: Sequence[str]) -> Bar:
        groups = [group for group in results.groups() if group.pattern in patterns]
        rows = [row for group in groups if (row := results.find("tcp", group)) and reference in row.ratios]
        return _ratio_bar(results, what, reference, needed, rows)

    return [
        bar("tcp, all patterns", "socket", 0.9, (*SCATTERED, "contiguous")),
        bar("tcp, random", "mooncake", 2, ("random",)),
        bar("tcp, random", "nixl-tcp", 3, ("random",)),
    ]


def _is_scattered(group: Group, at_least_kib: int, at_most_kib: int = 1 << 30) -> bool:
    return group.pattern in SCATTERED and at_least_kib * _KIB <= group.block_bytes <= at_most_kib * _KIB


def _random_of(kib: int) -> Callable[[Group], bool]:
    return lambda group: group.pattern == "random" and group.block_bytes == kib * _KIB


def _ratio_bar(results: Results, what: str, reference: str, needed: float, rows: Sequence[Row]) -> Bar:
    """The worst of `rows` decides."""
    needed_text = f">= {needed:g} x {reference}"
    if not rows:
        return Bar(what, needed_text, _why_missing(results, reference), None)
    worst = min(rows, key=lambda row: row.ratios[reference])
    group = Group(worst.op, worst.pattern, worst.block_bytes, worst.num_blocks)
    other = results.find(reference, group)
    theirs = "?" if other is None else f"{other.gb_per_s:.2f}"
    found = (
        f"{worst.ratios[reference]:.2f} x: {worst.name} {worst.gb_per_s:.2f}, {reference} {theirs} GB/s "
        f"({worst.op} {worst.pattern} {worst.block_bytes // _KIB} KiB)"
    )
    return Bar(what, needed_text, found, worst.ratios[reference] >= needed)


def _why_missing(results: Results, name: str) -> str:
    for reasons in (results.skipped, results.failed):
        if name in reasons:
            return f"not measured: {name}: {reasons[name].splitlines()[0]}"
    return "not measured in this run"


def _single_copy_bar(results: Results) -> Bar:
    what, needed = "a contiguous run, pull", f"as fast as one copy (>= {AS_FAST:g} x, noise)"
    found = max(results.findings.single_copy, key=lambda each: each.ratio, default=None)
    if found is None:
        return Bar(what, needed, "not measured in this run", None)
    text = f"{found.ratio:.2f} x: {found.name} {found.gb_per_s:.2f}, one {found.copy} {found.copy_gb_per_s:.2f} GB/s"
    return Bar(what, needed, text, found.ratio >= AS_FAST)


def _latency_bar(results: Results) -> Bar:
    what, needed = "pull_blocks of one 64 KiB block, p50", "<= NIXL's"
    ours = [row for name in SAME_HOST_NAMES if (row := results.latency_of(name, 64 * _KIB))]
    theirs = results.latency_of("nixl", 64 * _KIB)
    if not ours or theirs is None:
        return Bar(what, needed, _why_missing(results, "nixl"), None)
    best = min(ours, key=lambda row: row.p50_us)
    found = f"{best.name} {best.p50_us:.1f} us, nixl {theirs.p50_us:.1f} us"
    return Bar(what, needed, found, best.p50_us <= theirs.p50_us)


def _link_bar(results: Results) -> Bar:
    what, needed = "link_clusters on one host", "<= 20 ms"
    names = [name for name in ("auto", "shm", "cma", "tcp") if name in results.link_ms]
    if not names:
        return Bar(what, needed, "not measured in this run", None)
    slowest = max(names, key=lambda name: results.link_ms[name])
    found = ", ".join(f"{name} {results.link_ms[name]:.1f}" for name in names) + " ms"
    return Bar(what, needed, found, results.link_ms[slowest] <= 20)


def _outside_copy_bar(results: Results) -> Bar:
    what, needed = "pull_blocks of 16384 blocks, time outside the copy", "< 15 %"
    found = min(results.findings.outside_copy, key=lambda each: each.share, default=None)
    if found is None:
        return Bar(what, needed, "not measured in this run", None)
    text = (
        f"{100 * found.share:.1f} %: {found.name} {found.pull_ms:.2f} ms, the copy alone {found.copy_ms:.2f} ms "
        f"({found.num_blocks} x {found.block_bytes // _KIB} KiB)"
    )
    return Bar(what, needed, text, found.share < 0.15 if found.num_blocks >= 16384 else None)


def _owner_cpu_bar(results: Results) -> Bar:
    what = "the owner's processor time in a one-sided pull"
    needed = f"noise (<= {100 * NOISE_OF_A_CORE:g} % of a core)"
    ours = [each for each in results.findings.owner_cpu if each.name in SAME_HOST_NAMES]
    if not ours:
        return Bar(what, needed, "not measured in this run", None)
    worst = max(ours, key=lambda each: each.pulled - each.idle)
    text = f"{worst.name}: {100 * worst.pulled:.2f} % of a core, {100 * worst.idle:.2f} % when not pulled from"
    return Bar(what, needed, text, worst.pulled - worst.idle <= NOISE_OF_A_CORE)


def _python_path_bar(results: Results) -> Bar:
    """Without the compiled kernel, `memcpy` is one call from Python for each block."""
    what, needed = "without the compiled kernel, scattered", ">= 0.9 x memcpy from Python"
    if results.findings.kernel_is_native:
        return Bar(what, needed, "does not apply: the kernel is compiled here", None)
    groups = [group for group in results.groups() if group.pattern in SCATTERED]
    rows = [row for group in groups if (row := results.find("shm", group) or results.find("auto", group))]
    return _ratio_bar(results, what, "memcpy", 0.9, [row for row in rows if "memcpy" in row.ratios])
