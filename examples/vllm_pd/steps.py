# SPDX-License-Identifier: Apache-2.0
"""Shows people what the demo is doing while it takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

HEARTBEAT_S = 10.0


class Steps:
    """Shows what is going on and for how long: a spinner on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.detail = ""

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show `title` while the block runs, and its time at the end."""
        start = time.monotonic()
        self.detail = ""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(title, start, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
        self.console.print(f"[green]done[/green] {escape(title)} [dim]({time.monotonic() - start:.1f} s)[/dim]")

    def _watch(self, title: str, start: float, done: threading.Event) -> None:
        if not self.console.is_terminal:
            self.console.print(f"     {escape(title)} ...")
            while not done.wait(HEARTBEAT_S):
                self.console.print(f"     ... {self._line(title, start)}")
            return
        with self.console.status(self._line(title, start)) as status:
            while not done.wait(0.5):
                status.update(self._line(title, start))

    def _line(self, title: str, start: float) -> str:
        room = max(20, self.console.width - len(title) - 20)
        return f"{escape(title)} {time.monotonic() - start:.0f} s [dim]{escape(self.detail[:room])}[/dim]"
