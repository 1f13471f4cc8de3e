# SPDX-License-Identifier: Apache-2.0
"""The short way of repeated pulls and pushes: it is taken, it moves the right bytes, and it is never taken wrongly.

Every way in which a call, a cache or a link can differ from the time before goes the long way: with its result, or
with its error, as if there were no short one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from datadist_core import BlocksCacheKey, Cache, CacheKeyByIdAndIndex, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from datadist_core.cache import routes
from datadist_core.cache.mover import Mover
from datadist_core.cache.routes import Routes, usual_items
from datadist_core.errors import CacheNotExist, ClosedError, NotYetLinked, ParamInvalid, TimedOut
from datadist_core.testing.parallel import eventually
from datadist_core.tests.core_ends import (
    LINK_MS,
    cluster_info,
    desc,
    filled_cache,
    linked,
    make_end,
    manager,
    must_link,
    plain_cache,
)

BACKENDS = ["loopback", "shm", "cma", "tcp"]


class Ways:
    """Counts which way transfers went."""

    def __init__(self) -> None:
        self.short = 0
        self.long = 0


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    seen = Ways()
    again, transfer = Routes.again, Mover._transfer

    def counted_again(self: Routes, *arguments: Any) -> Any:
        report = again(self, *arguments)
        seen.short += report is not None
        return report

    def counted_transfer(self: Mover, *arguments: Any) -> Any:
        seen.long += 1
        return transfer(self, *arguments)

    monkeypatch.setattr(Routes, "again", counted_again)
    monkeypatch.setattr(Mover, "_transfer", counted_transfer)
    return seen


class Scene:
    """P with a filled cache, D linked to it with a cache of its own that has pulled once."""

    def __init__(self, prompt: LLMDataDist, decoder: LLMDataDist) -> None:
        self.prompt, self.decoder = prompt, decoder
        self.theirs = filled_cache(prompt, 1)
        self.mine = plain_cache(decoder, 2)
        self.key = BlocksCacheKey(prompt.cluster_id, 0)
        self.pull([0], [0])

    def pull(self, src: Any, dst: Any, **options: Any) -> Any:
        return manager(self.decoder).pull_blocks(self.key, self.mine, src, dst, **options)

    def push(self, src: Any, dst: Any, **options: Any) -> Any:
        return manager(self.decoder).push_blocks(self.key, self.mine, src, dst, **options)

    def check_pulled(self, src: list[int], dst: list[int]) -> None:
        for ours, others in zip(self.mine.numpy(), self.theirs.numpy(), strict=True):
            np.testing.assert_array_equal(ours[dst], others[src])


@pytest.fixture(params=BACKENDS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with linked(request.param) as (prompt, decoder):
        yield Scene(prompt, decoder)


@pytest.fixture
def shm_scene() -> Iterator[Scene]:
    with linked("shm") as (prompt, decoder):
        yield Scene(prompt, decoder)


def numpy_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class TestTheShortWay:
    @pytest.mark.parametrize("of", [list, tuple, lambda values: numpy_of(*values)])
    def test_moves_the_blocks(self, scene: Scene, ways: Ways, of: Callable[[list[int]], Any]) -> None:
        for src, dst in (([3], [7]), ([1, 2, 3], [9, 8, 7]), (list(range(16)), list(range(16))[::-1])):
            before = [tensor.copy() for tensor in self.others(scene, dst)]
            report = scene.pull(of(src), of(dst))
            scene.check_pulled(src, dst)
            assert report.num_bytes == len(src) * 4 * 1024
            assert report.seconds > 0
            for untouched, tensor in zip(before, self.others(scene, dst), strict=True):
                np.testing.assert_array_equal(tensor, untouched)
        assert (ways.short, ways.long) == (3, 0)

    @staticmethod
    def others(scene: Scene, dst: list[int]) -> list[np.ndarray]:
        """Blocks that no pull may touch."""
        rest = [block for block in range(16) if block not in dst]
        return [tensor[rest] for tensor in scene.mine.numpy()]

    def test_pushes(self, scene: Scene, ways: Ways) -> None:
        scene.push([5], [4])
        scene.push([6, 7], [1, 0])
        for ours, others in zip(scene.mine.numpy(), scene.theirs.numpy(), strict=True):
            np.testing.assert_array_equal(others[[4, 1, 0]], ours[[5, 6, 7]])
        assert (ways.short, ways.long) == (1, 1)

    def test_layer_ranges_have_ways_of_their_own(self, scene: Scene, ways: Ways) -> None:
        for _ in range(2):
            before = [tensor.copy() for tensor in scene.mine.numpy()]
            scene.pull([2], [3], src_layer_range=range(1), dst_layer_range=range(1, 2))
            after, theirs = scene.mine.numpy(), scene.theirs.numpy()
            for i in (0, 1):
                np.testing.assert_array_equal(after[i], before[i])
                np.testing.assert_array_equal(after[2 + i][3], theirs[i][2])
            scene.mine.numpy()[2][3] = 0
        assert (ways.short, ways.long) == (1, 1)

    def test_by_cache_id(self, scene: Scene, ways: Ways) -> None:
        scene.key = CacheKeyByIdAndIndex(scene.prompt.cluster_id, scene.theirs.cache_id)  # type: ignore[assignment]
        for block in (1, 2, 3):
            scene.pull([block], [block])
            scene.check_pulled([block], [block])
        assert (ways.short, ways.long) == (2, 1)

    def test_names_the_backend(self, scene: Scene) -> None:
        backend = scene.decoder.link_info(scene.prompt.cluster_id).backend
        assert scene.pull([1], [1]).backend == backend


class TestWhatIsWrongWithACall:
    """The errors of the long way, and nothing moved; the short way is there afterwards."""

    @pytest.mark.parametrize(
        ("src", "dst", "options", "error", "named"),
        [
            ([16], [0], {}, ParamInvalid, "src_blocks: block index 16"),
            ([0], [16], {}, ParamInvalid, "dst_blocks: block index 16"),
            ([-1], [0], {}, ParamInvalid, "src_blocks holds the negative index -1"),
            (numpy_of(0), numpy_of(-5), {}, ParamInvalid, "dst_blocks holds the negative index -5"),
            ([0, 1], [0], {}, ParamInvalid, "equally long"),
            ([2**64], [0], {}, ParamInvalid, "src_blocks holds an index that is out of range"),
            ([True], [0], {}, TypeError, "src_blocks must hold ints only"),
            ([0], [0.0], {}, TypeError, "dst_blocks must hold ints only"),
            ("0", [0], {}, TypeError, "src_blocks"),
            ([0], None, {}, TypeError, "dst_blocks"),
            ([0], [], {}, ParamInvalid, "dst_blocks is empty"),
            ([0], [0], {"deadline_s": 0}, TimedOut, "deadline_s=0"),
            ([0], [0], {"deadline_s": "1"}, TypeError, "deadline_s"),
            ([0], [0], {"deadline_s": True}, TypeError, "deadline_s"),
            ([0], [0], {"tensor_num_per_layer": True}, TypeError, "tensor_num_per_layer"),
            ([0], [0], {"tensor_num_per_layer": 2.0}, TypeError, "tensor_num_per_layer"),
            ([0], [0], {"src_layer_range": 1}, TypeError, "src_layer_range"),
            ([0], [0], {"dst_layer_range": [0]}, TypeError, "dst_layer_range"),
            ([0], [0], {"dst_layer_range": range(9)}, ParamInvalid, "dst_layer_range"),
            ([0], [0], {"slices": []}, ParamInvalid, "slices"),
        ],
    )
    def test_is_said(
        self, shm_scene: Scene, ways: Ways, src: Any, dst: Any, options: dict[str, Any], error: type, named: str
    ) -> None:
        before = [tensor.copy() for tensor in shm_scene.mine.numpy()]
        with pytest.raises(error, match=named):
            shm_scene.pull(src, dst, **options)
        assert ways.short == 0
        for tensor, as_before in zip(shm_scene.mine.numpy(), before, strict=True):
            np.testing.assert_array_equal(tensor, as_before)
        shm_scene.pull([1], [2])
        shm_scene.pull([2], [3])
        assert ways.short >= 1
        shm_scene.check_pulled([1, 2], [2, 3])

    @pytest.mark.parametrize("key", [None, 1, [], "key"])
    def test_a_key_that_is_none(self, shm_scene: Scene, key: Any) -> None:
        shm_scene.key = key
        with pytest.raises(TypeError, match="src_cache_key"):
            shm_scene.pull([0], [0])

    @pytest.mark.parametrize("cache", [None, 1, "cache"])
    def test_a_cache_that_is_none(self, shm_scene: Scene, cache: Any) -> None:
        shm_scene.mine = cache
        with pytest.raises(TypeError, match="dst_cache"):
            shm_scene.pull([0], [0])

    def test_numpy_ints_in_a_list_go_the_long_way(self, shm_scene: Scene, ways: Ways) -> None:
        shm_scene.pull([np.int64(1)], [np.int32(2)])
        shm_scene.check_pulled([1], [2])
        assert (ways.short, ways.long) == (0, 1)


class TestWhatIsNotAsItWas:
    def test_our_cache_is_freed(self, scene: Scene) -> None:
        manager(scene.decoder).deallocate_blocks_cache(scene.mine)
        with pytest.raises(CacheNotExist):
            scene.pull([1], [1])

    def test_our_cache_is_made_anew(self, scene: Scene) -> None:
        manager(scene.decoder).deallocate_blocks_cache(scene.mine)
        scene.mine = plain_cache(scene.decoder, 5)
        for block in (1, 2):
            scene.pull([block], [block])
            scene.check_pulled([block], [block])

    def test_their_cache_is_freed(self, scene: Scene) -> None:
        before = [tensor.copy() for tensor in scene.mine.numpy()]
        manager(scene.prompt).deallocate_blocks_cache(scene.theirs)
        with pytest.raises(CacheNotExist):
            scene.pull([1], [1])
        for tensor, as_before in zip(scene.mine.numpy(), before, strict=True):
            np.testing.assert_array_equal(tensor, as_before)

    def test_their_cache_is_made_anew(self, scene: Scene, ways: Ways) -> None:
        manager(scene.prompt).deallocate_blocks_cache(scene.theirs)
        scene.theirs = filled_cache(scene.prompt, 9)
        for block in (1, 2):
            scene.pull([block], [block])
            scene.check_pulled([block], [block])
        assert (ways.short, ways.long) == (1, 1)

    def test_their_key_names_another_cache(self, scene: Scene) -> None:
        """As long as the old one lives, a peer that knows it may go on with it: as without a short way."""
        scene.theirs = filled_cache(scene.prompt, 11, model_id=1)
        scene.key = BlocksCacheKey(scene.prompt.cluster_id, 1)
        scene.pull([1], [1])
        scene.check_pulled([1], [1])

    def test_the_link_is_gone(self, scene: Scene) -> None:
        scene.decoder.unlink_clusters([cluster_info(scene.prompt)], timeout=LINK_MS)
        with pytest.raises(NotYetLinked):
            scene.pull([1], [1])

    def test_the_link_is_made_anew(self, scene: Scene, ways: Ways) -> None:
        scene.decoder.unlink_clusters([cluster_info(scene.prompt)], timeout=LINK_MS)
        must_link(scene.decoder, scene.prompt)
        for block in (4, 5):
            scene.pull([block], [block])
            scene.check_pulled([block], [block])
        assert (ways.short, ways.long) == (1, 1)

    def test_the_peer_has_finalized(self, scene: Scene) -> None:
        scene.prompt.finalize()
        with pytest.raises(LLMException):
            scene.pull([1], [1])
        assert eventually(lambda: _error_of(lambda: scene.pull([1], [1])) is NotYetLinked)

    def test_this_end_has_finalized(self, scene: Scene) -> None:
        cache_manager = manager(scene.decoder)
        scene.decoder.finalize()
        with pytest.raises(ClosedError):
            cache_manager.pull_blocks(scene.key, scene.mine, [1], [1])

    def test_the_role_forbids_it_now(self) -> None:
        with linked("shm", v2=False) as (prompt, decoder):
            scene = Scene(prompt, decoder)
            scene.pull([1], [1])
            assert decoder.unlink_clusters([cluster_info(prompt)], timeout=LINK_MS)[0] is LLMStatusCode.LLM_SUCCESS
            decoder._role = LLMRole.PROMPT
            with pytest.raises(LLMException, match="DECODER"):
                scene.pull([2], [2])

    def test_a_handle_of_somebody_else(self, shm_scene: Scene, ways: Ways) -> None:
        """A handle with the same number, but not ours, is looked up as ever."""
        mine = shm_scene.mine
        shm_scene.mine = Cache(mine.cache_id, mine.cache_desc, mine.tensor_addrs, True)
        shm_scene.pull([1], [1])
        assert (ways.short, ways.long) == (0, 1)


def _error_of(call: Callable[[], object]) -> type | None:
    try:
        call()
    except LLMException as error:
        return type(error)
    return None


class TestWhatIsKept:
    def test_so_many_and_no_more(self, shm_scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(routes, "MAX_ROUTES", 3)
        link = manager(shm_scene.decoder)._mover._links.peek(shm_scene.prompt.cluster_id)
        for _ in range(10):
            shm_scene.mine = plain_cache(shm_scene.decoder, 1, desc(num_blocks=16))
            shm_scene.pull([1], [1])
            assert 1 <= len(link.peer_caches.routes) <= 3

    def test_no_mapping_of_a_peer_that_is_gone(self) -> None:
        def mappings() -> int:
            gc.collect()
            return open("/proc/self/maps").read().count("datadist-pool")

        with make_end("shm", role=LLMRole.DECODER) as decoder:
            mine = plain_cache(decoder, 1)
            before = mappings()
            for seed in range(3):
                with make_end("shm", "127.0.0.1:0", LLMRole.PROMPT) as prompt:
                    must_link(decoder, prompt)
                    filled_cache(prompt, seed)
                    for block in (1, 2):
                        manager(decoder).pull_blocks(BlocksCacheKey(prompt.cluster_id, 0), mine, [block], [block])
                    assert mappings() > before + 1
                    decoder.unlink_clusters([cluster_info(prompt)], timeout=LINK_MS)
                del prompt
            assert eventually(lambda: mappings() == before)


@pytest.mark.parametrize(
    "blocks",
    [[], (), [True], [1.0], ["1"], [None], "12", b"12", range(3), {1}, 3, None, [2**63], [[1]], np.arange(4)[::2],
     np.zeros((2, 2), dtype=np.int64), np.arange(3, dtype=np.int32), np.arange(3.0), np.array([], dtype=np.int64)],
)  # fmt: skip
def test_unusual_items(blocks: Any) -> None:
    assert usual_items(blocks) is None


def test_usual_items() -> None:
    for blocks in ([1, 2, -3], (4,), numpy_of(7, 8)):
        found = usual_items(blocks)
        assert found is not None
        assert list(found) == list(blocks)
