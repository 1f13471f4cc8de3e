# SPDX-License-Identifier: Apache-2.0
"""Which bytes of one worker's pages belong where in another's: from two descriptions to a plan, once per pair of peers.

The same plan serves a pull and a push: the source is P's worker, the target D's, whoever moves the bytes. A plan says
for every head of every layer that the target has from this source, where it lies at both ends; what no plan can pair is
refused when it is made, naming the field and both values. Then each load only picks its blocks out of the tables.

With blocks of different sizes the tokens fall into pieces, cut at every page boundary of either end. Where a piece lies
in its pages repeats with the least common multiple of the two sizes; pieces that lie alike are one `Meeting`, whose
blocks are every n-th of the tables. Blocks of one size have one meeting, and whole pages are moved as such, so that the
core merges neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from typing import Protocol, cast

from .copies import BlockCopy, Share, check_num_slices, copies_of
from .topology import CacheDescription, Held, LayerDescription, PlanError, held_layers, holder_for

#: Block ids by position // block size; None = no block there.
Table = Sequence[int | None]
#: Ways for blocks of two sizes to meet.
MAX_MEETINGS = 1024


class End(Protocol):
    """What is read of a worker's description. `spread` tells apart who may have a head from several holders."""

    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def spread(self) -> int: ...
    @property
    def caches(self) -> Sequence[CacheDescription]: ...


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Pages paired by token position."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of one load: all copies of `PairPlan.meetings[meeting]` are made of them."""

    pairs: BlockPairs
    meeting: int


