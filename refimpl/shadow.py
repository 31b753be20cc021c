"""The replicated repair: every gradient gathered, and all state on every rank.

Costs W times the state memory of the sharded twin, and an all-gather of every gradient in
every step. It is here because it is plain: native AdamW8bit steps on tensors that have the
original parameters' sizes, so precision and blocks are right by construction. The approach is
that of bitsandbytes draft PR #2081; the sharded twin is tested equal to it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import (
    GRADIENT,
    OriginalParamAdamW8bit,
    TensorSettings,
    explaining_failure,
    raise_others,
    raise_own,
)
from .layout import BLOCK_SIZE, ShardLayout
from .update import Hyperparameters


class ShadowAdamW8bit(OriginalParamAdamW8bit):
    """AdamW8bit on shadow tensors, one per original parameter, replicated on every rank.

    Constructor, `step` and errors: see `OriginalParamAdamW8bit`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shadows: dict[Tensor, _Shadow] = {}
        super().__init__(*args, **kwargs)

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
                settings = self._settings[tensor]
                if tensor not in self._shadows:
                    self._shadows[tensor] = _Shadow(tensor, settings, self.min_8bit_size)
                self._shadows[tensor].step(
                    tensor, gradient, settings.layout, self._hyperparameters(group, tensor)
                )

    def step_count(self, tensor: Tensor, index: int) -> int:
        """How often original parameter `index` of `tensor` has been updated."""
        return self._shadows[tensor].state(index)["step"] if tensor in self._shadows else 0

    def read_state(self, tensor: Tensor, index: int, start: int, end: int) -> dict[str, Tensor]:
        """The state of elements `start..end` of original parameter `index`: views, in whole blocks."""
        state = self._shadows[tensor].state(index)
        blocks = slice(start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
        values = {name: state[name].view(-1)[start:end] for name in ("state1", "state2")}
        if self._settings[tensor].is_8bit[index]:
            values.update({name: state[name][blocks] for name in ("absmax1", "absmax2")})
        return values


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
                self.native.append(optimizer(groups, min_8bit_size=min_8bit_size))
        self.groups = {group["params"][0]: group for native in self.native for group in native.param_groups}

    def state(self, index: int) -> dict[str, Any]:
        """The native state of original parameter `index`."""
        shadow = self.params[index]
        return next(native.state[shadow] for native in self.native if shadow in native.state)

    def step(
        self, tensor: Tensor, gradient: Tensor, layout: ShardLayout, hypers: list[Hyperparameters]
    ) -> None:
        """Update `tensor`, this rank's shard, given the `gradient` of all of flat coordinates."""
        for shadow, param, hyper in zip(self.params, layout.params, hypers, strict=True):
            shadow.grad = gradient[param.flat_start : param.flat_end].view(param.shape)
            self.groups[shadow].update(
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
    numels = [high - low for low, high in pairwise(layout.bounds)]
    message = torch.zeros(1 + max(numels), dtype=tensor.dtype, device=tensor.device)
    message[0] = status
    if status == GRADIENT and tensor.grad is not None:
        message[1 : 1 + tensor.numel()] = tensor.grad.reshape(-1)
    messages = [message]
    if layout.process_group is not None:
        messages = [torch.empty_like(message) for _ in range(layout.num_ranks)]
        with explaining_failure("the all-gather of gradients"):
            dist.all_gather(messages, message, group=layout.process_group)
    flat = torch.cat([row[1 : 1 + numel] for row, numel in zip(messages, numels, strict=True)])
    statuses = {rank: int(row[0]) for rank, row in enumerate(messages) if any(layout.segments_of(rank))}
    return flat, statuses
