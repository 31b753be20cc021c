"""What is not supported is refused before anything changed, in a sentence that names it and its rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_native import TWINS, Case
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from refimpl import read_layouts
from refimpl.layout import ShardLayout
from refimpl.tools.fixture import Model, wrap
from refimpl.tools.world import RankError, World

GetWorld = Callable[[int], World]
CASE = Case({"x": (3000,), "y": (97, 99), "z": (500,)})

pytestmark = pytest.mark.parametrize("twin", TWINS)


@pytest.mark.rule("refuse.hyperparameter", "refuse.amsgrad")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1e-3}, "lr must be a finite number of at least 0, got -0.001"),
        ({"lr": math.nan}, "lr must be a finite number of at least 0, got nan"),
        ({"lr": math.inf}, "lr must be a finite number of at least 0, got inf"),
        ({"eps": -1.0}, "eps must be a finite number of at least 0, got -1.0"),
        ({"eps": math.nan}, "eps must be"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers .* got \(0.9, 1.0\)"),
        ({"betas": (math.nan, 0.9)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"min_8bit_size": 0}, "min_8bit_size must be at least 1, got 0"),
        ({"min_8bit_size": -5}, "min_8bit_size must be at least 1, got -5"),
        ({"min_8bit_size": 4096.0}, "min_8bit_size must be an int, got 4096.0"),
        ({"amsgrad": True}, "refuse.amsgrad"),
    ],
)
def test_arguments(twin: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TWINS[twin](Model({"a": (10,)}).parameters(), **arguments)


@pytest.mark.rule("refuse.hyperparameter")
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
def test_hyperparameters_of_a_group(twin: str, key: str) -> None:
    first, second = Model({"a": (10,)}), Model({"b": (10,)})
    optimizer = TWINS[twin](first.parameters())
    with pytest.raises(ValueError, match=f"{key} must be"):
        optimizer.add_param_group({"params": second.parameters(), key: math.nan})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": second.parameters()})


@pytest.mark.rule("refuse.override")
@pytest.mark.parametrize("key", ["optim_bits", "min_8bit_size"])
def test_group_keys_that_native_ignores_silently(twin: str, key: str) -> None:
    groups = [{"params": Model({"a": (10,)}).parameters(), key: 32}]
    with pytest.raises(ValueError, match=f"'{key}' has no effect in a param group"):
        TWINS[twin](groups)


@pytest.mark.rule("refuse.memory-order")
def test_memory_order(twin: str) -> None:
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"'weight' has strides .*refuse\.memory-order"):
        TWINS[twin](conv.named_parameters())


@pytest.mark.rule("refuse.sparse-gradient")
def test_sparse_gradients(twin: str) -> None:
    embedding = nn.Embedding(100, 50, sparse=True)
    optimizer = TWINS[twin](embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"gradient of 'weight' is sparse.*refuse\.sparse-gradient"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@pytest.mark.rule("refuse.layout")
def test_a_layout_that_does_not_fit(twin: str) -> None:
    model = Model({"a": (10,)})
    layout = ShardLayout(params=(), bounds=(0, 11))
    with pytest.raises(ValueError, match=r"has 11 local elements but the tensor has 10.*refuse\.layout"):
        TWINS[twin](model.named_parameters(), layouts={model.a.weight: layout})


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def without_layouts(twin: str, orig: bool) -> list[str]:
    wrapped, other = (wrap(CASE.model(), use_orig_params=orig) for _ in range(2))
    partly = wrap(CASE.model(), ["x"], use_orig_params=orig)
    part = {tensor: each for tensor, each in read_layouts(partly).items() if "x" in each.params[0].fqn}
    make = TWINS[twin]
    return [
        attempt(lambda: make(wrapped.parameters())),
        attempt(lambda: make(wrapped.parameters(), layouts=read_layouts(other))),
        attempt(lambda: make(partly.parameters(), layouts=part)),
        attempt(lambda: make(Model({"a": (10,)}).parameters(), layouts=read_layouts(other))),
    ]


@pytest.mark.rule("refuse.no-metadata")
@pytest.mark.parametrize("orig", [False, True])
def test_layouts_missing_or_of_another_model(twin: str, orig: bool, world: GetWorld) -> None:
    for missing, other, partly, plain in world(2).run(without_layouts, twin, orig):
        for message in (missing, other, partly):
            assert "flattened by FSDP1 but not in layouts" in message
            assert "refuse.no-metadata" in message
        assert "none of the parameters is in layouts" in plain


def dead_tensors(twin: str) -> str:
    """Layouts read before an outer unit took the parameters over."""
    inner = wrap(CASE.model(), ["x"])
    layouts = read_layouts(inner.x)
    return attempt(lambda: TWINS[twin](inner.parameters(), layouts=layouts))


@pytest.mark.rule("refuse.no-metadata")
def test_layouts_read_before_wrapping_was_complete(twin: str, world: GetWorld) -> None:
    for message in world(2).run(dead_tensors, twin):
        assert "refuse.no-metadata" in message


def step_and_compare(twin: str, orig: bool, backward: Callable[[FSDP], Any], **options: Any) -> str:
    """What step() says after `backward`, and proof that it has changed nothing."""
    model = wrap(CASE.model(), ["y"], use_orig_params=orig, **options)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model))
    model(CASE.gradients(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    params = [param.detach().clone() for param in model.parameters()]
    state = optimizer.full_state_dict()["state"]
    backward(model)
    message = attempt(optimizer.step)
    assert all(map(torch.equal, params, model.parameters()))
    for name, entry in optimizer.full_state_dict()["state"].items():
        assert entry["step"] == state[name]["step"] == 1
        assert torch.equal(entry["state1"], state[name]["state1"])
    optimizer.zero_grad()
    return message


def backward_in_no_sync(model: FSDP) -> None:
    with model.no_sync():
        model(CASE.gradients(2)).backward()


@pytest.mark.rule("refuse.unsharded-gradient")
@pytest.mark.parametrize("orig", [False, True])
def test_a_gradient_that_is_not_sharded(twin: str, orig: bool, world: GetWorld) -> None:
    for message in world(2).run(step_and_compare, twin, orig, backward_in_no_sync):
        assert "it is not sharded, as after a backward in no_sync()" in message
        assert "refuse.unsharded-gradient" in message


def backward(model: FSDP) -> None:
    model(CASE.gradients(2, torch.bfloat16)).backward()


def low_precision(twin: str, orig: bool) -> str:
    mixed = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrap(CASE.model(), ["y"], use_orig_params=orig, mixed_precision=mixed)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model))
    backward(model)
    before = [param.detach().clone() for param in model.parameters()]
    message = attempt(optimizer.step)
    assert all(map(torch.equal, before, model.parameters()))
    return message


@pytest.mark.rule("refuse.gradient-dtype")
@pytest.mark.parametrize("orig", [False, True])
def test_a_gradient_of_another_dtype(twin: str, orig: bool, world: GetWorld) -> None:
    for message in world(2).run(low_precision, twin, orig):
        assert "is torch.bfloat16 but the parameter is torch.float32" in message
        assert "refuse.gradient-dtype" in message


def spoil_on_rank_1(model: FSDP) -> None:
    """A gradient that only the second rank must refuse."""
    model(CASE.gradients(2)).backward()
    if dist.get_rank() == 1:
        tensor = next(iter(model.y.parameters()))
        tensor.grad = None
        tensor.data, kept = tensor.data.half(), tensor.data
        tensor.grad = torch.zeros_like(tensor.data)
        tensor.data = kept


@pytest.mark.rule("refuse.gradient-dtype", "collective.unconditional")
@pytest.mark.parametrize("orig", [False, True])
def test_one_rank_refuses_and_those_it_shares_a_block_with_learn_of_it(
    twin: str, orig: bool, world: GetWorld
) -> None:
    other, own = world(2).run(step_and_compare, twin, orig, spoil_on_rank_1)
    assert "is torch.float16 but the parameter is torch.float32" in own
    assert "rank 1 refused this step" in other


def skip_on_rank_1(twin: str) -> None:
    """What torch.amp.GradScaler does when only one rank sees an inf."""
    model = wrap(CASE.model())
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model))
    model(CASE.gradients(1)).backward()
    if dist.get_rank() == 0:
        optimizer.step()


@pytest.mark.rule("scope.skipped-step")
def test_a_step_skipped_on_one_rank_does_not_hang_for_ever(twin: str) -> None:
    with World(2, device="cpu", timeout=4) as world, pytest.raises(RankError) as caught:
        world.run(skip_on_rank_1, twin)
    assert "ranks [0] did not finish within 4 s" in str(caught.value)
    assert {"sharded": "in exchange", "shadow": "in _gather_gradient"}[twin] in str(caught.value)


def group_times_out(twin: str) -> str:
    """The process group's own timeout, seconds here, ends the wait, and the message says what to do."""
    from datetime import timedelta

    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = wrap(CASE.model(), process_group=group)
    optimizer = TWINS[twin](model.parameters(), layouts=read_layouts(model))
    model(CASE.gradients(1)).backward()
    return attempt(optimizer.step) if dist.get_rank() == 0 else "skipped"


@pytest.mark.rule("scope.skipped-step")
def test_the_timeout_message_names_the_scaler_to_use(twin: str) -> None:
    with World(2, device="cpu", timeout=60) as world:
        message, _ = world.run(group_times_out, twin)
    assert "use ShardedGradScaler" in message
