"""Every way to carry a checkpoint from one run to another, as a pair of functions for the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from against_native import TWINS, Case, Snapshot, snapshot
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from refimpl import read_layouts
from refimpl.checkpoint import load_sharded, save_sharded
from refimpl.tools.fixture import wrap

Layout = tuple[str, bool]  # fine or coarse, use_orig_params


def save_full(model: nn.Module, optimizer: Any, path: Path) -> None:
    full = optimizer.full_state_dict(rank0_only=True)
    if full and dist.get_rank() == 0:
        torch.save(full, path / "optimizer.pt")


def load_full(model: nn.Module, optimizer: Any, path: Path) -> None:
    full = torch.load(path / "optimizer.pt", weights_only=True) if dist.get_rank() == 0 else {}
    layout = next(optimizer.named_params()).layout
    if layout.process_group is None and not full:
        full = torch.load(path / "optimizer.pt", weights_only=True)
    optimizer.load_full_state_dict(full)


def save_compact(model: nn.Module, optimizer: Any, path: Path) -> None:
    save_sharded(optimizer, path)


def load_compact(model: nn.Module, optimizer: Any, path: Path) -> None:
    load_sharded(optimizer, path)


def fsdp_context(model: nn.Module, rank0_only: bool) -> Any:
    # offload_to_cpu: see stock.problem
    return FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


def save_fsdp(model: nn.Module, optimizer: Any, path: Path, rank0_only: bool = False) -> None:
    with fsdp_context(model, rank0_only):
        found = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, path / "optimizer.pt")


def load_fsdp(model: nn.Module, optimizer: Any, path: Path, rank0_only: bool = False) -> None:
    found = None
    if not rank0_only or dist.get_rank() == 0:
        found = torch.load(path / "optimizer.pt", weights_only=True)
    with fsdp_context(model, rank0_only):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found))


def save_fsdp_rank0(model: nn.Module, optimizer: Any, path: Path) -> None:
    save_fsdp(model, optimizer, path, rank0_only=True)


def load_fsdp_rank0(model: nn.Module, optimizer: Any, path: Path) -> None:
    load_fsdp(model, optimizer, path, rank0_only=True)


def save_dsd_full(model: nn.Module, optimizer: Any, path: Path) -> None:
    found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(found, path / "optimizer.pt")


def load_dsd_full(model: nn.Module, optimizer: Any, path: Path) -> None:
    found = torch.load(path / "optimizer.pt", weights_only=True)
    set_optimizer_state_dict(model, optimizer, found, options=StateDictOptions(full_state_dict=True))


def save_dsd_sharded(model: nn.Module, optimizer: Any, path: Path) -> None:
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)


def load_dsd_sharded(model: nn.Module, optimizer: Any, path: Path) -> None:
    found = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(found, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, found["optimizer"])


Route = tuple[Callable[..., None], Callable[..., None]]
ROUTES: dict[str, Route] = {
    "full": (save_full, load_full),
    "compact": (save_compact, load_compact),
    "FSDP full": (save_fsdp, load_fsdp),
    "FSDP rank 0": (save_fsdp_rank0, load_fsdp_rank0),
    "DSD full": (save_dsd_full, load_dsd_full),
    "DSD sharded": (save_dsd_sharded, load_dsd_sharded),
}


def build(
    case: Case, layout: Layout, twin: str, values: Mapping[str, Tensor] | None = None, **options: Any
) -> tuple[FSDP, Any]:
    """A wrapped model, with `values` in place of its parameters, and an optimizer."""
    wrapping, orig = layout
    model = case.model()
    for name, param in model.named_parameters():
        if values is not None:
            param.data.copy_(values[name])
    units = list(case.shapes) if wrapping == "fine" else list(case.frozen)
    wrapped = wrap(model, units, use_orig_params=orig, **options)
    optimizer = TWINS[twin](
        wrapped.parameters(),
        layouts=read_layouts(wrapped),
        min_8bit_size=case.min_8bit_size,
        overrides=case.overrides,
        **case.hyper,
    )
    return wrapped, optimizer


def steps(case: Case, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        model(case.gradients(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_save(
    case: Case,
    layouts: list[Layout],
    twin: str,
    route: str,
    path: Path,
    last: int,
    strategy: str = "FULL_SHARD",
) -> Snapshot:
    """Train to step `last` and save, once for each layout, into numbered folders under `path`."""
    warnings.simplefilter("ignore")  # torch's own, about deprecated contexts
    found = None
    for number, layout in enumerate(layouts):
        folder = path / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        model, optimizer = build(case, layout, twin, sharding_strategy=ShardingStrategy[strategy])
        steps(case, model, optimizer, 1, last)
        ROUTES[route][0](model, optimizer, folder)
        found = snapshot(model, optimizer)
    dist.barrier()
    assert found is not None
    return found


def load_and_train(
    case: Case,
    layouts: list[Layout],
    twin: str,
    route: str,
    folders: list[Path],
    values: Mapping[str, Tensor],
    first: int,
    strategy: str = "FULL_SHARD",
) -> list[Snapshot]:
    """From every folder into every layout: what was loaded, and what comes of training on."""
    warnings.simplefilter("ignore")
    found = []
    for layout in layouts:
        for folder in folders:
            model, optimizer = build(case, layout, twin, values, sharding_strategy=ShardingStrategy[strategy])
            ROUTES[route][1](model, optimizer, folder)
            found.append(snapshot(model, optimizer))
            steps(case, model, optimizer, first, case.steps)
            found.append(snapshot(model, optimizer))
    return found


def values_of(found: Snapshot) -> dict[str, Tensor]:
    return {name: entry["value"] for name, entry in found.items()}
