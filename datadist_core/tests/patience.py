# SPDX-License-Identifier: Apache-2.0
"""Time limits of the library, for tests that are not about them: also on a machine that stands still for seconds.

Imported by every process of the tests. Who tests a limit sets it.
"""

from __future__ import annotations

from datadist_core import datadist
from datadist_core.backends import _tcp_accept
from datadist_core.cache import keeper, mover
from datadist_core.link import answers, communicator, parting, peer_caches

PATIENCE_S = 30.0
LINK_MS = 30_000
"""For calls that are to succeed."""

datadist.CHECK_LINK_TIMEOUT_S = PATIENCE_S
mover.CONSUME_TIMEOUT_S = PATIENCE_S
answers.ESTABLISH_WAIT_S = PATIENCE_S
communicator.END_S = PATIENCE_S
keeper.REVOKE_TIMEOUT_S = keeper.SETTLE_TIMEOUT_S = peer_caches.REVOKE_WAIT_S = PATIENCE_S
parting.LATE_S = PATIENCE_S
_tcp_accept.HELLO_TIMEOUT_S = PATIENCE_S
