# SPDX-License-Identifier: Apache-2.0
"""Time limits of the connector, for tests that are not about them: also on a machine that stands still for seconds.

Imported by every process of the tests that links workers. Who tests a limit sets it.
"""

from __future__ import annotations

from datadist_core.tests.patience import PATIENCE_S
from vllm_datadist.worker import lease_calls, notices, offers, pushes, renewals, sources

LINK_S = PATIENCE_S
"""For one attempt to link."""
WORK_S = 2 * PATIENCE_S
"""For a load or a push, and for what is to be reported."""

for module in (lease_calls, notices, offers, pushes, renewals, sources):
    module.CALL_TIMEOUT_S = PATIENCE_S
