# SPDX-License-Identifier: Apache-2.0
"""A table that forgets its oldest entries."""

from __future__ import annotations

from vllm_datadist.newest import Newest


def test_the_oldest_entries_go() -> None:
    table: Newest[str, int] = Newest(2)
    table["a"] = 1
    table["b"] = 2
    table["a"] = 3
    assert dict(table) == {"a": 3, "b": 2}
    table["c"] = 4
    assert dict(table) == {"b": 2, "c": 4}
    assert table.pop("b") == 2
    assert table.setdefault("d", 5) == 5
    assert table.setdefault("e", 6) == 6
    assert dict(table) == {"d": 5, "e": 6}
    table.move_to_end("d")
    table["f"] = 7
    assert dict(table) == {"d": 5, "f": 7}
