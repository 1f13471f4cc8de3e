# SPDX-License-Identifier: Apache-2.0
"""The setting `integrity` from the connector down: a load whose bytes were changed on the way fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from connector.tests import test_worker_pair
from connector.tests.test_worker_pair import Worker, _fill, _hand_off, _start
from datadist_core.errors import IntegrityError
from datadist_core.tests.flipping import flip_after_next, forget_flips, is_pending
from vllm_datadist.config import ConnectorConfig
from vllm_datadist.worker.node import DataDistNode

FLIPPING = "datadist_core.tests.flipping:FlippingShm"
SOURCE, TARGET = [3, 9, 1], [7, 8, 2]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Worker]]:
    """A worker with that setting, over shm whose copies can be spoiled."""
    started: list[Worker] = []

    def start_one(integrity: str) -> Worker:
        config = ConnectorConfig.from_extra_config({"integrity": integrity})
        node = functools.partial(DataDistNode, integrity=config.integrity)
        monkeypatch.setattr(test_worker_pair, "DataDistNode", node)
        started.append(_start(FLIPPING))
        return started[-1]

    yield start_one
    forget_flips()
    for worker in started:
        worker.side.close()


def _flip_in_next(p: Worker, d: Worker, block: int) -> None:
    """The first hand-off makes the link, whose probing are transfers, too."""
    _fill(p)
    assert not _hand_off(p, d, [0], [0], attempt=1).failed
    flip_after_next(d.tensors["layers.1"][block].data_ptr() + 77)


def test_a_load_with_a_changed_bit_fails_and_the_next_is_right(start: Callable[[str], Worker]) -> None:
    """B46."""
    p, d = start("off"), start("checksum")
    _flip_in_next(p, d, 8)
    results = _hand_off(p, d, SOURCE, TARGET, attempt=2)
    assert not is_pending()
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})
    assert isinstance(results.loads[0].error, IntegrityError)
    assert "tensor 1, block" in str(results.loads[0].error)
    results = _hand_off(p, d, SOURCE, TARGET, attempt=3)
    assert (results.received, results.failed) == ({"d-1"}, set())
    assert torch.equal(d.blocks(TARGET), p.blocks(SOURCE))


def test_without_it_the_load_succeeds_with_wrong_bytes(start: Callable[[str], Worker]) -> None:
    """B46: The known limit, and the proof that nothing else would have found the flip."""
    p, d = start("checksum"), start("off")
    _flip_in_next(p, d, 8)
    results = _hand_off(p, d, SOURCE, TARGET, attempt=2)
    assert not is_pending()
    assert (results.received, results.failed) == ({"d-1"}, set())
    assert not torch.equal(d.blocks(TARGET), p.blocks(SOURCE))


def test_p_makes_its_checksums_while_it_holds_the_lease(
    start: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = start("off"), start("checksum")
    _fill(p)
    server = p.side._node._datadist._open().server
    answer, held = server.checksums, list[int]()

    def watched(asked: object) -> bytes:
        answered = answer(asked)
        held.append(p.side.leases.num_active)
        return answered

    monkeypatch.setattr(server, "checksums", watched)
    assert not _hand_off(p, d, SOURCE, TARGET).failed
    assert held == [1]
    assert p.side.leases.num_active == 0
