"""Which rank holds which elements of which original parameter, and which blocks are cut.

Pure integers: no torch, no communication, so a world of any size can be planned anywhere.
All ranges are half-open, and a name says whose coordinates it is in: `param_`, `flat_`,
`shard_` or `state_`. One unit of three original parameters on three ranks, in blocks
of four instead of 256:

    flat coordinates   0           6                     17    20      24
    parameters         |  a (6)    |        b (11)        |c (3)| padding|
    blocks             |aaaa|aa    |bbbb|bbbb|bbb         |ccc  |
    bounds             0                8               16             24
    rank                      0          |       1       |        2

Blocks start again at element 0 of every original parameter (rule `block.restart`), so the
first block of `b` covers flat 6..10 and the bound at 8 cuts it: ranks 0 and 1 both touch
it, and each needs the gradient elements that the other holds. The bound at 16 cuts the
short last block of `b`, flat 14..17, and its last element lies on rank 2.

What FSDP1 calls a shard, a tensor that is not sharded (one rank, two bounds) and an uneven
dim-0 shard of a single parameter are all the same thing here: a sequence of bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

BLOCK_SIZE = 256
"""Elements per quantization block. bitsandbytes hard-codes 256 since 0.44 (upstream PR #1365)."""


def block_start(position: int) -> int:
    """Round down to a block."""
    return position - position % BLOCK_SIZE


def block_end(position: int) -> int:
    """Round up to a block."""
    return position + -position % BLOCK_SIZE


def num_blocks(numel: int) -> int:
    """Blocks of `numel` elements, the last perhaps short."""
    return -(-numel // BLOCK_SIZE)


@dataclass(frozen=True)
class OriginalParam:
    """One parameter of the unwrapped model, and where its element 0 lies in flat coordinates."""

    fqn: str
    shape: tuple[int, ...]
    flat_start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def flat_end(self) -> int:
        """Where it ends in flat coordinates."""
        return self.flat_start + self.numel


@dataclass(frozen=True)
class Segment:
    """The part `param_start..param_end` of one original parameter inside one rank's shard.

    `index` is the parameter's position in `ShardLayout.params`; element `param_start` lies at
    `shard_start` of the rank's local tensor.
    """

    index: int
    param_start: int
    param_end: int
    shard_start: int

    @property
    def shard_end(self) -> int:
        """Where it ends in the rank's local tensor."""
        return self.shard_start + self.param_end - self.param_start


@dataclass(frozen=True)
class Piece:
    """The part of a cut block that one rank holds."""

    rank: int
    param_start: int
    param_end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param_end - self.param_start


@dataclass(frozen=True)
class CutBlock:
    """A block with a rank bound strictly inside it, and the two or more pieces that make it up."""

    index: int
    param_start: int
    param_end: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param_end - self.param_start


@dataclass(frozen=True)
class ClippedBounds(Sequence[int]):
    """The bounds of a unit as one of its parameters sees them, counted from its element 0.

    Computed when asked for: a unit of a thousand parameters on ten thousand ranks needs none of them.
    """

    unit_bounds: range
    start: int
    numel: int

    def __len__(self) -> int:
        return len(self.unit_bounds)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return ClippedBounds(self.unit_bounds[position], self.start, self.numel)
        return min(max(self.unit_bounds[position] - self.start, 0), self.numel)


@dataclass(frozen=True)
class ShardLayout:
    """The layout of one tensor that the optimizer sees: all of its parameters, all of its bounds.

    `params` are ordered by `flat_start`; what lies between or behind them is padding.
    `bounds[r]..bounds[r + 1]` is what rank `r` holds, so a unit on W ranks has W + 1 bounds
    (a `range` will do where shards are equal). `rank` is this process's position in
    `process_group`, which holds the ranks that share the tensor and is None where nothing is
    shared; this module never looks inside it.

    Raises `ValueError` if parameters overlap, bounds decrease or do not cover every
    parameter, or `rank` has no shard.
    """

    params: tuple[OriginalParam, ...]
    bounds: Sequence[int]
    rank: int = 0
    process_group: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        covered = 0
        for param in self.params:
            if param.flat_start < covered:
                raise ValueError(
                    f"parameter '{param.fqn}' starts at {param.flat_start}, inside what comes"
                    f" before it (which ends at {covered}): parameters must be ordered and disjoint"
                )
            covered = param.flat_end
        bounds = self.bounds
        ordered = isinstance(bounds, (range, ClippedBounds)) or all(
            low <= high for low, high in pairwise(bounds)
        )
        if len(bounds) < 2 or bounds[0] != 0 or not ordered:
            raise ValueError(f"bounds must start at 0 and never decrease, got {bounds}")
        if bounds[-1] < covered:
            raise ValueError(f"bounds end at {bounds[-1]} but the parameters end at {covered}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} has no shard among {self.num_ranks} ranks")

    @property
    def num_ranks(self) -> int:
        """How many ranks share the tensor."""
        return len(self.bounds) - 1

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's local tensor, padding included."""
        return self.bounds[self.rank + 1] - self.bounds[self.rank]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's segments, in shard order; empty where the rank holds only padding."""
        return tuple(self.segments_of(self.rank))

    def segments_of(self, rank: int) -> Iterator[Segment]:
        """The non-empty segments of `rank`, in shard order."""
        flat_start, flat_end = self.bounds[rank], self.bounds[rank + 1]
        first = bisect_right(self.params, flat_start, key=lambda param: param.flat_end)
        for index in range(first, len(self.params)):
            param = self.params[index]
            if param.flat_start >= flat_end:
                break
            start, end = max(flat_start, param.flat_start), min(flat_end, param.flat_end)
            if start < end:
                yield Segment(
                    index=index,
                    param_start=start - param.flat_start,
                    param_end=end - param.flat_start,
                    shard_start=start - flat_start,
                )

    def pieces(self, index: int, param_start: int, param_end: int) -> tuple[Piece, ...]:
        """Who holds `param_start..param_end` of parameter `index`: non-empty pieces in rank order."""
        origin = self.params[index].flat_start
        flat_start, flat_end = origin + param_start, origin + param_end
        pieces = []
        rank = bisect_right(self.bounds, flat_start) - 1
        while rank < self.num_ranks and self.bounds[rank] < flat_end:
            start, end = max(flat_start, self.bounds[rank]), min(flat_end, self.bounds[rank + 1])
            if start < end:
                pieces.append(Piece(rank, start - origin, end - origin))
            rank += 1
        return tuple(pieces)

    def cut_blocks_of(self, rank: int) -> tuple[CutBlock, ...]:
        """The cut blocks that `rank` touches: none, one or two, in flat order.

        Only the first element of a shard can lie behind a block's start, and only the last
        one before a block's end, so there are never more than two.
        """
        segments = tuple(self.segments_of(rank))
        if not segments:
            return ()
        cuts: list[CutBlock] = []
        first, last = segments[0], segments[-1]
        for index, position in ((first.index, first.param_start), (last.index, last.param_end)):
            numel = self.params[index].numel
            if position % BLOCK_SIZE == 0 or position == numel:
                continue
            start = block_start(position)
            end = min(start + BLOCK_SIZE, numel)
            if cuts and (cuts[0].index, cuts[0].param_start) == (index, start):
                continue  # a shard shorter than a block: both of its bounds cut the same one
            cuts.append(CutBlock(index, start, end, self.pieces(index, start, end)))
        return tuple(cuts)

    def any_cut(self, is_8bit: Sequence[bool]) -> bool:
        """Whether any bound cuts a block of a parameter with `is_8bit`, on whatever rank."""
        for param, has_blocks in zip(self.params, is_8bit, strict=True):
            first = bisect_right(self.bounds, param.flat_start)
            last = bisect_left(self.bounds, param.flat_end)
            if has_blocks and any(
                (self.bounds[rank] - param.flat_start) % BLOCK_SIZE for rank in range(first, last)
            ):
                return True
        return False


@dataclass(frozen=True)
class Run:
    """A stretch of a tensor that one kernel call updates, and where its state lies.

    `state_start` counts elements and `block_start` counts blocks, in the 8-bit state where
    `is_8bit`, else in the FP32 state (which has no blocks). `index` names one parameter of
    the run; all of them share precision, hyperparameters and step.
    """

    index: int
    is_8bit: bool
    start: int
    end: int
    state_start: int
    block_start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


@dataclass(frozen=True)
class StateSegment:
    """Where the state of one segment lies: the parameter range it covers, and its offsets.

    8-bit state covers whole blocks, so `param_start..param_end` is the segment widened to the
    blocks it touches: the state of a cut block is complete on every rank that touches it.
    """

    index: int
    is_8bit: bool
    param_start: int
    param_end: int
    state_start: int
    block_start: int


@dataclass(frozen=True)
class CutRun:
    """A cut block of 8-bit state: this rank's own piece of it, and where its state lies."""

    block: CutBlock
    own: Piece
    shard_start: int
    state_start: int
    block_start: int


@dataclass(frozen=True)
class ShardPlan:
    """How one rank updates one tensor: its runs, its cut blocks, and the size of its state."""

    runs: tuple[Run, ...]
    cuts: tuple[CutRun, ...]
    state: tuple[StateSegment, ...]
    codes: int
    blocks: int
    floats: int


def plan_shard(layout: ShardLayout, is_8bit: Sequence[bool], share: Sequence[Hashable]) -> ShardPlan:
    """Plan the update of this rank's shard.

    `is_8bit[i]` says whether parameter `i` has 8-bit state; two neighbours may be updated by one
    call only if `share[i]` is equal (hyperparameters, step). State lies in shard order, 8-bit and
    FP32 apart.
    """
    runs: list[Run] = []
    state: dict[int, StateSegment] = {}
    codes = blocks = floats = 0
    for segment in layout.segments:
        index, start, end = segment.index, segment.param_start, segment.param_end
        if not is_8bit[index]:
            state[index] = StateSegment(index, False, start, end, floats, 0)
            runs.append(Run(index, False, segment.shard_start, segment.shard_end, floats, 0))
            floats += end - start
            continue
        numel = layout.params[index].numel
        first, last = block_start(start), min(block_end(end), numel)
        state[index] = StateSegment(index, True, first, last, codes, blocks)
        whole_start, whole_end = block_end(start), end if end == numel else block_start(end)
        if whole_start < whole_end:  # what is left of the segment without its cut blocks
            runs.append(
                Run(
                    index,
                    True,
                    segment.shard_start + whole_start - start,
                    segment.shard_start + whole_end - start,
                    codes + whole_start - first,
                    blocks + (whole_start - first) // BLOCK_SIZE,
                )
            )
        codes += last - first
        blocks += num_blocks(last - first)
    cuts = tuple(
        _cut_run(layout, cut, state[cut.index])
        for cut in layout.cut_blocks_of(layout.rank)
        if is_8bit[cut.index]
    )
    return ShardPlan(tuple(merge_runs(runs, share)), cuts, tuple(state.values()), codes, blocks, floats)


def _cut_run(layout: ShardLayout, cut: CutBlock, state: StateSegment) -> CutRun:
    own = next(piece for piece in cut.pieces if piece.rank == layout.rank)
    offset = cut.param_start - state.param_start
    flat_start = layout.params[cut.index].flat_start + own.param_start
    return CutRun(
        block=cut,
        own=own,
        shard_start=flat_start - layout.bounds[layout.rank],
        state_start=state.state_start + offset,
        block_start=state.block_start + offset // BLOCK_SIZE,
    )


def merge_runs(runs: Sequence[Run], share: Sequence[Hashable]) -> list[Run]:
    """Join neighbours that one kernel call can update.

    They must touch, agree in precision and `share[index]`, and their blocks must stay in step:
    where state is 8-bit, all but the last must hold whole blocks (rule `block.restart`).
    """
    merged: list[Run] = []
    for run in runs:
        before = merged[-1] if merged else None
        if (
            before is not None
            and before.end == run.start
            and before.is_8bit == run.is_8bit
            and share[before.index] == share[run.index]
            and (not run.is_8bit or before.numel % BLOCK_SIZE == 0)
        ):
            merged[-1] = replace(before, end=run.end)
        else:
            merged.append(run)
    return merged
