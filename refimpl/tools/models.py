"""Models to audit, from the command line: built on the meta device, never downloaded."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from .audit import ONE_UNIT, PER_LAYER


class TargetError(ValueError):
    """A model or wrapping that was named and cannot be had; the message is one sentence."""


def load(target: str) -> nn.Module:
    """The model that `target` names, on the meta device.

    Args:
        target: `package.module:function`, a function without arguments that returns a module; the path of a
            Hugging Face `config.json`; or the name of a `transformers` model or configuration class.

    Raises `TargetError`.
    """
    with torch.device("meta"):
        if ":" in target:
            return _from_function(target)
        if target.endswith(".json"):
            return _from_config_file(Path(target))
        return _from_class(target)


def _from_function(target: str) -> nn.Module:
    module_name, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise TargetError(f"cannot import '{module_name}': {error}") from None
    except AttributeError:
        raise TargetError(f"'{module_name}' has no '{name}'") from None
    model = function()
    if not isinstance(model, nn.Module):
        raise TargetError(f"'{target}' returned a {type(model).__name__}, not a module")
    return model


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise TargetError("this needs transformers: pip install 'refimpl[audit]'") from None


def _from_config_file(path: Path) -> nn.Module:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read the configuration {path}: {error}") from None
    return from_config(values)


def from_config(values: Mapping[str, Any]) -> nn.Module:
    """A `transformers` model from the contents of its `config.json`.

    The class is that of `architectures`, else the bare model of its `model_type`.
    """
    transformers = _transformers()
    values = dict(values)
    try:
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except (KeyError, ValueError) as error:
        raise TargetError(f"transformers does not know this configuration: {error}") from None
    names = values.get("architectures") or []
    model_class = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        model: nn.Module = model_class(config) if model_class else transformers.AutoModel.from_config(config)
    return model


def _from_class(name: str) -> nn.Module:
    transformers = _transformers()
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        model: Any = found
        return model(model.config_class())  # type: ignore[no-any-return]
    if isinstance(found, type) and issubclass(found, transformers.PretrainedConfig):
        bare: nn.Module = transformers.AutoModel.from_config(found())
        return bare
    raise TargetError(
        f"'{name}' is not a model or configuration class of transformers {transformers.__version__}; give"
        " package.module:function, the path of a config.json, or such a class"
    )


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """`model` with PEFT's LoRA adapters of this rank on all its linear layers, all else frozen."""
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise TargetError("--lora needs peft: pip install 'refimpl[audit]'") from None
    config = peft.LoraConfig(r=rank, target_modules="all-linear")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of one library about another
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def wrapping(model: nn.Module, text: str) -> Any:
    """What `--wrap` asks for, as `audit` takes it.

    `one-unit`; `per-layer`; `per-block`, the classes that the model says must not be split, else those
    that fill a `ModuleList`; `per-tensor`, LoRA adapters as PEFT's own policy makes them, and blocks;
    `size:NUMEL`; or class names with commas between them.

    Raises `TargetError`.
    """
    if text in ("one-unit", "per-layer"):
        return {"one-unit": ONE_UNIT, "per-layer": PER_LAYER}[text]
    if text.startswith("size:"):
        numel = text.removeprefix("size:").replace("_", "")
        if not numel.isdecimal():
            raise TargetError(f"--wrap size:NUMEL takes a whole number, got '{text}'")
        return partial(size_based_auto_wrap_policy, min_num_params=int(numel))
    if text in ("per-block", "per-tensor"):
        classes = block_classes(model)
        if text == "per-block":
            return ModuleWrapPolicy(classes)
        return _per_tensor(model, classes)
    wanted = text.split(",")
    known = {type(module).__name__: type(module) for module in model.modules()}
    for name in wanted:
        if name not in known:
            raise TargetError(f"the model has no module of class '{name}'; it has {', '.join(sorted(known))}")
    return ModuleWrapPolicy({known[name] for name in wanted})


def block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of the model's repeated blocks."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    if not classes:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        classes = {type(child) for each in lists for child in each if len(each) > 1}
    if not classes:
        raise TargetError("the model has no repeated blocks: name the classes to wrap")
    return classes


def _per_tensor(model: nn.Module, classes: set[type[nn.Module]]) -> list[str]:
    """Each trainable leaf a unit, and each block: what PEFT's `fsdp_auto_wrap_policy` wraps."""

    def is_unit(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        leaf = not list(module.children()) and weight is not None and weight.requires_grad
        return bool(leaf) or type(module) in classes

    return [name for name, module in model.named_modules() if name and is_unit(module)]
