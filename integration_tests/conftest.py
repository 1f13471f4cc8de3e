# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers with tiny models; and the promise that the suite leaves nothing behind."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from examples.vllm_pd.models import make_tiny_model
from integration_tests.failure_logs import LogMarks
from integration_tests.warm_start import WarmProcess, warm_servers

#: Shared memory that vLLM and Python make by name, and leave when they are killed. The connector has none with a name.
VLLM_OWN = ("psm_", "sem.mp-", "vllm_dist_")
LOG_MARKS = pytest.StashKey[LogMarks]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts servers: `make test-fast` leaves it out.

    The first test waits for the warm process too, which computes for half a minute; on a busy machine for some.
    """
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.servers)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def _log_marks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    request.node.stash[LOG_MARKS] = LogMarks(tmp_path_factory.getbasetemp())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the servers' own words to a failure."""
    report = yield
    if report.failed and LOG_MARKS in item.stash:
        report.sections.append(("servers' logs meanwhile", item.stash[LOG_MARKS].since()))
    return report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


class TinyModels:
    """Random-weight models, each made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, kind: str) -> Path:
        path = self._directory / kind
        return path if path.exists() else make_tiny_model(kind, path)


@pytest.fixture(scope="session", autouse=True)
def warm_process() -> Iterator[WarmProcess | None]:
    """Servers start in a tenth of the time."""
    with warm_servers() as warm:
        yield warm


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(warm_process: WarmProcess | None) -> Iterator[None]:
    """After the last test: no process of ours, no entry in /dev/shm, no listening port of a child."""
    shm_before = set(os.listdir("/dev/shm"))
    yield
    warm_pid = None if warm_process is None else warm_process.pid
    processes = lambda: [p for p in psutil.Process().children(recursive=True) if p.pid != warm_pid]  # noqa: E731
    leftovers = _wait_until_gone(lambda: [p.pid for p in processes() if _is_server(p)])
    assert not leftovers, f"processes left: {leftovers}"
    files = lambda: sorted(set(os.listdir("/dev/shm")) - shm_before)  # noqa: E731
    ours = _wait_until_gone(lambda: [name for name in files() if not name.startswith(VLLM_OWN)])
    assert not ours, f"/dev/shm entries left: {ours}"
    # Those of a server that somebody else has started meanwhile stay.
    for name in set(files()) - _mapped():
        Path("/dev/shm", name).unlink(missing_ok=True)


def _is_server(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _mapped() -> set[str]:
    """Names in /dev/shm that a process has in its memory."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found |= set(re.findall(r" /dev/shm/(.+)$", maps.read_text(errors="replace"), re.MULTILINE))
    return found


def _wait_until_gone(find) -> list:
    end = time.monotonic() + 60
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.2)
    return found
