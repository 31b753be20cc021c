"""Names, dtypes and replicas that could make state go astray without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from against_native import TWINS, Case, differences, native_run, snapshot
from routes import ROUTES, build, steps
from torch import nn

from refimpl import ShadowAdamW8bit, ShardedAdamW8bit, read_layouts
from refimpl.checkpoint import CheckpointError, load_sharded, save_sharded
from refimpl.tools.fixture import Model, wrap
from refimpl.tools.world import World

GetWorld = Callable[[int], World]
CASE = Case({"x": (3000,), "y": (97, 99), "z": (500,)})


@pytest.mark.parametrize("twin", TWINS)
def test_parameters_without_names_keep_their_own_state(twin: str) -> None:
    model, other = CASE.model(), CASE.model()
    optimizer = TWINS[twin](model.parameters())
    steps(CASE, model, optimizer, 1, 2)
    again = TWINS[twin](other.parameters())
    again.load_state_dict(optimizer.state_dict())
    found, expected = again.full_state_dict()["state"], optimizer.full_state_dict()["state"]
    assert list(found) == ["param.0.0", "param.0.1", "param.0.2"]
    for name, entry in expected.items():
        assert torch.equal(found[name]["state1"], entry["state1"])
        assert not torch.equal(entry["state1"].float(), torch.zeros_like(entry["state1"].float()))


def test_two_models_with_the_same_names(tmp_path: Path) -> None:
    first, second = Model({"a": (70, 80)}), Model({"a": (70, 80)})
    optimizer = ShardedAdamW8bit([*first.named_parameters()])
    optimizer.add_param_group({"params": [*second.named_parameters()]})
    for number, model in enumerate((first, second)):
        model.a.weight.grad = torch.full((70, 80), 1.0 + number)
    optimizer.step()
    saved = optimizer.state_dict()
    expected = [entry["state1"].clone() for entry in saved["state"].values()]
    optimizer.load_state_dict(saved)
    found = [entry["state1"] for entry in optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, found, expected))
    for refused in (optimizer.full_state_dict, lambda: save_sharded(optimizer, tmp_path)):
        with pytest.raises(CheckpointError, match=r"two parameters of this optimizer are named 'a\.weight'"):
            refused()


def test_names_of_a_compiled_model_are_those_of_the_model() -> None:
    optimizer = ShardedAdamW8bit(torch.compile(Model({"a": (10,)})).named_parameters())
    assert [param.fqn for param in optimizer.named_params()] == ["a.weight"]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_bf16_defaults(path: Path) -> list[list[str]]:
    native = native_run(CASE)
    problems = []
    for route in ROUTES:
        folder = path / route
        folder.mkdir(exist_ok=True)
        model, optimizer = build(CASE, ("coarse", False), "sharded")
        steps(CASE, model, optimizer, 1, 2)
        with default_dtype(torch.bfloat16):
            ROUTES[route][0](model, optimizer, folder)
            dist.barrier()
            ROUTES[route][1](model, optimizer, folder)
        problems.append(differences([snapshot(model, optimizer)], native[1:2]))
    return problems


def test_the_default_dtype_does_not_touch_state(world: GetWorld, tmp_path: Path) -> None:
    for problems in world(2).run(in_bf16_defaults, tmp_path):
        assert problems == [[]] * len(ROUTES)


def drifted(path: Path) -> tuple[str, str]:
    """Replicas under NO_SHARD that have taken different gradients, on purpose."""
    model = Model({"a": (70, 80)})
    optimizer = ShardedAdamW8bit(model.named_parameters())
    model.a.weight.grad = torch.full((70, 80), 1.0 + dist.get_rank())
    optimizer.step()
    try:
        save_sharded(optimizer, path)
    except CheckpointError as error:
        return str(error), str(list(path.iterdir()))
    return "no error", ""


@pytest.mark.rule("refuse.checkpoint")
def test_replicas_that_differ_are_not_saved(world: GetWorld, tmp_path: Path) -> None:
    for message, files in world(2).run(drifted, tmp_path):
        assert "differs between ranks that should hold copies of it" in message
        assert files == "[]"


def ignored_parameter() -> list[str]:
    """A full form on the first rank only cannot reach a parameter that is not sharded."""
    model = CASE.model()
    wrapped = wrap(model, ignored_states=[model.z.weight])
    optimizer = ShardedAdamW8bit(wrapped.parameters(), layouts=read_layouts(wrapped))
    steps(CASE, wrapped, optimizer, 1, 1)
    full = optimizer.full_state_dict()
    optimizer.load_full_state_dict(full)
    before = optimizer.full_state_dict()["state"]
    try:
        optimizer.load_full_state_dict(full if dist.get_rank() == 0 else {})
    except CheckpointError as error:
        after = optimizer.full_state_dict()["state"]
        assert all(torch.equal(before[name]["state1"], after[name]["state1"]) for name in before)
        return [str(error)]
    return []


@pytest.mark.rule("refuse.checkpoint")
def test_a_full_form_that_cannot_reach_every_rank(world: GetWorld) -> None:
    for (message,) in world(2).run(ignored_parameter):
        assert "the checkpoint is empty on a rank that no other can give it to" in message


def frozen_group_added() -> bool:
    model = wrap(CASE.model(), ["y"])
    inner = list(model.y.parameters())
    inner[0].requires_grad_(False)
    rest = [param for param in model.parameters() if param is not inner[0]]
    optimizer = ShardedAdamW8bit(rest, layouts=read_layouts(model))
    model({"x": CASE.gradients(1)["x"], "z": CASE.gradients(1)["z"]}).backward()
    optimizer.step()
    optimizer.add_param_group({"params": inner})
    full = optimizer.full_state_dict()
    optimizer.load_full_state_dict(full)
    return list(optimizer.full_state_dict()["state"]) == ["x.weight", "z.weight"]


def test_a_frozen_group_added_later(world: GetWorld) -> None:
    assert world(2).run(frozen_group_added) == [True, True]


@pytest.mark.parametrize("lr", [torch.tensor(0.25), np.float32(0.25)], ids=["tensor", "numpy"])
def test_learning_rates_of_other_types(lr: Any, tmp_path: Path) -> None:
    model = Model({"a": (10,), "b": (10,)})
    groups = [{"params": [each], "lr": lr} for each in model.named_parameters()]
    optimizer = ShardedAdamW8bit(groups)
    for param in model.parameters():
        param.grad = torch.ones(10)
    optimizer.step()
    full = optimizer.full_state_dict()
    save_sharded(optimizer, tmp_path)
    optimizer.param_groups[0]["lr"] = 0.5
    assert full["params"]["a.weight"]["lr"] == 0.25
    load_sharded(optimizer, tmp_path)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@pytest.mark.rule("refuse.checkpoint")
def test_another_checkpoint_in_the_folder_is_not_replaced(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": nn.Linear(3, 3).state_dict()}, checkpoint_id=tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    optimizer = ShardedAdamW8bit(Model({"a": (10,)}).named_parameters())
    with pytest.raises(CheckpointError):
        save_sharded(optimizer, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def different_checkpoints() -> str:
    """Each rank passes a checkpoint of its own step."""
    model, optimizer = build(CASE, ("coarse", False), "sharded")
    steps(CASE, model, optimizer, 1, 1)
    first = optimizer.full_state_dict()
    steps(CASE, model, optimizer, 2, 2)
    second = optimizer.full_state_dict()
    try:
        optimizer.load_full_state_dict(first if dist.get_rank() == 0 else second)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.rule("refuse.checkpoint")
def test_ranks_must_pass_the_same_checkpoint(world: GetWorld) -> None:
    for message in world(2).run(different_checkpoints):
        assert "ranks were given different checkpoints" in message


@pytest.mark.rule("override.by-name")
def test_global_overrides_do_not_leak_into_the_shadow() -> None:
    import bitsandbytes as bnb

    manager = bnb.optim.GlobalOptimManager.get_instance()
    models = [Model({"a": (10,)}), Model({"a": (10,)})]
    manager.register_parameters(models[0].parameters())
    manager.override_config(models[0].a.weight, "lr", 0.5)
    manager.register_parameters(models[0].parameters())
    try:
        for make, model in zip(
            (ShardedAdamW8bit, ShadowAdamW8bit), [Model({"a": (10,)}), models[1]], strict=True
        ):
            model.a.weight.grad = torch.ones(10)
            make(model.named_parameters()).step()
            models.append(model)
        assert torch.equal(models[-1].a.weight, models[-2].a.weight)
    finally:
        manager.initialize()


def skipped_on_rank_1(path: Path) -> list[str]:
    """No bound cuts a block, so there is no exchange that would notice in the step itself."""
    case = Case({"a": (6, 1024)})
    model, optimizer = build(case, ("coarse", False), "sharded")
    model(case.gradients(1)).backward()
    if dist.get_rank() == 0:
        optimizer.step()
    messages = []
    for save in (optimizer.full_state_dict, lambda: save_sharded(optimizer, path)):
        try:
            save()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


@pytest.mark.rule("scope.skipped-step")
def test_a_step_skipped_on_one_rank_is_noticed_when_saving(world: GetWorld, tmp_path: Path) -> None:
    for messages in world(2).run(skipped_on_rank_1, tmp_path):
        assert len(messages) == 2
        assert all("'a.weight' was updated 1 times on one rank and 0 on another" in each for each in messages)
