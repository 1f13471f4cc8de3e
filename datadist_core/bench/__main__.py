# SPDX-License-Identifier: Apache-2.0
"""`python -m datadist_core.bench`: options in; tables, a picture and JSON out."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from ..errors import LLMException
from . import scale
from .blocks import PATTERNS, WORD_BYTES
from .contenders import DEFAULT_BACKENDS, DEFAULT_PEERS, OURS, PEERS
from .contract import OPS
from .measure import Plan, run
from .options import NONE, add_output_files, known, names_of, progress_on_stderr
from .plot import plot
from .report import to_json, write_report

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 4 << 10, 1 << 20
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if bytes were wrong, one of ours failed, or there was nothing to measure; 2 for bad options.

    A bar that is missed, or a peer that fails, is reported and not an error.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["scale"]:
        return scale.main(arguments[1:], progress_on_stderr())
    options = _parser().parse_args(arguments)
    plan = Plan(
        options.backends,
        options.peers,
        options.op,
        options.pattern,
        options.block_bytes,
        options.total_bytes,
        options.seconds,
    )
    try:
        results = run(plan, progress_on_stderr())
    except (LLMException, OSError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    write_report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(results), indent=1) + "\n")
    if options.plot is not None:
        plot(results, options.plot)
    return 0 if results.verified and not results.failed.keys() - PEERS.keys() else 1


# -- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m datadist_core.bench",
        description="Throughput and latency of pull and push, in turns with plain references and with other engines. "
        "Lists take commas. What cannot be used here is skipped, with the reason. "
        "'scale' as the first argument measures one end with many links instead: 'scale --help'.",
    )
    add = parser.add_argument
    add("--backends", type=names_of(OURS), default=DEFAULT_BACKENDS, help=known(OURS, DEFAULT_BACKENDS))
    add(
        "--peers",
        type=names_of(PEERS, may_be_none=True),
        default=DEFAULT_PEERS,
        help=f"{known(PEERS, DEFAULT_PEERS)}; or {NONE}",
    )
    add(
        "--block-bytes", type=_block_sizes, default=_block_sizes("4K,16K,64K,256K,1M"), help="e.g. 4K,1M; each 4K to 1M"
    )
    add("--pattern", type=names_of(PATTERNS), default=tuple(PATTERNS), help=known(PATTERNS))
    add("--op", type=names_of(OPS), default=OPS, help=known(OPS))
    add("--seconds", type=_seconds, default=1.0, help="per row (default 1)")
    add("--total-bytes", type=_total_bytes, default=64 << 20, help="per transfer (default 64M)")
    add_output_files(parser, "throughput over block size")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?)(iB|B)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 65536, 64K or 64KiB")
    return int(found[1]) * _UNITS[found[2]]


def _block_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(_bytes(part) for part in text.split(",")))
    for size in sizes:
        if not MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES or size % WORD_BYTES:
            raise argparse.ArgumentTypeError(f"{size} must be 4K to 1M and a multiple of {WORD_BYTES}")
    return sizes


def _total_bytes(text: str) -> int:
    size = _bytes(text)
    if size < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds greater than 0, at most 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
