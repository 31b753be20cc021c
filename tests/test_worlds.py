"""Any model, any bounds, up to 1,000 ranks, played in one process through the core of the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from against_native import grade
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from refimpl import ShardedAdamW8bit
from refimpl.layout import OriginalParam, ShardLayout
from refimpl.tools.fixture import gradient, start_value

Unit = tuple[list[tuple[int, int]], Sequence[int]]  # (padding before, numel) of each parameter, bounds


class PlayedRank:
    """One rank: its shards of all units, and an optimizer that shares no process group."""

    def __init__(
        self,
        units: list[Unit],
        rank: int,
        min_8bit_size: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layouts: dict[nn.Parameter, ShardLayout] = {}
        for number, (sizes, bounds) in enumerate(units):
            layout = ShardLayout(params_of(number, sizes), bounds, rank)
            shard = flat(layout, start_value)[bounds[rank] : bounds[rank + 1]]
            self.layouts[nn.Parameter(shard.to(device, dtype, copy=True))] = layout
        self.optimizer = ShardedAdamW8bit(
            list(self.layouts), layouts=self.layouts, min_8bit_size=min_8bit_size
        )

    def backward(self, step: int) -> None:
        for tensor, layout in self.layouts.items():
            whole = flat(layout, lambda shape: grade(gradient(shape, 0, step)), padding=0.0)
            shard = whole[layout.bounds[layout.rank] : layout.bounds[layout.rank + 1]]
            tensor.grad = shard.to(tensor.device, tensor.dtype, copy=True)


def params_of(number: int, sizes: list[tuple[int, int]]) -> tuple[OriginalParam, ...]:
    starts = accumulate(gap + numel for gap, numel in sizes)
    return tuple(
        OriginalParam(f"{number}.{index}", (numel,), end - numel)
        for index, ((_, numel), end) in enumerate(zip(sizes, starts, strict=True))
    )


def flat(layout: ShardLayout, make: object, padding: float = 42.0) -> Tensor:
    whole = torch.full((layout.bounds[-1],), padding)
    for param in layout.params:
        whole[param.flat_start : param.flat_end] = make(param.shape)
    return whole


def play(units: list[Unit], steps: int, min_8bit_size: int, *where: Any) -> list[PlayedRank]:
    """Train every rank, carrying edge gradients from hand to hand."""
    size = len(units[0][1]) - 1
    ranks = [PlayedRank(units, rank, min_8bit_size, *where) for rank in range(size)]
    for step in range(1, steps + 1):
        for rank in ranks:
            rank.backward(step)
        outgoing = [rank.optimizer.outgoing_edges() for rank in ranks]
        parcels = [
            buffer[0].split(rank.optimizer._exchanges[0].send_sizes) if buffer else None
            for rank, buffer in zip(ranks, outgoing, strict=True)
        ]
        for number, rank in enumerate(ranks):
            incoming = [torch.cat([sent[number] for sent in parcels])] if parcels[0] else []
            rank.optimizer.step_with_edges(incoming)
    return ranks


def native(
    units: list[Unit],
    steps: int,
    min_8bit_size: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, dict[str, Any]]:
    params = {
        param.fqn: nn.Parameter(start_value(param.shape).to(device, dtype))
        for number, (sizes, _) in enumerate(units)
        for param in params_of(number, sizes)
    }
    optimizer = bnb.optim.AdamW8bit(params.values(), min_8bit_size=min_8bit_size)
    for step in range(1, steps + 1):
        for param in params.values():
            param.grad = grade(gradient(param.shape, 0, step)).to(device, dtype)
        optimizer.step()
    return {name: {"value": param.detach(), **optimizer.state[param]} for name, param in params.items()}


def check(units: list[Unit], steps: int = 3, min_8bit_size: int = 200, *where: Any) -> None:
    """Every element of every rank's parameters and state equals the native one; padding is untouched."""
    expected = native(units, steps, min_8bit_size, *where)
    for rank in play(units, steps, min_8bit_size, *where):
        for tensor, layout in rank.layouts.items():
            covered = torch.zeros(tensor.numel(), dtype=torch.bool)
            for segment in layout.segments:
                param = layout.params[segment.index]
                entry = expected[param.fqn]
                here = slice(segment.shard_start, segment.shard_end)
                there = slice(segment.param_start, segment.param_end)
                covered[here] = True
                assert torch.equal(tensor.detach()[here], entry["value"][there])
                check_state(rank.optimizer, tensor, segment, entry)
            assert (tensor.detach()[~covered] == 42.0).all()


def check_state(optimizer: ShardedAdamW8bit, tensor: Tensor, segment: object, entry: dict) -> None:
    param = optimizer.params_by_tensor()[tensor][segment.index]
    assert optimizer.step_count(param) == entry["step"]
    start, end = optimizer.needed_range(param)
    found = optimizer.read_state(param, start, end)
    blocks = slice(start // 256, -(-end // 256))
    for name, value in found.items():
        whole = entry[name][blocks] if "absmax" in name else entry[name][start:end]
        assert value.dtype == whole.dtype
        assert torch.equal(value, whole)


@st.composite
def units(draw: st.DrawFn) -> list[Unit]:
    """Up to three units with gaps, on equal shards with padding behind, or on any bounds at all."""
    size = draw(st.integers(1, 7))
    numels = st.one_of(st.integers(1, 5), st.integers(190, 300), st.integers(1, 1400))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 3]), numels), min_size=1, max_size=5))
        total = sum(gap + numel for gap, numel in sizes)
        shard = -(-total // size)
        equal = range(0, shard * size + 1, shard)
        cuts = draw(st.lists(st.integers(0, total), min_size=size - 1, max_size=size - 1))
        found.append((sizes, draw(st.sampled_from([equal, (0, *sorted(cuts), total)]))))
    return found


@pytest.mark.rule(
    "world.invariant",
    "update.equals-unwrapped",
    "state.equals-unwrapped",
    "block.restart",
    "block.tail",
    "block.cut-by-rank",
    "padding.inert",
)
@settings(max_examples=1000, deadline=None)
@given(units())
def test_any_layout(layout: list[Unit]) -> None:
    check(layout)


@pytest.mark.rule("world.invariant")
@pytest.mark.parametrize("size", [41, 100, 1000])
def test_large_worlds(size: int) -> None:
    """Shards far shorter than a block: blocks shared by many ranks, and ranks that hold padding alone."""
    sizes = [(0, 4100), (0, 1), (3, 300), (0, 5), (0, 999)]
    total = sum(gap + numel for gap, numel in sizes)
    shard = -(-total // size)
    one_element_each: Unit = ([(0, size)], range(size + 1))
    check([(sizes, range(0, shard * size + 1, shard)), one_element_each], steps=2, min_8bit_size=30)


@pytest.mark.rule("block.cut-by-rank")
def test_a_block_shared_by_three_or_four_ranks() -> None:
    """4,100 elements over 41 ranks of 100 elements."""
    layout = ShardLayout((OriginalParam("a", (4100,)),), range(0, 4101, 100), rank=20)
    check([([(0, 4100)], layout.bounds)])
    shared = {len(cut.pieces) for rank in range(41) for cut in layout.cut_blocks_of(rank)}
    assert {3, 4} <= shared


def test_a_real_step_needs_a_process_group() -> None:
    rank = PlayedRank([([(0, 1000)], (0, 500, 1000))], 0, 200)
    rank.backward(1)
    before = [tensor.detach().clone() for tensor in rank.layouts]
    with pytest.raises(RuntimeError, match="no process group"):
        rank.optimizer.step()
    assert all(map(torch.equal, before, rank.layouts))
