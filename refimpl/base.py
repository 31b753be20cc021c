"""What both twins share: constructor, overrides by name, refusals, `step` with a closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import named_state, stock
from .fsdp import clean_name, is_fsdp_parameter
from .layout import OriginalParam, ShardLayout
from .named_state import NamedParam, State, States
from .update import Hyperparameters, is_state_8bit

NO_GRADIENT, GRADIENT, REFUSED = 0, 1, 2
"""What a rank tells the others about one tensor before anything is changed."""

Overrides = Mapping[str, Mapping[str, Any]]
OVERRIDE_KEYS = ("optim_bits", *named_state.HYPERPARAMETERS)


@dataclass(frozen=True)
class ParamSettings:
    """What holds for one original parameter: its precision, and what overrides its param group."""

    optim_bits: int
    is_8bit: bool
    overrides: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class TensorSettings:
    """One tensor of a param group: its layout, and the settings of `layout.params`, in order."""

    layout: ShardLayout
    params: tuple[ParamSettings, ...]

    @property
    def is_8bit(self) -> list[bool]:
        """Which of the parameters have 8-bit state."""
        return [param.is_8bit for param in self.params]

    @property
    def is_cut(self) -> bool:
        """Whether any rank's bound cuts a block of 8-bit state."""
        return self.layout.any_cut(self.is_8bit)


class OriginalParamAdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit state that follows the ORIGINAL parameters. Use one of the two subclasses.

    Args:
        params: as for any optimizer; with `model.named_parameters()` (or groups of them) an unwrapped
            model's parameters have names, which `overrides` and checkpoints need.
        lr, betas, eps, weight_decay: as in `bitsandbytes.optim.AdamW8bit`, also per param group.
        amsgrad: accepted for its place in the signature; must be False, as upstream.
        layouts: what `refimpl.read_layouts(model)` returned after wrapping. A parameter that is not
            in it is one whole tensor, so an unwrapped model needs none.
        min_8bit_size: original parameters with at least this many elements have 8-bit state.
        overrides: FQN pattern (`fnmatch` syntax, `*` also matches dots) -> any of `optim_bits`
            (8 or 32), `lr`, `weight_decay`, `betas`, `eps`. They hold under every wrapping, also for one
            parameter among several in a flat one. A scheduler does not touch an overridden `lr`.

    Raises:
        ValueError: a hyperparameter out of range, an override that is unknown, matches nothing or
            contradicts another, a layout that does not fit its tensor, a parameter FSDP has
            flattened without a layout, a parameter not in row-major memory order.
        TypeError: a DTensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        layouts: Mapping[Any, ShardLayout] | None = None,
        min_8bit_size: int = 4096,
        overrides: Overrides | None = None,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad=True has no 8-bit kernel, here or upstream (refuse.amsgrad)")
        if isinstance(min_8bit_size, bool) or not isinstance(min_8bit_size, int):
            raise ValueError(f"min_8bit_size must be an int, got {min_8bit_size!r}")
        if min_8bit_size < 1:
            raise ValueError(f"min_8bit_size must be at least 1, got {min_8bit_size}")
        self.min_8bit_size = min_8bit_size
        self.overrides = {pattern: dict(values) for pattern, values in (overrides or {}).items()}
        for pattern, values in self.overrides.items():
            for key, value in values.items():
                _check_override(pattern, key, value)
        self._layouts = layouts or {}
        self._settings: dict[Tensor, TensorSettings] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        if self._layouts and not any(tensor in self._layouts for tensor in self._settings):
            raise ValueError(
                "none of the parameters is in layouts: they belong to another model, or were read"
                " before it was wrapped (refuse.layout)"
            )
        names = [param.fqn for settings in self._settings.values() for param in settings.layout.params]
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"the override '{pattern}' matches none of the {len(names)} parameters"
                    " (an unwrapped model has names only if the optimizer is given"
                    " model.named_parameters()) (refuse.override)"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; in addition every new tensor's layout and settings are resolved."""
        for key in ("optim_bits", "min_8bit_size"):
            if key in param_group:
                raise ValueError(
                    f"'{key}' has no effect in a param group: use overrides={{name: ...}} (refuse.override)"
                )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for key in named_state.HYPERPARAMETERS:
                _check_hyperparameter(key, group[key])
            number = len(self.param_groups) - 1
            unnamed = [f"param.{number}.{position}" for position in range(len(group["params"]))]
            names = group.get("param_names") or unnamed
            settings = {
                tensor: self._resolve(tensor, name)
                for tensor, name in zip(group["params"], names, strict=True)
            }
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._settings.update(settings)
        self._forget_state(settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; `closure` as in torch.

        Collective: every rank that shares a parameter must call it.

        Raises `RuntimeError`, before anything changed, if a gradient has another dtype than its
        parameter (`refuse.gradient-dtype`), an unsharded shape, as right after a backward in `no_sync`
        (`refuse.unsharded-gradient`), or is sparse (`refuse.sparse-gradient`). What one rank alone must
        refuse is raised on those too that exchange gradients with it (`refuse.missing-gradient` is
        found so); others learn of it when it stops.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state by name, see `named_state.full_state_dict`. Collective."""
        return named_state.full_state_dict(self, rank0_only=rank0_only)

    def load_full_state_dict(self, full: Mapping[str, Any]) -> None:
        """Replace all state by what `full_state_dict` returned, see `named_state.load_full_state_dict`.

        Collective. The wrapping, number of ranks, strategy and `use_orig_params` may be others.
        """
        named_state.load_full_state_dict(self, full)

    def named_params(self) -> Iterator[NamedParam]:
        """Every original parameter, with its effective hyperparameters, in param group order."""
        for group in self.param_groups:
            for tensor in group["params"]:
                yield from self._named_params_of(group, tensor)

    def params_by_tensor(self) -> dict[Tensor, list[NamedParam]]:
        """The original parameters in each tensor."""
        return {
            tensor: self._named_params_of(group, tensor)
            for group in self.param_groups
            for tensor in group["params"]
        }

    def _named_params_of(self, group: Mapping[str, Any], tensor: Tensor) -> list[NamedParam]:
        settings = self._settings[tensor]
        found = []
        for index, param in enumerate(settings.params):
            values = {**group, **dict(param.overrides)}
            hyper = {key: _plain(values[key]) for key in named_state.HYPERPARAMETERS}
            found.append(NamedParam(tensor, settings.layout, index, param.is_8bit, hyper))
        return found

    def step_count(self, param: NamedParam) -> int:
        """How often this rank has updated `param`; 0 where it holds nothing of it."""
        steps: list[int] = self.state[param.tensor]["steps"]
        return steps[param.index]

    def hyperparameter_conflict(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Why the param groups cannot be set to what was `saved` by name, if they cannot."""
        for group in self.param_groups:
            for key in named_state.HYPERPARAMETERS:
                names = self._saved_values(group, key, saved)
                if len(names) > 1:
                    (one, first), (other, second) = list(names.items())[:2]
                    return (
                        f"'{first}' and '{second}' were saved with {key} {one} and {other}, but share a"
                        f" param group here: give one of them an override of {key}"
                    )
        return None

    def restore_hyperparameters(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the param groups to what was `saved` by name; overrides stay as they are."""
        for group in self.param_groups:
            for key in named_state.HYPERPARAMETERS:
                for value in self._saved_values(group, key, saved):
                    if isinstance(group[key], Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = value

    def _saved_values(
        self, group: Mapping[str, Any], key: str, saved: Mapping[str, Mapping[str, Any]]
    ) -> dict[Any, str]:
        """The different values of `key` that the group's parameters were saved with, and one name each."""
        found: dict[Any, str] = {}
        for tensor in group["params"]:
            settings = self._settings[tensor]
            for param, setting in zip(settings.layout.params, settings.params, strict=True):
                if param.fqn in saved and key not in dict(setting.overrides):
                    value = saved[param.fqn][key]
                    found.setdefault(tuple(value) if isinstance(value, list) else value, param.fqn)
        return found

    def needed_range(self, param: NamedParam) -> tuple[int, int]:
        """The elements of `param` whose state this rank keeps, in whole blocks."""
        raise NotImplementedError

    def read_state(self, param: NamedParam, start: int, end: int) -> State:
        """The state of elements `start..end` of `param`, in whole blocks: views."""
        raise NotImplementedError

    def write_states(self, states: States) -> None:
        """Replace all state by the step, and the state of `needed_range`, of each parameter."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What torch's own checkpointing can flatten and split, see `stock`. Collective only if FSDP's is."""
        packed = super().state_dict()
        packed["state"] = {
            number: stock.pack(self, tensor, self._named_params_of(group, tensor))
            for group, saved in zip(self.param_groups, packed["param_groups"], strict=True)
            for tensor, number in zip(group["params"], saved["params"], strict=True)
            if tensor.requires_grad or any(self.state[tensor]["steps"])
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace state and param groups by what `state_dict` returned, perhaps resharded by FSDP.

        Collective over the ranks that share parameters. Raises `CheckpointError` on all of them, with
        nothing changed, if it does not fit (`refuse.checkpoint`).
        """
        packed: dict[Tensor, stock.Packed] = {}
        problem = named_state.first_problem(lambda: self._match(state_dict, packed))
        named_state.agree(problem, named_state.groups_of(self))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._forget_state(self._settings)
        self._write_packed(packed)

    def _match(self, state_dict: Mapping[str, Any], packed: dict[Tensor, stock.Packed]) -> str | None:
        """Put the state in `state_dict` into `packed`, by tensor; or say why it is not this optimizer's."""
        if stock.is_native(state_dict):
            return (
                "the checkpoint is native bitsandbytes state: convert it with"
                " checkpoint.from_bitsandbytes and use load_full_state_dict"
            )
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            return f"the checkpoint has param groups of {saved_sizes} tensors, this optimizer of {sizes}"
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for tensor, number in zip(group["params"], saved["params"], strict=True):
                if state_dict["state"].get(number):
                    packed[tensor] = state_dict["state"][number]
                    params = self._named_params_of(group, tensor)
                    problem = stock.problem(params, tensor, packed[tensor])
                    if problem is not None:
                        return problem
        return None

    def _forget_state(self, tensors: Iterable[Tensor]) -> None:
        """As if `tensors` had never been updated.

        Steps are there all the same. It keeps torch.distributed.checkpoint, which looks for any state at
        all, from making a dummy step of its own (`_init_optim_state` in its state_dict.py).
        """
        for tensor in tensors:
            self.state[tensor] = {"steps": [0] * len(self._settings[tensor].params)}

    def _write_packed(self, packed: dict[Tensor, stock.Packed]) -> None:
        """Replace all state by this rank's elements of it, and fetch what else it needs. Collective."""
        raise NotImplementedError

    def _update(self) -> None:
        """Enter the collectives, raise if any rank has a problem, else update."""
        raise NotImplementedError

    def _takes_part(self, tensor: Tensor) -> bool:
        """Whether `tensor` may be updated: the same on every rank that shares it.

        A frozen parameter has nothing to exchange. Where nothing is shared, a gradient is
        reason enough, as in any optimizer.
        """
        return tensor.requires_grad or self._settings[tensor].layout.num_ranks == 1

    def _problems(self) -> dict[Tensor, str]:
        """The gradients of this rank that cannot be used, and why."""
        return {
            tensor: problem
            for tensor, settings in self._settings.items()
            if (problem := _gradient_problem(tensor, settings.layout)) is not None
        }

    def _status(self, tensor: Tensor, problems: Mapping[Tensor, str]) -> int:
        if problems:  # with any gradient: whoever shares something with this rank must not go on
            return REFUSED
        return NO_GRADIENT if tensor.grad is None else GRADIENT

    def _name(self, tensor: Tensor) -> str:
        return _name(self._settings[tensor].layout)

    def _hyperparameters(self, group: Mapping[str, Any], tensor: Tensor) -> list[Hyperparameters]:
        """Those of each original parameter of `tensor`: its group's, unless overridden by name."""
        plain = _hyperparameters(group)
        return [
            _hyperparameters({**group, **dict(param.overrides)}) if param.overrides else plain
            for param in self._settings[tensor].params
        ]

    def _resolve(self, tensor: Tensor, name: str) -> TensorSettings:
        """The layout of `tensor`, checked against it, and the settings of its parameters."""
        if isinstance(tensor, DTensor):
            raise TypeError(f"parameter '{name}' is a DTensor: only FSDP1 is supported (refuse.dtensor)")
        layout = self._layouts.get(tensor)
        if layout is None:
            if is_fsdp_parameter(tensor):
                raise ValueError(
                    f"parameter '{name}' of {tensor.numel()} elements is flattened by FSDP1 but not in"
                    " layouts: pass layouts=refimpl.read_layouts(model), read after wrapping"
                    " (refuse.no-metadata)"
                )
            whole = OriginalParam(clean_name(name), tuple(tensor.shape))
            layout = ShardLayout((whole,), (0, whole.numel))
        if layout.shard_numel != tensor.numel():
            raise ValueError(
                f"the layout of {_name(layout)} has {layout.shard_numel} local elements but the"
                f" tensor has {tensor.numel()}: read the layouts again, after wrapping (refuse.layout)"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"parameter {_name(layout)} has strides {tensor.stride()}: 8-bit blocks follow"
                " row-major order, make it contiguous first (refuse.memory-order)"
            )
        return TensorSettings(layout, tuple(self._resolve_param(param) for param in layout.params))

    def _resolve_param(self, param: OriginalParam) -> ParamSettings:
        chosen: dict[str, Any] = {}
        chosen_by: dict[str, str] = {}
        for pattern, values in self.overrides.items():
            if not fnmatchcase(param.fqn, pattern):
                continue
            for key, value in values.items():
                value = tuple(value) if key == "betas" else value
                if chosen.setdefault(key, value) != value:
                    raise ValueError(
                        f"the overrides '{chosen_by[key]}' and '{pattern}' disagree on {key} of"
                        f" '{param.fqn}': {chosen[key]} and {value} (refuse.override)"
                    )
                chosen_by.setdefault(key, pattern)
        bits = chosen.pop("optim_bits", 8)
        return ParamSettings(
            optim_bits=bits,
            is_8bit=is_state_8bit(param.numel, self.min_8bit_size, bits),
            overrides=tuple(sorted(chosen.items())),
        )


def _name(layout: ShardLayout) -> str:
    if not layout.params:
        return "a tensor of padding alone"
    more = f" and {len(layout.params) - 1} more in its flat parameter" if len(layout.params) > 1 else ""
    return f"'{layout.params[0].fqn}'{more}"


@contextmanager
def explaining_failure(what: str) -> Iterator[None]:
    """Say with a collective's failure, a timeout for one, what users have got wrong before."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed: {error}\nAll ranks must call step(), or none. torch.amp.GradScaler may skip"
            " it on one rank alone: use ShardedGradScaler from"
            " torch.distributed.fsdp.sharded_grad_scaler"
        ) from error


def raise_own(problems: Mapping[Tensor, str]) -> None:
    """Raise the first of this rank's problems, if it has any."""
    if problems:
        raise RuntimeError(next(iter(problems.values())))


def raise_others(name: str, statuses: Mapping[int, int]) -> None:
    """Raise if a rank that shares tensor `name` refuses, or some have a gradient and some have not."""
    refused = sorted(rank for rank, status in statuses.items() if status == REFUSED)
    if refused:
        raise RuntimeError(
            f"rank {refused[0]} refused this step, its own error says why; this rank, which shares"
            f" {name} with it, has changed nothing"
        )
    absent = sorted(rank for rank, status in statuses.items() if status == NO_GRADIENT)
    if absent and len(absent) < len(statuses):
        raise RuntimeError(
            f"rank {absent[0]} has no gradient for {name} where other ranks have one: under FSDP1 all"
            " have it or none; it was set to None on some ranks only (refuse.missing-gradient)"
        )


def _gradient_problem(tensor: Tensor, layout: ShardLayout) -> str | None:
    grad = tensor.grad
    if grad is None or (
        grad.layout == torch.strided and grad.dtype == tensor.dtype and grad.shape == tensor.shape
    ):
        return None
    name = _name(layout)
    if grad.layout != torch.strided:
        return f"the gradient of {name} is sparse: the kernels take dense ones (refuse.sparse-gradient)"
    if grad.dtype != tensor.dtype:
        return (
            f"the gradient of {name} is {grad.dtype} but the parameter is {tensor.dtype}: the kernels"
            " read both as one dtype; do not use keep_low_precision_grads (refuse.gradient-dtype)"
        )
    return (
        f"the gradient of {name} has shape {tuple(grad.shape)} but the parameter"
        f" {tuple(tensor.shape)}: it is not sharded, as after a backward in no_sync(); run the last"
        " backward before step() outside no_sync() (refuse.unsharded-gradient)"
    )


def _plain(value: Any) -> Any:
    """A hyperparameter as plain numbers, where a scheduler has made a tensor or numpy number of it."""
    if isinstance(value, (tuple, list)):
        return tuple(float(each) for each in value)
    return float(value)


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    beta1, beta2 = values["betas"]
    return Hyperparameters(float(values["lr"]), beta1, beta2, values["eps"], values["weight_decay"])


def _check_override(pattern: str, key: str, value: Any) -> None:
    if key not in OVERRIDE_KEYS:
        raise ValueError(
            f"the override '{pattern}' sets '{key}'; it may set {', '.join(OVERRIDE_KEYS)} (refuse.override)"
        )
    if key != "optim_bits":
        _check_hyperparameter(key, value, f" in the override '{pattern}'")
    elif value not in (8, 32):
        raise ValueError(f"optim_bits must be 8 or 32, got {value!r} in the override '{pattern}'")


def _check_hyperparameter(key: str, value: Any, where: str = "") -> None:
    if key == "betas":
        valid = len(value) == 2 and all(0.0 <= beta < 1.0 for beta in value)
        accepted = "two numbers from 0 up to, not including, 1"
    else:
        valid = math.isfinite(value) and value >= 0.0
        accepted = "a finite number of at least 0"
    if not valid:
        raise ValueError(f"{key} must be {accepted}, got {value!r}{where} (refuse.hyperparameter)")
