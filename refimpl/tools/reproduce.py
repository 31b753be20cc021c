"""The report: native AdamW8bit depends on how FSDP1 wraps the model; the repairs do not.

The experiment of bitsandbytes #2080. Four small original parameters and a large one are trained
for two updates under two wrappings that hand the optimizer the same values and gradients:

    fine    each parameter is an FSDP unit of its own
    coarse  the four small ones share a unit; the large one still has its own

On two ranks the small parameters have 2,048 elements and the large one 8,192, as published. On other
world sizes they grow with the number of ranks, so that what the optimizer is handed stays the
same: 1,024 local elements each in the fine wrapping, 4,096 together in the coarse one.

Gradients are those of `fixture.gradient`, which span five decades within a block. The two wrappings
are compared once more with the start values, gradients and hyperparameters published in draft PR #2081,
which are smooth, so that its figure can be recognized: 6.15e-5 on two CPU ranks.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import ShadowAdamW8bit, ShardedAdamW8bit, read_layouts
from .fixture import Model, full_parameters, gradients, train_step, wrap
from .world import rank_device

MIN_8BIT_SIZE = 4096
STEPS = 2
LOCAL_SMALL = 1024
LOCAL_LARGE = 4096
WRAPPINGS: dict[str, tuple[str, ...]] = {
    "fine": ("small.a", "small.b", "small.c", "small.d", "large"),
    "coarse": ("small", "large"),
}
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
UNWRAPPED = "unwrapped"

PUBLISHED: dict[str, Any] = {**HYPERPARAMETERS, "betas": (0.9, 0.95), "weight_decay": 0.0}

Factory = Callable[..., torch.optim.Optimizer]
IMPLEMENTATIONS: dict[str, tuple[str, Factory]] = {
    "native": (
        "native AdamW8bit",
        lambda model, _, **hyper: bnb.optim.AdamW8bit(
            model.parameters(), min_8bit_size=MIN_8BIT_SIZE, **{**HYPERPARAMETERS, **hyper}
        ),
    ),
    "adamw_fp32": (
        "FP32 AdamW (control)",
        lambda model, _, **hyper: torch.optim.AdamW(model.parameters(), **{**HYPERPARAMETERS, **hyper}),
    ),
    "shadow": (
        "repair: replicated",
        lambda model, layouts, **hyper: ShadowAdamW8bit(
            model.named_parameters(),
            layouts=layouts,
            min_8bit_size=MIN_8BIT_SIZE,
            **{**HYPERPARAMETERS, **hyper},
        ),
    ),
    "sharded": (
        "repair: sharded",
        lambda model, layouts, **hyper: ShardedAdamW8bit(
            model.named_parameters(),
            layouts=layouts,
            min_8bit_size=MIN_8BIT_SIZE,
            **{**HYPERPARAMETERS, **hyper},
        ),
    ),
}
CONTROL = "adamw_fp32"


def shapes(world_size: int) -> dict[str, tuple[int, ...]]:
    """The fixture's parameters, by name."""
    small = {f"small.{name}": (LOCAL_SMALL * world_size,) for name in "abcd"}
    return {**small, "large": (LOCAL_LARGE // 64 * world_size, 64)}


def report() -> dict[str, Any]:
    """Run the experiment on the ranks of the default process group. Collective; the same on all."""
    world_size = dist.get_world_size()
    device = rank_device()
    layouts: dict[str, Any] = {
        "min_8bit_size": MIN_8BIT_SIZE,
        "original_numels": {
            f"{name}.weight": torch.Size(shape).numel() for name, shape in shapes(world_size).items()
        },
    }
    implementations, published = {}, {}
    for key, (_, factory) in IMPLEMENTATIONS.items():
        fine, coarse = (_train_published(factory, units, world_size, device) for units in WRAPPINGS.values())
        published[key] = _largest(coarse - fine)
        runs = {}
        for wrapping, units in {**WRAPPINGS, UNWRAPPED: None}.items():
            model, found = _build(world_size, units, device)
            runs[wrapping] = _train(model, factory(model, found), found, world_size, device)
            if units is not None:
                layouts[wrapping] = [_describe(layout) for layout in found.values()]
        implementations[key] = _compare(runs)
    return {
        "environment": environment(device),
        "layouts": layouts,
        "implementations": implementations,
        "max_abs_update_difference_with_published_values": published,
    }


def _build(
    world_size: int, units: Sequence[str] | None, device: torch.device
) -> tuple[nn.Module, dict[Any, Any]]:
    model: nn.Module = Model(shapes(world_size))
    if units is None:
        return model.to(device), {}
    model = wrap(model, units, device=device, use_orig_params=False)
    return model, read_layouts(model)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layouts: Mapping[Any, Any],
    world_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """Two updates; the complete change of all parameters, and the precision of their state."""
    return {
        "update": _update(model, optimizer, device, lambda step: gradients(shapes(world_size), step)),
        "states": _state_dtypes(model, optimizer, layouts),
    }


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    gradients_at: Callable[[int], Mapping[str, Tensor]],
) -> Tensor:
    """The complete change of all parameters in two updates."""
    start = _flat_parameters(model)
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, {name: grad.to(device) for name, grad in gradients_at(step).items()})
    return _flat_parameters(model) - start


