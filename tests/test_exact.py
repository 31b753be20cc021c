"""Both twins equal native AdamW8bit on the unwrapped model, to the last bit, after every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from against_native import (
    TWINS,
    WRAPPINGS,
    Case,
    check,
    differences,
    graded,
    hybrid_options,
    native_run,
    wrapped_run,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from refimpl.tools.world import World

GetWorld = Callable[[int], World]


def zero_first_step(*names: str) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor]]:
    def change(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: g * (0.0 if k in names and step == 1 else 1.0) for k, g in grads.items()}

    return change


def zero_odd_rows(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    grads["emb"][1::2] = 0.0
    return grads


def start_at_zero(*names: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for name in names:
            nn.init.zeros_(model.get_submodule(name).weight)

    return prepare


LORA = {"A": (8, 520), "B": (520, 8), "bias": (520,), "A2": (4, 1000), "B2": (1000, 4)}
STRADDLING = Case({"x": (3000,), "y": (96, 96), "z": (500,)})
CASES = {
    "precision flip": Case({**dict.fromkeys("abcd", (48, 48)), "e": (64, 128)}),
    "aligned": Case({"a": (6, 1024)}),
    "uneven, short last block": Case({"a": (101, 80)}),
    "straddling": STRADDLING,
    "threshold": Case({"p": (63, 65), "q": (64, 64), "r": (17, 241)}),
    "LoRA": Case({**LORA, "base": (520, 520)}, frozen=("base",)),
    "LoRA from zero": Case(
        LORA, prepare=start_at_zero("B", "B2"), change_gradients=zero_first_step("A", "A2")
    ),
    "override": Case({"emb": (160, 64), "w": (100, 64)}, overrides={"emb.*": {"optim_bits": 32}}),
    "zero rows": Case(
        {"emb": (512, 10)},
        steps=50,
        change_gradients=zero_odd_rows,
        hyper={"lr": 1e-3, "weight_decay": 0.0},
    ),
    "one-element parameters and short shards": Case(
        {"a": (1,), "b": (5,), "c": (260,), "d": (1, 1)}, min_8bit_size=2
    ),
    "all 8-bit, odd sizes": Case(
        {"a": (257,), "b": (1,), "c": (511,), "d": (256,), "e": (77, 13)}, min_8bit_size=1
    ),
    "blocks of different scales": Case(
        {"x": (3000,), "y": (97, 99), "z": (5001,), "w": (70,)}, change_gradients=graded
    ),
    "all FP32": Case({"a": (257,), "b": (1,), "c": (77, 13)}),
}


@pytest.mark.rule(
    "update.equals-unwrapped",
    "state.equals-unwrapped",
    "wrap.invariant",
    "world.invariant",
    "orig-params.invariant",
)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_public_cases(name: str, size: int, world: GetWorld) -> None:
    for wrapping, orig in WRAPPINGS:
        check(world(size), CASES[name], wrapping, orig)


@pytest.mark.rule("precision.original-size", "precision.strict-less", "precision.same-on-every-rank")
def test_precision_by_original_size(world: GetWorld) -> None:
    run = wrapped_run_states(world(2), CASES["threshold"], "coarse")
    assert run == {"p.weight": torch.float32, "q.weight": torch.uint8, "r.weight": torch.uint8}


def wrapped_run_states(world: World, case: Case, wrapping: str) -> dict[str, torch.dtype]:
    found = world.run(wrapped_run, case, wrapping, False, "sharded")[0][-1]
    return {name: entry["state1"].dtype for name, entry in found.items()}


BLOCKS = Case(
    {
        "first.a": (300, 17),
        "first.b": (700,),
        "second.a": (50, 99),
        "second.b": (3,),
        "second.c": (6, 1024),
        "tail": (4099,),
    }
)


@pytest.mark.rule("strategy.invariant")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
)
@pytest.mark.parametrize("wrapping", ["coarse", ("first", "second"), "fine"], ids=str)
@pytest.mark.parametrize("orig", [False, True])
def test_strategies(
    strategy: ShardingStrategy, wrapping: str, orig: bool, size: int, world: GetWorld
) -> None:
    check(world(size), BLOCKS, wrapping, orig, sharding_strategy=strategy)


def hybrid_run(case: Case, wrapping: str, orig: bool, twin: str, strategy: ShardingStrategy) -> object:
    options = {**hybrid_options(), "sharding_strategy": strategy}
    return wrapped_run(case, wrapping, orig, twin, **options)


@pytest.mark.rule("strategy.invariant")
@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
@pytest.mark.parametrize("orig", [False, True])
def test_hybrid(strategy: ShardingStrategy, orig: bool, world: GetWorld) -> None:
    expected = native_run(BLOCKS)
    for twin in TWINS:
        for wrapping in ("coarse", "fine"):
            for found in world(4).run(hybrid_run, BLOCKS, wrapping, orig, twin, strategy):
                assert differences(found, expected) == []


def subgroup_run(case: Case, orig: bool, twin: str) -> object:
    """FSDP over ranks 2 and 1 of three, in this order; rank 0 has another group of its own."""
    pair, single = dist.new_group([1, 2]), dist.new_group([0])
    group = single if dist.get_rank() == 0 else pair
    return wrapped_run(case, "coarse", orig, twin, process_group=group)


@pytest.mark.rule("world.invariant")
@pytest.mark.parametrize("orig", [False, True])
def test_a_process_group_that_is_not_the_default(orig: bool, world: GetWorld) -> None:
    expected = native_run(STRADDLING)
    for twin in TWINS:
        for found in world(3).run(subgroup_run, STRADDLING, orig, twin):
            assert differences(found, expected) == []


def exact_in_half(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiples of 2^-8 below 1: FSDP's divisions stay clear of float16's subnormal numbers."""
    return {name: (grad * 2**14).round() * 2**-8 for name, grad in grads.items()}


