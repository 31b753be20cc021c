"""Wrapped FSDP1 model -> layouts. The only file that reads private attributes of FSDP.

FSDP1 offers no supported way to ask which part of which original parameter a rank holds
(bitsandbytes #2081 names that as missing; PyTorch #136314 asks for it). Everything needed
is on the flat parameter all the same, right after wrapping and without communication.
The names read here were the same in torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1; what they say is checked against
each other, so that a release which changes them is refused instead of misread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from .layout import ClippedBounds, OriginalParam, Segment, ShardLayout

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What FSDP, activation checkpointing and torch.compile add to a parameter's name."""


def read_layouts(model: nn.Module) -> dict[nn.Parameter, ShardLayout]:
    """The layout of every tensor in `model.parameters()`, for an optimizer to be built on.

    `model` is an FSDP1 module or contains some; call this after wrapping, on every rank (it
    does not communicate). With `use_orig_params=False` there is one flat parameter a unit;
    with True each original parameter is a tensor of its own, of which this rank may hold a part or
    nothing. Parameters outside any unit (`ignored_states`, an unwrapped root) are whole.

    FQNs are those of the unwrapped model; a tied weight goes by its first name in its unit. `process_group`
    is the one the unit is sharded over, also under HYBRID_SHARD; it is None where the
    tensor is not sharded (NO_SHARD, one rank).

    Raises `ValueError` if nothing in `model` is wrapped by FSDP1, or a parameter is not in row-major
    memory order (`refuse.memory-order`); `TypeError` for a DTensor (`refuse.dtensor`);
    `RuntimeError` if FSDP's own metadata is not understood.
    """
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise TypeError(
                f"parameter '{clean_name(name)}' is a DTensor (FSDP2 or tensor parallelism): only"
                " FullyShardedDataParallel (FSDP1) models are supported (refuse.dtensor)"
            )
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]
    if not units:
        raise ValueError(
            f"no module of this {type(model).__name__} is wrapped by FullyShardedDataParallel"
            " (FSDP1): wrap the model first; on an unwrapped model the optimizers need no"
            " layouts, only model.named_parameters()"
        )
    layouts: dict[nn.Parameter, ShardLayout] = {}
    for name, module in units:
        handle = module._handle
        if handle is not None:  # None: all parameters of this unit belong to nested units
            layouts.update(_read_unit(name, handle))
    for name, param in model.named_parameters():
        if param not in layouts:
            if not param.is_contiguous():
                raise _memory_order_error(clean_name(name), param.shape, param.stride())
            whole = OriginalParam(clean_name(name), tuple(param.shape))
            layouts[param] = ShardLayout((whole,), (0, whole.numel))
    return layouts


def wrapped_modules(model: nn.Module, policy: Any) -> list[nn.Module]:
    """The submodules that `FullyShardedDataParallel(model, auto_wrap_policy=policy)` makes units.

    In the order in which they are wrapped, children before parents, without `model` itself, which is
    always one. `policy` is a `ModuleWrapPolicy`, a `CustomPolicy` or a callable such as
    `size_based_auto_wrap_policy`. Nothing is wrapped, so `model` may be on the meta device. Only the
    audit uses this; it is here for what it reads.
    """
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(model, set(), {})
        return [module for module in _post_order(model) if module in chosen and module is not model]
    units: list[nn.Module] = []
    _apply_callable_policy(model, policy, units)
    return [module for module in units if module is not model]


def _apply_callable_policy(module: nn.Module, policy: Any, units: list[nn.Module]) -> int:
    """FSDP's recursion over children; how many elements were wrapped."""
    numel = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(
        _apply_callable_policy(child, policy, units) for child in module.children() if child not in units
    )
    if policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        units.append(module)
        return numel
    return wrapped


def _post_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    seen = {module} if seen is None else seen
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(child, seen)
    yield module


def is_fsdp_parameter(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has flattened `tensor`, or made it a view into a flat parameter."""
    return getattr(tensor, "_fsdp_flattened", False)


def _read_unit(unit_name: str, handle: Any) -> dict[nn.Parameter, ShardLayout]:
    """The layouts of one unit's tensors: its flat parameter, or its original parameters' views."""
    flat_param = handle.flat_param
    params = _read_params(unit_name, flat_param)
    total = sum(flat_param._numels_with_padding)
    shard_numel = flat_param._sharded_size.numel()
    sharded = handle.uses_sharded_strategy
    rank, num_ranks = (handle.rank, handle.world_size) if sharded else (0, 1)
    group = handle.process_group if num_ranks > 1 else None
    if shard_numel * num_ranks < total:
        raise _unexpected(f"{num_ranks} shards of {shard_numel} elements cannot hold {total}")
    bounds = range(0, shard_numel * num_ranks + 1, shard_numel)
    unit = ShardLayout(params, bounds, rank, group)
    _check_against_fsdp(unit, flat_param)
    if flat_param._params is None:  # use_orig_params=False
        return {flat_param: unit}
    return {
        tensor: ShardLayout(
            (OriginalParam(param.fqn, param.shape),),
            ClippedBounds(bounds, param.flat_start, param.numel),
            rank,
            group,
        )
        for tensor, param in zip(flat_param._params, params, strict=True)
    }


def _read_params(unit_name: str, flat_param: Any) -> tuple[OriginalParam, ...]:
    fields = zip(
        flat_param._fqns,
        flat_param._shapes,
        flat_param._strides,
        flat_param._param_extensions,
        strict=True,
    )
    params = []
    flat_start = 0
    for numel, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            fqn, shape, stride, extension = next(fields)
            param = OriginalParam(clean_name(f"{unit_name}.{fqn}".lstrip(".")), tuple(shape), flat_start)
            if extension is not None:
                raise TypeError(
                    f"parameter '{param.fqn}' is sharded by tensor parallelism as well as by"
                    " FSDP1: its original size is not known here (refuse.dtensor)"
                )
            if not _is_row_major(shape, stride):
                raise _memory_order_error(param.fqn, shape, stride)
            if param.numel != numel:
                raise _unexpected(f"'{param.fqn}' has shape {param.shape} but {numel} elements")
            params.append(param)
        flat_start += numel
    return tuple(params)


def _check_against_fsdp(unit: ShardLayout, flat_param: Any) -> None:
    """Our arithmetic and FSDP's own record of this rank's shard must agree."""
    recorded = [
        Segment(index, info.intra_param_start_idx, info.intra_param_end_idx + 1, offset)
        for index, info in enumerate(flat_param._shard_param_infos)
        if info.in_shard and info.numel_in_shard > 0
        for offset in (info.offset_in_shard,)
    ]
    if recorded != list(unit.segments):
        raise _unexpected(f"it records {recorded} where {unit.segments} was computed")


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether memory order is row-major; strides of dimensions of size 1 do not matter."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def clean_name(name: str) -> str:
    """`name` without what wrappers have added to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _memory_order_error(fqn: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"parameter '{fqn}' of shape {tuple(shape)} has strides {tuple(stride)}, for instance"
        " channels_last: FSDP1 flattens it in memory order, so its 8-bit blocks would differ from"
        " those of the unwrapped optimizer; make it contiguous before wrapping"
        " (refuse.memory-order)"
    )


def _unexpected(what: str) -> RuntimeError:
    return RuntimeError(
        f"FSDP1's metadata in torch {torch.__version__} is not as expected: {what}"
        " (the names read here are known to hold for torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1)"
    )
