"""Models whose gradients are known to the last bit, wrapped by real FSDP1.

Every parameter sits in a module of its own and the loss is the sum of <parameter, gradient>, so a
backward pass hands over exactly the gradient that was asked for. Values are rounded to a few
significant bits: FSDP divides gradients before and after it adds them up over the ranks, and with
bits to spare both divisions are exact at any world size. What differs after a step is then
the optimizer's doing alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

Shapes = Mapping[str, Sequence[int]]


class Holder(nn.Module):
    """One parameter, and its part of the loss."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, gradient: Tensor) -> Tensor:
        """`<weight, gradient>`: backward gives `gradient`, whatever the weight."""
        return (self.weight * gradient).sum()


class Model(nn.Module):
    """One `Holder` a name, in the order of `shapes`; parameter FQNs are `NAME.weight`.

    A dotted name, `block.a`, puts holder `a` into a submodule `block`, which is a `Model` too.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, inner in _by_child(shapes).items():
            shape = inner.get("")
            child = Model(inner, dtype) if shape is None else Holder(start_value(shape).to(dtype))
            self.add_module(name, child)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The loss whose gradient at `NAME.weight` is `gradients[NAME]`; other children stay unused."""
        parts = []
        for name, inner in _by_child(gradients).items():
            child = self.get_submodule(name)
            parts.append(child(inner.get("", inner)))
        return torch.stack(parts).sum()


def _by_child(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`{"block.a": v}` -> `{"block": {"a": v}}`, and `{"a": v}` -> `{"a": {"": v}}`."""
    children: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        child, _, rest = name.partition(".")
        children.setdefault(child, {})[rest] = value
    return children


def start_value(shape: Sequence[int]) -> Tensor:
    """`0.05 * sin(0.37 i + 0.1)` at element i, row-major, float32."""
    index = torch.arange(_numel(shape), dtype=torch.float64)
    return (0.05 * torch.sin(0.37 * index + 0.1)).float().reshape(tuple(shape))


def gradient(shape: Sequence[int], position: int, step: int, bits: int = 12) -> Tensor:
    """Gradient of the parameter at `position` in the model, in `step` (from 1), float32.

    `0.01 * sin(0.7 i + 1.3 step + position) * 10^-(i mod 5)` rounded to `bits` significant bits: five
    decades within every block, as blockwise quantization meets them.
    """
    index = torch.arange(_numel(shape), dtype=torch.float64)
    value = torch.sin(0.7 * index + 1.3 * step + position) * 10.0 ** -(index % 5) * 1e-2
    mantissa, exponent = torch.frexp(value)
    rounded = torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)
    return rounded.float().reshape(tuple(shape))


def gradients(shapes: Shapes, step: int, bits: int = 12) -> dict[str, Tensor]:
    """`gradient` of every parameter of a model of `shapes`."""
    return {
        name: gradient(shape, position, step, bits) for position, (name, shape) in enumerate(shapes.items())
    }


def wrap(
    model: nn.Module,
    units: Sequence[str] = (),
    *,
    device: torch.device | None = None,
    **options: Any,
) -> FSDP:
    """Wrap each submodule named in `units` as an FSDP1 unit of its own, and the rest as the root unit.

    `device` is where the model runs (default: CPU); further options go to every unit.
    """
    options["device_id"] = device or torch.device("cpu")
    for name in units:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, FSDP(owner.get_submodule(child), **options))
    return FSDP(model, **options)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The whole value of every original parameter by FQN, as FSDP itself puts it together."""
    with FSDP.summon_full_params(model, writeback=False):  # does nothing to an unwrapped model
        return {
            name.replace("_fsdp_wrapped_module.", ""): param.detach().cpu().clone()
            for name, param in model.named_parameters()
        }


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, grads: Mapping[str, Tensor]) -> None:
    """One backward pass that yields `grads`, then one optimizer step."""
    model(grads).backward()
    optimizer.step()
    optimizer.zero_grad()


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
