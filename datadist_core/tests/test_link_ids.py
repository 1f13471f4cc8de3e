# SPDX-License-Identifier: Apache-2.0
"""A push that is bound to one link never goes over the link that has taken its place.

What a peer allowed over one link, it may have taken back when that link was lost; a later link says nothing of it.
Here a second process with the same cluster id takes the first one's link over, while that one is still up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Queue

import numpy as np
import pytest

from datadist_core import (
    BlocksCacheKey,
    Cache,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from datadist_core.cache import store
from datadist_core.errors import PeerLost
from datadist_core.tests.core_ends import filled_cache, make_end, manager, must_link, plain_cache

D = 52
WAIT_S = 30.0
KEY = BlocksCacheKey(D, 0)


@dataclass
class Scene:
    """P; two ends that are cluster D, each with a cache that looks the same from P; the first is linked to P."""

    prompt: LLMDataDist
    first: LLMDataDist
    second: LLMDataDist
    source: Cache = field(init=False)
    theirs: Cache = field(init=False)
    link_id: int = field(init=False)
    losses: Queue[int] = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.source = plain_cache(self.prompt, 1)
        filled_cache(self.first, 2)
        self.theirs = filled_cache(self.second, 3)
        assert self.prompt.link_id(D) is None
        must_link(self.first, self.prompt)
        link_id = self.prompt.link_id(D)
        assert link_id is not None
        self.link_id = link_id
        self.prompt.on_link_lost(self._lost)

    def _lost(self, cluster_id: int, error: LLMException) -> None:
        self.losses.put(cluster_id)

    def replace(self) -> int:
        """The second takes the link over. Returns the new link's id."""
        must_link(self.second, self.prompt)
        link_id = self.prompt.link_id(D)
        assert link_id not in (None, self.link_id)
        return link_id

    def push(self, block: int, link_id: int | None) -> None:
        manager(self.prompt).push_blocks(KEY, self.source, [block], [block], link_id=link_id)

    def send(self, block: int, link_id: int | None, before: Callable[[int], None] = lambda layer: None) -> object:
        """Layer by layer; the one status."""
        config = TransferWithCacheKeyConfig(KEY)
        layers = Layers(before)
        task = manager(self.prompt).transfer_cache_async(
            self.source, layers, [config], [block], [block], link_id=link_id
        )
        return task.get_results(60_000)[0]

    def arrived(self, block: int) -> list[bool]:
        """Of each tensor of the second end's cache, whether that block is as at P."""
        pairs = zip(self.source.numpy(), self.theirs.numpy(), strict=True)
        return [bool(np.array_equal(mine[block], other[block])) for mine, other in pairs]


class SameIds:
    """Each cache has the same id, as the first caches of three processes have."""

    def __next__(self) -> int:
        return 7


@dataclass
class Layers(LayerSynchronizer):
    before: Callable[[int], None]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.before(layer_index)
        return True


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    def end(**options: object) -> object:
        return make_end("shm", role=LLMRole.MIX, **options)

    with end(listen="127.0.0.1:0") as prompt, end(cluster_id=D) as first, end(cluster_id=D) as second:
        monkeypatch.setattr(store, "_cache_ids", SameIds())
        yield Scene(prompt, first, second)


def test_a_link_that_is_replaced_while_it_is_up_is_reported_as_lost(scene: Scene) -> None:
    scene.replace()
    assert scene.losses.get(timeout=WAIT_S) == D
    scene.prompt.check_link_status(D)
    assert scene.losses.empty()


def test_push_blocks_goes_over_its_own_link_only(scene: Scene) -> None:
    for block in (1, 2):  # the second goes the short way
        scene.push(block, scene.link_id)
    new = scene.replace()
    with pytest.raises(PeerLost, match=f"link_id={scene.link_id}.* {new} now"):
        scene.push(3, scene.link_id)
    for block in (4, 5):
        scene.push(block, new)
    with pytest.raises(PeerLost, match="link_id"):  # there is a short way now
        scene.push(3, scene.link_id)
    scene.push(6, None)
    assert [all(scene.arrived(block)) for block in range(1, 7)] == [False, False, False, True, True, True]
    assert not any(scene.arrived(3))


@pytest.mark.parametrize("short_way", [False, True])
def test_a_task_stops_at_the_layer_before_which_its_link_was_replaced(scene: Scene, short_way: bool) -> None:
    assert scene.send(1, scene.link_id) is LLMStatusCode.LLM_SUCCESS

    def replace(layer: int) -> None:
        if layer == 1:
            new = scene.replace()
            if short_way:
                assert scene.send(2, new) is LLMStatusCode.LLM_SUCCESS

    assert scene.send(3, scene.link_id, replace) is LLMStatusCode.LLM_LINK_FAILED
    assert all(scene.arrived(2)) is short_way
    assert not any(scene.arrived(3))
    assert scene.send(4, None) is LLMStatusCode.LLM_SUCCESS
    assert all(scene.arrived(4))