def _train_published(factory: Factory, units: Sequence[str], world_size: int, device: torch.device) -> Tensor:
    """The complete change of all parameters in two updates with the values of #2081."""
    model = Model(shapes(world_size))
    for number, param in enumerate(model.parameters()):
        name = f"small.leaves.{number}.weight" if number < 4 else "large.weight"  # as they go there
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        index = torch.arange(param.numel(), dtype=torch.float32)
        param.data = (0.025 * torch.sin(index * 0.017 + 0.019 + key % 997)).reshape(param.shape)
    wrapped = wrap(model, units, device=device, use_orig_params=False)
    optimizer = factory(wrapped, read_layouts(wrapped), **PUBLISHED)
    return _update(
        wrapped, optimizer, device, lambda step: _published_gradients(full_parameters(wrapped), step)
    )


def _published_gradients(values: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Of `(p - 0.1)^2 / 2`, where p sums the mean of value times coefficient over the parameters."""
    coefficients = {}
    for number, (name, value) in enumerate(values.items()):
        frequency = 0.0078125 * (number + 1) if number < 4 else 0.00390625
        index = torch.arange(value.numel(), dtype=torch.float32)
        coefficients[name] = torch.sin((index + 1) * frequency + (step - 1) * 0.03125).reshape(value.shape)
    error = sum(float((values[name] * each).mean()) for name, each in coefficients.items()) - 0.1
    return {name.removesuffix(".weight"): error * each / each.numel() for name, each in coefficients.items()}


def _flat_parameters(model: nn.Module) -> Tensor:
    """Every original parameter, by name, in one float64 vector."""
    values = full_parameters(model)
    return torch.cat([values[name].double().flatten() for name in sorted(values)])


def _state_dtypes(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[Any, Any]
) -> dict[str, str]:
    """The dtype of the first moment of every original parameter, as it was really allocated."""
    dtypes = {}
    if isinstance(optimizer, (ShadowAdamW8bit, ShardedAdamW8bit)):
        state = optimizer.full_state_dict()["state"]
        dtypes = {fqn: entry["state1"].dtype for fqn, entry in state.items()}
    else:
        for name, tensor in model.named_parameters():
            entry = optimizer.state[tensor]
            moment = entry["state1"] if "state1" in entry else entry["exp_avg"]
            fqns = [param.fqn for param in layouts[tensor].params] if layouts else [name]
            dtypes.update(dict.fromkeys(fqns, moment.dtype))
    return {fqn: str(dtype).removeprefix("torch.") for fqn, dtype in sorted(dtypes.items())}


def _compare(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    states = {name: run["states"] for name, run in runs.items()}
    fine, coarse = runs["fine"]["update"], runs["coarse"]["update"]
    truth = runs[UNWRAPPED]["update"]
    return {
        "states": states,
        "state_precision_equal": states["fine"] == states["coarse"],
        "projection_relative_l2": _projection_difference(coarse, fine),
        "max_abs_update_difference": _largest(coarse - fine),
        "against_unwrapped": {
            wrapping: {
                "state_precision_equal": states[wrapping] == states[UNWRAPPED],
                "projection_relative_l2": _projection_difference(runs[wrapping]["update"], truth),
                "max_abs_update_difference": _largest(runs[wrapping]["update"] - truth),
            }
            for wrapping in WRAPPINGS
        },
    }


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _projection_difference(update: Tensor, reference: Tensor) -> float:
    """Relative L2 difference of 16 fixed projections, row k being `sin(0.013 (k + 1) i + k)`."""
    row = torch.arange(16, dtype=torch.float64).unsqueeze(1)
    index = torch.arange(reference.numel(), dtype=torch.float64)
    projection = torch.sin(0.013 * (row + 1) * index + row)
    expected = projection @ reference
    return float(((projection @ update) - expected).norm() / expected.norm())


def _describe(layout: Any) -> dict[str, Any]:
    return {
        "params": [param.fqn for param in layout.params],
        "local_numel": layout.shard_numel,
        "bounds": list(layout.bounds),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure was measured on: versions, device, backend, processor, ranks."""
    return {
        "torch": torch.__version__,
        "bitsandbytes": bnb.__version__,
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "logical_cpus": os.cpu_count(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def is_as_expected(result: Mapping[str, Any]) -> bool:
    """Whether the fault shows in the native optimizer, and the control and every repair are exact."""
    implementations = dict(result["implementations"])
    native = implementations.pop("native")
    fault = not native["state_precision_equal"] and native["max_abs_update_difference"] > 0.0
    published = dict(result["max_abs_update_difference_with_published_values"])
    fault = fault and published.pop("native") > 0.0
    return fault and all(map(_is_exact, implementations.values())) and not any(published.values())


def _is_exact(implementation: Mapping[str, Any]) -> bool:
    comparisons = [implementation, *implementation["against_unwrapped"].values()]
    return all(
        each["state_precision_equal"]
        and each["projection_relative_l2"] == 0.0
        and each["max_abs_update_difference"] == 0.0
        for each in comparisons
    )


def render(result: Mapping[str, Any]) -> str:
    """The report as a table for a terminal."""
    where, layouts = result["environment"], result["layouts"]
    numels = layouts["original_numels"]
    small, large = numels["small.a.weight"], numels["large.weight"]
    local = {
        (wrapping, param): unit["local_numel"]
        for wrapping in WRAPPINGS
        for unit in layouts[wrapping]
        for param in unit["params"]
    }
    lines = [
        f"torch {where['torch']}, bitsandbytes {where['bitsandbytes']}, {where['world_size']} ranks,"
        f" {where['device']} ({where['backend']}), FSDP1 FULL_SHARD, use_orig_params=False",
        "",
        f"Four original parameters of {small:,} elements and one of {large:,};"
        f" min_8bit_size={layouts['min_8bit_size']:,}; {STEPS} updates.",
        "Same values, gradients and hyperparameters under two wrappings:",
        "  fine    one FSDP unit per parameter; the optimizer is handed"
        f" {local['fine', 'small.a.weight']:,} local elements of each small one",
        "  coarse  the four small ones in one unit; it is handed"
        f" {local['coarse', 'small.a.weight']:,} local elements of them together",
        "",
        f"{'':24}{'state of the small ones':^25}{'of the large one':^19}"
        f"{'largest difference of the updates':^36}",
        f"{'':24}{'fine':^12}{'coarse':^13}{'fine':^9}{'coarse':^10}{'fine|coarse':^12}"
        f"{'fine|unwr.':^12}{'coarse|unwr.':^12}",
    ]
    for key, (label, _) in IMPLEMENTATIONS.items():
        entry = result["implementations"][key]
        states = entry["states"]
        words = [
            _word(states[wrapping][param])
            for param in ("small.a.weight", "large.weight")
            for wrapping in WRAPPINGS
        ]
        apart = [
            entry["max_abs_update_difference"],
            *(entry["against_unwrapped"][wrapping]["max_abs_update_difference"] for wrapping in WRAPPINGS),
        ]
        lines.append(
            f"{label:24}{words[0]:^12}{words[1]:^13}{words[2]:^9}{words[3]:^10}"
            + "".join(f"{_number(each):^12}" for each in apart)
        )
    native = result["implementations"]["native"]
    published = result["max_abs_update_difference_with_published_values"]
    lines += [
        "",
        "fine|coarse with the values published in #2081: native"
        f" {_number(published['native'])}, control and repairs"
        f" {_number(max(value for key, value in published.items() if key != 'native'))}.",
        "The native optimizer's updates differ between the wrappings by"
        f" {native['projection_relative_l2']:.2e} (relative L2 of a fixed projection).",
        "unwr.: the unwrapped model in one process, same optimizer. 0 means equal to the last bit.",
        "",
        "AS EXPECTED: the fault shows, the control and the repairs are exact."
        if is_as_expected(result)
        else "NOT AS EXPECTED: see the figures above.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _word(dtype: str) -> str:
    return {"float32": "FP32", "uint8": "8-bit"}.get(dtype, dtype)


def _number(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.2e}"
