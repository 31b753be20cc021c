"""What the repairs cost: ratios of step times, measured in one run, and exact counts beside them.

Every optimizer steps on the same FSDP1 model, the same flat shards and gradients, in turn, one step
each a round, so that what disturbs the machine disturbs all of them. Times are medians over the
rounds, of the slowest rank in each round.

    native    bitsandbytes AdamW8bit on the flat shards (its state is the wrong one)
    sharded   refimpl.ShardedAdamW8bit
    bare      the kernel calls of `sharded` alone, on views made beforehand, without exchange or copies
    shadow    refimpl.ShadowAdamW8bit
    adamw     torch.optim.AdamW(fused=True), 32-bit state: a mark from outside
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
import torch.distributed as dist
from torch import nn

from .. import ShadowAdamW8bit, ShardedAdamW8bit, read_layouts
from ..edges import flat, flat_gradient
from ..layout import ShardLayout, merge_runs
from ..sharded import Update
from ..update import Hyperparameters, new_state, update_run
from .audit import lay_out, state_bytes, units_of
from .fixture import Model, gradients, wrap
from .reproduce import environment
from .world import rank_device

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"width": 47, "blocks": 2, "vocabulary": 203},
    "small": {"width": 256, "blocks": 2, "vocabulary": 2003},
    "medium": {"width": 512, "blocks": 5, "vocabulary": 5003},
    "odd": {"width": 509, "blocks": 5, "vocabulary": 5003},  # its blocks are cut everywhere
    "large": {"width": 1024, "blocks": 2, "vocabulary": 5003},
}
WRAPPINGS = ("one unit", "per block", "per layer")
LAYERS = ("norm1", "qkv", "out", "norm2", "up", "down")
IMPLEMENTATIONS = ("native", "sharded", "bare", "shadow", "adamw")
COUNTED = ("native", "sharded", "shadow")
HYPERPARAMETERS = Hyperparameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)


def shapes(width: int, blocks: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a decoder: matrices with biases, norms, and an embedding of odd length."""
    found: dict[str, tuple[int, ...]] = {"embedding.table": (vocabulary, width)}
    sizes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    for block in range(blocks):
        for layer in LAYERS:
            rows = sizes.get(layer, (width, 0))[0]
            if layer in sizes:
                found[f"block{block}.{layer}.matrix"] = sizes[layer]
            found[f"block{block}.{layer}.bias"] = (rows,)
    return found


def units(wrapping: str, blocks: int) -> list[str]:
    """The modules that are FSDP units of their own; the root unit holds the rest."""
    if wrapping == "one unit":
        return []
    if wrapping == "per block":
        return [f"block{block}" for block in range(blocks)]
    return ["embedding", *(f"block{block}.{layer}" for block in range(blocks) for layer in LAYERS)]


def planned_layouts(
    sizes: Mapping[str, tuple[int, ...]], unit_names: Sequence[str], ranks: int, rank: int
) -> list[ShardLayout]:
    """What FSDP1 makes of a model under FULL_SHARD with `use_orig_params=False`, without running it."""
    members = units_of(sizes, unit_names, use_orig_params=False)
    return [replace(lay_out(each, ranks, align=0), rank=rank) for each in members if each]


def measure(model_name: str, wrapping: str, rounds: int, played: bool = False) -> dict[str, Any]:
    """All implementations on one model and wrapping. Collective; the same figures on every rank.

    With `played`, one process plays the first of two ranks: the edges it would receive are made up,
    the exchange is not timed, and the shadow twin, which needs the other rank's gradients, is left out.
    """
    sizes = shapes(**MODELS[model_name])
    unit_names = units(wrapping, MODELS[model_name]["blocks"])
    make = _played_shards if played else _real_shards
    model, layouts = make(sizes, unit_names)
    steps, optimizers = _implementations(model, layouts, played)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            times[name].append(_slowest(step))
    seconds = {name: values[1:] for name, values in times.items()}  # the first round creates state
    pairs = [("sharded", "native"), ("sharded", "bare"), ("shadow", "sharded"), ("sharded", "adamw")]
    return {
        "model": model_name,
        "wrapping": wrapping,
        "parameters": sum(torch.Size(shape).numel() for shape in sizes.values()),
        "elements_per_rank": sum(param.numel() for param in layouts),
        "units": len(layouts),
        "seconds": {name: _spread(values) for name, values in seconds.items()},
        **{
            f"{name} / {other}": _ratio(seconds[name], seconds[other])
            for name, other in pairs
            if name in seconds
        },
        "kernel_calls": {name: kernel_calls(step) for name, step in steps.items() if name in COUNTED},
        **_bytes(optimizers["sharded"], sizes, 2 if played else dist.get_world_size()),
    }


