# SPDX-License-Identifier: Apache-2.0
"""P and D under a stream of transfers, stopped, continued, killed and started again at random moments.

    python -m datadist_core.testing.soak --seconds 600 --seed 7 --backend tcp

Every byte of every transfer that is reported as good is compared. When the time is over both ends are let run, must
serve each other again, and must hold what they held at the start: nothing lost, nothing wrong, nothing left over.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import TimedOut
from .parallel import eventually
from .ports import free_port
from .soak_end import FIXED, EndSetup, Holdings, RemoteEnd, StreamCounts

NUM_STREAM_THREADS = 3
DEADLINE_S = 2.0
#: How long after its deadline a transfer may end: what the engine grants a backend, and a busy machine.
LATE_S = 40.0
SETTLE_S = 60.0
ACTIONS = ("stop", "stop", "stop", "long stop", "kill", "both", "calm")
#: Heartbeats short enough that stops of a second or two cost the link.
HEARTBEAT_MS = 400


@dataclass(slots=True)
class SoakReport:
    """`problems` is empty after a good run."""

    actions: Counter[str] = field(default_factory=Counter)
    good: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, counts: StreamCounts) -> None:
        self.good += counts.good
        self.failed += counts.failed
        self.slowest_s = max(self.slowest_s, counts.slowest_s)
        self.problems += counts.wrong

    def __str__(self) -> str:
        actions = ", ".join(f"{count} x {name}" for name, count in sorted(self.actions.items()))
        failed = ", ".join(f"{count} x {name}" for name, count in sorted(self.failed.items())) or "none"
        problems = "\n".join(f"PROBLEM: {problem}" for problem in self.problems) or "nothing lost, wrong or left over"
        return (
            f"done to the ends: {actions}\n{self.good} good transfers, slowest {self.slowest_s:.1f} s; "
            f"failed: {failed}\n{problems}"
        )


class Soak:
    """One run. P listens, D links; both stream to each other. A context manager that kills both.

    Args:
        seed: of everything that is chosen. The moments still depend on the machine.
    """

    def __init__(self, seed: int, backend: str) -> None:
        self._random = random.Random(seed)
        self._report = SoakReport()
        options = {"heartbeat_interval": HEARTBEAT_MS}
        self._ends = {
            "P": RemoteEnd(EndSetup(1, seed, backend, f"127.0.0.1:{free_port()}", options=options)),
            "D": RemoteEnd(EndSetup(2, seed + 1, backend, f"127.0.0.1:{free_port()}", options=options)),
        }

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *exc: object) -> None:
        for end in self._ends.values():
            end.kill()

    def run(self, seconds: float) -> SoakReport:
        """Warm up, disturb for `seconds`, settle, compare."""
        before = self._warm_up()
        for name in self._ends:
            self._stream(name)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._act(self._random.choice(ACTIONS), self._random.choice("PD"))
            self._pause(0.05, 0.4)
        for name in self._ends:
            self._end_stream(name)
        self._check_service()
        if not self._report.problems:
            self._link_anew()
        self._check_holdings(before)
        return self._report

    def _warm_up(self) -> dict[str, Holdings]:
        """What both hold when they are linked and have served each other."""
        self._ends["D"].link(self._ends["P"])
        for name in self._ends:
            self._stream(name)
        self._pause(0.3, 0.3)
        for name in self._ends:
            self._end_stream(name)
        before: dict[str, Holdings] = {}

        def are_linked() -> bool:  # a machine that lets only one of them run costs the link
            p, d = self._ends["P"], self._ends["D"]
            served = _serves(d, p) and _serves(p, d)
            before.update({name: end.do("holdings") for name, end in self._ends.items()})
            return served and all(held.num_links == 1 for held in before.values())

        if not eventually(are_linked, SETTLE_S):
            raise TimedOut(f"the two ends do not serve each other within {SETTLE_S} s")
        return before

    def _stream(self, name: str) -> None:
        peer = self._ends["D" if name == "P" else "P"]
        self._ends[name].do("start_stream", peer.place, NUM_STREAM_THREADS, DEADLINE_S)

    def _end_stream(self, name: str) -> None:
        try:
            self._report.add(self._ends[name].do("stop_stream", DEADLINE_S + LATE_S))
        except RuntimeError as error:
            self._report.problems.append(f"{name}: {error}")

    def _act(self, action: str, name: str) -> None:
        self._report.actions[action] += 1
        if action == "kill":
            self._restart(name)
        elif action == "stop":
            self._stop([name], 0.05, 0.8)
        elif action == "long stop":
            self._stop([name], 1.5, 3.0)
        elif action == "both":
            self._stop(["P", "D"], 0.05, 2.0)
        else:
            self._pause(0.1, 0.5)

    def _stop(self, names: Sequence[str], low_s: float, high_s: float) -> None:
        for name in names:
            self._ends[name].signal(signal.SIGSTOP)
        self._pause(low_s, high_s)
        for name in names:
            self._ends[name].signal(signal.SIGCONT)

    def _restart(self, name: str) -> None:
        """Kill it, and start another one with the same id at the same port; it streams at once."""
        old = self._ends[name]
        old.kill()
        setup, place = old.setup, old.place
        self._ends[name] = RemoteEnd(
            EndSetup(setup.cluster_id, setup.seed, setup.backend, f"{place.host}:{place.port}", options=setup.options)
        )
        self._stream(name)

    def _pause(self, low_s: float, high_s: float) -> None:
        time.sleep(self._random.uniform(low_s, high_s))

    def _check_service(self) -> None:
        """Both serve each other again, without a restart of either."""
        p, d = self._ends["P"], self._ends["D"]
        for own, peer in ((d, p), (p, d)):
            if not eventually(lambda own=own, peer=peer: _serves(own, peer), SETTLE_S):  # type: ignore[misc]
                self._report.problems.append(f"cluster {own.setup.cluster_id} cannot pull after the soak")

    def _link_anew(self) -> None:
        """The end of a link is when a backend lets go of what it kept of those that never came up."""
        p, d = self._ends["P"], self._ends["D"]
        d.do("unlink", p.place)
        d.link(p)

    def _check_holdings(self, before: dict[str, Holdings]) -> None:
        """A restarted end holds no more than the one before it did."""
        for name, end in self._ends.items():
            if not eventually(lambda end=end, name=name: not _beyond(end, before[name]), SETTLE_S):  # type: ignore[misc]
                self._report.problems.append(f"{name} holds more than at the start: {_beyond(end, before[name])}")


def _serves(own: RemoteEnd, peer: RemoteEnd) -> bool:
    own.do("link", peer.place)
    return bool(own.do("pull", peer.place, list(FIXED)) == "LLM_SUCCESS")


def _beyond(end: RemoteEnd, before: Holdings) -> str:
    holdings: Holdings = end.do("holdings")
    return holdings.beyond(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if anything was lost, wrong or left over."""
    parser = argparse.ArgumentParser(prog="python -m datadist_core.testing.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to disturb the two ends")
    parser.add_argument("--seed", type=int, default=1, help="of what is done to them")
    parser.add_argument("--backend", default="auto", help="transfer_backend of both")
    options = parser.parse_args(arguments)
    try:
        with Soak(options.seed, options.backend) as soak:
            report = soak.run(options.seconds)
    except TimedOut as error:
        report = SoakReport(problems=[f"an end does not answer any more: {error}"])
    sys.stdout.write(f"{report}\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
