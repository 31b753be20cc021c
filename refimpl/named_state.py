"""State by name, in original coordinates: gathered from the ranks that hold it, and spread again.

The full form of a checkpoint, which every other form here converts to or from:

    {"format": "refimpl.AdamW8bit", "version": 1, "block_size": 256, "min_8bit_size": 4096,
     "params": {fqn: {"shape", "bits", "step", "lr", "betas", "eps", "weight_decay"}, ...},
     "state": {fqn: {"step", "state1", "state2"[, "absmax1", "absmax2"]}, ...}}

`state1` and `state2` have the original shape: uint8 codes, with `absmax1` and `absmax2` of
ceil(numel / 256) float32 elements beside them, or float32 moments. A parameter that was never
updated has step 0 and no state. State is passed on block by block, each by the rank that holds the block's
first element, which has all of it (`layout.StateSegment`): nothing is dequantized, nothing sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import BLOCK_SIZE, ShardLayout, block_end, num_blocks

FORMAT = "refimpl.AdamW8bit"
VERSION = 1
STRETCH = 2**16 * BLOCK_SIZE
"""Elements passed on or saved as one at most: what a rank must have or read beside what it is after."""
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")

State = dict[str, Tensor]
"""`state1`, `state2` and, where 8-bit, `absmax1`, `absmax2`, of a range of whole blocks; flat."""

States = dict[tuple[Tensor, int], tuple[int, State]]
"""By `NamedParam.key`: the step, and the state of `needed_range` (empty if the step is 0)."""


NEVER = 2**62
"""In place of a step count, where a rank holds nothing of a parameter."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The optimizer is as it was, on every rank."""


