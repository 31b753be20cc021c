"""`read_layouts` against FSDP1 itself: every original element holds a number that no other has.

Whatever lies in a rank's tensors after wrapping was put there by FSDP, so the numbers say where every
element went. The layouts must say the same.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import refimpl
from refimpl.fsdp import is_fsdp_parameter, read_layouts
from refimpl.layout import ShardLayout
from refimpl.tools.fixture import Model, gradients, wrap
from refimpl.tools.world import World

FIRST_ID = 1000
"""Above 0 and 42, which FSDP1 pads with, so that no padding can pass for an element."""

Worlds = Callable[[int], World]
Ids = dict[str, torch.Tensor]
"""What each original parameter held before wrapping, flat and row-major, by FQN."""
Wrapped = tuple[Any, Ids]


# ---- models, and how they are wrapped: run on every rank


class Tied(nn.Module):
    """`head.weight` is `emb.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.emb.weight


def small() -> Any:
    return Model({"a": (7, 9), "b": (5,), "c": (3, 4), "d": (1,)})


def deep() -> Any:
    return Model({"emb": (11, 3), "block.a": (5, 5), "block.b": (7,), "block.inner.c": (13,), "out": (3, 5)})


def numbered(model: nn.Module) -> Wrapped:
    """`model`, with an id of its own in every element, and the ids."""
    ids: Ids = {}
    start = FIRST_ID
    for name, param in model.named_parameters():
        end = start + param.numel()
        assert end < 2**24  # exact in float32
        ids[name] = torch.arange(start, end)
        with torch.no_grad():
            param.copy_(ids[name].reshape(param.shape))
        start = end
    return model, ids


def one_unit(**options: Any) -> Wrapped:
    model, ids = numbered(small())
    return wrap(model, **options), ids


def nested_units(**options: Any) -> Wrapped:
    model, ids = numbered(deep())
    return wrap(model, ["block.inner", "block"], **options), ids


def every_module_a_unit(**options: Any) -> Wrapped:
    """No parameter is left for `block.inner`, `block` and the root unit."""
    model, ids = numbered(deep())
    units = ["emb", "block.a", "block.b", "block.inner.c", "block.inner", "block", "out"]
    return wrap(model, units, **options), ids


def tied_weights(**options: Any) -> Wrapped:
    model, ids = numbered(Tied())
    return wrap(model, ["body"], **options), ids


def frozen_unit(**options: Any) -> Wrapped:
    model, ids = numbered(deep())
    model.block.requires_grad_(False)
    return wrap(model, ["block"], **options), ids


def small_units(**options: Any) -> Wrapped:
    """Units of 1, 5 and 2 elements: on 4 ranks some hold padding only."""
    shapes = {"one": (1,), "five": (5,), "pair.x": (1,), "pair.y": (1, 1), "rest": (9,)}
    model, ids = numbered(Model(shapes))
    return wrap(model, ["one", "five", "pair"], **options), ids


def zero_elements(**options: Any) -> Wrapped:
    shapes = {"first": (0,), "a": (6,), "between": (0, 3), "b": (3, 3), "last": (0,)}
    model, ids = numbered(Model(shapes))
    return wrap(model, **options), ids


def bfloat16_compute(**options: Any) -> Wrapped:
    """With `use_orig_params` FSDP aligns parameters to 8 elements, not to 4."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return nested_units(mixed_precision=precision, **options)


def float64_parameters(**options: Any) -> Wrapped:
    """With `use_orig_params` FSDP aligns parameters to 2 elements."""
    model, ids = numbered(small().double())
    return wrap(model, **options), ids


def checkpointing_before(**options: Any) -> Wrapped:
    """Activation checkpointing before FSDP: its prefix is inside FSDP's own names."""
    model, ids = numbered(deep())
    model.block.inner = checkpoint_wrapper(model.block.inner)
    model.block = checkpoint_wrapper(model.block)
    return wrap(model, ["block", "out"], **options), ids


def checkpointing_after(**options: Any) -> Wrapped:
    """Activation checkpointing after FSDP: its prefix is in the names of modules."""
    model, ids = numbered(deep())
    model.block = checkpoint_wrapper(wrap(model.block, ["inner"], **options))
    return wrap(model, **options), ids


def compiled_after(**options: Any) -> Wrapped:
    model, ids = nested_units(**options)
    return torch.compile(model), ids


def compiled_before(**options: Any) -> Wrapped:
    model, ids = numbered(deep())
    model.block.inner = torch.compile(model.block.inner)
    model.block = torch.compile(wrap(model.block, **options))
    return wrap(model, **options), ids


def ignored_parameters(**options: Any) -> Wrapped:
    model, ids = numbered(deep())
    ignored = [model.block.b.weight, model.out.weight]
    return wrap(model, ["block"], ignored_states=ignored, **options), ids


def unwrapped_root(**options: Any) -> Wrapped:
    """Two units in modules that FSDP does not know: `emb`, `block.a`, `block.b` are in none."""
    model, ids = numbered(deep())
    model.block.inner = wrap(model.block.inner, **options)
    model.out = wrap(model.out, **options)
    return model, ids


CASES = {
    each.__name__: each
    for each in (
        one_unit,
        nested_units,
        every_module_a_unit,
        tied_weights,
        frozen_unit,
        small_units,
        zero_elements,
        bfloat16_compute,
        float64_parameters,
        checkpointing_before,
        checkpointing_after,
        compiled_after,
        compiled_before,
        ignored_parameters,
        unwrapped_root,
    )
}
OUTSIDE = {
    "ignored_parameters": {"block.b.weight", "out.weight"},
    "unwrapped_root": {"emb.weight", "block.a.weight", "block.b.weight"},
}
"""Parameters in no unit."""


# ---- what a rank sees


@dataclass(frozen=True)
class Seen:
    """One tensor of one rank: its values, and everything that its layout says."""

    values: list[float]
    params: list[tuple[str, tuple[int, ...]]]
    shard_numel: int
    rank: int
    group: list[int] | None
    segments: list[list[tuple[str, int, int, int]]]


def see(build: Callable[..., Wrapped], **options: Any) -> tuple[dict[str, list[float]], list[Seen]]:
    """The original ids by FQN, and what this rank's tensors and layouts hold."""
    model, ids = build(**options)
    layouts = read_layouts(model)
    tensors = list(model.parameters())
    assert {id(tensor) for tensor in layouts} == {id(tensor) for tensor in tensors}
    original = {name: values.tolist() for name, values in ids.items()}
    return original, [look(tensor, layouts[tensor]) for tensor in tensors]


def look(tensor: nn.Parameter, layout: ShardLayout) -> Seen:
    group = layout.process_group
    return Seen(
        values=tensor.detach().flatten().tolist(),
        params=[(param.fqn, param.shape) for param in layout.params],
        shard_numel=layout.shard_numel,
        rank=layout.rank,
        group=None if group is None else dist.get_process_group_ranks(group),
        segments=[
            [
                (layout.params[each.index].fqn, each.param_start, each.param_end, each.shard_start)
                for each in layout.segments_of(rank)
            ]
            for rank in range(layout.num_ranks)
        ],
    )


@functools.cache
def groups(*ranks: tuple[int, ...]) -> list[Any]:
    """New process groups, once for the life of this rank; every rank builds all of them."""
    return [dist.new_group(list(each)) for each in ranks]


def own_group(*ranks: tuple[int, ...]) -> Any:
    return next(group for group in groups(*ranks) if dist.get_rank() in dist.get_process_group_ranks(group))


# ---- what must hold


def check_rank(original: dict[str, list[float]], seen: list[Seen]) -> None:
    """The ids in this rank's tensors are where the layouts say, and nowhere else."""
    names = [fqn for each in seen for fqn, _ in each.params]
    assert sorted(names) == sorted(original)
    every_id = set(itertools.chain.from_iterable(original.values()))
    for each in seen:
        assert each.shard_numel == len(each.values)
        told: dict[int, float] = {}
        for fqn, start, end, shard_start in each.segments[each.rank]:
            told |= enumerate(original[fqn][start:end], shard_start)
        assert told == {at: value for at, value in enumerate(each.values) if value in every_id}


def check_group(ranks: list[list[Seen]], members: list[int]) -> None:
    """The ranks of a shard group agree on who holds what, and together hold everything once."""
    for same in zip(*(ranks[member] for member in members), strict=True):
        first = same[0]
        assert all(each.params == first.params and each.segments == first.segments for each in same)
        if first.group is None:
            assert [each.rank for each in same] == [0] * len(members)
            assert len(first.segments) == 1
        else:
            assert [each.group for each in same] == [members] * len(members)
            assert [each.rank for each in same] == list(range(len(members)))
            assert len(first.segments) == len(members)
        numel = sum(torch.Size(shape).numel() for _, shape in first.params)
        assert numel == sum(end - start for shard in first.segments for _, start, end, _ in shard)


def check(results: list[Any], members: Iterable[list[int]]) -> list[list[Seen]]:
    for original, seen in results:
        check_rank(original, seen)
    ranks = [seen for _, seen in results]
    for each in members:
        check_group(ranks, each)
    return ranks


def sharded_names(seen: list[Seen]) -> set[str]:
    return {fqn for each in seen if each.group is not None for fqn, _ in each.params}


def all_names(seen: list[Seen]) -> set[str]:
    return {fqn for each in seen for fqn, _ in each.params}


# ---- every wrapping, strategy and world size


FLAT = [(size, strategy) for size in (2, 3, 4) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]


@pytest.mark.rule("padding.inert")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(("size", "strategy"), [(1, "FULL_SHARD"), *FLAT])
@pytest.mark.parametrize("case", CASES)
def test_layouts_say_where_fsdp_put_every_element(
    world: Worlds, case: str, size: int, strategy: str, use_orig_params: bool
) -> None:
    results = world(size).run(
        see,
        CASES[case],
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    for seen in check(results, [list(range(size))]):
        sharded = all_names(seen) - OUTSIDE.get(case, set())
        assert sharded_names(seen) == (set() if size == 1 or strategy == "NO_SHARD" else sharded)


def see_hybrid(build: Callable[..., Wrapped], **options: Any) -> Any:
    shard, replicate = own_group((0, 1), (2, 3)), own_group((0, 2), (1, 3))
    return see(build, process_group=(shard, replicate), **options)


@pytest.mark.rule("strategy.invariant")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("case", CASES)
def test_under_hybrid_sharding_the_group_is_the_one_that_shards(
    world: Worlds, case: str, strategy: str, use_orig_params: bool
) -> None:
    results = world(4).run(
        see_hybrid,
        CASES[case],
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    for seen in check(results, [[0, 1], [2, 3]]):
        assert sharded_names(seen) == all_names(seen) - OUTSIDE.get(case, set())


def see_replicated(**options: Any) -> Any:
    shard, replicate = own_group((0,), (1,)), own_group((0, 1))
    return see(nested_units, process_group=(shard, replicate), **options)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_hybrid_sharding_over_one_rank_is_none(world: Worlds, use_orig_params: bool) -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    results = world(2).run(see_replicated, use_orig_params=use_orig_params, sharding_strategy=strategy)
    for seen in check(results, [[0], [1]]):
        assert sharded_names(seen) == set()


# ---- process groups that are not the default one


def see_in_group(members: tuple[int, ...], **options: Any) -> Any:
    group = groups(members)[0]
    if dist.get_rank() not in members:
        return None
    return see(nested_units, process_group=group, **options)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("members", [(0, 1), (1, 2), (0, 2)])
def test_a_group_of_some_of_the_ranks(world: Worlds, members: tuple[int, ...], use_orig_params: bool) -> None:
    results = world(3).run(see_in_group, members, use_orig_params=use_orig_params)
    ranks = check([results[member] for member in members], [])
    for position, seen in enumerate(ranks):
        assert {each.rank for each in seen} == {position}
        assert {tuple(each.group or ()) for each in seen} == {members}
    assert [each.segments for each in ranks[0]] == [each.segments for each in ranks[1]]


def two_groups(**options: Any) -> Wrapped:
    """One unit over ranks 0 and 1 or 2 and 3, the rest over all four."""
    model, ids = numbered(deep())
    model.block = wrap(model.block, process_group=own_group((0, 1), (2, 3)), **options)
    return wrap(model, **options), ids


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_units_may_be_sharded_over_different_groups(world: Worlds, use_orig_params: bool) -> None:
    results = world(4).run(see, two_groups, use_orig_params=use_orig_params)
    for rank, seen in enumerate(check(results, [])):
        for each in seen:
            pair = rank // 2 * 2
            in_block = each.params[0][0].startswith("block.")
            assert each.group == ([pair, pair + 1] if in_block else [0, 1, 2, 3])
            assert each.rank == (rank - pair if in_block else rank)


# ---- single facts, by hand


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_shapes_are_those_of_the_unwrapped_model(world: Worlds, use_orig_params: bool) -> None:
    results = world(2).run(see, nested_units, use_orig_params=use_orig_params)
    expected = [(name, tuple(param.shape)) for name, param in deep().named_parameters()]
    for _, seen in results:
        assert sorted(pair for each in seen for pair in each.params) == sorted(expected)


@pytest.mark.rule("padding.inert")
def test_padding_on_several_ranks(world: Worlds) -> None:
    results = world(4).run(see, small_units, use_orig_params=False)
    held: dict[str, list[int]] = {}
    for _, seen in results:
        for each in seen:
            names = "+".join(fqn for fqn, _ in each.params)
            held.setdefault(names, []).append(sum(end - at for _, at, end, _ in each.segments[each.rank]))
    assert held["one.weight"] == [1, 0, 0, 0]
    assert held["five.weight"] == [2, 2, 1, 0]
    assert held["pair.x.weight+pair.y.weight"] == [1, 1, 0, 0]


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_a_tied_weight_goes_by_its_first_name(world: Worlds, use_orig_params: bool) -> None:
    results = world(2).run(see, tied_weights, use_orig_params=use_orig_params)
    for _, seen in results:
        assert all_names(seen) == {"emb.weight", "body.weight", "body.bias", "head.bias"}


@pytest.mark.rule("padding.inert", "orig-params.invariant")
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_alignment_follows_the_compute_dtype(world: Worlds, mixed: bool) -> None:
    build = bfloat16_compute if mixed else nested_units
    results = world(2).run(see, build, use_orig_params=True)
    shards = next(each for each in results[0][1] if each.params[0][0] == "block.a.weight").segments
    held = [sum(end - start for _, start, end, _ in shard) for shard in shards]
    # block.a and block.b: 25 and 7 elements, aligned to 4 (28 + 7 + 1) or to 8 (32 + 7 + 1)
    assert held == ([20, 5] if mixed else [18, 7])


def names_like_prefixes(**options: Any) -> Wrapped:
    model, ids = numbered(Model({"my_orig_mod": (3,), "unit_orig_mod.a": (4,), "b": (2,)}))
    return wrap(model, ["unit_orig_mod"], **options), ids


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_only_whole_names_are_taken_for_wrappers(world: Worlds, use_orig_params: bool) -> None:
    check(world(2).run(see, names_like_prefixes, use_orig_params=use_orig_params), [[0, 1]])


# ---- when it is called


def read_on_rank0_only() -> int:
    model, _ = nested_units()
    return len(read_layouts(model)) if dist.get_rank() == 0 else 0


def test_reading_does_not_communicate(world: Worlds) -> None:
    assert world(2).run(read_on_rank0_only) == [3, 0]


def read_twice(use_orig_params: bool) -> bool:
    model, _ = nested_units(use_orig_params=use_orig_params)
    before = read_layouts(model)
    shapes = {name.removesuffix(".weight"): param.shape for name, param in deep().named_parameters()}
    model(gradients(shapes, step=1)).backward()
    after = read_layouts(model)
    return before == after and bool(before)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_layouts_are_the_same_after_a_backward_pass(world: Worlds, use_orig_params: bool) -> None:
    assert world(2).run(read_twice, use_orig_params) == [True, True]


def flattened(use_orig_params: bool) -> dict[str, bool]:
    model, _ = ignored_parameters(use_orig_params=use_orig_params)
    layouts = read_layouts(model)
    return {layout.params[0].fqn: is_fsdp_parameter(tensor) for tensor, layout in layouts.items()}


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_fsdp_parameters_are_told_from_others(world: Worlds, use_orig_params: bool) -> None:
    for told in world(2).run(flattened, use_orig_params):
        assert {name for name, is_fsdp in told.items() if not is_fsdp} == {"block.b.weight", "out.weight"}
        assert any(told.values())


# ---- memory order


class Conv(nn.Module):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=memory_format)


def contiguous_conv(**options: Any) -> Wrapped:
    model, ids = numbered(Conv(torch.contiguous_format))
    return wrap(model, **options), ids


def column_vector(**options: Any) -> Wrapped:
    """Shape (n, 1) by transposition: strides (1, n), and row-major all the same."""
    model = small()
    model.a.weight = nn.Parameter(torch.zeros(1, 6).t())
    assert model.a.weight.stride() == (1, 6)
    model, ids = numbered(model)
    return wrap(model, **options), ids


def column_vector_outside(**options: Any) -> Wrapped:
    model, ids = numbered(Model({"a": (1, 6), "b": (5,)}))
    model.a.weight = nn.Parameter(model.a.weight.detach().t())
    return wrap(model, ignored_states=[model.a.weight], **options), ids


def no_columns(**options: Any) -> Wrapped:
    """Shape (3, 0), as a LoRA of rank 0 has it: torch makes it with strides (1, 1), contiguous."""
    model, ids = numbered(Model({"a": (6,), "none": (3, 0), "b": (5,)}))
    return wrap(model, **options), ids


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    "build",
    [
        contiguous_conv,
        column_vector,
        column_vector_outside,
        no_columns,
    ],
)
def test_row_major_parameters_are_accepted(
    world: Worlds, build: Callable[..., Wrapped], use_orig_params: bool
) -> None:
    check(world(2).run(see, build, use_orig_params=use_orig_params), [[0, 1]])


# ---- refusals


def channels_last(**options: Any) -> Any:
    return wrap(Conv(torch.channels_last), **options)


def channels_last_outside(**options: Any) -> Any:
    model = Conv(torch.channels_last)
    return wrap(model, ignored_states=[model.conv.weight], **options)


def transposed(**options: Any) -> Any:
    model = small()
    model.a.weight = nn.Parameter(torch.zeros(4, 6).t())
    return wrap(model, **options)


def transposed_two_by_two(**options: Any) -> Any:
    model = small()
    model.b.weight = nn.Parameter(torch.zeros(2, 2).t())
    return wrap(model, **options)


def transposed_in_a_unit(**options: Any) -> Any:
    model = deep()
    model.block.a.weight = nn.Parameter(torch.zeros(4, 6).t())
    return wrap(model, ["block"], **options)


def refusal(build: Callable[..., Any], **options: Any) -> tuple[str, str]:
    """Type and message of what `read_layouts` raises."""
    model = build(**options)
    try:
        read_layouts(model)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


@pytest.mark.rule("refuse.memory-order")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (channels_last, "conv.weight"),
        (channels_last_outside, "conv.weight"),
        (transposed, "a.weight"),
        (transposed_two_by_two, "b.weight"),
        (transposed_in_a_unit, "block.a.weight"),
    ],
)
def test_another_memory_order_is_refused(
    world: Worlds, build: Callable[..., Any], name: str, use_orig_params: bool
) -> None:
    for kind, message in world(2).run(refusal, build, use_orig_params=use_orig_params):
        assert kind == "ValueError"
        assert f"parameter '{name}'" in message
        assert "(refuse.memory-order)" in message


def fsdp2(wrap_part: bool) -> Any:
    """FSDP2 alone, or for one part of an FSDP1 model."""
    model = deep()
    fully_shard(model.block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if wrap_part:
        model.out = wrap(model.out)
    return model


@pytest.mark.rule("refuse.dtensor")
@pytest.mark.parametrize("wrap_part", [False, True], ids=["alone", "beside FSDP1"])
def test_dtensors_are_refused(world: Worlds, wrap_part: bool) -> None:
    for kind, message in world(2).run(refusal, fsdp2, wrap_part=wrap_part):
        assert kind == "TypeError"
        assert "parameter 'block.a.weight' is a DTensor" in message
        assert "(refuse.dtensor)" in message


def tensor_parallel(**options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8, bias=False))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel()})
    return wrap(model, ["1"], device_mesh=mesh["data"], **options)


@pytest.mark.rule("refuse.dtensor")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
def test_tensor_parallel_parameters_inside_fsdp_are_refused(world: Worlds, use_orig_params: bool) -> None:
    for kind, message in world(4).run(refusal, tensor_parallel, use_orig_params=use_orig_params):
        assert kind == "TypeError"
        assert "parameter '1.weight'" in message
        assert "(refuse.dtensor)" in message


def test_a_model_without_fsdp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no module of this Tied is wrapped .* wrap the model first"):
        read_layouts(Tied())


# ---- FSDP metadata that is not as expected: tampered with, as a later release of torch might


def shifted_offset(flat_param: Any) -> None:
    first, *others = flat_param._shard_param_infos
    flat_param._shard_param_infos = (first._replace(offset_in_shard=1), *others)


def exclusive_end(flat_param: Any) -> None:
    first, *others = flat_param._shard_param_infos
    end = first.intra_param_end_idx + 1
    flat_param._shard_param_infos = (first._replace(intra_param_end_idx=end), *others)


def forgotten_segment(flat_param: Any) -> None:
    first, *others = flat_param._shard_param_infos
    flat_param._shard_param_infos = (first._replace(in_shard=False), *others)


def other_numel(flat_param: Any) -> None:
    first, *others = flat_param._numels_with_padding
    flat_param._numels_with_padding = (first + 1, *others)


def short_shard(flat_param: Any) -> None:
    flat_param._sharded_size = torch.Size([3])


def no_room_for_alignment(flat_param: Any) -> None:
    flat_param._sharded_size = torch.Size([sum(flat_param._numels_with_padding) // 2 - 1])


def read_tampered(tamper: Callable[[Any], None], use_orig_params: bool) -> tuple[str, str]:
    def build() -> Any:
        model, _ = one_unit(use_orig_params=use_orig_params)
        tamper(model._handle.flat_param)
        return model

    return refusal(build) if dist.get_rank() == 0 else ("", "")


@pytest.mark.parametrize(
    ("tamper", "use_orig_params", "message"),
    [
        (shifted_offset, False, "it records .* was computed"),
        (exclusive_end, False, "it records .* was computed"),
        (forgotten_segment, False, "it records .* was computed"),
        (other_numel, False, r"'a\.weight' has shape \(7, 9\) but 64 elements"),
        (short_shard, False, "2 shards of 3 elements cannot hold 81"),
        (no_room_for_alignment, True, "2 shards of 42 elements cannot hold 86"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    world: Worlds, tamper: Callable[[Any], None], use_orig_params: bool, message: str
) -> None:
    kind, told = world(2).run(read_tampered, tamper, use_orig_params)[0]
    assert kind == "RuntimeError"
    assert f"FSDP1's metadata in torch {torch.__version__} is not as expected" in told
    assert re.search(message, told)


# ---- one file reads private names of FSDP


PRIVATE = re.compile(
    r"_handle|_?flat_param|_all_handles|_fsdp_\w+|_is_flat_param|_shard_param_infos?|_shared_param_infos"
    r"|_param_infos|_param_extensions|_fqns|_numels\w*|_shapes|_strides|_contiguities|_is_padding_mask"
    r"|_sharded_size|_shard_numel_padded|_\w+_unsharded_size|_local_shard|uses_sharded_strategy"
)


def private_names(source: str) -> Iterator[str]:
    """Private names of FSDP in code: attributes, names, imports, and strings such as for `getattr`."""
    for node in ast.walk(ast.parse(source)):
        for field in ("attr", "id", "name", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and PRIVATE.fullmatch(word):
                yield word
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            yield from (name for name in modules if name and ".fsdp._" in name)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("module._handle.rank", ["_handle"]),
        ("x = unit._flat_param", ["_flat_param"]),
        ("getattr(tensor, '_fsdp_flattened', False)", ["_fsdp_flattened"]),
        ("from torch.distributed.fsdp._flat_param import X", ["torch.distributed.fsdp._flat_param"]),
        ("import torch.distributed.fsdp._common_utils as c", ["torch.distributed.fsdp._common_utils"]),
        ("from torch.distributed.fsdp import FullyShardedDataParallel", []),
        ("'''It reads `_handle` and flat_param.'''  # and _fqns", []),
        ("name.replace('_fsdp_wrapped_module.', '')", []),
    ],
)
def test_private_names_are_found_in_code_alone(source: str, found: list[str]) -> None:
    assert list(private_names(source)) == found


def test_only_fsdp_py_reads_private_names_of_fsdp() -> None:
    package = Path(refimpl.__file__).parent
    found = {
        path.relative_to(package).as_posix(): sorted(set(private_names(path.read_text())))
        for path in package.rglob("*.py")
    }
    assert len(found.pop("fsdp.py")) > 5
    assert {path: names for path, names in found.items() if names} == {}
