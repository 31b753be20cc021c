"""The same to-the-bit checks on a GPU: native kernels split into runs, tiles and scratch blocks.

CPU and CUDA kernels are different quantizers, so each is compared with native AdamW8bit on its own
kind of device. One GPU is enough. Run them all, and the benchmark, with `make gpu`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_native import Case, check
from test_worlds import Unit
from test_worlds import check as check_played
from torch import Tensor
from torch.distributed.fsdp import CPUOffload

import refimpl.update
from refimpl import ShardedAdamW8bit, read_layouts
from refimpl.layout import Run, ShardPlan
from refimpl.tools.fixture import gradient, start_value, wrap
from refimpl.tools.world import World
from refimpl.update import Hyperparameters, new_state, update_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = Hyperparameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)


def at_offset(value: Tensor, offset: int) -> Tensor:
    """`value` on the GPU, `offset` elements behind the start of its storage."""
    buffer = torch.zeros(offset + value.numel(), dtype=value.dtype, device="cuda")
    buffer[offset:] = value
    return buffer[offset:]


def updated(numel: int, dtype: torch.dtype, is_8bit: bool, offset: int, pieces: list[int]) -> list[Tensor]:
    """Parameter and state after two updates, each split into calls that end at `pieces`."""
    sizes = (numel, -(-numel // 256), 0) if is_8bit else (0, 0, numel)
    state = new_state(ShardPlan((), (), (), *sizes), torch.device("cuda"))
    param = at_offset(start_value((numel,)).to(dtype), offset)
    for step in (1, 2):
        grad = at_offset(gradient((numel,), 0, step).to(dtype), offset)
        for start, end in zip([0, *pieces], [*pieces, numel], strict=True):
            run = Run(0, is_8bit, start, end, start, start // 256)
            update_run(run, param, grad, state, HYPER, step)
    torch.cuda.synchronize()
    return [param, *state.values()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 3, 7])
@pytest.mark.parametrize("numel", [4096, 4097, 10_000, 65_537])
def test_split_calls_equal_whole_ones(numel: int, offset: int, dtype: torch.dtype) -> None:
    for is_8bit, pieces in [(True, [256, 1024, 3840]), (False, [1, 257, 1000, 4000])]:
        whole = updated(numel, dtype, is_8bit, 0, [])
        split = updated(numel, dtype, is_8bit, offset, pieces)
        assert all(map(torch.equal, whole, split))


@pytest.mark.parametrize("tile", [256, 1024])
def test_tiles_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = updated(10_001, torch.float32, True, 0, [])
    monkeypatch.setattr(refimpl.update, "GPU_TILE", tile)
    assert all(map(torch.equal, whole, updated(10_001, torch.float32, True, 0, [])))


UNITS: list[Unit] = [
    ([(0, 3000), (0, 9216), (3, 500), (0, 1)], range(0, 12_721, 3180)),
    ([(0, 5001), (1, 777)], (0, 100, 120, 5000, 5779)),
    ([(0, 4100)], range(0, 4101, 1025)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_world_of_four_on_one_device(dtype: torch.dtype) -> None:
    for min_8bit_size in (1, 200, 4096):
        check_played(UNITS, 4, min_8bit_size, "cuda", dtype)


@pytest.mark.parametrize("size", [size for size in (2, 3, 4) if size <= max(2, torch.cuda.device_count())])
def test_real_ranks(size: int) -> None:
    """NCCL needs a GPU for each rank."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"there are fewer than {size} GPUs here")
    case = Case({"x": (3000,), "y": (97, 99), "z": (500,)}, device="cuda")
    with World(size, device="cuda") as world:
        for wrapping in ("coarse", "fine"):
            check(world, case, wrapping, orig=False)


def offloaded() -> tuple[list[Any], list[str]]:
    """Two steps with parameters on the CPU between them, and without."""
    case = Case({"x": (3000,), "y": (97, 99)}, device="cuda")
    values, devices = [], []
    for offload in (False, True):
        model = wrap(
            case.model(), device=torch.device("cuda"), cpu_offload=CPUOffload(offload_params=offload)
        )
        optimizer = ShardedAdamW8bit(model.parameters(), layouts=read_layouts(model))
        for step in (1, 2):
            model(case.gradients(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        devices += sorted({entry["codes1"].device.type for entry in optimizer.state.values()})
        values.append([param.detach().cpu() for param in model.parameters()])
    assert dist.get_world_size() == 1
    return values, devices


def test_state_lives_where_the_shard_lives() -> None:
    """CPU kernels update an offloaded shard: other values than on the GPU, in the same layout."""
    with World(1, device="cuda") as world:
        ((values, devices),) = world.run(offloaded)
    assert devices == ["cuda", "cpu"]
    on_gpu, on_cpu = values
    assert [value.shape for value in on_gpu] == [value.shape for value in on_cpu]