@dataclass(frozen=True)
class NamedParam:
    """One original parameter as an optimizer holds it. `hyper` are its effective hyperparameters."""

    tensor: Tensor
    layout: ShardLayout
    index: int
    is_8bit: bool
    hyper: Mapping[str, Any]

    @property
    def key(self) -> tuple[Tensor, int]:
        """What identifies it in this process, whatever its name."""
        return self.tensor, self.index

    @property
    def fqn(self) -> str:
        """Its name in the unwrapped model."""
        return self.layout.params[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """Its original shape."""
        return self.layout.params[self.index].shape

    @property
    def numel(self) -> int:
        """Its original number of elements."""
        return self.layout.params[self.index].numel

    def owned_stretches(self, rank: int) -> Iterator[tuple[int, int]]:
        """The elements whose state `rank` passes on, in ranges of at most `STRETCH`.

        Its own; where state is 8-bit, all blocks whose first element it holds.
        """
        for segment in self.layout.segments_of(rank):
            if segment.index == self.index:
                start, end = segment.param_start, segment.param_end
                if self.is_8bit:
                    start, end = block_end(start), block_end(end)
                end = min(end, self.numel)
                for first in range(start, end, STRETCH):
                    yield first, min(first + STRETCH, end)


class HoldsState(Protocol):
    """What a twin offers to the functions here."""

    min_8bit_size: int

    def named_params(self) -> Iterator[NamedParam]:
        """Every original parameter, in the same order on every rank."""

    def step_count(self, param: NamedParam) -> int:
        """How often this rank has updated `param`; 0 where it holds nothing of it."""

    def needed_range(self, param: NamedParam) -> tuple[int, int]:
        """The elements whose state this rank keeps: whole blocks where 8-bit, or nothing."""

    def read_state(self, param: NamedParam, start: int, end: int) -> State:
        """The state of elements `start..end`, which this rank keeps: views."""

    def write_states(self, states: States) -> None:
        """Replace all state."""

    def restore_hyperparameters(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the param groups to what was saved, by name."""

    def hyperparameter_conflict(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Why `restore_hyperparameters(saved)` is impossible, if it is."""


# ---- the full form


def full_state_dict(optimizer: HoldsState, *, rank0_only: bool = False) -> dict[str, Any]:
    """The full form of `optimizer`'s state, on CPU. Collective.

    Gathered parameter by parameter. With `rank0_only`, only the first rank of each process group gets
    it, and the others an empty dict.
    """
    refuse_equal_names(optimizer)
    steps = agree_on_steps(optimizer)
    state = {}
    for param in optimizer.named_params():
        if steps[param.fqn] > 0:
            values = _gather(optimizer, param)
            if param.layout.rank == 0 or not rank0_only:
                state[param.fqn] = {"step": steps[param.fqn], **_in_shape(values, param)}
    if rank0_only and any(param.layout.rank > 0 for param in optimizer.named_params()):
        return {}
    return {**describe(optimizer, steps), "state": state}


def refuse_equal_names(optimizer: HoldsState) -> None:
    """Raise `CheckpointError` if two parameters have one name, as two models in one optimizer may."""
    seen: set[str] = set()
    for param in optimizer.named_params():
        if param.fqn in seen:
            raise CheckpointError(
                f"two parameters of this optimizer are named '{param.fqn}': state by name needs a name for"
                " each; use state_dict(), or an optimizer for each model"
            )
        seen.add(param.fqn)


def describe(optimizer: HoldsState, steps: Mapping[str, int]) -> dict[str, Any]:
    """All of the full form but the state: what it belongs to, and how it is laid out."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "block_size": BLOCK_SIZE,
        "min_8bit_size": optimizer.min_8bit_size,
        "params": {
            param.fqn: {
                "shape": param.shape,
                "bits": 8 if param.is_8bit else 32,
                "step": steps[param.fqn],
                **param.hyper,
            }
            for param in optimizer.named_params()
        },
    }


def load_full_state_dict(optimizer: HoldsState, full: Mapping[str, Any]) -> None:
    """Replace `optimizer`'s state and the hyperparameters of its groups by the full form. Collective.

    Every rank passes the same `full`, or the first rank of each process group passes it and the
    others an empty dict (`rank0_only`). Overrides by name stay as the optimizer was constructed.

    Raises `CheckpointError` on every rank, with nothing changed, if it does not fit (`refuse.checkpoint`).
    """
    is_dict = isinstance(full, Mapping)
    header = {key: value for key, value in full.items() if key != "state"} if is_dict else {}
    shared, differ = _share_headers(optimizer, header)
    problem = first_problem(
        lambda: None if is_dict else f"the checkpoint is a {type(full).__name__}, not a dict",
        lambda: None if shared else "the checkpoint is empty on the first rank of a process group",
        lambda: _check_holders(optimizer, bool(header)),
        lambda: check_header(optimizer, shared),
        lambda: _check_entries(optimizer, full) if full else None,
    )
    agree(problem, groups_of(optimizer))  # what is wrong with one is worth more than that they differ
    agree(differ, groups_of(optimizer))
    states: States = {}
    for param in optimizer.named_params():
        step = shared["params"].get(param.fqn, {"step": 0})["step"]
        whole = full["state"].get(param.fqn) if full else None
        states[param.key] = (step, _spread(optimizer, param, whole) if step > 0 else {})
    optimizer.write_states(states)
    optimizer.restore_hyperparameters(shared["params"])


def first_problem(*checks: Callable[[], str | None]) -> str | None:
    """The first problem that any of `checks` finds, or stumbles over: checkpoints come from anywhere."""
    for check in checks:
        try:
            problem = check()
        except CheckpointError as error:
            problem = str(error)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"the checkpoint is malformed: {type(error).__name__}: {error}"
        if problem is not None:
            return problem
    return None


def check_header(optimizer: HoldsState, header: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with this header cannot be loaded, if it cannot: the first reason."""
    if header.get("format") != FORMAT:
        return f"this is not a {FORMAT} checkpoint (its format is {header.get('format')!r})"
    if header["version"] > VERSION:
        return (
            f"the checkpoint has format version {header['version']}, newer than version {VERSION}, the"
            " latest that this release reads: use a newer refimpl"
        )
    if header["block_size"] != BLOCK_SIZE:
        return (
            f"the checkpoint has blocks of {header['block_size']} elements, this release has blocks of"
            f" {BLOCK_SIZE}: they cannot be converted without dequantizing"
        )
    refuse_equal_names(optimizer)
    ours = {param.fqn: param for param in optimizer.named_params()}
    for fqn, saved in header["params"].items():
        if saved["step"] > 0 and fqn not in ours:
            return f"the checkpoint is of another model: it has '{fqn}', which this optimizer has not"
    for fqn, param in ours.items():
        if fqn not in header["params"]:
            if param.tensor.requires_grad:
                return f"the checkpoint is of another model: it lacks '{fqn}'"
            continue
        saved = header["params"][fqn]
        if tuple(saved["shape"]) != param.shape:
            return f"'{fqn}' has shape {tuple(saved['shape'])} in the checkpoint, {param.shape} here"
        bits = 8 if param.is_8bit else 32
        if saved["step"] > 0 and saved["bits"] != bits:
            return (
                f"'{fqn}' has {saved['bits']}-bit state in the checkpoint, {bits}-bit here: min_8bit_size is"
                f" {header['min_8bit_size']} there and {optimizer.min_8bit_size} here, or an override"
                " of optim_bits differs"
            )
    return optimizer.hyperparameter_conflict(header["params"])


def _check_holders(optimizer: HoldsState, has_full: bool) -> str | None:
    """A rank without the full form must get every parameter from the first rank of its group."""
    for param in optimizer.named_params():
        if not has_full and (param.layout.process_group is None or param.layout.rank == 0):
            return (
                "the checkpoint is empty on a rank that no other can give it to: pass it on the first rank of"
                f" each process group, and everywhere where a parameter is not sharded ('{param.fqn}')"
            )
    return None


def _check_entries(optimizer: HoldsState, full: Mapping[str, Any]) -> str | None:
    """Whether every entry has the tensors it should have."""
    for param in optimizer.named_params():
        if full["params"].get(param.fqn, {"step": 0})["step"] == 0:
            continue
        entry = full["state"].get(param.fqn)
        if entry is None:
            return f"the checkpoint has no state of '{param.fqn}', which was updated"
        for name, expected in _in_shape(empty_state(param.numel, param.is_8bit), param).items():
            found = entry.get(name)
            if not isinstance(found, Tensor):
                return f"'{param.fqn}' has no {name} in the checkpoint"
            if found.shape != expected.shape or found.dtype != expected.dtype:
                return (
                    f"{name} of '{param.fqn}' is {found.dtype} of shape {tuple(found.shape)} in the"
                    f" checkpoint, not {expected.dtype} of shape {tuple(expected.shape)}"
                )
    return None


# ---- collectives


def groups_of(optimizer: HoldsState) -> list[Any]:
    """The process groups of the optimizer's tensors, in the same order on every rank."""
    groups = [param.layout.process_group for param in optimizer.named_params()]
    return [group for group in dict.fromkeys(groups) if group is not None]


def of_everyone(value: Any, group: Any) -> list[Any]:
    """`value` of every rank of `group`, by rank. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def agree(problem: str | None, groups: Sequence[Any]) -> None:
    """Raise `CheckpointError` on every rank of `groups` if any of them has a problem. Collective."""
    for group in groups:
        problems = of_everyone(problem, group)
        if problem is None:  # learned from one group, it is passed on to the next
            problem = next(
                (
                    f"rank {rank} of {len(problems)} cannot load: {theirs}"
                    for rank, theirs in enumerate(problems)
                    if theirs is not None
                ),
                None,
            )
    if problem is not None:
        raise CheckpointError(f"{problem} (refuse.checkpoint); nothing was changed")


def _share_headers(optimizer: HoldsState, header: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Give ranks without a checkpoint the header of the first rank of their group. Collective.

    Also a problem, if ranks have different checkpoints.
    """
    problem = None
    for group in groups_of(optimizer):
        headers = of_everyone(header, group)
        if len({repr(theirs) for theirs in headers if theirs}) > 1:
            problem = "ranks were given different checkpoints: all must pass the same one"
        header = header or headers[0]
    return header, problem


def agree_on_steps(optimizer: HoldsState) -> dict[str, int]:
    """Step counts by name: a rank that holds nothing of a parameter learns them from the others.

    Raises `CheckpointError` on every rank of a group if ranks that share a parameter do not agree.
    """
    steps = {param.fqn: optimizer.step_count(param) for param in optimizer.named_params()}
    for group in groups_of(optimizer):
        members = [param for param in optimizer.named_params() if param.layout.process_group == group]
        device = transport_device(members[0].tensor, group)
        counts = [steps[param.fqn] for param in members]
        held = [len(range(*optimizer.needed_range(param))) > 0 for param in members]
        least = [-count if holds else -NEVER for count, holds in zip(counts, held, strict=True)]
        both = torch.tensor([counts, least], dtype=torch.int64, device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        for param, most, least_negated in zip(members, *both.tolist(), strict=True):
            if -least_negated not in (most, NEVER):
                raise CheckpointError(
                    f"'{param.fqn}' was updated {most} times on one rank and {-least_negated} on another: a"
                    " rank has skipped a step, or had no gradient where others had one"
                )
            steps[param.fqn] = most
    return steps


def _gather(optimizer: HoldsState, param: NamedParam) -> State:
    """The whole state of one parameter, from the ranks that own its blocks. Collective."""
    whole = empty_state(param.numel, param.is_8bit)
    layout = param.layout
    for piece in layout.pieces(param.index, 0, param.numel):
        for start, end in param.owned_stretches(piece.rank):
            part = empty_state(end - start, param.is_8bit)
            if piece.rank == layout.rank:
                copy_state(part, optimizer.read_state(param, start, end))
            if layout.process_group is not None:
                _broadcast(part, piece.rank, layout.process_group, param.tensor)
            copy_state(cut_state(whole, start, end), part)
    return whole


def _spread(optimizer: HoldsState, param: NamedParam, whole: Mapping[str, Any] | None) -> State:
    """What this rank needs of a parameter's state; from the first rank if it has no `whole` itself."""
    group = param.layout.process_group
    if group is not None:  # _check_holders has made sure that its first rank has it
        have = torch.tensor([whole is not None], dtype=torch.int32)
        have = have.to(transport_device(param.tensor, group))
        dist.all_reduce(have, dist.ReduceOp.MIN, group=group)
        if not have.item():
            received = empty_state(param.numel, param.is_8bit)
            if whole is not None:
                copy_state(received, {name: whole[name].reshape(-1) for name in received})
            _broadcast(received, 0, group, param.tensor)
            whole = received
    assert whole is not None
    start, end = optimizer.needed_range(param)
    flat = {name: whole[name].reshape(-1) for name in empty_state(0, param.is_8bit)}
    return {name: value.clone() for name, value in cut_state(flat, start, end).items()}


def _broadcast(part: State, rank: int, group: Any, tensor: Tensor) -> None:
    """Send `part` of the group's `rank` to all, as one message of bytes."""
    # absmax first: it must lie at a multiple of four bytes to be read as float32
    names = sorted(part)
    message = torch.cat([part[name].view(torch.uint8) for name in names])
    message = message.to(transport_device(tensor, group))
    dist.broadcast(message, dist.get_global_rank(group, rank), group=group)
    sizes = [part[name].numel() * part[name].element_size() for name in names]
    parts = message.cpu().split(sizes)  # type: ignore[no-untyped-call]
    copy_state(part, {n: v.view(part[n].dtype) for n, v in zip(names, parts, strict=True)})


def transport_device(tensor: Tensor, group: Any) -> torch.device:
    """Where `group` can send from: NCCL only from a GPU, also where CPUOffload keeps `tensor` on CPU."""
    if group is not None and tensor.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device


# ---- pieces of state


def empty_state(numel: int, is_8bit: bool) -> State:
    """Room on CPU for the state of `numel` elements that begin a block."""
    dtype = torch.uint8 if is_8bit else torch.float32
    state = {name: torch.empty(numel, dtype=dtype, device="cpu") for name in ("state1", "state2")}
    if is_8bit:
        for name in ("absmax1", "absmax2"):
            state[name] = torch.empty(num_blocks(numel), dtype=torch.float32, device="cpu")
    return state


def cut_state(state: Mapping[str, Tensor], start: int, end: int) -> State:
    """Elements `start..end` of flat `state`, which begins at a block, as `start` does: views."""
    first, last = start // BLOCK_SIZE, num_blocks(end)
    return {
        name: value[first:last] if name.startswith("absmax") else value[start:end]
        for name, value in state.items()
    }


def copy_state(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy every tensor of `source` into that of `target`."""
    for name, value in target.items():
        value.copy_(source[name])


def _in_shape(state: Mapping[str, Tensor], param: NamedParam) -> State:
    return {
        name: value if name.startswith("absmax") else value.view(param.shape) for name, value in state.items()
    }
