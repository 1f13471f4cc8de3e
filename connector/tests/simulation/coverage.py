# SPDX-License-Identifier: Apache-2.0
"""Which rows of the protocol's tables a run of schedules has met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from vllm_datadist.handoff.lease import LEASE_TABLE
from vllm_datadist.handoff.load import LOAD_TABLE
from vllm_datadist.handoff.offer import OFFER_TABLE
from vllm_datadist.handoff.parts import GROUP_TABLE
from vllm_datadist.handoff.push import PUSH_TABLE
from vllm_datadist.handoff.renewal import RENEWAL_TABLE
from vllm_datadist.handoff.request import REQUEST_TABLE
from vllm_datadist.handoff.table import Table

TABLES: tuple[Table[Any, Any, Any], ...] = (
    LEASE_TABLE, LOAD_TABLE, RENEWAL_TABLE, REQUEST_TABLE, GROUP_TABLE, OFFER_TABLE, PUSH_TABLE
)  # fmt: skip
Row = tuple[str, str, str]


def row(table: Table[Any, Any, Any], state: Enum, event: Enum) -> Row:
    """What a row is called in reports."""
    return table.name, state.value, event.value


class _CountingRows(dict[Any, Any]):
    """Each row with how often it was used; one look-up for both."""

    def __init__(self, table: Table[Any, Any, Any]) -> None:
        super().__init__({key: [value, 0] for key, value in table.rows.items()})

    def get(self, key: Any, default: Any = None) -> Any:
        counted = super().get(key)
        if counted is None:
            return default
        counted[1] += 1
        return counted[0]


@contextmanager
def counting() -> Iterator[Counter[Row]]:
    """How often each row was used: filled in when the context ends."""
    met: Counter[Row] = Counter()
    rows = [table.rows for table in TABLES]
    try:
        for table in TABLES:
            table.rows = _CountingRows(table)
        yield met
    finally:
        for table, own in zip(TABLES, rows, strict=True):
            met.update({row(table, *key): count for key, (_, count) in table.rows.items() if count})
            table.rows = own


def all_rows() -> set[Row]:
    return {row(table, *key) for table in TABLES for key in table.rows}