@dataclass(frozen=True, slots=True)
class Paging:
    """How the blocks of both ends are divided."""

    group: int
    is_state: bool
    source_tokens: int
    source_pages: int
    target_tokens: int
    target_pages: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """Tokens `offset` .. `offset + num_tokens - 1`, and those every `period` further: each lies in one page of both."""

    paging: Paging
    offset: int
    period: int
    num_tokens: int
    copies: tuple[BlockCopy, ...]

    def pairs(self, source: Table, target: Table, first_token: int, end_token: int) -> BlockPairs:
        """The pages of tokens first_token..end_token-1, from tables of pages. Pieces are moved whole.

        Positions where the target has no page are left out; the source must have all others.

        Raises:
            PlanError: the source lacks a page that the target has.
        """
        if self.paging.is_state:
            return self._state(source, target, end_token)
        begin = max(0, (first_token - self.offset - self.num_tokens) // self.period + 1)
        count = -(-(end_token - self.offset) // self.period) - begin
        if count <= 0:
            return _NO_PAIRS
        wanted = self._every(target, self.paging.target_tokens, begin, count)
        found = self._every(source, self.paging.source_tokens, begin, count)
        if len(wanted) == len(found) == count and None not in wanted and None not in found:
            return BlockPairs(cast("tuple[int, ...]", found), cast("tuple[int, ...]", wanted))
        return self._some_pairs(found, wanted, begin)

    def _every(self, table: Table, tokens: int, begin: int, count: int) -> tuple[int | None, ...]:
        step = self.period // tokens
        start = self.offset // tokens + begin * step
        return tuple(table[start : start + (count - 1) * step + 1 : step])

    def _state(self, source: Table, target: Table, end_token: int) -> BlockPairs:
        """The one block that holds what is left of all tokens."""
        found, wanted = (table[0] if len(table) == 1 else None for table in (source, target))
        if found is None or wanted is None:
            raise PlanError(f"the state after token {end_token - 1} is in no block (tables: {source!r}, {target!r})")
        return BlockPairs((found,), (wanted,))

    def _some_pairs(self, found: Table, wanted: Table, begin: int) -> BlockPairs:
        """Where not every position has its page."""
        sources: list[int] = []
        targets: list[int] = []
        for index, page in enumerate(wanted):
            if page is None:
                continue
            source = found[index] if index < len(found) else None
            if source is None:
                first = self.offset + (begin + index) * self.period
                raise _lacking(first, first + self.num_tokens, page)
            sources.append(source)
            targets.append(page)
        return BlockPairs(tuple(sources), tuple(targets))


_NO_PAIRS = BlockPairs((), ())


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All that one target worker has from one source worker.

    Attributes:
        heads: numbers of the heads, by layer.
    """

    meetings: tuple[Meeting, ...]
    heads: Mapping[str, frozenset[int]]

    @property
    def is_empty(self) -> bool:
        """Nothing comes from there."""
        return not self.meetings

    def moves(self, sources: Sequence[Table], targets: Sequence[Table], first_token: int, end_token: int) -> list[Move]:
        """What to copy for tokens first_token..end_token-1. One table per KV cache group, of each end.

        Raises:
            PlanError: the source lacks a block that the target has, or there is no table for a group.
        """
        moves = []
        pages: dict[Paging, tuple[Table, Table]] = {}
        for index, meeting in enumerate(self.meetings):
            paging = meeting.paging
            if paging not in pages:
                pages[paging] = _pages(paging, sources, targets)
            pairs = meeting.pairs(*pages[paging], first_token, end_token)
            if pairs.target:
                moves.append(Move(pairs, index))
        return moves


def _pages(paging: Paging, sources: Sequence[Table], targets: Sequence[Table]) -> tuple[Table, Table]:
    if paging.group >= min(len(sources), len(targets)):
        raise PlanError(f"there is no block table for KV cache group {paging.group}")
    source, target = sources[paging.group], targets[paging.group]
    return _in_pages(source, paging.source_pages), _in_pages(target, paging.target_pages)


def _in_pages(table: Table, pages_per_block: int) -> Table:
    if pages_per_block == 1:
        return table
    return [
        None if block is None else block * pages_per_block + page for block in table for page in range(pages_per_block)
    ]


# --- making a plan ------------------------------------------------------------------------------------------------


def plan_pair(source: End, target: End, by_layer: bool = False) -> PairPlan:
    """What `target` has from `source`: of all holders of a head exactly one gives it (`topology.holder_for`).

    Args:
        by_layer: what is copied between two tensors is of one layer, for a push that sends layer after layer.

    Raises:
        PlanError: a layer that both hold does not fit, the block sizes meet in too many ways, or the layouts differ in
            too many places.
    """
    shares = _shares(source, target)
    num_slices = 0
    by_caches: defaultdict[tuple[int, int], list[Share]] = defaultdict(list)
    for share in shares:
        by_caches[share.source.cache.model_id, share.target.cache.model_id].append(share)
    copies: defaultdict[_Place, list[BlockCopy]] = defaultdict(list)
    for some in by_caches.values():
        for place in _places(some[0].source.cache, some[0].target.cache):
            for copy in copies_of(some, place.offset, place.num_tokens, by_layer):
                copies[place].append(copy)
                num_slices += len(copy.slices or ())
                check_num_slices(num_slices, some[0])
    heads: defaultdict[str, set[int]] = defaultdict(set)
    for share in shares:
        heads[share.target.layer.layer_name].update(share.heads)
    meetings = tuple(place.meeting(tuple(made)) for place, made in copies.items())
    return PairPlan(meetings, {name: frozenset(numbers) for name, numbers in heads.items()})


def fit_errors(ours: End, theirs: End) -> list[str]:
    """Each difference that no plan can bridge, of layers that both hold: the field, and both values."""
    found: list[str] = []
    others: defaultdict[str, list[Held]] = defaultdict(list)
    for held in held_layers(theirs.caches):
        others[held.layer.layer_name].append(held)
    for mine in held_layers(ours.caches):
        for other in others.get(mine.layer.layer_name, ()):
            found += _fit_errors(mine, other)
            if 0 in (mine.layer.total_heads, other.layer.total_heads) and ours.tp_size != theirs.tp_size:
                found.append(
                    f"layer {mine.layer.layer_name}: tp_size is {ours.tp_size} here and {theirs.tp_size} at the peer, "
                    "and which heads of the model a rank holds is not known"
                )
    return list(dict.fromkeys(found))


_SAME_IN_CACHES = ("group", "kind", "window", "chunk", "is_state")
_SAME_IN_LAYERS = ("content_bytes", "total_heads", "packing")


def _fit_errors(mine: Held, other: Held) -> list[str]:
    pairs = [(name, getattr(mine.cache, name), getattr(other.cache, name)) for name in _SAME_IN_CACHES]
    pairs += [(name, getattr(mine.layer, name), getattr(other.layer, name)) for name in _SAME_IN_LAYERS]
    if mine.layer.packing and mine.cache.page_tokens != other.cache.page_tokens:
        name = f"packing is {mine.layer.packing}, and block_tokens"
        pairs.append((name, mine.cache.block_tokens, other.cache.block_tokens))
    where = f"layer {mine.layer.layer_name}"
    return [f"{where}: {name} is {a!r} here and {b!r} at the peer" for name, a, b in pairs if a != b]


def _shares(source: End, target: End) -> list[Share]:
    errors = fit_errors(target, source)
    if errors:
        raise PlanError("; ".join(errors))
    holding: defaultdict[str, list[Held]] = defaultdict(list)
    for held in held_layers(source.caches):
        holding[held.layer.layer_name].append(held)
    return [
        Share(theirs, mine, heads)
        for mine in held_layers(target.caches)
        for theirs in holding.get(mine.layer.layer_name, ())
        for heads in _given(theirs.layer, mine.layer, source, target)
    ]


def _given(theirs: LayerDescription, mine: LayerDescription, source: End, target: End) -> Iterator[range]:
    """Ranges of heads that this source gives to this target."""
    first, end = max(theirs.first_head, mine.first_head), min(theirs.heads.stop, mine.heads.stop)
    numbers = [head for head in range(first, end) if _gives(head, theirs, source, target)]
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        heads = [head for _, head in run]
        yield range(heads[0], heads[-1] + 1)


def _gives(head: int, layer: LayerDescription, source: End, target: End) -> bool:
    if layer.total_heads == 0:
        return source.tp_rank == target.tp_rank
    return holder_for(head, layer.rank_heads, layer.total_heads, source.tp_size, target.spread) == source.tp_rank


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece lies in a page of each end."""

    paging: Paging
    offset: int
    period: int
    num_tokens: int

    def meeting(self, copies: tuple[BlockCopy, ...]) -> Meeting:
        return Meeting(self.paging, self.offset, self.period, self.num_tokens, copies)


def _places(source: CacheDescription, target: CacheDescription) -> Iterator[_Place]:
    """All ways in which a page of one meets one of the other."""
    of_source, of_target = source.page_tokens, target.page_tokens
    period = lcm(of_source, of_target)
    if period // of_source + period // of_target > MAX_MEETINGS:
        raise PlanError(
            f"KV cache group {target.group}: block_tokens is {target.block_tokens} here and {source.block_tokens} at "
            f"the peer: these sizes meet in more than {MAX_MEETINGS} ways"
        )
    paging = Paging(
        target.group,
        target.is_state,
        of_source,
        source.pages_per_block,
        of_target,
        target.pages_per_block,
    )
    cuts = sorted({*range(0, period, of_source), *range(0, period, of_target)})
    for offset, end in zip(cuts, [*cuts[1:], period], strict=True):
        yield _Place(paging, offset, period, end - offset)


def _lacking(first_token: int, end_token: int, wanted: int) -> PlanError:
    return PlanError(
        f"tokens {first_token}..{end_token - 1}: the target has block {wanted} for them, the source has none"
    )
