"""Compare an optimizer on a wrapped model with native AdamW8bit on the unwrapped one, step by step.

What is compared, after every step and to the last bit: every parameter, and of its state the
precision, step, codes and absmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from refimpl import ShadowAdamW8bit, ShardedAdamW8bit, read_layouts
from refimpl.tools.fixture import Model, Shapes, full_parameters, gradients, wrap

TWINS = {"sharded": ShardedAdamW8bit, "shadow": ShadowAdamW8bit}
WRAPPINGS = [(units, orig) for units in ("coarse", "fine") for orig in (False, True)]

Grads = dict[str, Tensor]
Snapshot = dict[str, dict[str, Any]]


def grade(gradient: Tensor) -> Tensor:
    """Another scale every 100 elements, so that each block has a largest gradient of its own."""
    scale = torch.exp2(-(torch.arange(gradient.numel()) // 100 % 7))
    return gradient * scale.reshape(gradient.shape)


def graded(step: int, grads: Grads) -> Grads:
    """For `Case.change_gradients`. The scales are powers of two: sums over ranks stay exact."""
    return {name: grade(gradient) for name, gradient in grads.items()}


@dataclass(frozen=True)
class Case:
    """A model, its gradients, and how it is optimized; nothing about wrapping."""

    shapes: Shapes
    steps: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    bits: int = 12
    change_gradients: Callable[[int, Grads], Grads] = lambda step, grads: grads
    prepare: Callable[[nn.Module], Any] = lambda model: None
    frozen: tuple[str, ...] = ()
    hyper: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    min_8bit_size: int = 4096
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def model(self) -> Model:
        model = Model(self.shapes, self.dtype)
        self.prepare(model)
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return model.to(self.device)

    def gradients(self, step: int, dtype: torch.dtype | None = None) -> Grads:
        grads = self.change_gradients(step, gradients(self.shapes, step, self.bits))
        return {name: grad.to(self.device, dtype or self.dtype) for name, grad in grads.items()}


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yields after every step."""
    for step in range(1, case.steps + 1):
        model(case.gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def native_run(case: Case) -> list[Snapshot]:
    """Native AdamW8bit on the unwrapped model, in this process."""
    model = case.model()
    optimizer = bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=case.min_8bit_size, **case.hyper)
    manager = override_native(case, dict(model.named_parameters()))
    try:
        return [native_snapshot(model, optimizer) for _ in train(case, model, optimizer)]
    finally:
        manager.initialize()


def override_native(case: Case, params: Mapping[str, Tensor]) -> Any:
    """Ask native for the overrides of `case`, and nothing else; its manager is one for all the process."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    for name, param in params.items():
        for pattern, values in case.overrides.items():
            if fnmatchcase(name, pattern):
                manager.override_config(param, key_value_dict=dict(values))
    return manager


def hybrid_options() -> dict[str, Any]:
    """For FSDP on four ranks: two replicas of two shards; the ranks of a shard group are not neighbours."""
    groups = {ranks: dist.new_group(ranks) for ranks in [(0, 2), (1, 3), (0, 1), (2, 3)]}
    rank = dist.get_rank()
    shard, replicate = groups[rank % 2, rank % 2 + 2], groups[rank - rank % 2, rank - rank % 2 + 1]
    return {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": (shard, replicate)}


def native_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    kept = ("step", "state1", "state2", "absmax1", "absmax2")
    return {
        name: {
            "value": param.detach().cpu().clone(),
            **{
                key: value.cpu().clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(param, {}).items()
                if key in kept
            },
        }
        for name, param in model.named_parameters()
    }


def snapshot(model: nn.Module, optimizer: Any) -> Snapshot:
    """The same of one of ours, on a wrapped model. Collective."""
    state = optimizer.full_state_dict()["state"]
    return {name: {"value": value, **state.get(name, {})} for name, value in full_parameters(model).items()}


def wrapped_run(case: Case, wrapping: Any, orig: bool, twin: str, **options: Any) -> list[Snapshot]:
    """One of ours on the wrapped model; runs on every rank.

    `wrapping` is "fine" (each parameter a unit), "coarse" (one unit; frozen ones apart), or unit names.
    """
    units = {"fine": list(case.shapes), "coarse": list(case.frozen)}.get(wrapping, wrapping)
    options["device"] = torch.device(case.device)
    model = wrap(case.model(), units, use_orig_params=orig, **options)
    optimizer = TWINS[twin](
        model.parameters(),
        layouts=read_layouts(model),
        min_8bit_size=case.min_8bit_size,
        overrides=case.overrides,
        **case.hyper,
    )
    return [snapshot(model, optimizer) for _ in train(case, model, optimizer)]


def differences(found: list[Snapshot], expected: list[Snapshot]) -> list[str]:
    """Every value that is not bit for bit the same, in words; empty if all are."""
    assert len(found) == len(expected)
    problems = []
    for step, (ours, native) in enumerate(zip(found, expected, strict=True), 1):
        if ours.keys() != native.keys():
            return [f"step {step}: parameters {sorted(ours)} instead of {sorted(native)}"]
        for name, entry in native.items():
            if ours[name].keys() != entry.keys():
                problems.append(f"step {step}: {name} has {list(ours[name])}, not {list(entry)}")
                continue
            for key, value in entry.items():
                if not _equal(ours[name][key], value):
                    problems.append(f"step {step}: {name} {key}")
    return problems


def _equal(ours: Any, native: Any) -> bool:
    if isinstance(native, Tensor):
        return ours.dtype == native.dtype and ours.shape == native.shape and torch.equal(ours, native)
    return type(ours) is type(native) and ours == native


def check(world: Any, case: Case, wrapping: Any, orig: bool, twins: Any = TWINS, **options: Any) -> None:
    """Every rank's view of each twin equals the native run."""
    expected = native_run(case)
    for twin in twins:
        for rank, found in enumerate(world.run(wrapped_run, case, wrapping, orig, twin, **options)):
            assert differences(found, expected) == [], f"{twin}, {wrapping}, {orig=}, rank {rank}"
