# SPDX-License-Identifier: Apache-2.0
"""The command line of `datadist doctor`: options in; findings out as they come, or JSON at the end."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..backends._cma_host import may_trace_all, yama_scope
from ..checks import HostPort
from ..errors import LLMException, ParamInvalid
from ..security import Security
from ..transfer.registry import backend_names
from .findings import Finding, Section, as_json, as_text, fail, has_failed, summary
from .host import check_host
from .memory import check_memory
from .network import check_network
from .own_backends import FOREIGN, OwnBackends, check_yama, tcp_within_this_host
from .peer import PeerCheck, PeerTest, compare
from .scratch import EndOptions, TestEnd
from .security_check import check_security

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ENDING = {signal.SIGINT, signal.SIGTERM}
SECTIONS = ("host", "memory", "network", "security", "backends")
_DESCRIPTION = """\
What this host can do for the transfer of KV caches; with --connect, whether a running peer can be reached, how fast,
and what to change if not. It reads and measures, and changes nothing. Exit status: 0, or 1 if a line says FAIL.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--connect", metavar="HOST:PORT", type=_address, help="test the control and data path to a peer")
    what.add_argument("--listen", metavar="HOST:PORT", type=_address, help="be the other end of such a test")
    parser.add_argument("--cluster-id", type=int, metavar="N", help="of the peer; without it, it is asked for")
    parser.add_argument("--security", default="", metavar="JSON", help='the option "security": docs/security.md')
    parser.add_argument(
        "--backends", default="auto", type=_backends, metavar="LIST", help="that have to work, e.g. shm,tcp (auto)"
    )
    parser.add_argument(
        "--backend-options", default={}, type=_json, metavar="JSON", help='e.g. {"tcp": {"streams": 2}}'
    )
    parser.add_argument("--timeout", type=_seconds, default=5.0, metavar="S", help="of each step with --connect (5)")
    parser.add_argument(
        "--try-listen", action="append", default=[], type=_address, metavar="HOST:PORT", help="can this be listened on?"
    )
    parser.add_argument("--pool", type=_size, default=1 << 30, metavar="SIZE", help="of the pool to plan for (1G)")
    parser.add_argument("--huge-pages", action="store_true", help="the pool is to lie in huge pages")
    parser.add_argument("--links", type=_count, default=64, metavar="N", help="links of one process to plan for (64)")
    parser.add_argument(
        "--only", type=_sections, default=SECTIONS, metavar="LIST", help=f"some of {','.join(SECTIONS)}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show the library's log")


def run(options: argparse.Namespace) -> int:
    """Exit status."""
    _quiet(options.verbose)
    if options.listen is not None:
        return _listen(options)
    sections = []
    for title, check in _connect(options) if options.connect is not None else _local(options):
        found = _collected(title, check)
        sections.append(found)
        if not options.json:
            _say(as_text(found))
    _say(as_json(sections) if options.json else summary(sections))
    return 1 if has_failed(sections) else 0


def _collected(title: str, check: Iterable[Finding]) -> Section:
    """A check that breaks is a finding, too; the others go on."""
    found: list[Finding] = []
    try:
        found.extend(check)
    except (LLMException, OSError) as error:
        found.append(fail("check", f"it could not be finished: {error}", "run it again with --verbose"))
    return Section(title, tuple(found))


def _local(options: argparse.Namespace) -> Iterator[tuple[str, Iterable[Finding]]]:
    locks_memory = any(name in FOREIGN for name in backend_names(options.backends))
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "host": lambda: check_host(options.links),
        "memory": lambda: check_memory(options.pool, options.huge_pages, locks_memory),
        "network": lambda: check_network(options.try_listen),
        "security": lambda: check_security(options.security) if options.security else (),
        "backends": lambda: _backend_checks(options),
    }
    for title in SECTIONS:
        if title in options.only and (title != "security" or options.security):
            yield title, checks[title]()


def _backend_checks(options: argparse.Namespace) -> Iterator[Finding]:
    yield check_yama(yama_scope(), may_trace_all())
    yield from OwnBackends(options.backends, options.backend_options).run()


def _connect(options: argparse.Namespace) -> Iterator[tuple[str, Iterable[Finding]]]:
    security = _security(options)
    if isinstance(security, Finding):
        yield "security", [security]
        return
    ends = EndOptions(options.backends, options.security, options.backend_options)
    test = PeerTest(PeerCheck(options.connect, options.cluster_id, ends, security, options.timeout))
    yield f"peer {options.connect}", test.run()
    if any(measured.backend == "tcp" for measured in test.measured):
        own = tcp_within_this_host(ends, not test.is_test_end)
        yield "compared with this host", compare(test.measured, own, test.on_this_host)


def _security(options: argparse.Namespace) -> Security | Finding:
    try:
        return Security.parse(options.security, "--security") if options.security else Security()
    except ParamInvalid as error:
        return fail("security", str(error), "see docs/security.md")


def _listen(options: argparse.Namespace) -> int:
    # Blocked in all threads, which inherit it, and so waited for: a handler would run only once this thread wakes up.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        end = TestEnd(EndOptions(options.backends, options.security, options.backend_options), options.listen)
    except (LLMException, OSError) as error:
        sys.stderr.write(f"datadist doctor: {error}\n")
        return 1
    _say(f"test end at {end.address()}, cluster {end.cluster_id()}; Ctrl-C ends it. At the other end:")
    _say(f"  datadist doctor --connect {end.address()}")
    signal.sigwait(_ENDING)
    end.close()
    return 0


def _quiet(verbose: bool) -> None:
    """What the library logs is in the findings; NIXL and the like write to stderr by themselves."""
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    else:
        logging.getLogger().addHandler(logging.NullHandler())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- types of options


def _checked(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (LLMException, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _address(text: str) -> HostPort:
    found: HostPort = _checked(text, lambda given: HostPort.parse(given, "address"))
    return found


def _backends(text: str) -> str:
    if not text or any(c.isspace() for c in text):
        raise argparse.ArgumentTypeError(f"{text!r}: give names separated by commas, e.g. shm,tcp")
    return text


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise argparse.ArgumentTypeError(f"{','.join(unknown)!r} is unknown; give some of {','.join(SECTIONS)}")
    return names


def _json(text: str) -> dict[str, Any]:
    value = _checked(text, json.loads)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _seconds(text: str) -> float:
    value = float(_checked(text, float))
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds > 0 and <= 600")
    return value


def _size(text: str) -> int:
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not digits.isdigit() or unit not in _SIZES or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of bytes, with K, M, G or T behind it")
    return int(digits) * _SIZES[unit]


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1..1000000")
    return int(text)
