# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between engines of different shapes, planned and carried out byte by byte, against a naive gather.

B31 (more ranks than KV heads), B32 (another cut of heads), B33 (other block sizes), and what there is beside:
pipeline stages, layouts, numbers of blocks, windows, a prefix that D has.
"""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from connector.tests.shaped_engine import (
    ALL_LAYERS,
    LAYOUTS,
    Layers,
    Rank,
    Shape,
    carry_out,
    check,
    engine,
    layer_name,
)
from vllm_datadist.description import Description
from vllm_datadist.groups import GroupInfo, missing_position
from vllm_datadist.handoff.desk import Sources
from vllm_datadist.messages import Endpoint
from vllm_datadist.params import MAX_WORKERS
from vllm_datadist.worker import copies
from vllm_datadist.worker.kv_layout import LocalCache
from vllm_datadist.worker.planner import PlanError, plan_pair
from vllm_datadist.worker.shares import check_brings, find_sources
from vllm_datadist.worker.topology import LayerDescription, Strip, plain

END = 141


def hand_off(ps: list[Rank], ds: list[Rank], first: int = 0, end: int = END) -> None:
    """Fill P, let each rank of D find its sources, carry the plans out, and check all that D has then."""
    for p in ps:
        p.fill(p.tables, end)
    workers = tuple(p.endpoint for p in random.Random(end).sample(ps, len(ps)))
    num_reads = dict.fromkeys(workers, 0)
    promised: dict[object, set[int]] = {worker: set() for worker in workers}
    let_go: list[object] = []
    for d in ds:
        sources = find_sources(d.description, workers)
        let_go += sources.unread
        for source in sources.read:
            p = next(p for p in ps if p.endpoint == source.endpoint)
            plan = plan_pair(p.description, d.description)
            check_brings(d.description, source.endpoint, workers, plan)
            assert not plan.is_empty
            num_reads[source.endpoint] += 1
            promised[source.endpoint].add(source.num_readers)
            carry_out(plan, p, d, first, end)
        check(d, first, end)
    # P is told by each reader how many there are, and is let go by exactly one if there is none.
    assert all(told == ({num_reads[worker]} if num_reads[worker] else set()) for worker, told in promised.items())
    assert sorted(let_go, key=repr) == sorted((w for w, count in num_reads.items() if not count), key=repr)


def engines(p: Shape, d: Shape, end: int = END) -> tuple[list[Rank], list[Rank]]:
    return engine(p, end, seed=1), engine(d, end, seed=2)


TP_SIZES = [1, 2, 4, 8, 16]
FEW = (Layers((3, 20)),)


@pytest.mark.parametrize("total_heads", [1, 2, 4, 8, 16])
@pytest.mark.slow
def test_b31_b32_any_cut_of_heads(total_heads: int) -> None:
    for p_tp, d_tp in itertools.product(TP_SIZES, repeat=2):
        p = Shape(p_tp, 16, total_heads=total_heads, groups=FEW)
        d = replace(p, tp_size=d_tp, layout="LBNHC")
        hand_off(*engines(p, d, 33), first=16, end=33)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
@pytest.mark.slow
def test_layouts_of_every_kind(layouts: tuple[str, str]) -> None:
    for p_tp, d_tp, sizes in [(1, 1, (16, 16)), (2, 1, (16, 32)), (1, 2, (32, 16))]:
        p, d = Shape(p_tp, sizes[0], layouts[0], spare_blocks=5), Shape(d_tp, sizes[1], layouts[1])
        hand_off(*engines(p, d, 75), first=32, end=75)


BLOCK_SIZES = [16, 32, 48, 64, 128]


@pytest.mark.parametrize("block_sizes", list(itertools.product(BLOCK_SIZES, repeat=2)), ids=str)
def test_b33_block_sizes_with_a_prefix_at_d_and_a_ragged_end(block_sizes: tuple[int, int]) -> None:
    p, d = Shape(1, block_sizes[0], total_heads=2), Shape(1, block_sizes[1], total_heads=2)
    for first, end in itertools.product((0, block_sizes[0], block_sizes[1], 1, END - 1), (END, 128, 129)):
        if first < end:
            hand_off(*engines(p, d, end), first=first, end=end)


@pytest.mark.parametrize("pages", [(2, 1), (1, 4), (4, 2)], ids=str)
def test_b33_blocks_that_the_attention_kernel_cuts(pages: tuple[int, int]) -> None:
    for sizes in [(64, 64), (64, 128), (128, 64), (192, 64)]:
        p = Shape(1, sizes[0], pages_per_block=pages[0])
        d = Shape(2, sizes[1], "LBNHC", pages_per_block=pages[1])
        hand_off(*engines(p, d), first=64)


KERNELS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("transposed", KERNELS, ids=str)
def test_b33_kernels_that_keep_tokens_side_by_side(transposed: tuple[bool, bool]) -> None:
    """As vLLM's CPU attention keeps K: what a token has is then all over a head's block."""
    for sizes, (p_tp, d_tp) in itertools.product([(32, 32), (32, 64), (64, 32), (48, 32)], [(1, 1), (2, 1), (1, 2)]):
        p, d = Shape(p_tp, sizes[0], is_transposed=transposed[0]), Shape(d_tp, sizes[1], is_transposed=transposed[1])
        hand_off(*engines(p, d), first=sizes[1])


def test_b33_blocks_that_a_kernel_packs_are_moved_whole_or_refused() -> None:
    """Nobody knows where a token lies in them, so P and D must have blocks of one size and the same packing."""
    ps, [d] = engines(Shape(2, 32, is_transposed=True), Shape(1, 32, is_transposed=True))
    for rank in (*ps, d):
        rank.caches = [_packed(cache, "tiles") for cache in rank.caches]
    hand_off(ps, [d])
    [d] = engine(Shape(1, 64), END, 2)
    d.caches = [_packed(cache, "tiles") for cache in d.caches]
    with pytest.raises(PlanError, match="packing is tiles, and block_tokens is 64 here and 32 at the peer"):
        plan_pair(ps[0].description, d.description)
    [d] = engine(Shape(1, 32), END, 2)
    with pytest.raises(PlanError, match="packing is '' here and 'tiles' at the peer"):
        plan_pair(ps[0].description, d.description)


def _packed(cache: LocalCache, packing: str) -> LocalCache:
    layers = [msgspec.structs.replace(layer, packing=packing) for layer in cache.description.layers]
    return LocalCache(msgspec.structs.replace(cache.description, layers=layers), cache.addresses)


STAGES = [(0,), (0, 2), (0, 1, 10), (0, 1, 2, 3)]


@pytest.mark.parametrize("stages", list(itertools.product(STAGES, repeat=2)), ids=str)
@pytest.mark.slow
def test_pipeline_stages_on_both_sides(stages: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for p_tp, d_tp in [(1, 1), (2, 1), (1, 2), (8, 2)]:
        for layout in ("LBHNC", "BLHNC"):
            p = Shape(p_tp, 16, layout, stages=stages[0])
            hand_off(*engines(p, Shape(d_tp, 32, stages=stages[1]), 70), first=32, end=70)


#: Layers with another number of heads, in stages of their own and mixed; two heads are replicated on 4 and 8 ranks.
UNLIKE = (Layers((0, 1), total_heads=8), Layers((2, 5), total_heads=2), Layers((3, 4), total_heads=4))
UNLIKE_STAGES = [(0,), (0, 2), (0, 3), (0, 2, 3), (0, 1, 4, 5)]


@pytest.mark.parametrize("stages", list(itertools.product(UNLIKE_STAGES, repeat=2)), ids=str)
@pytest.mark.slow
def test_stages_whose_layers_have_other_numbers_of_heads(stages: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Every worker of D counts all readers of each worker of P, also those of layers it does not have itself."""
    _hand_off_unlike(stages)


