# SPDX-License-Identifier: Apache-2.0
"""No file can be opened any more, the clock jumps, processes stop and go on: what works goes on, the rest recovers."""

from __future__ import annotations

import ast
import json
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import datadist_core
from datadist_core.testing.parallel import eventually
from datadist_core.testing.soak import Soak
from datadist_core.testing.soak_end import FIXED, EndSetup, RemoteEnd, SoakEnd
from datadist_core.tests.jumping_clock import keep_jumping, run_under_a_jumping_clock

HEARTBEAT = {"heartbeat_interval": 10_000}
"""Nobody is given up here because a busy machine does not let it run."""
P, D, NEWCOMER = 1, 2, 3


def _ends(stack: ExitStack, backend: str) -> tuple[RemoteEnd, RemoteEnd, RemoteEnd]:
    """P and D, linked, and one that is not linked yet; everything that a process starts once has been started."""
    setups = [EndSetup(i, i, backend, "127.0.0.1:0", options=HEARTBEAT) for i in (P, D, NEWCOMER)]
    p, d, newcomer = (stack.enter_context(RemoteEnd(setup)) for setup in setups)
    newcomer.link(p)
    newcomer.do("unlink", p.place)
    d.link(p)
    return p, d, newcomer


@pytest.mark.slow
@pytest.mark.parametrize(("who", "backend"), [("listener", "tcp"), ("dialler", "auto")])
def test_without_a_free_descriptor_links_live_on_and_new_ones_come_later(who: str, backend: str) -> None:
    """With 0 to 7 descriptors left: so that every step of linking is the first that fails, once."""
    with ExitStack() as stack:
        p, d, newcomer = _ends(stack, backend)
        short = p if who == "listener" else newcomer
        before = short.do("holdings")
        outcomes = set()
        for num_left in range(8):
            short.do("use_up_files", num_left)
            status, _ = newcomer.do("link", p.place, 400)
            outcomes.add(status)
            # Late in a process that does not get to run.
            assert status == "LLM_SUCCESS" or eventually(lambda: newcomer.do("link_failure", p.place) != "None"), (
                num_left
            )
            assert d.do("pull", p.place, list(FIXED)) == "LLM_SUCCESS", num_left
            assert d.do("push", p.place, 3) == "LLM_SUCCESS", num_left
            short.do("give_files_back")
            newcomer.do("unlink", p.place, True)
        assert "LLM_SUCCESS" not in outcomes or len(outcomes) > 1, "nothing was short: this showed nothing"
        assert eventually(lambda: not short.do("holdings").beyond(before)), short.do("holdings").beyond(before)
        newcomer.link(p)
        assert newcomer.do("pull", p.place, list(FIXED)) == "LLM_SUCCESS"


@pytest.mark.slow
def test_without_a_free_descriptor_nobody_spins() -> None:
    """A connection that cannot be accepted stays readable: who asked again and again would burn a processor."""
    with ExitStack() as stack:
        p, d, newcomer = _ends(stack, "auto")
        p.do("use_up_files", 0)
        status, _ = newcomer.do("link", p.place, 300)
        assert status != "LLM_SUCCESS"
        begun_s = p.do("cpu_s")
        threading.Event().wait(1.0)
        assert p.do("cpu_s") - begun_s < 0.5
        assert d.do("pull", p.place, list(FIXED)) == "LLM_SUCCESS"
        p.do("give_files_back")
        assert eventually(lambda: newcomer.do("link", p.place, 1000)[0] == "LLM_SUCCESS")


# --- stopped and killed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "seed"), [("auto", 3), ("tcp", 3)])
def test_b15_b17_soak_with_stops_and_kills_of_either_end(backend: str, seed: int) -> None:
    """The short form of `python -m datadist_core.testing.soak`."""
    with Soak(seed, backend) as soak:
        report = soak.run(5.0)
    assert report.problems == [], str(report)
    assert report.good > 20, str(report)
    assert sum(report.actions.values()) >= 1, str(report)  # 5 or more, but for a busy machine


# --- the clock ------------------------------------------------------------------------------------------------------

ROOT = Path(datadist_core.__file__).parent
PACKAGES = (ROOT, ROOT.parent / "connector" / "vllm_datadist")
#: They tell users when something was measured or happened, or how long a certificate is valid, and wait for nothing.
MAY_LOOK_AT_THE_WALL_CLOCK = {"bench", "security_check.py", "trace.py"}
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
CLOCK_REALTIME = {"CLOCK_REALTIME", "CLOCK_TAI"}


