# SPDX-License-Identifier: Apache-2.0
"""`python -m fuzz`: fuzz the targets one after the other, or replay inputs. See `fuzz/README.md`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .limits import limited
from .target import NAMES, PLANTED, ROOT, corpus_of, inputs_of, load

_MAX_INPUT_BYTES = 4096
_RSS_LIMIT_MB = 2048
#: Of the whole machine's time: libFuzzer ends what hangs. What is merely slow is found by `limits`.
_HANG_S = 60
_START_S = 180.0


@dataclass(slots=True)
class Outcome:
    """Of one target. `coverage`: places in the code that were reached, as libFuzzer counts them."""

    target: str
    executions: int = 0
    coverage: int = 0
    finding: str = ""
    input_path: Path | None = None
    new_inputs: list[Path] = field(default_factory=list)


def fuzz(name: str, seconds: int, work: Path) -> Outcome:
    """Fuzz one target in a process of its own. New inputs and a finding's input are left in `work`."""
    begun, fresh = work / "begun", work / "new"
    for folder in (begun, fresh):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs_of(name)):
        (begun / f"{number:04}").write_bytes(data)
    command = [
        *(sys.executable, "-m", "fuzz.engine", name),
        f"-max_total_time={seconds}",
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-rss_limit_mb={_RSS_LIMIT_MB}",
        f"-timeout={_HANG_S}",
        f"-artifact_prefix={work}/finding-",
        "-print_final_stats=1",
        *(str(fresh), str(begun)),
    ]
    done = subprocess.run(
        command, cwd=ROOT.parent, capture_output=True, text=True, errors="replace", check=False,
        timeout=seconds + _START_S + _HANG_S,
    )  # fmt: skip
    return _outcome(name, done, work)


def _outcome(name: str, done: subprocess.CompletedProcess[str], work: Path) -> Outcome:
    log = done.stderr + done.stdout
    outcome = Outcome(name, new_inputs=sorted((work / "new").iterdir()))
    if counted := re.findall(r"number_of_executed_units: (\d+)", log):
        outcome.executions = int(counted[-1])
    if covered := re.findall(r"cov: (\d+)", log):
        outcome.coverage = int(covered[-1])
    outcome.input_path = next(iter(sorted(work.glob("finding-*"))), None)
    if done.returncode or outcome.input_path is not None:
        outcome.finding = _last_lines(log)
    return outcome


def _last_lines(log: str) -> str:
    lines = log.splitlines()
    for sign in ("Uncaught Python exception", "ERROR:"):
        if found := [i for i, line in enumerate(lines) if sign in line]:
            return "\n".join(lines[found[0] :][:40])
    return "\n".join(lines[-25:])


def replay(name: str, data: bytes) -> None:
    """One input, without atheris. Raises what is found."""
    limited(load(name).run, data)


def minimise(name: str, folders: Sequence[Path], work: Path) -> list[Path]:
    """The fewest inputs out of these folders that reach as much of the code."""
    kept, again = work / "kept", work / "again"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    command = [sys.executable, "-m", "fuzz.engine", name]
    again.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    again.chmod(0o700)
    subprocess.run(
        [*command, "-merge=1", f"-max_len={_MAX_INPUT_BYTES}", kept, *folders],
        cwd=ROOT.parent,
        env={**os.environ, "DATADIST_FUZZ_AGAIN": str(again)},
        capture_output=True,
        check=True,
        timeout=600,
    )
    return sorted(kept.iterdir())


def _update(name: str, work: Path) -> int:
    """The corpus becomes the fewest inputs that reach as much; those of fixed findings (`finding-*`) stay."""
    corpus = corpus_of(name)
    corpus.mkdir(exist_ok=True, parents=True)
    kept = minimise(name, [work / "new", work / "begun"], work)
    for old in corpus.iterdir():
        if not old.name.startswith("finding-"):
            old.unlink()
    for path in kept:
        shutil.copy(path, corpus / path.name[:16])
    return len(kept)


def _report(outcome: Outcome) -> str:
    text = f"{outcome.target:<8} {outcome.executions:>9} executions, {outcome.coverage:>5} places reached"
    if not outcome.finding:
        return f"{text}, no finding"
    where = f"\npython -m fuzz --replay {outcome.input_path} {outcome.target}" if outcome.input_path else ""
    return f"{text}, FINDING\n{outcome.finding}{where}"


def _fuzz_all(names: Sequence[str], seconds: int, jobs: int, update: bool, keep: Path) -> int:
    def one(name: str) -> Outcome:
        work = keep / name
        shutil.rmtree(work, ignore_errors=True)
        return fuzz(name, max(1, seconds // len(names)), work)

    status = 0
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(one, names):
            sys.stdout.write(_report(outcome) + "\n")
            if update and not outcome.finding:
                sys.stdout.write(f"{outcome.target:<8} {_update(outcome.target, keep / outcome.target)} inputs kept\n")
            sys.stdout.flush()
            status = status or bool(outcome.finding)
    return status


def _replay_all(names: Sequence[str]) -> int:
    """The kept inputs and the seeds."""
    status = 0
    inputs_by_name = {name: inputs_of(name) for name in names}  # all imports come before memory is watched
    for name, inputs in inputs_by_name.items():
        for data in inputs:
            try:
                replay(name, data)
            except BaseException:
                traceback.print_exc()
                sys.stderr.write(f"in {name}: {data!r}\n")
                status = 1
        sys.stdout.write(f"{name:<8} {len(inputs):>5} inputs replayed\n")
    return status


def _replay_file(name: str, path: Path) -> int:
    try:
        replay(name, path.read_bytes())
    except BaseException:
        traceback.print_exc()
        return 1
    sys.stdout.write("no finding\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*NAMES, PLANTED, []], help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--seconds", type=int, default=600, help="in all (600)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at the same time (1)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one input, without atheris")
    parser.add_argument("--replay-all", action="store_true", help="all inputs that are kept, without atheris")
    parser.add_argument("--update", action="store_true", help="put what is new into the corpus, minimised")
    parser.add_argument("--work", type=Path, help="where findings and new inputs are left (a temporary folder)")
    options = parser.parse_args(arguments)
    names = options.targets or list(NAMES)
    if options.replay_all:
        return _replay_all(names)
    if options.replay is not None:
        return _replay_file(names[0], options.replay)
    work = (options.work or Path(tempfile.mkdtemp(prefix="datadist-fuzz-"))).absolute()
    return _fuzz_all(names, options.seconds, options.jobs, options.update, work)


if __name__ == "__main__":
    sys.exit(main())
