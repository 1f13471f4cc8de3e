# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public method, given wrongly: the documented exception and status code, a text that names
the argument, and an object that works afterwards. The rows are in the `argument_*` modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from datadist_core import (
    BlocksCacheKey,
    CacheKey,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
    errors,
)
from datadist_core.tests.argument_accepts import ACCEPTS, Accept
from datadist_core.tests.argument_caches import CACHES, GET_TENSORS, cache_rows
from datadist_core.tests.argument_ends import (
    ENDS,
    INIT,
    LINK,
    LINK_CLUSTERS,
    QUERY,
    SWITCH_ROLE,
    UNLINK,
    end_rows,
)
from datadist_core.tests.argument_moves import MOVES, move_rows
from datadist_core.tests.argument_rows import Fault, Row, Where
from datadist_core.tests.argument_setters import setter_rows
from datadist_core.tests.argument_surface import (
    ANY_TYPE,
    living_methods,
    public_callables,
    public_parameters,
    stale_exceptions,
)
from datadist_core.tests.argument_tasks import GET_RESULTS, SYNCHRONIZE, TRANSFER, task_rows
from datadist_core.tests.argument_values import value_rows
from datadist_core.tests.argument_world import World, world
from datadist_core.tests.core_ends import cluster_info, config, filled_cache, make_end, must_link, plain_cache

MANAGER_CALLS = [*CACHES, GET_TENSORS, *MOVES, TRANSFER]
LIFE = [
    one.state_row(Fault.FINALIZED, LLMStatusCode.LLM_ENGINE_FINALIZED, "finalize", Where.ENDED) for one in MANAGER_CALLS
]
ROWS = [*setter_rows(), *value_rows(), *end_rows(), *cache_rows(), *move_rows(), *task_rows(), *LIFE]


#: After these the end without links is tried too.
TOUCH_LISTENERS = {one.name for one in (LINK_CLUSTERS, SWITCH_ROLE, LINK, UNLINK, QUERY)}
#: Those of a communicator need one: test_a_communicator_has_its_calls. A V2 end has no kv_cache_manager.
GOOD = [
    one
    for one in (*ENDS, INIT, *MANAGER_CALLS, SYNCHRONIZE, GET_RESULTS)
    if one not in (UNLINK, QUERY) and one.name != "LLMDataDist.kv_cache_manager"
]


