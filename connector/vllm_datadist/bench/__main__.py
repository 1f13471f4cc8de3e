# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_datadist.bench`: options in; a table, the bars, a picture and JSON out."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from datadist_core.bench.options import NONE, add_output_files, known, names_of, progress_on_stderr

from .contenders import DEFAULT_BACKENDS, DEFAULT_PEERS, OUR_NAMES, OURS, PEERS
from .measure import BLOCK_TOKENS, CONTINUATION_TOKENS, Plan, run
from .model import UnusableModel, read_model
from .plot import plot
from .report import to_json, write_report
from .results import Results

DEFAULT_TOKENS = (129, 513, 2049, 4097)
DEFAULT_REPEATS = 8
MAX_TOKENS = 8065
"""The largest that the model made here can hold with its continuation."""
_MAX_REPEATS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a text was wrong, one of ours failed, or there was nothing to measure; 2 for bad options.

    A bar that is missed, or a peer that fails, is reported and not an error.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    plan = Plan(options.backends, options.peers, options.tokens, options.repeats, options.rounds, options.model)
    _check_model(parser, plan)
    signal.signal(signal.SIGTERM, _leave)
    try:
        results = run(plan, progress_on_stderr())
    except (UnusableModel, OSError) as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    write_report(results)
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(results), indent=1) + "\n")
    if options.plot is not None:
        plot(results, options.plot)
    return _exit_status(results)


def _exit_status(results: Results) -> int:
    ours_failed = any(name in OUR_NAMES for name in results.failed)
    return 1 if ours_failed or not results.rows or not all(row.verified for row in results.rows) else 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    """By an exception, so that the servers are stopped."""
    raise SystemExit(128 + signal.SIGTERM)


# -- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_datadist.bench",
        description="The time that a hand-off adds at D, with real vLLM servers: ours and vLLM's NixlConnector. "
        "Lists take commas. What cannot be used here is skipped, with the reason.",
    )
    add = parser.add_argument
    add("--backends", type=names_of(OURS), default=DEFAULT_BACKENDS, help=known(OURS, DEFAULT_BACKENDS))
    add(
        "--peers",
        type=names_of(PEERS, may_be_none=True),
        default=DEFAULT_PEERS,
        help=f"{known(PEERS, DEFAULT_PEERS)} (vLLM's NixlConnector); or {NONE}",
    )
    tokens = ",".join(map(str, DEFAULT_TOKENS))
    add("--tokens", type=_token_counts, default=DEFAULT_TOKENS, help=f"lengths of prompts; default {tokens}")
    add("--repeats", type=_count, default=DEFAULT_REPEATS, help=f"samples per row (default {DEFAULT_REPEATS})")
    add("--rounds", type=_count, default=1, help="start each contender's servers so many times, in turns (default 1)")
    add("--model", type=_model_folder, metavar="DIR", help="default: a random one with much KV cache, made here")
    add_output_files(parser, "the added time over the length")
    return parser


def _token_counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_token_count(part) for part in text.split(",")))


def _token_count(text: str) -> int:
    """Such that all but one token fill whole blocks: the others cannot be in D's prefix cache."""
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not BLOCK_TOKENS < count <= MAX_TOKENS or count % BLOCK_TOKENS != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a multiple of {BLOCK_TOKENS} plus 1, from {BLOCK_TOKENS + 1} to {MAX_TOKENS}: "
            f"all but one token must fit into whole blocks of D's prefix cache; e.g. 129,513"
        )
    return count


def _count(text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= count <= _MAX_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {_MAX_REPEATS}")
    return count


def _model_folder(text: str) -> Path:
    try:
        return read_model(Path(text)).path
    except UnusableModel as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check_model(parser: argparse.ArgumentParser, plan: Plan) -> None:
    """Told before any server is started."""
    if plan.model is None:
        return
    limit, needed = read_model(plan.model).max_positions, max(plan.tokens) + CONTINUATION_TOKENS
    if needed > limit:
        parser.error(
            f"argument --tokens: {max(plan.tokens)} is too long for {plan.model} (max_position_embeddings "
            f"{limit}); use at most {limit - CONTINUATION_TOKENS}"
        )


if __name__ == "__main__":
    sys.exit(main())
