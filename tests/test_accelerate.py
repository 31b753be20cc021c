"""Hugging Face Accelerate's `save_state` and `load_state` carry the optimizer; neither knows the other.

What is worked around in `accelerator` and `Plugin` is FSDP1 on CPU ranks, with any optimizer.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_native import Case, Snapshot, differences, native_run, snapshot
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from refimpl import ShardedAdamW8bit, read_layouts
from refimpl.checkpoint import CheckpointError
from refimpl.tools.world import World

accelerate = pytest.importorskip("accelerate", reason="pip install accelerate, to test with it")
transformers = pytest.importorskip("transformers", reason="pip install transformers, to test with it")

GetWorld = Callable[[int], World]

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
VOCABULARY, LENGTH = 211, 31
CASE = Case({"x": (3000,), "y": (97, 99), "z": (500,), "w": (5001,)}, steps=4)


class Plugin(accelerate.FullyShardedDataParallelPlugin):
    """For a full state dict of the model, from CPU ranks.

    Accelerate switches `offload_to_cpu` of the model's configuration on before each save, and up to torch
    2.13 FSDP then frees parameters that are on the CPU already (PyTorch #188989): whatever the optimizer,
    `save_state` ends in "setStorage: ... out of bounds". Here it switches that on in a copy.
    """

    @property
    def state_dict_config(self) -> Any:
        return FullStateDictConfig(rank0_only=True) if self.state_dict_type.name == FULL else self._config

    @state_dict_config.setter
    def state_dict_config(self, value: Any) -> None:
        self._config = value


@dataclass(frozen=True)
class Setup:
    kind: str
    orig: bool
    schedule: str = ""
    offload: bool = False

    def optim_state_dict_config(self) -> Any:
        """Accelerate's own, but without `offload_to_cpu`: see `stock.problem`. Sharded, that does no harm."""
        if self.kind == FULL:
            return FullOptimStateDictConfig(offload_to_cpu=self.offload, rank0_only=True)
        return None


def accelerator(setup: Setup) -> Any:
    """One that wraps by FSDP1 although on CPU ranks, which Accelerate reserves for devices."""
    size, rank = str(dist.get_world_size()), str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # it would be "cpu:0", which FSDP takes for another
    accelerate.state.AcceleratorState._reset_state(True)
    # With MULTI_CPU it would ignore the plugin and wrap by DistributedDataParallel.
    state = accelerate.PartialState(cpu=True)
    state._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    plugin = Plugin(
        fsdp_version=1,
        state_dict_type=setup.kind,
        optim_state_dict_config=setup.optim_state_dict_config(),
        use_orig_params=setup.orig,
        auto_wrap_policy="transformer_based_wrap",
    )
    return accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)


def gpt2(seed: int) -> nn.Module:
    """Two blocks, tied embeddings, dropout; 8-bit and 32-bit parameters, and borders inside blocks."""
    torch.manual_seed(seed)
    size = {"n_layer": 2, "n_head": 4, "n_embd": 48, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


class Run:
    """A model and its optimizer as an Accelerate user prepares them."""

    def __init__(self, setup: Setup, model: nn.Module) -> None:
        self.accelerator = accelerator(setup)
        self.model = self.accelerator.prepare(model)
        assert type(self.model) is FSDP
        self.inner = ShardedAdamW8bit(self.model.parameters(), layouts=read_layouts(self.model), lr=1e-3)
        self.optimizer = self.accelerator.prepare(self.inner)
        self.scheduler = None
        if setup.schedule:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.5)
        if setup.schedule == "prepared":
            self.scheduler = self.accelerator.prepare(self.scheduler)
        if setup.schedule == "registered":
            self.accelerator.register_for_checkpointing(self.scheduler)

    def update(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, first: int, last: int) -> None:
        """Steps of GPT-2, on tokens that differ from step to step and rank to rank."""
        for step in range(first, last + 1):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
            self.update(self.model(input_ids=tokens, labels=tokens).loss)

    def train_case(self, first: int, last: int) -> None:
        """Steps of `CASE`, whose gradients are exact on any number of ranks."""
        for step in range(first, last + 1):
            self.update(self.model(CASE.gradients(step)))

    def now(self) -> tuple[Snapshot, Any]:
        """All parameters and their state, and what `full_state_dict` says of them besides."""
        return snapshot(self.model, self.inner), self.inner.full_state_dict()["params"]


