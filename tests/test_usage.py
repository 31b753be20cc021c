"""A real `torch.optim.Optimizer`: what users do with one, and what FSDP offers around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from against_native import TWINS, Case, Snapshot, differences, native_snapshot, snapshot, train
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from refimpl import ShardedAdamW8bit, read_layouts
from refimpl.tools.fixture import Model, wrap
from refimpl.tools.world import World

GetWorld = Callable[[int], World]
Loop = Callable[[Case, nn.Module, torch.optim.Optimizer], Iterator[Any]]

CASE = Case({"x": (3000,), "y": (96, 96), "z": (500,), "w": (5001,)})


def wrapped(case: Case, loop: Loop, orig: bool, twin: str) -> list[tuple[Snapshot, Any]]:
    model = wrap(case.model(), ["w"], use_orig_params=orig)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model), **case.hyper)
    return [(snapshot(model, optimizer), note) for note in loop(case, model, optimizer)]


def check(world: World, loop: Loop, native_loop: Loop | None = None, case: Case = CASE) -> None:
    model = case.model()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), **case.hyper)
    native = [native_snapshot(model, optimizer) for _ in (native_loop or loop)(case, model, optimizer)]
    for twin in TWINS:
        for orig in (False, True):
            for found in world.run(wrapped, case, loop, orig, twin):
                assert differences([each for each, _ in found], native) == [], f"{twin}, {orig=}"


def with_scheduler(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        ],
        milestones=[2],
    )
    for _ in train(case, model, optimizer):
        scheduler.step()
        yield


@pytest.mark.rule("update.equals-unwrapped")
def test_schedulers(world: GetWorld) -> None:
    check(world(2), with_scheduler)


def with_closure(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 2, 3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(case.gradients(step))
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), Tensor)
        yield


def test_closures(world: GetWorld) -> None:
    check(world(2), with_closure)


def zero_in_place(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 2, 3):
        model(case.gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield


def test_zero_grad_in_place(world: GetWorld) -> None:
    check(world(2), zero_in_place)


def accumulate(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 3, 5):
        model(case.gradients(step)).backward()
        model(case.gradients(step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def accumulate_without_sync(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 3, 5):
        with model.no_sync():
            model(case.gradients(step)).backward()
        model(case.gradients(step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@pytest.mark.rule("update.equals-unwrapped")
def test_gradient_accumulation(world: GetWorld) -> None:
    check(world(2), accumulate)


@pytest.mark.rule("update.equals-unwrapped")
def test_no_sync_then_a_synchronized_backward(world: GetWorld) -> None:
    check(world(2), accumulate_without_sync, accumulate)


MAX_NORM = 0.01


def clip_with_fsdp(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    for step in (1, 2, 3):
        model(case.gradients(step)).backward()
        norm = model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield norm.item()


@pytest.mark.rule("scope.clip-norm", "update.equals-unwrapped")
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_clip_grad_norm(twin: str, orig: bool, world: GetWorld) -> None:
    """FSDP's norm is summed in its own order, so the unwrapped run is clipped by FSDP's norm."""
    results = world(2).run(wrapped, CASE, clip_with_fsdp, orig, twin)
    norms = [norm for _, norm in results[0]]
    assert min(norms) > MAX_NORM

    def clip_by_these(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        for step, norm in enumerate(norms, 1):
            model(case.gradients(step)).backward()
            for param in model.parameters():
                param.grad.mul_(torch.clamp(MAX_NORM / (torch.tensor(norm) + 1e-6), max=1.0))
            optimizer.step()
            optimizer.zero_grad()
            yield

    model = CASE.model()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), **CASE.hyper)
    native = [native_snapshot(model, optimizer) for _ in clip_by_these(CASE, model, optimizer)]
    for found in results:
        assert differences([each for each, _ in found], native) == []


def with_scaler(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In step 2 one element of `x`, which only the first rank holds, overflows on every rank."""
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**10)
    for step in (1, 2, 3, 4):
        grads = case.gradients(step)
        if step == 2:
            grads["x"][7] = torch.inf
        scaler.scale(model(grads)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield


def skip_the_second(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 2, 3, 4):
        if step != 2:
            model(case.gradients(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield


@pytest.mark.rule("update.equals-unwrapped")
def test_sharded_grad_scaler_skips_on_all_ranks(world: GetWorld) -> None:
    check(world(2), with_scaler, skip_the_second)


def freeze_and_thaw(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for step in (1, 2, 3, 4):
        model.w.requires_grad_(step not in (2, 3))
        model(case.gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@pytest.mark.rule("update.equals-unwrapped")
def test_units_frozen_and_thawed(world: GetWorld) -> None:
    check(world(2), freeze_and_thaw)


def groups_of(model: nn.Module, names: bool = False) -> list[dict[str, Any]]:
    """Two groups: everything but `w` in one, `w` with another learning rate and betas in the second."""
    named = [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in model.named_parameters()]
    first = [each for each in named if not each[0].startswith("w")]
    second = [each for each in named if each[0].startswith("w")]
    pick = (lambda pairs: pairs) if names else (lambda pairs: [param for _, param in pairs])
    return [
        {"params": pick(first)},
        {"params": pick(second), "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
    ]


def grouped_run(orig: bool, twin: str) -> list[Snapshot]:
    model = wrap(CASE.model(), ["w"], use_orig_params=orig)
    first, second = groups_of(model)
    optimizer = TWINS[twin]([first], layouts=read_layouts(model), **CASE.hyper)
    optimizer.add_param_group(second)
    return [snapshot(model, optimizer) for _ in train(CASE, model, optimizer)]


@pytest.mark.rule("update.equals-unwrapped")
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_param_groups(twin: str, orig: bool, world: GetWorld) -> None:
    model = CASE.model()
    optimizer = bnb.optim.AdamW8bit(groups_of(model), **CASE.hyper)
    native = [native_snapshot(model, optimizer) for _ in train(CASE, model, optimizer)]
    for found in world(2).run(grouped_run, orig, twin):
        assert differences(found, native) == []


@pytest.mark.rule("wrap.invariant")
@pytest.mark.parametrize("twin", TWINS)
def test_on_an_unwrapped_model_it_is_the_native_optimizer(twin: str) -> None:
    runs = []
    for make in (TWINS[twin], bnb.optim.AdamW8bit):
        model = CASE.model()
        optimizer = make(groups_of(model, names=make is not bnb.optim.AdamW8bit), lr=1e-3)
        view = native_snapshot if make is bnb.optim.AdamW8bit else snapshot
        runs.append([view(model, optimizer) for _ in train(CASE, model, optimizer)])
    assert differences(*runs) == []


def test_a_gradient_that_is_not_contiguous() -> None:
    model, reference = Model({"a": (70, 80)}), Model({"a": (70, 80)})
    ours = ShardedAdamW8bit(model.named_parameters())
    native = bnb.optim.AdamW8bit(reference.parameters())
    for param in (model.a.weight, reference.a.weight):
        param.grad = torch.randn(80, 70, generator=torch.Generator().manual_seed(0)).t()
    ours.step()
    native.step()
    assert torch.equal(model.a.weight, reference.a.weight)


def none_on_one_rank(orig: bool, twin: str) -> str:
    """The second rank loses the gradient of a parameter that both ranks hold a part of."""
    model = wrap(CASE.model(), ["w"], use_orig_params=orig)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model))
    model(CASE.gradients(1)).backward()
    if dist.get_rank() == 1:
        next(iter(model.w.parameters())).grad = None
    before = [param.detach().clone() for param in model.parameters()]
    try:
        optimizer.step()
    except RuntimeError as error:
        assert all(map(torch.equal, before, model.parameters()))
        assert not optimizer.full_state_dict()["state"]
        return str(error)
    return "no error"


@pytest.mark.rule("refuse.missing-gradient")
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_a_gradient_missing_on_one_rank_is_refused_on_both(twin: str, orig: bool, world: GetWorld) -> None:
    for message in world(2).run(none_on_one_rank, orig, twin):
        assert "rank 1 has no gradient for 'w.weight' where other ranks have one" in message
