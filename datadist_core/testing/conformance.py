# SPDX-License-Identifier: Apache-2.0
"""The rules of `transfer.backend` as tests, for every backend, also those that are not part of this project.

    class TestMyBackend(BackendConformance):
        factory = "my_package.my_module:MyBackend"

Needs pytest. Each test opens real backends over real memory, in this process and, where it matters, with the peer
in a process of its own that gets stopped or killed. Every pair of ends is closed after the test, and then every
batch that was ever accepted must have had its one completion.
"""

from __future__ import annotations

from ._suite_bytes import BytesSuite
from ._suite_completions import CompletionSuite
from ._suite_links import LinkSuite
from ._suite_prepared import PreparedSuite
from ._suite_processes import ProcessSuite
from ._suite_serving import ServingSuite

__all__ = [
    "BackendConformance",
    "BytesSuite",
    "CompletionSuite",
    "LinkSuite",
    "PreparedSuite",
    "ProcessSuite",
    "ServingSuite",
]


class BackendConformance(BytesSuite, CompletionSuite, ServingSuite, LinkSuite, PreparedSuite, ProcessSuite):
    """Subclass it as `Test...` and set `factory`; see `SuiteBase` for what else can be set."""