def _real_shards(
    sizes: Mapping[str, tuple[int, ...]], unit_names: Sequence[str]
) -> tuple[nn.Module, dict[Any, ShardLayout]]:
    """A model wrapped by FSDP1, with gradients."""
    device = rank_device()
    model = wrap(Model(sizes), unit_names, device=device, use_orig_params=False)
    model({name: grad.to(device) for name, grad in gradients(sizes, 1).items()}).backward()
    return model, read_layouts(model)


def _played_shards(
    sizes: Mapping[str, tuple[int, ...]], unit_names: Sequence[str]
) -> tuple[nn.Module, dict[Any, ShardLayout]]:
    """The shards of the first of two ranks, with gradients."""
    device = rank_device()
    model = nn.ParameterList()
    layouts: dict[Any, ShardLayout] = {}
    for layout in planned_layouts(sizes, unit_names, 2, 0):
        shard = nn.Parameter(torch.randn(layout.shard_numel, device=device))
        shard.grad = torch.randn_like(shard) * 1e-3
        model.append(shard)
        layouts[shard] = layout
    return model, layouts


def _implementations(
    model: nn.Module, layouts: Mapping[Any, ShardLayout], played: bool
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    hyper: dict[str, Any] = {"lr": 1e-3}
    sharded = ShardedAdamW8bit(model.parameters(), layouts=layouts, **hyper)
    optimizers: dict[str, Any] = {
        "native": bnb.optim.AdamW8bit(model.parameters(), **hyper),
        "sharded": sharded,
        "shadow": ShadowAdamW8bit(model.parameters(), layouts=layouts, **hyper),
        "adamw": torch.optim.AdamW(model.parameters(), fused=True, **hyper),
    }
    steps: dict[str, Callable[[], Any]] = {name: each.step for name, each in optimizers.items()}
    if played:
        del steps["shadow"]
        received = [
            torch.ones(sum(sizes), device=buffer.device)
            for buffer, sizes in zip(sharded.outgoing_edges(), sharded.edge_sizes(), strict=True)
        ]

        def step() -> None:
            sharded.outgoing_edges()
            sharded.step_with_edges(received)

        steps["sharded"] = step
    steps["sharded"]()
    calls = list(_bare_calls(sharded))

    def bare() -> None:
        with torch.no_grad():
            for call in calls:
                update_run(*call)

    return {**steps, "bare": bare}, optimizers


def _bare_calls(optimizer: ShardedAdamW8bit) -> Iterator[tuple[Any, ...]]:
    """The arguments of every kernel call of one step of `optimizer`, with state of their own."""
    update: Update = (HYPERPARAMETERS, 2)
    for tensor, plan in optimizer._plans.items():
        state = new_state(plan, tensor.device)
        for run in plan.runs:
            yield run, flat(tensor), flat_gradient(tensor), state, *update
    for cut_blocks in optimizer._cut_blocks:
        for run in merge_runs(cut_blocks.runs, [None] * len(cut_blocks.runs)):
            yield run, cut_blocks.param.clone(), cut_blocks.grad, cut_blocks.state, *update


def _slowest(step: Callable[[], Any]) -> float:
    """Seconds of one step, on the rank that took longest."""
    device = rank_device()
    dist.barrier()
    start = _now(device)
    step()
    seconds = torch.tensor(_now(device) - start, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of two implementations, round by round: both of a pair ran within one round."""
    return _spread([value / other for value, other in zip(values, others, strict=True)])


def kernel_calls(step: Callable[[], Any]) -> int:
    """How often one step calls a bitsandbytes kernel."""
    names = ("optimizer_update_8bit_blockwise", "optimizer_update_32bit")
    with ExitStack() as stack:
        spies = [stack.enter_context(mock.patch.object(F, name, wraps=getattr(F, name))) for name in names]
        step()
    return sum(spy.call_count for spy in spies)


def _bytes(sharded: ShardedAdamW8bit, sizes: Mapping[str, Sequence[int]], ranks: int) -> dict[str, Any]:
    """State and traffic of the rank that has most of them, and what they are measured against."""
    numels = [torch.Size(shape).numel() for shape in sizes.values()]
    share = sum(int(state_bytes(numel, numel >= 4096)) for numel in numels) / ranks
    own = {
        "state": sum(
            value.nbytes
            for entry in sharded.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ),
        "sent": sum(buffer.nbytes for buffer in sharded.outgoing_edges()),
        "gathered": sum((ranks - 1) * tensor.nbytes for tensor in sharded.params_by_tensor()),
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    most = {name: max(each[name] for each in found) for name in own}
    return {
        "state_bytes": {"sharded": most["state"], "unwrapped native / ranks": share},
        "state / (unwrapped native / ranks)": most["state"] / share,
        "bytes_sent_per_step": most["sent"],
        "bytes_gathered_per_step": {"shadow": most["gathered"]},
    }


def run(models: Sequence[str], rounds: int, played: bool = False) -> dict[str, Any]:
    """Every model under every wrapping, on the ranks of the default process group. Collective."""
    return {
        "environment": environment(rank_device()),
        "rounds": rounds,
        "played": played,
        "results": [measure(model, wrapping, rounds, played) for model in models for wrapping in WRAPPINGS],
    }


def render(result: Mapping[str, Any]) -> str:
    """The figures as a table for a terminal."""
    where = result["environment"]
    lines = [
        f"{where['world_size']} ranks, {where['device']} ({where['backend']}), {where['threads_per_rank']}"
        f" thread a rank, {where['processor']}; torch {where['torch']},"
        f" bitsandbytes {where['bitsandbytes']}; {result['rounds']} rounds",
        "Ratios of step times: median [least to most] over the rounds."
        + (" One process plays the first of two ranks; the exchange is not timed." * result["played"]),
        "",
        f"{'model':8}{'wrapping':11}{'elements':>11}{'':2}{'sharded/native':^22}{'sharded/bare':^20}"
        f"{'shadow/sharded':^16}{'state':>8}{'sent':>9}{'gathered':>10}{'kernel calls':>22}",
        f"{'':19}{'a rank':>11}{'':60}{'ratio':>8}{'bytes':>9}{'MB':>10}{'native,sharded,shadow':>22}",
    ]
    for each in result["results"]:
        calls = {"shadow": "-", **each["kernel_calls"]}
        shadow = f"{each['shadow / sharded']['median']:.2f}" if "shadow / sharded" in each else "-"
        lines.append(
            f"{each['model']:8}{each['wrapping']:11}{each['elements_per_rank']:>11,}{'':2}"
            f"{_words(each['sharded / native']):^22}{_words(each['sharded / bare']):^20}"
            f"{shadow:^16}"
            f"{each['state / (unwrapped native / ranks)']:>8.4f}{each['bytes_sent_per_step']:>9,}"
            f"{each['bytes_gathered_per_step']['shadow'] / 1e6:>10.1f}"
            f"{calls['native']:>12} {calls['sharded']:>4} {calls['shadow']:>4}"
        )
    lines += [
        "",
        "state ratio: sharded state of the largest rank / (native state of the unwrapped model / ranks).",
        "sent: edge gradients a rank sends a step; gathered: what the shadow twin receives instead.",
    ]
    return "\n".join(lines)


def _words(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['least']:.2f} to {ratio['most']:.2f}]"
