"""Overrides by name hold under every wrapping, also for one parameter inside a flat one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from against_native import (
    TWINS,
    WRAPPINGS,
    Case,
    Snapshot,
    check,
    differences,
    native_snapshot,
    snapshot,
    train,
)
from torch import nn

from refimpl import read_layouts
from refimpl.tools.fixture import Model, wrap
from refimpl.tools.world import World

GetWorld = Callable[[int], World]

SHAPES = {"emb": (160, 64), "w": (100, 64), "bias": (300,), "v": (91, 50), "norm": (40,)}
OVERRIDES: dict[str, dict[str, Any]] = {
    "emb.*": {"optim_bits": 32},
    "bias.weight": {"weight_decay": 0.0},
    "norm.*": {"weight_decay": 0.0, "lr": 5e-3},
    "[vw].*": {"betas": (0.85, 0.95), "eps": 1e-6},
    "w.*": {"lr": 2e-3},
}


@pytest.mark.rule("override.by-name")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_they_equal_native_overrides_on_the_unwrapped_model(size: int, world: GetWorld) -> None:
    for wrapping, orig in WRAPPINGS:
        check(world(size), Case(SHAPES, overrides=OVERRIDES), wrapping, orig)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    plain = ("bias.weight", "norm.weight")
    return [
        {"params": [param for name, param in params.items() if name not in plain]},
        {"params": [params[name] for name in plain], "weight_decay": 0.0},
    ]


@pytest.mark.rule("override.by-name")
def test_decay_and_no_decay_inside_one_flat_parameter(world: GetWorld) -> None:
    case = Case(SHAPES, overrides={name: {"weight_decay": 0.0} for name in ("bias.*", "norm.*")})
    model = case.model()
    optimizer = bnb.optim.AdamW8bit(decay_groups(model), lr=1e-3)
    native = [native_snapshot(model, optimizer) for _ in train(case, model, optimizer)]
    for twin in TWINS:
        for found in world(2).run(run_with, case, twin):
            assert differences(found, native) == []


def run_with(case: Case, twin: str) -> list[Snapshot]:
    model = wrap(case.model(), use_orig_params=False)
    assert len(list(model.parameters())) == 1
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model), overrides=case.overrides)
    return [snapshot(model, optimizer) for _ in train(case, model, optimizer)]


def scheduled(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in train(case, model, optimizer):
        scheduler.step()
        yield


def run_scheduled(case: Case, twin: str) -> list[Snapshot]:
    model = wrap(case.model(), use_orig_params=False)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model), overrides=case.overrides)
    return [snapshot(model, optimizer) for _ in scheduled(case, model, optimizer)]


@pytest.mark.rule("override.by-name")
def test_a_scheduler_scales_all_but_an_overridden_lr(world: GetWorld) -> None:
    case = Case(SHAPES, overrides={"bias.*": {"lr": 2e-3}})
    model = case.model()
    params = dict(model.named_parameters())
    bias = params.pop("bias.weight")
    optimizer = bnb.optim.AdamW8bit([{"params": params.values()}, {"params": [bias], "lr": 2e-3}], lr=1e-3)
    constant = {"bias": 2e-3}

    def native_loop() -> Iterator[None]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in train(case, model, optimizer):
            scheduler.step()
            optimizer.param_groups[1]["lr"] = constant["bias"]
            yield

    native = [native_snapshot(model, optimizer) for _ in native_loop()]
    for twin in TWINS:
        for found in world(2).run(run_scheduled, case, twin):
            assert differences(found, native) == []


@pytest.mark.rule("refuse.override")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing.*": {"lr": 1.0}}, r"'nothing\.\*' matches none of the 2 parameters"),
        ({"a.*": {"momentum": 1.0}}, r"'a\.\*' sets 'momentum'; it may set optim_bits, lr"),
        ({"a.*": {"optim_bits": 16}}, r"optim_bits must be 8 or 32, got 16 in the override 'a\.\*'"),
        ({"a.*": {"lr": -1.0}}, r"lr must be a finite number of at least 0, got -1\.0 in the override"),
        ({"a.*": {"betas": (0.9, 1.0)}}, "betas must be two numbers from 0 up to, not including, 1"),
        (
            {"a.*": {"lr": 1.0}, "*.weight": {"lr": 2.0}},
            r"'a\.\*' and '\*\.weight' disagree on lr of 'a\.weight': 1\.0 and 2\.0",
        ),
    ],
)
@pytest.mark.parametrize("twin", TWINS)
def test_a_wrong_override_is_refused_by_name(
    twin: str, overrides: Mapping[str, Mapping[str, Any]], message: str
) -> None:
    model = Model({"a": (10,), "b": (10,)})
    with pytest.raises(ValueError, match=message):
        TWINS[twin](model.named_parameters(), overrides=overrides)


@pytest.mark.rule("override.by-name")
def test_patterns_that_agree_add_up() -> None:
    model = Model({"a": (5000,), "b": (10,)})
    overrides = {"a.*": {"lr": 1.0, "optim_bits": 32}, "*.weight": {"lr": 1.0, "eps": 1e-6}}
    optimizer = TWINS["sharded"](model.named_parameters(), overrides=overrides)
    model.a.weight.grad = torch.ones(5000)
    optimizer.step()
    assert optimizer.full_state_dict()["state"]["a.weight"]["state1"].dtype == torch.float32
