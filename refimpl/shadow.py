"""The replicated repair: every gradient gathered, and all state on every rank.

Costs W times the state memory of the sharded twin, and an all-gather of every gradient in
every step. It is here because it is plain: native AdamW8bit steps on tensors that have the
original parameters' sizes, so precision and blocks are right by construction. The approach is
that of bitsandbytes draft PR #2081; the sharded twin is tested equal to it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import stock
from .base import (
    GRADIENT,
    OriginalParamAdamW8bit,
    TensorSettings,
    explaining_failure,
    raise_others,
    raise_own,
)
from .layout import ShardLayout
from .named_state import NamedParam, State, States, copy_state, cut_state, transport_device
from .update import Hyperparameters

STATE_NAMES = ("state1", "state2", "absmax1", "absmax2")


class ShadowAdamW8bit(OriginalParamAdamW8bit):
    """AdamW8bit on shadow tensors, one per original parameter, replicated on every rank.

    Constructor, `step` and errors: see `OriginalParamAdamW8bit`.
    """

    def _update(self) -> None:
        problems = self._problems()
        gathered = {
            tensor: _gather_gradient(tensor, settings.layout, self._status(tensor, problems))
            for tensor, settings in self._settings.items()
            if self._takes_part(tensor)
        }
        raise_own(problems)
        for tensor, (_, statuses) in gathered.items():
            raise_others(self._name(tensor), statuses)
        for group in self.param_groups:
            for tensor in group["params"]:
                gradient, statuses = gathered.get(tensor, (tensor, {}))
                if GRADIENT not in statuses.values():
                    continue
                self._shadow(tensor).step(
                    tensor,
                    gradient,
                    self._settings[tensor].layout,
                    self._hyperparameters(group, tensor),
                )
                entry = self.state[tensor]
                entry["steps"] = [step + 1 for step in entry["steps"]]

    def needed_range(self, param: NamedParam) -> tuple[int, int]:
        """All elements of `param`: its state is replicated."""
        return 0, param.numel

    def read_state(self, param: NamedParam, start: int, end: int) -> State:
        """The state of elements `start..end` of `param`, in whole blocks: views."""
        return cut_state(self._shadow(param.tensor).state(param.index), start, end)

    def write_states(self, states: States) -> None:
        """Replace all state by the step, and the state of all elements, of each parameter."""
        for tensor, settings in self._settings.items():
            self.state[tensor] = {"steps": [0] * len(settings.params)}
        for param in self.named_params():
            step, values = states.get(param.key, (0, {}))
            self.state[param.tensor]["steps"][param.index] = step
            if step > 0:
                self._shadow(param.tensor).set_state(param.index, step, values)

    def _write_packed(self, packed: dict[Tensor, stock.Packed]) -> None:
        states: States = {}
        for tensor, params in self.params_by_tensor().items():
            layout = self._settings[tensor].layout
            zero = torch.zeros_like(tensor, dtype=torch.float32)
            own = packed.get(tensor, dict.fromkeys(stock.NAMES, zero))
            whole = {name: torch.cat(_gather(own[name].to(zero), layout)) for name in stock.NAMES}
            unsharded = ShardLayout(layout.params, (0, layout.bounds[-1]))
            states.update(stock.unpack([replace(each, layout=unsharded) for each in params], whole))
        self.write_states(states)

    def _shadow(self, tensor: Tensor) -> _Shadow:
        """The shadow of `tensor`, made when it is first needed."""
        entry = self.state[tensor]
        if "shadow" not in entry:
            entry["shadow"] = _Shadow(tensor, self._settings[tensor], self.min_8bit_size)
        shadow: _Shadow = entry["shadow"]
        return shadow


class _NoOverrides:
    """In place of `bitsandbytes.optim.GlobalOptimManager`, which every native optimizer shares."""

    pid2config: ClassVar[dict[int, Any]] = {}
    index2config: ClassVar[dict[tuple[int, int], Any]] = {}
    module_weight_config_triple: ClassVar[list[Any]] = []


class _Shadow:
    """Shadow parameters of one tensor that the user's optimizer holds, and native optimizers on them.

    State depends on gradients alone, and each element's update on that element's value alone, so
    a shadow parameter need hold true values only where this rank's part is: that is copied in
    before a step and out after it.
    """

    def __init__(self, tensor: Tensor, settings: TensorSettings, min_8bit_size: int) -> None:
        self.params = [
            nn.Parameter(torch.zeros(param.shape, dtype=tensor.dtype, device=tensor.device))
            for param in settings.layout.params
        ]
        self.native: list[Any] = []
        for bits, optimizer in ((8, bnb.optim.AdamW8bit), (32, bnb.optim.AdamW32bit)):
            groups = [
                {"params": [shadow]}
                for shadow, param in zip(self.params, settings.params, strict=True)
                if param.optim_bits == bits
            ]
            if groups:
                native = optimizer(groups, min_8bit_size=min_8bit_size)
                native.mng = _NoOverrides()  # the global ones go by position, and would hit any optimizer
                self.native.append(native)
        self.where = {
            group["params"][0]: (native, position)
            for native in self.native
            for position, group in enumerate(native.param_groups)
        }

    def state(self, index: int) -> State:
        """The native state of original parameter `index`, flat."""
        shadow = self.params[index]
        native, _ = self.where[shadow]
        return {name: value.view(-1) for name, value in native.state[shadow].items() if name in STATE_NAMES}

    def set_state(self, index: int, step: int, values: State) -> None:
        """Replace the native state of original parameter `index`."""
        shadow = self.params[index]
        native, position = self.where[shadow]
        native.init_state(native.param_groups[position], shadow, position, 0)
        native.state[shadow]["step"] = step
        copy_state(self.state(index), values)

    def step(
        self, tensor: Tensor, gradient: Tensor, layout: ShardLayout, hypers: list[Hyperparameters]
    ) -> None:
        """Update `tensor`, this rank's shard, given the `gradient` of all of flat coordinates."""
        for shadow, param, hyper in zip(self.params, layout.params, hypers, strict=True):
            shadow.grad = gradient[param.flat_start : param.flat_end].view(param.shape)
            native, position = self.where[shadow]
            native.param_groups[position].update(
                lr=hyper.lr,
                betas=(hyper.beta1, hyper.beta2),
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
            )
        parts = [
            (
                self.params[segment.index].view(-1)[segment.param_start : segment.param_end],
                tensor.view(-1)[segment.shard_start : segment.shard_end],
            )
            for segment in layout.segments
        ]
        for shadow_part, shard_part in parts:
            shadow_part.copy_(shard_part)
        for native in self.native:
            native.step()
        for shadow_part, shard_part in parts:
            shard_part.copy_(shadow_part)
        for shadow in self.params:
            shadow.grad = None


