# SPDX-License-Identifier: Apache-2.0
"""`python -m datadist_core`, which is also the command `datadist`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: the command's, or 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="datadist", description="Tools of datadist_core.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    return status


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .doctor.cli import add_options, run

    doctor = commands.add_parser("doctor", help="what this host can do, and whether a peer can be reached")
    add_options(doctor)
    doctor.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
