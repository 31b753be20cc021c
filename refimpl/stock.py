"""State in the one shape that torch's own checkpointing carries: tensors like the local parameter.

`FSDP.optim_state_dict` and `torch.distributed.checkpoint.state_dict` flatten, split and reshard state that is
shaped like the tensor the optimizer sees, element by element, and lose or refuse anything else (native
8-bit state among it: bitsandbytes #89). So every element carries five float32 numbers, all exact:

    state1, state2      its two codes (0 to 255), or its FP32 moments
    absmax1, absmax2    its block's, or -1 where state is FP32
    steps               how often its parameter was updated; 0 in padding

20 bytes an element while a checkpoint is made; `checkpoint.save_sharded` needs a little over 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import BLOCK_SIZE, Segment, block_end, block_start, num_blocks
from .named_state import HoldsState, NamedParam, States, empty_state

NAMES = ("state1", "state2", "absmax1", "absmax2", "steps")
NO_ABSMAX = -1.0
NATIVE_KEY = "__bnb_optimizer_quant_state__"

Packed = Mapping[str, Tensor]
"""One tensor for each of `NAMES`, float32, of the shape of the tensor that the optimizer sees."""


def pack(optimizer: HoldsState, tensor: Tensor, params: Sequence[NamedParam]) -> Packed:
    """The state of this rank's part of `tensor`, whose original parameters are `params`."""
    packed = {name: torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for name in NAMES}
    for param, segment, start, end in _segments(params):
        step = optimizer.step_count(param)
        if step == 0:
            continue
        own = slice(segment.param_start - start, segment.param_end - start)
        values: dict[str, Any] = {"absmax1": NO_ABSMAX, "absmax2": NO_ABSMAX, "steps": float(step)}
        for name, value in optimizer.read_state(param, start, end).items():
            is_absmax = name.startswith("absmax")
            values[name] = (value.repeat_interleave(BLOCK_SIZE) if is_absmax else value)[own]
        for name in NAMES:
            packed[name].view(-1)[segment.shard_start : segment.shard_end] = values[name]
    return packed


def unpack(params: Sequence[NamedParam], packed: Packed) -> States:
    """The step of each parameter, and its state as far as this rank's part of a tensor says.

    The state is that of all blocks which the rank touches; codes that it does not hold are 0.
    """
    states: States = {param.key: (0, {}) for param in params}
    for param, segment, start, end in _segments(params):
        here = slice(segment.shard_start, segment.shard_end)
        values = {name: value.reshape(-1)[here] for name, value in packed.items()}
        step = int(values["steps"][0])
        if step == 0:
            continue
        state = {name: value.zero_() for name, value in empty_state(end - start, param.is_8bit).items()}
        offset = segment.param_start - start
        for name in ("state1", "state2"):
            state[name][offset : offset + segment.shard_end - segment.shard_start] = values[name]
        if param.is_8bit:
            of_each_block = _first_of_each_block(offset, num_blocks(end - start)).to(values["steps"].device)
            for name in ("absmax1", "absmax2"):
                state[name] = values[name][of_each_block].cpu()
        states[param.key] = (step, state)
    return states


def is_native(state_dict: Mapping[str, Any]) -> bool:
    """Whether `state_dict` is of a native bitsandbytes optimizer."""
    return any(NATIVE_KEY in entry or "qmap1" in entry for entry in state_dict["state"].values())


def problem(params: Sequence[NamedParam], tensor: Tensor, packed: Mapping[str, Any]) -> str | None:
    """Why `packed` cannot be the state of `tensor`, if it cannot."""
    name = f"'{params[0].fqn}'"
    for key in NAMES:
        value = packed.get(key)
        if not isinstance(value, Tensor):
            return f"the state of {name} has no tensor '{key}': it was not saved by this optimizer"
        if value.shape != tensor.shape:
            return f"{key} of {name} has shape {tuple(value.shape)}, its tensor {tuple(tensor.shape)}"
    if packed["steps"].any() and all(torch.equal(packed["steps"], packed[key]) for key in NAMES):
        return (
            f"all state tensors of {name} are the same one: FSDP.optim_state_dict with offload_to_cpu=True"
            " overwrites them with each other on CPU ranks where use_orig_params=True; save with"
            " offload_to_cpu=False"
        )
    return next(filter(None, _param_problems(params, packed)), None)


def _param_problems(params: Sequence[NamedParam], packed: Packed) -> Iterator[str | None]:
    for param, segment, start, _ in _segments(params):
        here = slice(segment.shard_start, segment.shard_end)
        values = {name: value.reshape(-1)[here].float() for name, value in packed.items() if name in NAMES}
        steps = values["steps"]
        if not (steps == steps[0]).all():
            yield f"'{param.fqn}' has several step counts: the checkpoint was made for another shape"
        elif steps[0] > 0:
            was_8bit = values["absmax1"][0].item() != NO_ABSMAX
            if was_8bit != param.is_8bit:
                bits = {True: "8-bit", False: "32-bit"}
                yield (
                    f"'{param.fqn}' has {bits[was_8bit]} state in the checkpoint, {bits[param.is_8bit]} here:"
                    " min_8bit_size or an override of optim_bits differs"
                )
            elif param.is_8bit:
                yield _block_problem(param, values, segment.param_start - start)


def _block_problem(param: NamedParam, values: Packed, offset: int) -> str | None:
    """Whether codes are codes, and all elements of a block have its absmax."""
    positions = torch.arange(offset, offset + values["steps"].numel()) // BLOCK_SIZE
    first = _first_of_each_block(offset, int(positions[-1]) + 1)
    for name in ("absmax1", "absmax2"):
        value = values[name].cpu()
        if not torch.equal(value.nan_to_num(), value[first][positions].nan_to_num()):
            return (
                f"{name} of '{param.fqn}' changes inside a block of {BLOCK_SIZE} elements: the checkpoint"
                " has another block size or shape"
            )
    for name in ("state1", "state2"):
        codes = values[name]
        if not ((codes == codes.round()) & (codes >= 0) & (codes <= 255)).all():
            return f"{name} of '{param.fqn}' does not consist of codes from 0 to 255"
    return None


def _first_of_each_block(offset: int, blocks: int) -> Tensor:
    """Where each block begins, among elements that begin `offset` behind a block's start."""
    return (torch.arange(blocks) * BLOCK_SIZE - offset).clamp(min=0)


def _segments(params: Sequence[NamedParam]) -> Iterator[tuple[NamedParam, Segment, int, int]]:
    """This rank's segment of each parameter, and the range of whole blocks around it (where 8-bit)."""
    segments = {segment.index: segment for segment in params[0].layout.segments}
    for param in params:
        segment = segments.get(param.index)
        if segment is not None:
            start, end = segment.param_start, segment.param_end
            if param.is_8bit:
                start, end = block_start(start), min(block_end(end), param.numel)
            yield param, segment, start, end
