"""The command line: `python -m refimpl reproduce`, `audit` or `bench`.

`reproduce` and `bench` run alone, starting ranks of their own, or under torchrun.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .tools import audit, bench, impact, models, reproduce
from .tools.world import World, choose_device, leave


class UsageError(Exception):
    """Something the caller asked for cannot be had: one line, exit status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is as it should be, 1 if not, 2 for bad usage."""
    options = _parse(arguments)
    if options.command in ("audit", "impact"):
        return (_audit if options.command == "audit" else _impact)(options)
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        status = _run_as_rank(options) if under_torchrun else _run(options)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"refimpl {options.command}: {error}", file=sys.stderr)
        return 2
    if under_torchrun:
        leave(status)
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="refimpl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("reproduce", help="show the fault of bitsandbytes #2080 and its repair")
    command.set_defaults(work=reproduce.report, render=reproduce.render, good=reproduce.is_as_expected)
    _add_common(command)
    command = commands.add_parser("bench", help="measure the step times of the repairs against native")
    command.set_defaults(render=bench.render, good=lambda result: True)
    command.add_argument(
        "--models", nargs="+", choices=bench.MODELS, default=["small", "medium", "odd", "large"]
    )
    command.add_argument("--rounds", type=_at_least_one, default=7, help="steps of each (default 7)")
    command.add_argument(
        "--played", action="store_true", help="play one of two ranks in one process: for a single GPU"
    )
    _add_common(command)
    _add_audit(commands)
    command = commands.add_parser("impact", help="audit public architectures at their published sizes")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    options = parser.parse_args(arguments)
    if options.command == "bench":
        options.work = partial(bench.run, options.models, options.rounds, options.played)
        options.ranks = 1 if options.played else options.ranks
    return options


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return int(text)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--ranks", type=int, help="ranks to start when not under torchrun (default 2)")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")


def _add_audit(commands: Any) -> None:
    command = commands.add_parser("audit", help="what native AdamW8bit would do to your model under FSDP1")
    command.add_argument("target", help="package.module:function, a config.json, or a transformers class")
    command.add_argument(
        "--wrap",
        default="per-block",
        help="one-unit, per-block (default), per-layer, per-tensor, size:NUMEL, or class names with commas",
    )
    command.add_argument("--world-size", default="2,8", help="numbers of ranks with commas (default 2,8)")
    command.add_argument("--use-orig-params", action="store_true")
    command.add_argument("--strategy", default="FULL_SHARD", choices=audit.STRATEGIES)
    command.add_argument("--min-8bit-size", type=_at_least_one, default=4096)
    command.add_argument("--lora", metavar="r=RANK", help="add LoRA adapters with peft, freeze the rest")
    command.add_argument("--bf16", action="store_true", help="bf16 mixed precision: other alignment")
    command.add_argument("--top", type=_at_least_one, default=10, help="parameters to list (default 10)")
    command.add_argument("--markdown", action="store_true", help="a table to paste into an issue")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")


def _audit(options: argparse.Namespace) -> int:
    try:
        sizes = [_world_size(text) for text in options.world_size.split(",")]
        model = models.load(options.target)
        if options.lora is not None:
            model = models.with_lora(model, _lora_rank(options.lora))
        wrapping = models.wrapping(model, options.wrap)
        results = []
        for size in sizes:
            if sys.stderr.isatty():
                print(f"auditing {size:,} ranks", file=sys.stderr)
            results.append(
                audit.audit(
                    model,
                    wrapping,
                    size,
                    options.strategy,
                    options.use_orig_params,
                    options.min_8bit_size,
                    forward_itemsize=2 if options.bf16 else 4,
                    wrapping_name=options.wrap,
                )
            )
        if options.json is not None:
            found = [{**each.summary(), "by_parameter": list(map(asdict, each.params))} for each in results]
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    except (UsageError, ValueError, OSError) as error:
        print(f"refimpl audit: {error}", file=sys.stderr)
        return 2
    print(audit.markdown(results) if options.markdown else audit.table(results, options.top))
    return 0


def _impact(options: argparse.Namespace) -> int:
    try:
        found = impact.impact()
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"refimpl impact: {error}", file=sys.stderr)
        return 2
    print(impact.markdown(found))
    return 0


def _world_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--world-size takes whole numbers of at least 1, got '{text}'")
    return int(text)


def _lora_rank(text: str) -> int:
    rank = text.removeprefix("r=")
    if not rank.isdecimal() or int(rank) < 1:
        raise UsageError(f"--lora takes r=RANK, a whole number of at least 1, got '{text}'")
    return int(rank)


def _run(options: argparse.Namespace) -> int:
    """Start the ranks ourselves."""
    size = 2 if options.ranks is None else options.ranks
    device = _check(options, size)
    with World(size, device=device, timeout=1800) as world:
        return _show(options, world.run(options.work)[0])


def _run_as_rank(options: argparse.Namespace) -> int:
    """Be one of the ranks that torchrun has started."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if options.ranks not in (None, size):
        raise UsageError(f"--ranks {options.ranks} contradicts torchrun, which started {size}")
    device = _check(options, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    if size < 2:
        raise UsageError(_too_few(size))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=5))
    result = options.work()
    return _show(options, result) if rank == 0 else 0


def _check(options: argparse.Namespace, local_size: int) -> str:
    """Find out what cannot work before any rank starts. The device to use."""
    if local_size < 2 and "WORLD_SIZE" not in os.environ and not getattr(options, "played", False):
        raise UsageError(_too_few(local_size))
    try:
        device = choose_device(local_size, options.device)
    except ValueError as error:
        raise UsageError(error) from None
    if options.json is not None and os.environ.get("RANK", "0") == "0":
        try:
            with open(options.json, "a"):
                pass
        except OSError as error:
            raise UsageError(f"cannot write {options.json}: {error.strerror}") from None
    return device


def _too_few(size: int) -> str:
    return f"needs at least 2 ranks, got {size}: with one, FSDP1 does not shard (NO_SHARD)"


def _show(options: argparse.Namespace, result: dict[str, Any]) -> int:
    print(options.render(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if options.good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