class Worlds:
    """One world of each kind, made when it is first asked for; one that a row broke is replaced."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[Where, World] = {}

    def get(self, where: Where) -> World:
        if where not in self._made:
            self._made[where] = self._make(where)
        return self._made[where]

    def discard(self, where: Where) -> None:
        """So that one bad row does not make all later ones fail."""
        self._made.pop(where, None)

    def _make(self, where: Where) -> World:
        if where is Where.FRESH:
            return _never_initialized(self.get(Where.V2))
        made = self._stack.enter_context(world(v2=where is not Where.V1, by_id_only=where is Where.BY_ID_ONLY))
        if where is Where.V2:
            made.task = TRANSFER.call(made)
        if where is Where.ENDED:
            made.kept = {one.name: one.arguments(made) for one in (*ENDS, INIT, *MANAGER_CALLS)}
            made.finalize()
        return made


def _never_initialized(living: World) -> World:
    """The arguments of a living world, but ends that know nothing of them."""
    made = copy.copy(living)
    made.kept = {one.name: one.arguments(living) for one in ENDS}
    made.prompt, made.decoder, made.lone = (LLMDataDist(LLMRole.MIX, i) for i in range(3))
    return made


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield Worlds(stack)


@pytest.fixture
def v2(worlds: Worlds) -> World:
    return worlds.get(Where.V2)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_argument_is_named_and_nothing_breaks(row: Row, worlds: Worlds):
    need_torch_for(row.callee)
    if row.where is Where.NOWHERE:
        row.check(None)
        return
    try:
        row.check(worlds.get(row.where))
    finally:
        check_alive(worlds, row)


def need_torch_for(callee: str) -> None:
    """All the rest works, and is tested, without it."""
    if callee == "create_tensors":
        pytest.importorskip("torch")


def check_alive(worlds: Worlds, row: Row) -> None:
    if row.where in (Where.FRESH, Where.ENDED):
        return
    try:
        worlds.get(row.where).check_alive()
        if row.callee in TOUCH_LISTENERS:
            worlds.get(row.where).check_lone_listens()
    except BaseException:
        worlds.discard(row.where)
        raise


# -- the table is complete


def test_every_parameter_has_a_row():
    have = {(row.callee, row.parameter) for row in ROWS}
    missing = [str(p) for p in public_parameters() if (p.callee, p.name) not in have]
    missing += [name for name in public_callables() if not any(row.callee == name for row in ROWS)]
    assert not missing


def test_no_exception_is_stale():
    assert stale_exceptions() == []


def test_every_row_names_what_exists():
    callables = public_callables()
    names = {name: {p.name for p in params} for name, params in callables.items()}
    getters = {one.name for one in ENDS} - set(names)
    unknown = [
        str(row)
        for row in ROWS
        if row.callee not in getters and row.parameter not in names.get(row.callee, set()) | {""}
    ]
    assert not unknown


def test_every_parameter_has_rows_for_wrong_types_and_none():
    wrong_type = {(row.callee, row.parameter) for row in ROWS if row.fault is Fault.TYPE}
    none = {(row.callee, row.parameter) for row in ROWS if row.fault in (Fault.NONE, Fault.MISSING)}
    missing = [f"{p}: type" for p in public_parameters() if (p.callee, p.name) not in wrong_type]
    missing += [f"{p}: None" for p in public_parameters() if not p.takes_none and (p.callee, p.name) not in none]
    assert not [text for text in missing if text.split(":")[0] not in ANY_TYPE]


def test_every_method_has_a_row_for_its_end():
    have = {row.callee for row in ROWS if row.fault is Fault.FINALIZED}
    assert living_methods() <= have


def test_every_list_may_be_a_tuple():
    have = {(one.callee.name, one.parameter) for one in ACCEPTS}
    assert not [str(p) for p in public_parameters() if p.takes_a_list and (p.callee, p.name) not in have]


# -- the good arguments, which the rows spoil one by one, are good


@pytest.mark.parametrize("one", GOOD, ids=lambda one: one.name)
def test_good_arguments_are_accepted(one):
    with world(v2=one.where is not Where.V1) as fresh_world:
        fresh_world.task = TRANSFER.call(fresh_world)
        one.call(fresh_world)
        if one.name != "LLMDataDist.unlink_clusters":
            fresh_world.check_alive()


def test_a_communicator_has_its_calls():
    with world() as made:
        comm_id = LINK.call(made)
        assert comm_id > 0
        assert QUERY.call(made, comm_id=comm_id) is RegisterMemStatus.PREPARING
        assert UNLINK.call(made, comm_id=comm_id) is None
        for gone in (QUERY, UNLINK):
            with pytest.raises(LLMException, match="comm_id"):
                gone.call(made, comm_id=comm_id)


@pytest.mark.parametrize("kind", [list, tuple], ids=["list", "tuple"])
@pytest.mark.parametrize("accept", ACCEPTS, ids=str)
def test_lists_are_accepted_as_tuples(accept: Accept, kind: type):
    need_torch_for(accept.callee.name)
    with world(v2=accept.callee.where is not Where.V1) as fresh_world:
        accept.call(fresh_world, kind)
        if accept.callee.name != "LLMDataDist.unlink_clusters":
            fresh_world.check_alive()


# -- life


def test_finalize_is_idempotent(worlds: Worlds):
    worlds.get(Where.ENDED).finalize()
    LLMDataDist(LLMRole.MIX, 1).finalize()


def test_a_refused_init_can_be_repeated():
    with LLMDataDist(LLMRole.MIX, 1) as end:
        for key, text in (("llm.TransferBackend", "nosuch"), ("llm.listenIpInfo", "203.0.113.1:0")):
            with pytest.raises(LLMException, match=f"{text.split(':')[0]}") as caught:
                end.init({key: text, "llm.EnableCacheManager": "1"})
            assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
            with pytest.raises(LLMException, match="init"):
                _ = end.cache_manager
        made = LLMConfig()
        made.enable_cache_manager = True
        end.init(made)
        end.init(made)
        assert end.cache_manager is end.cache_manager


def test_a_freed_cache_has_no_views(v2: World):
    for freed in (v2.target_freed, v2.target_freed_blocks):
        for view in (freed.numpy, freed.tensors):
            with pytest.raises(LLMException) as caught:
                view()
            assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_is_initialized_tells():
    with world(v2=False) as made:
        assert made.p.is_initialized() is True
        made.finalize()
        assert made.p.is_initialized() is False


def test_freeing_twice_and_unknown_keys_are_no_ops(v2: World):
    v2.p.deallocate_cache(v2.source_freed)
    v2.p.deallocate_blocks_cache(v2.source_freed_blocks)
    v2.p.unregister_cache(2**40)
    v2.p.remove_cache_key(CacheKey(v2.prompt.cluster_id, 31337))
    v2.check_alive()


HUGE_MS = 2**63 - 1


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.decoder.link_clusters([cluster_info(w.lone)], timeout=HUGE_MS),
        lambda w: w.decoder.unlink_clusters([w.prompt_info()], timeout=HUGE_MS),
        lambda w: w.decoder.call(w.prompt.cluster_id, "echo", b"", HUGE_MS / 1000),
        lambda w: w.d.pull_blocks(w.blocks_key(), w.target_blocks, [0], [1], deadline_s=HUGE_MS / 1000),
        lambda w: w.task.synchronize(HUGE_MS),
        lambda w: w.task.get_results(HUGE_MS),
    ],
    ids=["link_clusters", "unlink_clusters", "call", "pull_blocks", "synchronize", "get_results"],
)
def test_a_huge_time_limit_is_as_good_as_none(call):
    with world() as made:
        made.task = TRANSFER.call(made)
        result = call(made)
        assert not isinstance(result, tuple) or result[0] is LLMStatusCode.LLM_SUCCESS


def test_a_huge_sync_kv_timeout_is_as_good_as_none():
    with make_end(listen="127.0.0.1:0") as prompt, LLMDataDist(LLMRole.DECODER, 77) as decoder:
        made = config()
        made.sync_kv_timeout = HUGE_MS
        decoder.init(made)
        must_link(decoder, prompt)
        source, target = filled_cache(prompt, 1), plain_cache(decoder, 2)
        decoder.cache_manager.pull_blocks(BlocksCacheKey(prompt.cluster_id), target, [0], [1])
        np.testing.assert_array_equal(target.numpy()[0][1], source.numpy()[0][0])


def test_a_pool_that_cannot_be_mapped_is_named():
    with LLMDataDist(LLMRole.MIX, 1) as end:
        for key, name in (("llm.MemPoolConfig", "mem_pool_cfg"), ("llm.HostMemPoolConfig", "host_mem_pool_cfg")):
            with pytest.raises(LLMException, match=rf"{name}|{key}"):
                end.init({key: f'{{"memory_size": {2**62}}}'})
        end.init({})


def test_results_of_a_task_outlive_the_ends():
    with world() as made:
        task = TRANSFER.call(made)
        assert task.synchronize(5000) is LLMStatusCode.LLM_SUCCESS
        made.finalize()
        assert task.get_results(5000) == [LLMStatusCode.LLM_SUCCESS]


def test_every_error_class_has_its_code():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, LLMException)]
    for one in classes:
        assert one("text").status_code is one.default_code
        assert one("text", LLMStatusCode.LLM_TIMEOUT).status_code is LLMStatusCode.LLM_TIMEOUT
        assert one.default_code is not LLMStatusCode.LLM_SUCCESS
    assert len({c.__name__ for c in classes}) > 10


def test_the_proof_of_life_can_fail(v2: World):
    """A check that always passed would prove nothing."""
    broken = copy.copy(v2)
    broken.alive_source = v2.source_blocks
    before = [tensor.copy() for tensor in v2.source_blocks.numpy()]
    with pytest.raises(AssertionError):
        broken.check_alive()
    for tensor, old in zip(v2.source_blocks.numpy(), before, strict=True):
        np.copyto(tensor, old)