HALF = {
    torch.bfloat16: Case(STRADDLING.shapes, dtype=torch.bfloat16, bits=5),
    torch.float16: Case(STRADDLING.shapes, dtype=torch.float16, change_gradients=exact_in_half),
}


@pytest.mark.rule("update.equals-unwrapped", "state.equals-unwrapped")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("wrapping", ["coarse", "fine"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_model_in_half_precision(
    dtype: torch.dtype, wrapping: str, orig: bool, size: int, world: GetWorld
) -> None:
    check(world(size), HALF[dtype], wrapping, orig)


@pytest.mark.rule("update.equals-unwrapped", "state.equals-unwrapped")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_mixed_precision(reduce_dtype: torch.dtype | None, orig: bool, size: int, world: GetWorld) -> None:
    case = Case(BLOCKS.shapes, bits=5)
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    check(world(size), case, ("first", "second"), orig, mixed_precision=mixed)


def without_unused(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """`b` is unused in step 2, `a` in steps 1 and 3."""
    unused = {1: "a", 2: "b", 3: "a"}.get(step)
    return {name: grad for name, grad in grads.items() if name != unused}


@pytest.mark.rule("update.equals-unwrapped", "collective.unconditional")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("orig", [False, True])
def test_units_unused_in_an_iteration(orig: bool, size: int, world: GetWorld) -> None:
    shapes = {"a": (5000,), "b": (70, 70), "c": (300,), "d": (4097,)}
    check(world(size), Case(shapes, change_gradients=without_unused), "fine", orig)


def tie(model: nn.Module) -> None:
    model.head.weight = model.emb.weight


@pytest.mark.rule("update.equals-unwrapped")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("orig", [False, True])
def test_tied_weights(orig: bool, size: int, world: GetWorld) -> None:
    case = Case({"emb": (90, 70), "mid": (33,), "head": (90, 70)}, prepare=tie)
    check(world(size), case, "coarse", orig)


@pytest.mark.rule("update.equals-unwrapped", "state.equals-unwrapped", "block.cut-by-rank")
@pytest.mark.parametrize("orig", [False, True])
def test_long_runs(orig: bool, world: GetWorld) -> None:
    check(world(2), Case(STRADDLING.shapes, steps=100), "coarse", orig, ["sharded"])


def b_unused_in_step_2(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad for name, grad in grads.items() if (step, name) != (2, "b")}


def b_zero_in_step_2(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad * (0.0 if (step, name) == (2, "b") else 1.0) for name, grad in grads.items()}


@pytest.mark.rule("scope.unused-parameter")
@pytest.mark.parametrize("orig", [False, True])
def test_a_parameter_unused_in_a_used_unit_has_zeros(orig: bool, world: GetWorld) -> None:
    """`scope.unused-parameter`: FSDP1 hands over zeros, not None, so the unwrapped run must be given them.

    Left to itself it would skip `b`, and count 2 steps instead of 3.
    """
    shapes = {"a": (64, 64), "b": (64, 64)}
    unused = Case(shapes, steps=3, change_gradients=b_unused_in_step_2)
    expected = native_run(Case(shapes, steps=3, change_gradients=b_zero_in_step_2))
    for twin in TWINS:
        for found in world(2).run(wrapped_run, unused, "coarse", orig, twin):
            assert differences(found, expected) == []
    assert expected[-1]["b.weight"]["step"] == 3
    assert native_run(unused)[-1]["b.weight"]["step"] == 2