def _gather_gradient(tensor: Tensor, layout: ShardLayout, status: int) -> tuple[Tensor, dict[int, int]]:
    """The gradient of all of flat coordinates, and the status of every rank that holds a segment.

    Entered whatever the status (rule `collective.unconditional`): a rank without a gradient sends zeros.
    """
    message = torch.zeros(1 + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    message[0] = status
    if status == GRADIENT and tensor.grad is not None:
        message[1:] = tensor.grad.reshape(-1)
    with explaining_failure("the all-gather of gradients"):
        messages = _gather(message, layout, extra=1)
    statuses = {rank: int(row[0]) for rank, row in enumerate(messages) if any(layout.segments_of(rank))}
    return torch.cat([row[1:] for row in messages]), statuses


def _gather(local: Tensor, layout: ShardLayout, extra: int = 0) -> list[Tensor]:
    """`local` of every rank, as long as its shard and `extra` elements before it. Collective."""
    numels = [extra + high - low for low, high in pairwise(layout.bounds)]
    if layout.process_group is None:
        return [local.reshape(-1)]
    device = transport_device(local, layout.process_group)
    padded = torch.zeros(max(numels), dtype=local.dtype, device=device)
    padded[: local.numel()] = local.reshape(-1)
    rows = [torch.empty_like(padded) for _ in numels]
    dist.all_gather(rows, padded, group=layout.process_group)
    return [row[:numel].to(local.device) for row, numel in zip(rows, numels, strict=True)]