def save_and_go_on(setup: Setup, path: Path) -> list[Any]:
    run = Run(setup, gpt2(seed=0))
    run.train(1, 2)
    run.accelerator.save_state(path)
    saved = run.now()
    run.train(3, 4)
    return [saved, run.now()]


def resume(setup: Setup, path: Path) -> list[Any]:
    run = Run(setup, gpt2(seed=1))
    run.accelerator.load_state(path)
    loaded = run.now()
    run.train(3, 4)
    return [loaded, run.now()]


def resume_refused(setup: Setup, path: Path) -> str:
    run = Run(setup, gpt2(seed=1))
    with pytest.raises(CheckpointError) as refusal:
        run.accelerator.load_state(path)
    assert not any("state1" in entry for entry in snapshot(run.model, run.inner).values())
    return str(refusal.value)


def save_case(setup: Setup, path: Path) -> None:
    run = Run(setup, CASE.model())
    run.train_case(1, 2)
    run.accelerator.save_state(path)


def resume_case(setup: Setup, path: Path) -> list[Snapshot]:
    run = Run(setup, CASE.model())
    run.accelerator.load_state(path)
    loaded, _ = run.now()
    run.train_case(3, 4)
    return [loaded, run.now()[0]]


@pytest.fixture(scope="module")
def saving() -> Iterator[World]:
    """The two ranks that save."""
    with World(2, device="cpu") as world:
        yield world


@pytest.fixture(scope="module")
def resuming() -> Iterator[GetWorld]:
    """`resuming(n)`: n ranks that never saved."""
    worlds: dict[int, World] = {}
    yield lambda size: worlds.setdefault(size, World(size, device="cpu"))
    for world in worlds.values():
        world.close()


def check(setup: Setup, saving: World, resuming: GetWorld, path: Path) -> list[Any]:
    """What was loaded, and what comes of it, is that of the run that went on; returned is the latter."""
    expected = saving.run(save_and_go_on, setup, path)
    for went_on, resumed in zip(expected, resuming(2).run(resume, setup, path), strict=True):
        assert differences([each for each, _ in resumed], [each for each, _ in went_on]) == []
        assert [hyper for _, hyper in resumed] == [hyper for _, hyper in went_on]
    return expected[0]


@pytest.mark.rule("checkpoint.stock-apis")
@pytest.mark.parametrize(("kind", "orig"), [*itertools.product((FULL, SHARDED), (False, True))])
def test_resume(kind: str, orig: bool, saving: World, resuming: GetWorld, tmp_path: Path) -> None:
    (saved, _), (last, _) = check(Setup(kind, orig), saving, resuming, tmp_path)
    assert {entry["state1"].dtype for entry in last.values()} == {torch.uint8, torch.float32}
    assert {entry["step"] for entry in saved.values()} == {2}


@pytest.mark.rule("checkpoint.stock-apis")
@pytest.mark.parametrize("schedule", ["prepared", "registered"])
def test_a_scheduler(schedule: str, saving: World, resuming: GetWorld, tmp_path: Path) -> None:
    (_, saved), (_, last) = check(Setup(SHARDED, False, schedule), saving, resuming, tmp_path)
    steps = 2 if schedule == "prepared" else 1  # Accelerate takes one for each rank
    name = "transformer.wte.weight"
    for found, step in ((saved, 2), (last, 4)):
        assert found[name]["lr"] == pytest.approx(1e-3 * 0.5 ** (steps * step))


@pytest.mark.rule("checkpoint.stock-apis", "checkpoint.reshard")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_resume_on_another_number_of_ranks(
    kind: str, size: int, saving: World, resuming: GetWorld, tmp_path: Path
) -> None:
    native = native_run(CASE)
    for orig in (False, True):
        setup, path = Setup(kind, orig), tmp_path / str(orig)
        saving.run(save_case, setup, path)
        for found in resuming(size).run(resume_case, setup, path):
            assert differences(found, [native[1], native[3]]) == [], f"{orig=}"


@pytest.mark.rule("refuse.checkpoint")
def test_what_fsdp_spoils_on_cpu_is_refused(saving: World, resuming: GetWorld, tmp_path: Path) -> None:
    setup = Setup(FULL, orig=True, offload=True)  # Accelerate's default
    saving.run(save_and_go_on, setup, tmp_path)
    for sentence in resuming(2).run(resume_refused, setup, tmp_path):
        assert "save with offload_to_cpu=False (refuse.checkpoint)" in sentence
