# SPDX-License-Identifier: Apache-2.0
"""Ends an example in order when a signal asks for it, also where Python drops what the signal's handler raises."""

from __future__ import annotations

import signal

#: The signals to end that have come.
_signals: list[int] = []


def on_signal(number: int, _frame: object) -> None:
    _signals.append(number)
    raise_if_signalled()


def raise_if_signalled() -> None:
    """Ends this process in order if a signal has asked for it; for every wait.

    The signal's handler has raised the same before. But Python drops what is raised in a finalizer, and so do some
    extension modules while they are imported; `numpy.random` does, which is imported when it is used first.
    """
    if signal.SIGINT in _signals:
        raise KeyboardInterrupt
    if _signals:
        raise SystemExit(128 + _signals[0])  # so that `with` and `finally` blocks run