def wall_clock_uses(source: str) -> list[int]:
    """Lines that ask for the time of day, under whatever name it was imported."""
    tree = ast.parse(source)
    imported: dict[str, tuple[str | None, str]] = {}
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {(alias.asname or alias.name): (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name): alias.name for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (modules.get(base, base), node.attr) in WALL_CLOCKS or node.attr in CLOCK_REALTIME:
                found.append(node.lineno)
        elif isinstance(node, ast.Name) and imported.get(node.id, ("", ""))[0] == "time":
            name = imported[node.id][1]
            found += [node.lineno] if ("time", name) in WALL_CLOCKS or name in CLOCK_REALTIME else []
    return found


#: Only files with one of these are worth a closer look.
SUSPICIOUS = re.compile(r"\btime\.time|time_ns|localtime|gmtime|datetime|\btoday\b|CLOCK_|from time import|time as ")


def wall_clock_uses_of(path: Path) -> list[int]:
    source = path.read_text()
    return wall_clock_uses(source) if SUSPICIOUS.search(source) else []


def test_nobody_waits_by_the_wall_clock() -> None:
    uses = [
        f"{path.relative_to(package.parent)}:{line}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if not {"tests", *MAY_LOOK_AT_THE_WALL_CLOCK} & set(path.relative_to(package).parts)
        for line in wall_clock_uses_of(path)
    ]
    assert uses == []


def test_no_c_code_reads_the_wall_clock() -> None:
    words = ("CLOCK_REALTIME", "gettimeofday", "pthread_cond_timedwait", "sem_timedwait", "time(NULL)")
    for path in sorted((ROOT / "_copy").glob("*.[ch]")):
        assert [word for word in words if word in path.read_text()] == [], path.name


@pytest.mark.parametrize(
    "source",
    [
        "import time\nend = time.time() + 5",
        "from time import time\nend = time() + 5",
        "from time import time as now\nend = now()",
        "import time as t\nend = t.time()",
        "import datetime\nend = datetime.datetime.now()",
        "from datetime import datetime\nend = datetime.utcnow()",
        "import time\nx = time.clock_gettime(time.CLOCK_REALTIME)",
    ],
)
def test_a_use_of_the_wall_clock_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert wall_clock_uses_of(tmp_path / "module.py") == [2]


def main_under_a_jumping_clock() -> None:
    """In a child whose C library adds what `jump_by` was told. The system's own clock is never touched."""
    keep_jumping()
    backend = "datadist_core.testing.faults:FaultyTcp"
    slow = {"FaultyTcp": {"fault": {"kind": "delay", "seconds": 0.5}}}
    stuck = {"FaultyTcp": {"fault": {"kind": "drop", "nth": 2}}}  # the first one is the check of the link
    _check_moves(backend, slow, deadline_s=60.0, expected="LLM_SUCCESS", at_most_s=40.0)
    _check_moves(backend, stuck, deadline_s=1.0, expected="LLM_TIMEOUT", at_most_s=40.0)
    _check_heartbeats()


def _check_moves(backend: str, options: dict[str, Any], deadline_s: float, expected: str, at_most_s: float) -> None:
    p = SoakEnd(EndSetup(P, 1, backend, "127.0.0.1:0"))
    d = SoakEnd(EndSetup(D, 2, backend, options={"global_resource_config": json.dumps(options)}))
    status, reason = d.link(p.place(), 20_000)
    assert status == "LLM_SUCCESS", reason
    begun_s = time.monotonic()
    found = d.pull(p.place(), list(FIXED), deadline_s)
    assert found == expected, found
    assert time.monotonic() - begun_s < at_most_s
    assert time.monotonic() - begun_s > 0.4, "too early, or the fault was not there"
    d.close()
    p.close()


def _check_heartbeats() -> None:
    """A link that lives is not given up, though days pass."""
    beat = {"heartbeat_interval": 1000}  # looked at four times in it, by a clock that jumps eight times between looks
    p = SoakEnd(EndSetup(P, 1, "tcp", "127.0.0.1:0", options=beat))
    d = SoakEnd(EndSetup(D, 2, "tcp", options=beat))
    assert d.link(p.place(), 20_000)[0] == "LLM_SUCCESS"
    threading.Event().wait(1.5)
    assert d.is_linked(p.place())
    assert d.pull(p.place(), list(FIXED)) == "LLM_SUCCESS"
    d.close()
    p.close()


@pytest.mark.slow
def test_jumps_of_the_clock_change_nothing(tmp_path: Path) -> None:
    """Neither too early nor too late: deadlines of transfers and links, and heartbeats."""
    run_under_a_jumping_clock(main_under_a_jumping_clock, tmp_path)
