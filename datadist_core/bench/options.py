# SPDX-License-Identifier: Apache-2.0
"""What the command lines of both benches (this one and `vllm_datadist.bench`) have in common."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from .field import Progress
from .plot import INSTALL, can_plot

NONE = "none"
"""In place of a list of names: nobody."""


def known(names: Collection[str], default: Collection[str] = ()) -> str:
    """For the help of an option that takes some of `names`."""
    return f"of {', '.join(names)}; default {', '.join(default) or 'all'}"


def names_of(known: Collection[str], may_be_none: bool = False) -> Callable[[str], tuple[str, ...]]:
    """A type for argparse: a list of known names, with commas."""

    def parse(text: str) -> tuple[str, ...]:
        if may_be_none and text == NONE:
            return ()
        names = tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
        return names

    return parse


def add_output_files(parser: argparse.ArgumentParser, drawn: str) -> None:
    """--json and --plot, told before the measuring and not after it if they cannot be written. `drawn`: what is."""
    parser.add_argument("--json", type=_output_file, metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--plot", type=_plot_file, metavar="FILE", help=f"draw {drawn} there (PNG)")


def _output_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}; make it, or name another file")
    return path


def _plot_file(text: str) -> Path:
    if not can_plot():
        raise argparse.ArgumentTypeError(f"{text!r}: a picture needs matplotlib; {INSTALL}")
    return _output_file(text)


def progress_on_stderr() -> Progress:
    """Writes what it is told, with the seconds since now."""
    started_s = time.monotonic()

    def progress(text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - started_s:5.0f} s] {text}\n")
        sys.stderr.flush()

    return progress
