"""The full form to and from other optimizers' state dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import bitsandbytes.functional as F
import torch
from torch import Tensor

from .layout import BLOCK_SIZE, num_blocks
from .named_state import FORMAT, HYPERPARAMETERS, VERSION, CheckpointError
from .stock import NATIVE_KEY
from .update import code_tables

Names = Sequence[str] | Sequence[Sequence[str]]


def to_bitsandbytes(full: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """What `bitsandbytes.optim.AdamW8bit.load_state_dict` takes, exactly.

    Args:
        full: the full form, as `full_state_dict()` returned it.
        names: FQNs in the order of the native optimizer's parameters; one list a group if it has several.

    Raises `CheckpointError` if a name is not in `full`, or parameters of one group differ in a
    hyperparameter.
    """
    signed, unsigned = code_tables(torch.device("cpu"))
    groups = _groups(full, names)
    state = {}
    for number, name in enumerate(name for group in groups for name in group["params"]):
        entry = full["state"].get(name)
        if entry is not None:
            hidden = {key: value.clone() for key, value in entry.items() if key != "step"}
            if "absmax1" in entry:
                hidden.update(qmap1=signed.clone(), qmap2=unsigned.clone())
            state[number] = {"step": entry["step"], NATIVE_KEY: hidden}
    extra = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # of AdEMAMix, in every native group
    return {"state": state, "param_groups": [{**extra, **group} for group in _numbered(groups)]}


def from_bitsandbytes(
    state_dict: Mapping[str, Any],
    names: Names,
    shapes: Sequence[Sequence[int]] | Mapping[str, Sequence[int]],
    *,
    min_8bit_size: int = 4096,
) -> dict[str, Any]:
    """The full form of a native `AdamW8bit.state_dict()`, exactly.

    Args:
        state_dict: of native AdamW8bit on the unwrapped model, from bitsandbytes 0.44 on.
        names: FQNs in the order of its parameters; one list a group if it has several.
        shapes: of the parameters, in the same order or by name.
        min_8bit_size: what the native optimizer was constructed with; state dicts do not say.

    Raises `CheckpointError` if the number of parameters or a shape does not match, or blocks are not of
    256 elements.
    """
    flat_names = [name for group in _nested(names) for name in group]
    if len(shapes) != len(flat_names):
        raise CheckpointError(f"there are {len(shapes)} shapes for {len(flat_names)} names")
    by_name = shapes if isinstance(shapes, Mapping) else dict(zip(flat_names, shapes, strict=True))
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    if len(numbers) != len(flat_names):
        raise CheckpointError(f"the state dict has {len(numbers)} parameters, names has {len(flat_names)}")
    hypers = [
        {key: group[key] for key in HYPERPARAMETERS}
        for group in state_dict["param_groups"]
        for _ in group["params"]
    ]
    params, state = {}, {}
    for name, number, hyper in zip(flat_names, numbers, hypers, strict=True):
        shape = tuple(by_name[name])
        saved = state_dict["state"].get(number, {})
        entry = {**saved, **saved.get(NATIVE_KEY, {})}
        step = int(entry.get("step", 0))
        bits = 8 if "absmax1" in entry or (not entry and torch.Size(shape).numel() >= min_8bit_size) else 32
        params[name] = {"shape": shape, "bits": bits, "step": step, **hyper}
        if step > 0:
            kept = ("state1", "state2", *(("absmax1", "absmax2") if bits == 8 else ()))
            state[name] = {"step": step, **{key: _checked(name, key, entry[key], shape) for key in kept}}
    return {
        "format": FORMAT,
        "version": VERSION,
        "block_size": BLOCK_SIZE,
        "min_8bit_size": min_8bit_size,
        "params": params,
        "state": state,
    }


def to_torch_adamw(full: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """What `torch.optim.AdamW.load_state_dict` takes. One-way and lossy.

    8-bit state is dequantized: quantizing the result again gives other absmax values, so a run that
    goes back to 8-bit state does not continue bit for bit. Arguments and errors as in `to_bitsandbytes`.
    """
    groups = _groups(full, names)
    state = {}
    for number, name in enumerate(name for group in groups for name in group["params"]):
        entry = full["state"].get(name)
        if entry is not None:
            state[number] = {
                "step": torch.tensor(float(entry["step"]), dtype=torch.float32),
                "exp_avg": _dequantized(entry, 1),
                "exp_avg_sq": _dequantized(entry, 2),
            }
    extra = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
    extra |= {"differentiable": False, "fused": None, "decoupled_weight_decay": True}
    return {"state": state, "param_groups": [{**extra, **group} for group in _numbered(groups)]}


def _dequantized(entry: Mapping[str, Tensor], moment: int) -> Tensor:
    value = entry[f"state{moment}"]
    if value.dtype == torch.float32:
        return value.clone()
    table = code_tables(torch.device("cpu"))[moment - 1]
    flat: Tensor = F.dequantize_blockwise(
        value.reshape(-1), absmax=entry[f"absmax{moment}"], code=table, blocksize=BLOCK_SIZE
    )
    return flat.view(value.shape)


def _nested(names: Names) -> list[list[str]]:
    if all(isinstance(each, str) for each in names):
        return [[str(each) for each in names]]
    return [list(each) for each in names]


def _groups(full: Mapping[str, Any], names: Names) -> list[dict[str, Any]]:
    """Param groups with names for parameters, and the hyperparameters these were saved with."""
    groups = []
    for members in _nested(names):
        group: dict[str, Any] = {"params": members}
        for name in members:
            if name not in full["params"]:
                raise CheckpointError(f"the checkpoint has no parameter '{name}'")
            for key in HYPERPARAMETERS:
                value = full["params"][name][key]
                if group.setdefault(key, value) != value:
                    raise CheckpointError(
                        f"{key} of '{name}' is {value}, of '{members[0]}' {group[key]}: list them in"
                        " different groups"
                    )
        groups.append(group)
    return groups


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same groups with parameters numbered from 0, as in any optimizer's state dict."""
    numbered, start = [], 0
    for group in groups:
        end = start + len(group["params"])
        numbered.append({**group, "params": list(range(start, end))})
        start = end
    return numbered


def _checked(name: str, key: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    expected = num_blocks(numel) if key.startswith("absmax") else numel
    if value.numel() != expected:
        hint = ""
        if value.numel() == -(-numel // 2048):
            hint = ": blocks of 2,048 elements, as in bitsandbytes before 0.44, cannot be converted"
        raise CheckpointError(f"{key} of '{name}' has {value.numel()} elements, not {expected}{hint}")
    value = value.detach().cpu().clone()
    return value if key.startswith("absmax") else value.view(shape)
