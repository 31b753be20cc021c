"""State by name, in original coordinates: gathered from the ranks that hold it.

State is passed on block by block, never dequantized: each block by the rank that holds its first
element, which has all of it (`layout.StateSegment`). So nothing is saved twice, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import BLOCK_SIZE, ShardLayout


class HoldsState(Protocol):
    """What a twin must offer: which state it holds, by tensor and original parameter."""

    def layouts(self) -> Iterator[tuple[Tensor, ShardLayout, list[bool]]]:
        """Every tensor, its layout, and which of its parameters have 8-bit state."""

    def step_count(self, tensor: Tensor, index: int) -> int:
        """How often this rank has updated original parameter `index` of `tensor`."""

    def read_state(self, tensor: Tensor, index: int, start: int, end: int) -> dict[str, Tensor]:
        """The state of elements `start..end`, which this rank holds; whole blocks where 8-bit."""


def full_state_dict(optimizer: HoldsState, *, rank0_only: bool = False) -> dict[str, Any]:
    """The whole state of every original parameter, on CPU. Collective.

    `{"state": {fqn: entry}}`, where an entry has `step` (int) and `state1`, `state2` of the original
    shape: uint8 codes, with `absmax1`, `absmax2` of ceil(numel / 256) elements beside them, or
    float32. A parameter that was never updated has no entry. With `rank0_only`, ranks other than
    the first of each process group get no entries.
    """
    state = {}
    steps = _agree_on_steps(optimizer)
    for tensor, layout, is_8bit in optimizer.layouts():
        for index, param in enumerate(layout.params):
            step = steps[param.fqn]
            if step > 0:
                values = _gather(optimizer, tensor, layout, index, is_8bit[index])
                if layout.rank == 0 or not rank0_only:
                    state[param.fqn] = {"step": step, **values}
    return {"state": state}


def owned_range(layout: ShardLayout, index: int, rank: int, is_8bit: bool) -> tuple[int, int]:
    """The elements of parameter `index` whose state `rank` passes on: its own; where 8-bit, whole blocks."""
    for segment in layout.segments_of(rank):
        if segment.index == index:
            start, end = segment.param_start, segment.param_end
            if is_8bit:
                start, end = start + -start % BLOCK_SIZE, end + -end % BLOCK_SIZE
            return start, max(start, min(end, layout.params[index].numel))
    return 0, 0


def _agree_on_steps(optimizer: HoldsState) -> dict[str, int]:
    """Step counts by name: a rank that holds nothing of a parameter learns them from the others."""
    steps: dict[str, int] = {}
    groups: dict[Any, list[str]] = {}
    devices: dict[Any, torch.device] = {}
    for tensor, layout, _ in optimizer.layouts():
        for index, param in enumerate(layout.params):
            steps[param.fqn] = optimizer.step_count(tensor, index)
            if layout.process_group is not None:
                groups.setdefault(layout.process_group, []).append(param.fqn)
                devices[layout.process_group] = transport_device(tensor, layout.process_group)
    for group, names in groups.items():
        counts = torch.tensor([steps[name] for name in names], device=devices[group])
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=group)
        steps.update(zip(names, counts.tolist(), strict=True))
    return steps


def _gather(
    optimizer: HoldsState, tensor: Tensor, layout: ShardLayout, index: int, is_8bit: bool
) -> dict[str, Tensor]:
    param = layout.params[index]
    whole = _empty_state(param.numel, is_8bit)
    for piece in layout.pieces(index, 0, param.numel):
        start, end = owned_range(layout, index, piece.rank, is_8bit)
        if start == end:
            continue
        part = _empty_state(end - start, is_8bit)
        if piece.rank == layout.rank:
            for name, value in optimizer.read_state(tensor, index, start, end).items():
                part[name].copy_(value)
        if layout.process_group is not None:
            _broadcast(part, piece.rank, layout.process_group, tensor)
        for name, value in part.items():
            position = start // BLOCK_SIZE if name.startswith("absmax") else start
            whole[name][position : position + value.numel()] = value
    return {
        name: value if name.startswith("absmax") else value.view(param.shape) for name, value in whole.items()
    }


def _empty_state(numel: int, is_8bit: bool) -> dict[str, Tensor]:
    """Room on CPU for the state of `numel` elements that begin a block."""
    dtype = torch.uint8 if is_8bit else torch.float32
    state = {name: torch.empty(numel, dtype=dtype) for name in ("state1", "state2")}
    if is_8bit:
        blocks = -(-numel // BLOCK_SIZE)
        state.update({name: torch.empty(blocks) for name in ("absmax1", "absmax2")})
    return state


def _broadcast(part: Mapping[str, Tensor], rank: int, group: Any, tensor: Tensor) -> None:
    """Send `part` of the group's `rank` to all, as one message of bytes."""
    # absmax first: it must lie at a multiple of four bytes to be read as float32
    names = sorted(part)
    message = torch.cat([part[name].view(torch.uint8) for name in names])
    message = message.to(transport_device(tensor, group))
    dist.broadcast(message, dist.get_global_rank(group, rank), group=group)
    sizes = [part[name].numel() * part[name].element_size() for name in names]
    parts = message.cpu().split(sizes)  # type: ignore[no-untyped-call]
    for name, value in zip(names, parts, strict=True):
        part[name].copy_(value.view(part[name].dtype))


def transport_device(tensor: Tensor, group: Any) -> torch.device:
    """Where `group` can send from: NCCL only from a GPU, also where CPUOffload keeps `tensor` on CPU."""
    if group is not None and tensor.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
