"""`layout.py` against a brute-force oracle that looks at every flat coordinate by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from refimpl.layout import (
    BLOCK_SIZE,
    ClippedBounds,
    CutBlock,
    CutRun,
    OriginalParam,
    Piece,
    Run,
    ShardLayout,
    ShardPlan,
    plan_shard,
)

Element = tuple[int, int]
"""A parameter's position in `ShardLayout.params`, and one of its elements."""

BAD_LUCK = (
    "a block over three ranks or more",
    "a rank with two cut blocks",
    "a rank that starts in one parameter and ends in another",
    "a bound on a block's edge",
    "a bound inside a gap",
    "a short last block is cut",
    "a one-element parameter",
    "a zero-element parameter",
    "several ranks of padding only",
    "an empty shard between others",
    "equal shards",
    "uneven shards",
    "not sharded",
    "more than 40 ranks",
)

properties = settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---- the oracle: two dictionaries with an entry for every coordinate


@dataclass(frozen=True)
class Oracle:
    """Which element lies at a flat coordinate (nothing: padding), and which rank holds it."""

    element_at: dict[int, Element]
    rank_at: dict[int, int]

    @classmethod
    def of(cls, layout: ShardLayout) -> Oracle:
        elements = {
            param.flat_start + element: (index, element)
            for index, param in enumerate(layout.params)
            for element in range(param.numel)
        }
        ranks = {
            flat: rank
            for rank in range(len(layout.bounds) - 1)
            for flat in range(layout.bounds[rank], layout.bounds[rank + 1])
        }
        return cls(elements, ranks)

    def shards(self, layout: ShardLayout) -> list[dict[int, Element]]:
        """For each rank: the element at every position of its shard that is not padding."""
        shards: list[dict[int, Element]] = [{} for _ in layout.bounds[1:]]
        for flat, element in self.element_at.items():
            rank = self.rank_at[flat]
            shards[rank][flat - layout.bounds[rank]] = element
        return shards

    def blocks(self) -> dict[Element, dict[int, list[int]]]:
        """For each block, named by parameter and number: rank -> the elements that it holds."""
        blocks: dict[Element, dict[int, list[int]]] = {}
        for flat, (index, element) in self.element_at.items():
            holders = blocks.setdefault((index, element // BLOCK_SIZE), {})
            holders.setdefault(self.rank_at[flat], []).append(element)
        return blocks

    def cut_blocks(self, layout: ShardLayout) -> list[tuple[CutBlock, ...]]:
        """For each rank: the blocks of which it holds some elements and another rank the rest."""
        cuts: list[tuple[CutBlock, ...]] = [() for _ in layout.bounds[1:]]
        for (index, _), holders in self.blocks().items():
            if len(holders) > 1:
                everything = sorted(element for own in holders.values() for element in own)
                pieces = tuple(Piece(rank, own[0], own[-1] + 1) for rank, own in holders.items())
                for rank in holders:
                    cuts[rank] += (CutBlock(index, everything[0], everything[-1] + 1, pieces),)
        return cuts


# ---- layouts at random, with a liking for trouble

numels = st.one_of(
    st.integers(0, 3), st.sampled_from([255, 256, 257, 511, 512, 513, 768]), st.integers(1, 600)
) | st.integers(1, 2000)

alignments = st.sampled_from([1, 4, 8, 64])
"""FSDP1 aligns to 16 bytes, so to 8 elements at most; wider gaps are there to be hit by a bound."""


def place(sizes: Sequence[int], align: int = 1) -> tuple[OriginalParam, ...]:
    """Parameters one behind the other, each starting at a multiple of `align`."""
    params: list[OriginalParam] = []
    for index, numel in enumerate(sizes):
        end = params[-1].flat_end if params else 0
        params.append(OriginalParam(f"p{index}", (numel,), end + -end % align))
    return tuple(params)


def equal_bounds(total: int, num_ranks: int) -> range:
    """What FSDP1 does: every shard as long as the first, and padding behind the end."""
    shard = max(1, -(-total // num_ranks))
    return range(0, shard * num_ranks + 1, shard)


def fsdp1(sizes: Sequence[int], num_ranks: int, align: int = 1) -> ShardLayout:
    params = place(sizes, align)
    return ShardLayout(params, equal_bounds(params[-1].flat_end, num_ranks))


@st.composite
def equal_layouts(draw: st.DrawFn) -> ShardLayout:
    sizes = draw(st.lists(numels, min_size=1, max_size=5))
    num_ranks = draw(st.integers(2, 8) | st.integers(9, 60) | st.integers(41, 60))
    return fsdp1(sizes, num_ranks, draw(alignments))


@st.composite
def unsharded_layouts(draw: st.DrawFn) -> ShardLayout:
    params = place(draw(st.lists(numels, min_size=1, max_size=5)), draw(alignments))
    return ShardLayout(params, (0, params[-1].flat_end + draw(st.integers(0, 8))))


@st.composite
def uneven_layouts(draw: st.DrawFn) -> ShardLayout:
    params = place(draw(st.lists(numels, min_size=1, max_size=4)), draw(alignments))
    total = params[-1].flat_end + draw(st.integers(0, 300))
    edges = [at for param in params for at in range(param.flat_start, param.flat_end + 1, BLOCK_SIZE)]
    inner = draw(st.lists(st.integers(0, total) | st.sampled_from([0, total, *edges]), max_size=12))
    repeated = draw(st.lists(st.sampled_from(inner), max_size=3)) if inner else []
    return ShardLayout(params, (0, *sorted(inner + repeated), total))


@st.composite
def dim0_layouts(draw: st.DrawFn) -> ShardLayout:
    """As DTensor shards dimension 0: whole rows, `ceil(rows / ranks)` each, late ranks without any."""
    rows, row = draw(st.integers(1, 40)), draw(st.integers(1, 90))
    num_ranks = draw(st.integers(2, 8))
    ends = [min(rank * -(-rows // num_ranks), rows) * row for rank in range(num_ranks + 1)]
    return ShardLayout((OriginalParam("p", (rows, row)),), tuple(ends))


layouts = st.one_of(equal_layouts(), equal_layouts(), uneven_layouts(), dim0_layouts(), unsharded_layouts())

UNLUCKY_LAYOUTS = (
    fsdp1([5], 60),  # 55 ranks of padding only
    fsdp1([300, 1, 0, 700], 60, align=4),  # many ranks inside one block
    fsdp1([1, 1, 1], 3),
    fsdp1([0], 4),
    ShardLayout(place([257, 0, 256]), (0, 0, 256, 256, 257, 257, 300, 513, 513)),  # empty shards
)


def with_unlucky_examples(test: Callable[..., None]) -> Callable[..., None]:
    for layout in UNLUCKY_LAYOUTS:
        test = example(layout)(test)
    return properties(given(layouts)(test))


def bad_luck(layout: ShardLayout) -> set[str]:
    """Which of `BAD_LUCK` this layout has, told from the oracle alone."""
    oracle = Oracle.of(layout)
    shards, blocks = oracle.shards(layout), oracle.blocks()
    widths = [high - low for low, high in zip(layout.bounds, layout.bounds[1:], strict=False)]
    numel = {index: param.numel for index, param in enumerate(layout.params)}
    cut = {key: sorted(held) for key, held in blocks.items() if len(held) > 1}
    cuts_of = Counter(rank for ranks in cut.values() for rank in ranks)
    inner = [bound for bound in layout.bounds[1:-1] if 0 < bound < layout.bounds[-1]]
    padded = [rank for rank, shard in enumerate(shards) if not shard and widths[rank]]
    tests = {
        "a block over three ranks or more": any(len(ranks) > 2 for ranks in cut.values()),
        "a rank with two cut blocks": 2 in cuts_of.values(),
        "a rank that starts in one parameter and ends in another": any(
            len({index for index, _ in shard.values()}) > 1 for shard in shards
        ),
        "a bound on a block's edge": any(
            bound in oracle.element_at and oracle.element_at[bound][1] % BLOCK_SIZE == 0 for bound in inner
        ),
        "a bound inside a gap": any(
            {bound - 1, bound}.isdisjoint(oracle.element_at) and bound < max(oracle.element_at, default=0)
            for bound in inner
        ),
        "a short last block is cut": any((block + 1) * BLOCK_SIZE > numel[index] for index, block in cut),
        "a one-element parameter": 1 in numel.values(),
        "a zero-element parameter": 0 in numel.values(),
        "several ranks of padding only": len(padded) > 1,
        "an empty shard between others": any(
            not width and any(widths[:rank]) and any(widths[rank:]) for rank, width in enumerate(widths)
        ),
        "equal shards": len(widths) > 1 and len(set(widths)) == 1,
        "uneven shards": len(set(widths)) > 1,
        "not sharded": len(widths) == 1,
        "more than 40 ranks": len(widths) > 40,
    }
    return {name for name, present in tests.items() if present}


def test_the_random_layouts_include_the_unlucky_ones() -> None:
    seen: Counter[str] = Counter()

    @settings(properties, max_examples=300, derandomize=True)
    @given(layouts)
    def look(layout: ShardLayout) -> None:
        seen.update(bad_luck(layout))

    look()
    assert set(seen) == set(BAD_LUCK)
    assert all(seen[name] >= 5 for name in BAD_LUCK), seen


# ---- segments, pieces and cut blocks


@with_unlucky_examples
def test_segments_say_what_lies_where_in_every_shard(layout: ShardLayout) -> None:
    for rank, shard in enumerate(Oracle.of(layout).shards(layout)):
        segments = list(layout.segments_of(rank))
        told = [
            (segment.shard_start + offset, (segment.index, segment.param_start + offset))
            for segment in segments
            for offset in range(segment.param_end - segment.param_start)
        ]
        assert told == sorted(shard.items())
        assert [segment.index for segment in segments] == sorted({index for index, _ in shard.values()})
        assert all(segment.shard_end - 1 in shard for segment in segments)
        own = replace(layout, rank=rank)
        assert own.segments == tuple(segments)
        assert own.shard_numel == layout.bounds[rank + 1] - layout.bounds[rank]


@pytest.mark.rule("padding.inert")
@with_unlucky_examples
def test_segments_of_all_ranks_tile_every_parameter(layout: ShardLayout) -> None:
    told = Counter(
        (segment.index, element)
        for rank in range(layout.num_ranks)
        for segment in layout.segments_of(rank)
        for element in range(segment.param_start, segment.param_end)
    )
    assert told == Counter(
        (index, element) for index, param in enumerate(layout.params) for element in range(param.numel)
    )


@pytest.mark.rule("block.cut-by-rank")
@with_unlucky_examples
def test_cut_blocks_are_the_blocks_that_several_ranks_hold(layout: ShardLayout) -> None:
    for rank, expected in enumerate(Oracle.of(layout).cut_blocks(layout)):
        assert layout.cut_blocks_of(rank) == expected
        assert len(expected) <= 2


@pytest.mark.rule("block.cut-by-rank", "traffic.edges-only")
@with_unlucky_examples
def test_a_rank_that_touches_a_cut_block_holds_or_receives_all_of_it(layout: ShardLayout) -> None:
    shards = [set(shard.values()) for shard in Oracle.of(layout).shards(layout)]
    for rank in range(layout.num_ranks):
        for cut in layout.cut_blocks_of(rank):
            assert cut.param_start % BLOCK_SIZE == 0
            assert cut.numel == min(BLOCK_SIZE, layout.params[cut.index].numel - cut.param_start)
            assert rank in {piece.rank for piece in cut.pieces}
            gathered = [
                (piece.rank, (cut.index, element))
                for piece in cut.pieces
                for element in range(piece.param_start, piece.param_end)
            ]
            elements = [element for _, element in gathered]
            assert elements == [(cut.index, at) for at in range(cut.param_start, cut.param_end)]
            assert all(element in shards[holder] for holder, element in gathered)


@pytest.mark.rule("collective.unconditional")
@properties
@given(layouts, st.data())
def test_any_cut_is_the_same_answer_on_every_rank(layout: ShardLayout, data: st.DataObject) -> None:
    count = len(layout.params)
    is_8bit = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    cuts = [cut for own in Oracle.of(layout).cut_blocks(layout) for cut in own]
    for rank in {0, layout.num_ranks - 1}:
        told = replace(layout, rank=rank).any_cut(is_8bit)
        assert told == any(is_8bit[cut.index] for cut in cuts)


@properties
@given(layouts, st.data())
def test_pieces_of_any_range_come_from_the_ranks_that_hold_them(
    layout: ShardLayout, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(layout.params) - 1))
    param = layout.params[index]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, param.numel)] * 2)))
    oracle = Oracle.of(layout)
    held: dict[int, list[int]] = {}
    for element in range(start, end):
        held.setdefault(oracle.rank_at[param.flat_start + element], []).append(element)
    expected = tuple(Piece(rank, own[0], own[-1] + 1) for rank, own in held.items())
    assert layout.pieces(index, start, end) == expected


# ---- the plan of one rank


@dataclass(frozen=True)
class Case:
    """What `plan_shard` is given, for every rank."""

    layout: ShardLayout
    is_8bit: Sequence[bool]
    share: Sequence[Hashable]


@dataclass(frozen=True)
class Planned(Case):
    """One rank's plan, beside what the oracle says about that rank's shard and cut blocks."""

    plan: ShardPlan
    shard: dict[int, Element]
    cuts: tuple[CutBlock, ...]

    def block_numel(self, index: int, block: int) -> int:
        return min(BLOCK_SIZE, self.layout.params[index].numel - block * BLOCK_SIZE)

    def elements(self, start: int, end: int) -> list[Element]:
        return [self.shard[position] for position in range(start, end)]


def plans(case: Case) -> Iterator[Planned]:
    oracle = Oracle.of(case.layout)
    cuts = oracle.cut_blocks(case.layout)
    for rank, shard in enumerate(oracle.shards(case.layout)):
        layout = replace(case.layout, rank=rank)
        plan = plan_shard(layout, case.is_8bit, case.share)
        yield Planned(layout, case.is_8bit, case.share, plan, shard, cuts[rank])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some parameters 8-bit, some FP32, and neighbours with equal and with other hyperparameters."""
    layout = draw(layouts)
    count = len(layout.params)
    is_8bit = draw(st.lists(st.booleans() | st.just(True), min_size=count, max_size=count))
    keys: st.SearchStrategy[Hashable] = st.sampled_from(["a", "a", "a", ("b", 1.0)])
    return Case(layout, is_8bit, draw(st.lists(keys, min_size=count, max_size=count)))


def planned(test: Callable[..., None]) -> Callable[..., None]:
    for layout in UNLUCKY_LAYOUTS:
        count = len(layout.params)
        test = example(Case(layout, [True] * count, "a" * count))(test)
    return properties(given(cases())(test))


@planned
def test_runs_and_own_pieces_cover_every_held_element_once(case: Case) -> None:
    for each in plans(case):
        covered = [position for run in each.plan.runs for position in range(run.start, run.end)]
        for cut in each.plan.cuts:
            own = range(cut.own.param_start, cut.own.param_end)
            positions = range(cut.shard_start, cut.shard_start + len(own))
            assert each.elements(positions.start, positions.stop) == [(cut.block.index, at) for at in own]
            covered += positions
        assert sorted(covered) == sorted(each.shard)


@planned
def test_the_cuts_are_the_8bit_cut_blocks(case: Case) -> None:
    for each in plans(case):
        wanted = [block for block in each.cuts if each.is_8bit[block.index]]
        assert [cut.block for cut in each.plan.cuts] == wanted
        assert all(cut.own in cut.block.pieces for cut in each.plan.cuts)
        assert all(cut.own.rank == each.layout.rank for cut in each.plan.cuts)


@pytest.mark.rule("precision.same-on-every-rank", "override.by-name")
@planned
def test_a_run_has_one_precision_and_one_set_of_hyperparameters(case: Case) -> None:
    for each in plans(case):
        for run in each.plan.runs:
            assert run.numel == run.end - run.start > 0
            indices = {index for index, _ in each.elements(run.start, run.end)}
            assert run.index in indices
            assert {each.is_8bit[index] for index in indices} == {run.is_8bit}
            assert len({each.share[index] for index in indices}) == 1


def whole_blocks(each: Planned, start: int, end: int) -> bool:
    """Whether counting 256 from `start` on gives the parameters' own blocks, all of them whole."""
    groups: dict[int, list[Element]] = {}
    for position in range(start, end):
        groups.setdefault((position - start) // BLOCK_SIZE, []).append(each.shard[position])
    for elements in groups.values():
        index, block = elements[0][0], elements[0][1] // BLOCK_SIZE
        first = block * BLOCK_SIZE
        if elements != [(index, first + at) for at in range(each.block_numel(index, block))]:
            return False
    return True


@pytest.mark.rule("block.restart", "block.tail")
@planned
def test_the_blocks_of_an_8bit_run_are_blocks_of_its_parameters(case: Case) -> None:
    for each in plans(case):
        for run in each.plan.runs:
            assert not run.is_8bit or whole_blocks(each, run.start, run.end)


@planned
def test_runs_that_one_kernel_call_could_update_are_merged(case: Case) -> None:
    for each in plans(case):
        assert list(each.plan.runs) == sorted(each.plan.runs, key=lambda run: run.start)
        for before, after in zip(each.plan.runs, each.plan.runs[1:], strict=False):
            assert not could_be_one(each, before, after)


def could_be_one(each: Planned, before: Run, after: Run) -> bool:
    return (
        before.end == after.start
        and before.is_8bit == after.is_8bit
        and each.share[before.index] == each.share[after.index]
        and (not before.is_8bit or whole_blocks(each, before.start, after.end))
    )


# ---- where the state lies


def expected_state(each: Planned, is_8bit: bool) -> list[Element]:
    """What has state on this rank, in order: 8-bit, every element of a touched block; else the held ones."""
    held = [element for _, element in sorted(each.shard.items()) if each.is_8bit[element[0]] == is_8bit]
    if not is_8bit:
        return held
    touched = dict.fromkeys((index, element // BLOCK_SIZE) for index, element in held)
    return [
        (index, block * BLOCK_SIZE + at)
        for index, block in touched
        for at in range(each.block_numel(index, block))
    ]


def told_state(each: Planned, is_8bit: bool) -> dict[int, Element]:
    """State offset -> element, as the `StateSegment`s have it; they must not overlap."""
    told: dict[int, Element] = {}
    for segment in each.plan.state:
        if segment.is_8bit == is_8bit:
            for offset in range(segment.param_end - segment.param_start):
                assert segment.state_start + offset not in told
                told[segment.state_start + offset] = (segment.index, segment.param_start + offset)
    return told


def told_absmax(each: Planned) -> dict[int, Element]:
    """Absmax offset -> parameter and block number, as the `StateSegment`s have it."""
    told: dict[int, Element] = {}
    for segment in each.plan.state:
        if segment.is_8bit:
            for offset, element in enumerate(range(segment.param_start, segment.param_end, BLOCK_SIZE)):
                assert segment.block_start + offset not in told
                told[segment.block_start + offset] = (segment.index, element // BLOCK_SIZE)
    return told


@pytest.mark.rule("memory.sharded", "block.cut-by-rank")
@planned
def test_state_holds_every_touched_block_whole_and_nothing_else(case: Case) -> None:
    for each in plans(case):
        codes, floats = expected_state(each, True), expected_state(each, False)
        assert told_state(each, True) == dict(enumerate(codes))
        assert told_state(each, False) == dict(enumerate(floats))
        blocks = dict.fromkeys((index, element // BLOCK_SIZE) for index, element in codes)
        assert told_absmax(each) == dict(enumerate(blocks))
        sizes = (each.plan.codes, each.plan.blocks, each.plan.floats)
        assert sizes == (len(codes), len(blocks), len(floats))
        assert all(each.is_8bit[segment.index] == segment.is_8bit for segment in each.plan.state)


@planned
def test_runs_and_cuts_find_the_state_of_their_elements(case: Case) -> None:
    for each in plans(case):
        told = {is_8bit: told_state(each, is_8bit) for is_8bit in (False, True)}
        absmax = told_absmax(each)
        for run in each.plan.runs:
            elements = each.elements(run.start, run.end)
            assert [told[run.is_8bit][run.state_start + at] for at in range(run.numel)] == elements
            assert not run.is_8bit or finds_absmax(absmax, run.block_start, elements)
            assert run.is_8bit or run.block_start == 0
        for cut in each.plan.cuts:
            elements = [(cut.block.index, at) for at in range(cut.block.param_start, cut.block.param_end)]
            assert [told[True][cut.state_start + at] for at in range(len(elements))] == elements
            assert finds_absmax(absmax, cut.block_start, elements)


def finds_absmax(absmax: dict[int, Element], block_start: int, elements: list[Element]) -> bool:
    return all(
        absmax[block_start + at // BLOCK_SIZE] == (index, element // BLOCK_SIZE)
        for at, (index, element) in enumerate(elements)
    )


# ---- merging, by hand


@pytest.mark.parametrize(
    ("sizes", "is_8bit", "share", "expected"),
    [
        pytest.param((256, 512), (True, True), "aa", [(0, 768)], id="whole blocks stay in step"),
        pytest.param((256, 300, 256), (True,) * 3, "aaa", [(0, 556), (556, 812)], id="a short block ends it"),
        pytest.param((256, 256), (True, True), "ab", [(0, 256), (256, 512)], id="other hyperparameters"),
        pytest.param((5, 7), (False, False), "aa", [(0, 12)], id="FP32 has no blocks"),
        pytest.param((5, 7), (False, False), "ab", [(0, 5), (5, 12)], id="FP32, other hyperparameters"),
        pytest.param((256, 256), (True, False), "aa", [(0, 256), (256, 512)], id="other precision"),
        pytest.param((256, 0, 256), (True, False, True), "aba", [(0, 512)], id="nothing in between"),
    ],
)
def test_merging_by_hand(
    sizes: tuple[int, ...], is_8bit: tuple[bool, ...], share: str, expected: list[tuple[int, int]]
) -> None:
    plan = plan_shard(fsdp1(sizes, 1), is_8bit, share)
    assert [(run.start, run.end) for run in plan.runs] == expected
    assert plan.cuts == ()


# ---- the concrete cases of shared/cases.md


@pytest.mark.rule("block.cut-by-rank")
def test_one_block_over_three_and_four_ranks() -> None:
    layout = fsdp1([4100], 41)
    three = CutBlock(0, 0, 256, (Piece(0, 0, 100), Piece(1, 100, 200), Piece(2, 200, 256)))
    four = CutBlock(
        0, 256, 512, (Piece(2, 256, 300), Piece(3, 300, 400), Piece(4, 400, 500), Piece(5, 500, 512))
    )
    last = CutBlock(0, 3840, 4096, (Piece(38, 3840, 3900), Piece(39, 3900, 4000), Piece(40, 4000, 4096)))
    assert layout.cut_blocks_of(1) == (three,)  # both bounds of rank 1 cut the same block
    assert layout.cut_blocks_of(2) == (three, four)
    assert layout.cut_blocks_of(3) == (four,)
    assert layout.cut_blocks_of(40) == (last,)  # 4096..4100, a block too, is whole
    plan = plan_shard(replace(layout, rank=1), [True], "a")
    assert plan.runs == ()
    assert plan.cuts == (CutRun(three, Piece(1, 100, 200), shard_start=0, state_start=0, block_start=0),)
    assert (plan.codes, plan.blocks) == (256, 1)


@pytest.mark.rule("block.cut-by-rank")
def test_straddling_three_parameters() -> None:
    params = place([3000, 96 * 96, 500])
    layout = ShardLayout(params, equal_bounds(params[-1].flat_end, 2))
    block = CutBlock(1, 3328, 3584, (Piece(0, 3328, 3358), Piece(1, 3358, 3584)))  # block 13, 30 / 226
    first, second = (plan_shard(replace(layout, rank=rank), [False, True, False], "aaa") for rank in range(2))
    assert [segment.param_end - segment.param_start for segment in layout.segments_of(0)] == [3000, 3358]
    assert [segment.param_end - segment.param_start for segment in layout.segments_of(1)] == [5858, 500]
    assert first.runs == (Run(0, False, 0, 3000, 0, 0), Run(1, True, 3000, 6328, 0, 0))
    assert first.cuts == (CutRun(block, block.pieces[0], 6328, 3328, 13),)
    assert (first.codes, first.blocks, first.floats) == (3584, 14, 3000)
    assert second.runs == (Run(1, True, 226, 5858, 256, 1), Run(2, False, 5858, 6358, 0, 0))
    assert second.cuts == (CutRun(block, block.pieces[1], 0, 0, 0),)
    assert (second.codes, second.blocks, second.floats) == (5888, 23, 500)


@pytest.mark.rule("block.tail")
def test_uneven_with_a_short_last_block() -> None:
    layout = ShardLayout((OriginalParam("a", (101, 80)),), equal_bounds(8080, 2))
    block = CutBlock(0, 3840, 4096, (Piece(0, 3840, 4040), Piece(1, 4040, 4096)))  # block 15, at 200
    assert layout.cut_blocks_of(0) == layout.cut_blocks_of(1) == (block,)
    first, second = (plan_shard(replace(layout, rank=rank), [True], "a") for rank in range(2))
    assert (first.codes, first.blocks) == (16 * 256, 16)
    assert (second.codes, second.blocks) == (16 * 256 + 144, 17)
    assert first.blocks + second.blocks - 1 == 32  # block 15 is on both ranks


# ---- what is refused


def two(second_start: int) -> tuple[OriginalParam, ...]:
    return (OriginalParam("one", (10,)), OriginalParam("two", (2, 5), second_start))


@pytest.mark.rule("refuse.layout")
@pytest.mark.parametrize(
    ("params", "bounds", "rank", "message"),
    [
        pytest.param(two(9), (0, 20), 0, "parameter 'two' starts at 9", id="overlap"),
        pytest.param(two(10)[::-1], (0, 20), 0, "parameter 'one' starts at 0", id="out of order"),
        pytest.param((OriginalParam("p", (3,), -1),), (0, 20), 0, "'p' starts at -1", id="before 0"),
        pytest.param(two(10), (0, 12, 11, 20), 0, "never decrease", id="decreasing"),
        pytest.param(two(10), (0, 10, 19), 0, "bounds end at 19 .* end at 20", id="too short"),
        pytest.param(two(10), range(0, 19, 9), 0, "bounds end at 18 .* end at 20", id="range too short"),
        pytest.param(two(10), range(20, -1, -10), 0, "start at 0", id="range downwards"),
        pytest.param(two(10), (1, 20), 0, "start at 0", id="not from 0"),
        pytest.param(two(10), range(1, 21, 10), 0, "start at 0", id="range not from 0"),
        pytest.param(two(10), (0,), 0, "start at 0", id="one bound"),
        pytest.param((), (), 0, "start at 0", id="no bounds"),
        pytest.param(two(10), (0, 10, 20), 2, "rank 2 has no shard among 2", id="rank too high"),
        pytest.param(two(10), (0, 10, 20), -1, "rank -1 has no shard", id="rank below 0"),
    ],
)
def test_bad_layouts_are_refused(
    params: tuple[OriginalParam, ...], bounds: Sequence[int], rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout(params, bounds, rank)


def test_a_layout_is_not_refused_for_gaps_padding_or_repeated_bounds() -> None:
    layout = ShardLayout(two(12), (0, 0, 10, 10, 22, 30), rank=4)
    assert (layout.num_ranks, layout.shard_numel, layout.segments) == (5, 8, ())


# ---- scale


def llama_405b_units() -> Iterator[list[int]]:
    """Numels of the original parameters of Llama 3.1 405B, one unit a layer and one for the rest."""
    hidden, intermediate, kv, vocab = 16384, 53248, 8 * 128, 128256
    square, narrow, wide = hidden * hidden, kv * hidden, intermediate * hidden
    for _ in range(126):
        yield [square, narrow, narrow, square, wide, wide, wide, hidden, hidden]
    yield [vocab * hidden, hidden, vocab * hidden]


@pytest.mark.parametrize("rank", [0, 1, 8191, 16382, 16383])
def test_one_share_of_a_405b_model_at_16384_ranks(rank: int) -> None:
    units = list(llama_405b_units())
    assert sum(map(sum, units)) == 405_853_388_800
    for sizes in units:
        layout = replace(fsdp1(sizes, 16384), rank=rank)
        plan = plan_shard(layout, [numel >= 4096 for numel in sizes], ["a"] * len(sizes))
        assert len(plan.cuts) <= 2
        updated = sum(run.numel for run in plan.runs)
        updated += sum(cut.own.param_end - cut.own.param_start for cut in plan.cuts)
        held = min(sum(sizes), layout.bounds[rank + 1]) - layout.bounds[rank]
        assert updated == held > 0
        assert held <= plan.codes < held + 2 * BLOCK_SIZE


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 12), st.integers(1, 9))
def test_clipped_bounds_are_those_of_the_parameter(start: int, numel: int, shard: int, ranks: int) -> None:
    unit = range(0, shard * ranks + 1, shard)
    clipped = ClippedBounds(unit, start, numel)
    expected = [min(max(bound - start, 0), numel) for bound in unit]
    assert list(clipped) == expected
    assert list(clipped[1:-1]) == expected[1:-1]
    assert len(clipped) == ranks + 1
