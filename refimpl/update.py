"""The precision rule, the state of one shard, and the only calls of bitsandbytes' kernels.

Nothing here does arithmetic of its own: `optimizer_update_8bit_blockwise` and
`optimizer_update_32bit` are the functions that native `bitsandbytes.optim.AdamW8bit` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import bitsandbytes.functional as F
import torch
from torch import Tensor

from .layout import BLOCK_SIZE, Run, ShardPlan, block_end, num_blocks

CPU_TILE = 1024 * BLOCK_SIZE
"""Elements per kernel call on CPU. The CPU kernels make about ten temporaries as long as their
input: in pieces of whole blocks that fit the cache they give the same bits sooner."""
GPU_TILE = 2**30
"""Elements per kernel call elsewhere: the CUDA kernels take the count as a 32-bit integer."""


@dataclass(frozen=True)
class Hyperparameters:
    """What one kernel call needs besides tensors and the step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def is_state_8bit(numel: int, min_8bit_size: int, optim_bits: int = 8) -> bool:
    """Rule `precision.original-size`: 8-bit iff the ORIGINAL parameter has `min_8bit_size` elements.

    The same comparison as upstream (`Optimizer2State.init_state`), which applies it to the
    tensor it is handed.
    """
    return optim_bits == 8 and numel >= min_8bit_size


def new_state(plan: ShardPlan, device: torch.device) -> dict[str, Tensor]:
    """Zero state for one shard: codes and absmax of 8-bit segments, moments of FP32 segments.

    `codes1`/`codes2` are uint8 of `plan.codes`, `absmax1`/`absmax2` float32 of `plan.blocks`,
    `moments1`/`moments2` float32 of `plan.floats` elements, each in shard order.
    """
    sizes = {"codes": plan.codes, "absmax": plan.blocks, "moments": plan.floats}
    return {
        f"{name}{moment}": torch.zeros(
            size, dtype=torch.uint8 if name == "codes" else torch.float32, device=device
        )
        for name, size in sizes.items()
        for moment in (1, 2)
    }


def update_run(
    run: Run,
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    hyper: Hyperparameters,
    step: int,
) -> None:
    """One AdamW update of `param[run.start:run.end]`, in place, by native kernels.

    `param` and `grad` are flat, of one dtype, on one device; `state` is as from `new_state`. `step`
    counts from 1. Where state is 8-bit, `run.start` begins a block.
    """
    update = _update_8bit if run.is_8bit else _update_32bit
    for start, end in _tiles(run.numel, CPU_TILE if param.device.type == "cpu" else GPU_TILE):
        here = slice(run.start + start, run.start + end)
        in_state = slice(run.state_start + start, run.state_start + end)
        first_block = run.block_start + start // BLOCK_SIZE
        blocks = slice(first_block, first_block + num_blocks(end - start))
        update(param[here], grad[here], state, in_state, blocks, hyper, step)


def _tiles(numel: int, tile: int) -> Iterator[tuple[int, int]]:
    """`numel` elements in equal ranges of whole blocks, each of about `tile`, at most half as many more."""
    count = max(1, round(numel / tile))
    size = block_end(-(-numel // count))
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


def _update_8bit(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    elements: slice,
    blocks: slice,
    hyper: Hyperparameters,
    step: int,
) -> None:
    signed, unsigned = code_tables(param.device)
    F.optimizer_update_8bit_blockwise(
        "adam",
        grad,
        param,
        state["codes1"][elements],
        state["codes2"][elements],
        hyper.beta1,
        hyper.beta2,
        0.0,  # beta3 and alpha belong to AdEMAMix
        0.0,
        hyper.eps,
        step,
        hyper.lr,
        signed,
        unsigned,
        state["absmax1"][blocks],
        state["absmax2"][blocks],
        hyper.weight_decay,
    )


def _update_32bit(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Any],
    elements: slice,
    _: slice,
    hyper: Hyperparameters,
    step: int,
) -> None:
    F.optimizer_update_32bit(
        "adam",
        grad,
        param,
        state["moments1"][elements],
        hyper.beta1,
        hyper.eps,
        step,
        hyper.lr,
        state["moments2"][elements],
        hyper.beta2,
        weight_decay=hyper.weight_decay,
    )


@cache
def code_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values that a uint8 code of the first (signed) and second moment stands for.

    One pair a device, shared by every optimizer: they are constants.
    """
    signed = F.create_dynamic_map(signed=True)
    unsigned = F.create_dynamic_map(signed=False)
    return signed.to(device), unsigned.to(device)