@pytest.mark.parametrize("stages", [((0,), (0, 2, 3)), ((0, 1, 4, 5), (0, 3))], ids=str)
def test_two_of_those(stages: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    _hand_off_unlike(stages)


def _hand_off_unlike(stages: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for p_tp, d_tp in itertools.product([1, 2, 4, 8], repeat=2):
        dp_rank = (p_tp + d_tp) % 3
        p, d = Shape(p_tp, stages=stages[0], groups=UNLIKE), Shape(d_tp, stages=stages[1], groups=UNLIKE)
        hand_off(*engines(p, replace(d, dp_rank=dp_rank), 7), end=7)


def test_who_knows_its_own_layers_only_miscounts() -> None:
    """The negative control of the test above: what `Description.model_layers` is for."""
    ps, ds = engines(Shape(4, groups=UNLIKE), Shape(2, stages=(0, 2, 3), groups=UNLIKE), 7)
    workers = [p.endpoint for p in ps]
    counts = []
    for is_told in (True, False):
        told = [d.description if is_told else msgspec.structs.replace(d.description, model_layers=()) for d in ds]
        read = [source for one in told for source in find_sources(one, workers).read]
        counts.append({worker: {s.num_readers for s in read if s.endpoint == worker} for worker in workers})
    assert all(len(of_one) == 1 for of_one in counts[0].values())
    assert counts[0] != counts[1]


@pytest.mark.parametrize("tp_sizes", list(itertools.product([1, 2, 4], repeat=2)), ids=str)
def test_mla_from_any_holder(tp_sizes: tuple[int, int]) -> None:
    """One latent on all ranks: one holder gives it, another one to each rank and data parallel rank of D."""
    p = Shape(tp_sizes[0], 16, total_heads=1, use_mla=True)
    for dp_rank in (0, 1):
        hand_off(*engines(p, Shape(tp_sizes[1], 64, total_heads=1, use_mla=True, dp_rank=dp_rank), 70), end=70)


def test_b31_ranks_and_engines_that_need_the_same_head_have_it_from_different_holders() -> None:
    ps = engine(Shape(8), 16, seed=1)
    workers = tuple(p.endpoint for p in ps)
    for dp_rank, expected in [(0, [0, 3, 4, 7]), (1, [0, 3, 4, 7])]:
        ds = engine(Shape(4, dp_rank=dp_rank), 16, seed=2)
        read = [[source.endpoint.tp_rank for source in find_sources(d.description, workers).read] for d in ds]
        assert read == [[rank] for rank in expected]
    lone = [engine(Shape(1, total_heads=1, dp_rank=rank), 16, seed=2)[0] for rank in range(4)]
    ps = engine(Shape(4, total_heads=1), 16, seed=1)
    workers = tuple(p.endpoint for p in ps)
    assert [find_sources(d.description, workers).read[0].endpoint.tp_rank for d in lone] == [0, 1, 2, 3]


HYBRID = (Layers((0, 2, 4), window=24), Layers((1, 3, 5)))


@pytest.mark.parametrize(
    "sizes", [(16, 16), (32, 16), (16, 32), ((16, 32), 16), (32, (16, 32)), ((48, 16), (16, 48))], ids=str
)
@pytest.mark.parametrize("layouts", [("LBHNC", "LBHNC"), ("BLHNC", "LBNHC"), ("BLNHC", "BLHNC")], ids="-".join)
def test_hybrid_groups_over_the_same_bytes_with_a_window(sizes: tuple, layouts: tuple[str, str]) -> None:
    """Both ends have dropped what has left the window; what lies before it at P, in the same block, D need not have."""
    p = Shape(2, sizes[0], layouts[0], groups=HYBRID, stages=(0, 3))
    d = Shape(1, sizes[1], layouts[1], groups=HYBRID)
    seen = 96
    hand_off(engine(p, END, 1, (seen, 0)), engine(d, END, 2, (seen, 0)), first=0, end=END)


@pytest.mark.slow
def test_a_random_sample_of_everything() -> None:
    rng = random.Random(6)
    for _ in range(25):
        total_heads, num_tokens = rng.choice([1, 2, 4, 8]), rng.randrange(1, 200)
        shapes = [
            Shape(
                rng.choice([1, 2, 4, 8]),
                rng.choice(BLOCK_SIZES),
                rng.choice(list(LAYOUTS)),
                total_heads,
                stages=rng.choice(STAGES),
                spare_blocks=rng.randrange(2, 9),
            )
            for _ in range(2)
        ]
        first = rng.randrange(num_tokens)
        hand_off(*engines(*shapes, num_tokens), first=first, end=num_tokens)


# --- layer by layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
def test_a_plan_by_layer_keeps_the_layers_apart(layouts: tuple[str, str]) -> None:
    [p], [d] = engines(Shape(1, 16, layouts[0]), Shape(1, 32, layouts[1]), 70)
    p.fill(p.tables, 70)
    plan = plan_pair(p.description, d.description, by_layer=True)
    names = [layer_name(number) for number in ALL_LAYERS[0].numbers]
    for count, name in enumerate(names, start=1):
        carry_out(plan, p, d, 0, 70, only_layer=name)
        check(d, 0, 70, names[:count])


# --- how much is asked of the core ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_shapes_are_one_copy_of_whole_pages(layout: str) -> None:
    [p], [d] = engines(Shape(1, 16, layout), Shape(1, 16, layout, spare_blocks=9))
    [meeting] = plan_pair(p.description, d.description).meetings
    [copy] = meeting.copies
    num_tensors = d.caches[0].description.num_tensors
    assert (copy.slices, copy.target_tensors, copy.source_tensors) == (None, range(num_tensors), range(num_tensors))
    assert num_tensors == {"LHBNC": 16, "LBHNC": 4, "LBNHC": 4}.get(layout, 1)


def test_a_stage_of_p_is_one_copy_for_a_d_without_stages() -> None:
    """Its layers are neighbours at D too: 10 comes behind 2."""
    ps, [d] = engines(Shape(1, 16, stages=(0, 2)), Shape(1, 16))
    plans = [plan_pair(p.description, d.description) for p in ps]
    assert [[len(meeting.copies) for meeting in plan.meetings] for plan in plans] == [[1], [1]]
    assert [plan.meetings[0].copies[0].target_tensors for plan in plans] == [range(2), range(2, 4)]


def test_heads_of_head_major_pages_are_one_slice() -> None:
    [p, _], [d] = engines(Shape(2, 16), Shape(1, 16))
    [copy] = plan_pair(p.description, d.description).meetings[0].copies
    assert [one.num_bytes for one in copy.slices or ()] == [2 * 16 * 8]


def test_many_slices_are_several_copies() -> None:
    [p], [d] = engines(Shape(1, 128, "BLNHC", total_heads=16), Shape(1, 128, "BLHNC", total_heads=16), 128)
    copies = plan_pair(p.description, d.description).meetings[0].copies
    assert len(copies) == 8
    assert all(len(copy.slices or ()) <= 1024 for copy in copies)
    hand_off([p], [d], end=128)


# --- what cannot be paired -----------------------------------------------------------------------------------------


def test_b33_a_block_that_p_lacks_is_named_by_its_tokens() -> None:
    [p], [d] = engines(Shape(1, 16), Shape(1, 64))
    p.tables[0] = p.tables[0][:2]
    with pytest.raises(PlanError, match=r"tokens \d+\.\.\d+: the target has block \d+ for them, the source has none"):
        plan_pair(p.description, d.description).moves(p.tables, d.tables, 0, END)


def test_block_sizes_that_meet_in_too_many_ways_are_named() -> None:
    [p], [d] = engines(Shape(1, 1021), Shape(1, 1019), 10)
    with pytest.raises(PlanError, match="block_tokens is 1019 here and 1021 at the peer"):
        plan_pair(p.description, d.description)


@pytest.mark.parametrize("is_one_tensor", [True, False])
def test_layouts_that_differ_in_too_many_places_are_refused(
    is_one_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P says that every byte of a head lies on its own: 4 * 16 * 256 slices for each layer."""
    monkeypatch.setattr(copies, "MAX_PLAN_SLICES", 1 << 15)
    [p], [d] = engines(Shape(1), Shape(1))
    two = [_in_layers(rank.description, strip, 2, is_one_tensor) for rank, strip in ((p, APART), (d, plain(256, 256)))]
    assert sum(len(one.slices or ()) for one in plan_pair(two[0], two[1]).meetings[0].copies) == 2 * 4 * 16 * 256
    three = [_in_layers(description, description.caches[0].layers[0].strips, 3, is_one_tensor) for description in two]
    with pytest.raises(PlanError, match=r"layer layers\.\d+: .* differ in more than 32768 places"):
        plan_pair(three[0], three[1])


APART = (Strip(0, 256, 2, 512, 1),)


def _in_layers(d: Description, strips: tuple[Strip, ...], count: int, is_one_tensor: bool) -> Description:
    """So many layers, whose slices are not alike, of that cut."""
    head_bytes = 16 * strips[0].token_stride_bytes
    layers = [
        LayerDescription(
            f"layers.{number}", 0 if is_one_tensor else number, number * 4 * head_bytes, 0, 4, 4, 4, head_bytes, strips
        )
        for number in range(count)
    ]
    page_bytes, num_tensors = count * 4 * head_bytes, 1 if is_one_tensor else count
    cache = msgspec.structs.replace(d.caches[0], page_bytes=page_bytes, num_tensors=num_tensors, layers=layers)
    return msgspec.structs.replace(d, caches=[cache])


def test_a_number_of_ranks_that_heads_cannot_be_cut_for_is_named() -> None:
    [d] = engine(Shape(1, total_heads=4), 16, seed=1)
    workers = [replace(d.endpoint, tp_rank=rank, cluster_id=rank + 1) for rank in range(3)]
    with pytest.raises(PlanError, match="tp_size is 1 here and 3 at the peer: 4 KV heads cannot be cut"):
        find_sources(d.description, workers)


@pytest.mark.parametrize("left_out", range(4))
def test_a_ticket_that_names_too_few_workers_is_refused(left_out: int) -> None:
    """Else D would take for loaded what nobody brings."""
    ps, [d] = engines(Shape(2, stages=(0, 2)), Shape(1))
    workers = [p.endpoint for index, p in enumerate(ps) if index != left_out]
    with pytest.raises(
        PlanError, match=r"layer model\.layers\.\d+\.self_attn\.attn: the ticket names no worker of tp_rank"
    ):
        find_sources(d.description, workers)


@pytest.mark.parametrize("stages", [(0, 20), (0, 2, 20)], ids=str)
def test_a_stage_of_d_without_kv_cache_needs_nobody_and_is_counted_by_nobody(stages: tuple[int, ...]) -> None:
    ps, ds = engines(Shape(2), Shape(1, stages=stages))
    sources = find_sources(ds[-1].description, [p.endpoint for p in ps])
    assert (ds[-1].caches, sources) == ([], Sources(()))
    hand_off(ps, ds)
    hand_off(*engines(Shape(2, stages=stages), Shape(4, stages=stages)))


def test_layers_without_kv_cache_are_counted_by_all_alike() -> None:
    """The configuration does not say which layers have none, so an engine names them all."""
    ps, ds = engines(Shape(2), Shape(2, stages=(0, 20)))
    layers = (*ds[0].model_layers, msgspec.structs.replace(ds[0].model_layers[-1], number=21))
    descriptions = [msgspec.structs.replace(d.description, model_layers=layers) for d in ds]
    shares = [find_sources(description, [p.endpoint for p in ps]) for description in descriptions]
    for p in ps:
        counts = [source.num_readers for share in shares for source in share.read if source.endpoint == p.endpoint]
        assert counts == [2, 2], "one rank of each stage: the stage without KV cache releases, too"
    assert not any(share.unread for share in shares)


@pytest.mark.slow
def test_a_ticket_with_as_many_workers_as_may_be_costs_little() -> None:
    """It is looked at in the engine's thread. Some tens of milliseconds; it was some seconds."""
    [d] = engine(Shape(1), 16, seed=1)
    begun_s = time.process_time()
    for num_stages, tp_size in ((MAX_WORKERS, 1), (32, MAX_WORKERS // 32), (1, MAX_WORKERS)):
        places = [(pp_rank, tp_rank) for pp_rank in range(num_stages) for tp_rank in range(tp_size)]
        workers = [Endpoint(pp, tp, "p", 1, i + 1, pp) for i, (pp, tp) in enumerate(places)]
        with suppress(PlanError):
            find_sources(d.description, workers)
    assert time.process_time() - begun_s < 5


def test_an_engine_without_kv_cache_needs_nobody() -> None:
    ps, [d] = engines(Shape(2), Shape(1))
    empty = msgspec.structs.replace(d.description, caches=[], model_layers=())
    assert find_sources(empty, [p.endpoint for p in ps]) == Sources(())


def test_a_wrong_gather_is_seen() -> None:
    """The negative control of all tests here: two pages exchanged, one byte changed, one slice too many."""
    for spoil in ("tables", "byte", "heads"):
        [p], [d] = engines(Shape(1, 16), Shape(1, 32))
        p.fill(p.tables, END)
        if spoil == "tables":
            p.tables[0][0], p.tables[0][1] = p.tables[0][1], p.tables[0][0]
        if spoil == "byte":
            block = p.tables[0][5] or 0
            p.views[layer_name(2)].numpy()[block, 3, 1, 1] += 1
        if spoil == "heads":
            view = p.views[layer_name(10)].numpy()
            view[:, [0, 1]] = np.array(view[:, [1, 0]])
        carry_out(plan_pair(p.description, d.description), p, d, 0, END)
        with pytest.raises(AssertionError):
            check(d, 0, END)


# --- what the scheduler can see ------------------------------------------------------------------------------------


def test_what_p_must_have_for_blocks_of_another_size() -> None:
    full, window = GroupInfo(0, 64, None, ("a",)), GroupInfo(1, 64, 128, ("b",))
    table = [1] * 10  # 320 tokens in blocks of 32
    assert missing_position(full, table, 0, 300, 300, 32) is None
    assert missing_position(full, table[:9], 0, 300, 300, 32) == 288
    assert missing_position(full, table[:3], 0, 300, 300, 128) is None
    assert missing_position(full, [0, 0, *table], 64, 300, 300, 32) is None
    # D keeps tokens 128 and following, of which the next query sees those from 173 on. Others may see the rest.
    assert missing_position(window, [0] * 4 + table[4:], 0, 300, 300, 32) is None
    assert missing_position(window, [0] * 5 + table[5:], 0, 300, 300, 32) == 128
    assert missing_position(window, [0, 1, 1], 0, 300, 300, 128) is None
