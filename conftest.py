# SPDX-License-Identifier: Apache-2.0
"""For all tests."""

from __future__ import annotations

import gc
import logging
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

#: Files whose tests import vLLM, which takes as long as most files: one worker of pytest-xdist runs them all.
USE_VLLM = tuple(f"connector/tests/test_{name}.py" for name in ("caches_engine", "interior", "life", "stats"))
WITH_SERVERS = Path(__file__).parent / "integration_tests"
ALL_SLOW = re.compile(r"^pytestmark = pytest\.mark\.slow\b", re.MULTILINE)
VLLM_AT_COLLECTION = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Without the slow tests Hypothesis tries a quarter of its examples; what tests set is a share of that number."""
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if "not slow" in config.option.markexpr and runs_tests:
        from hypothesis import settings

        settings.register_profile("fast", settings.default, max_examples=settings.default.max_examples // 4)
        settings.load_profile("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is left out as a whole is not even imported: every worker of pytest-xdist would have to."""
    if not collection_path.match("test_*.py"):
        return None
    if "not servers" in config.option.markexpr and collection_path.is_relative_to(WITH_SERVERS):
        return True
    if "not slow" not in config.option.markexpr:
        return None
    return True if ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection() -> None:
    """Of what is made during collection nothing is garbage, and looking for some takes a fifth of its time."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several workers: files of slow tests first, so that none begins a long one when the others have ended."""
    if not hasattr(config, "workerinput"):
        return
    of_file, slow_of_file = Counter(item.path for item in items), Counter()
    for item in items:
        slow_of_file[item.path] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: (-slow_of_file[item.path] / of_file[item.path], -of_file[item.path], str(item.path)))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    session.config.stash[VLLM_AT_COLLECTION] = "vllm" in sys.modules


@pytest.fixture
def vllm_at_collection(request: pytest.FixtureRequest) -> bool:
    """Whether it was imported before the first test."""
    return request.config.stash[VLLM_AT_COLLECTION]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """As --dist loadscope, in the order of collection, and with the files of USE_VLLM as if they were one."""
    if config.getoption("dist") != "loadscope":
        return None
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "vllm" if nodeid.startswith(USE_VLLM) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def _torch_logs_as_others() -> None:
    """Its loggers, some thirty, hand on to no other: to each of them pytest would add itself six times per test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _modules_stay() -> None:
    """What has been imported so far stays. Without it a `gc.collect()`, of which leak checks make many, is quick."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # so that modules can go in order
