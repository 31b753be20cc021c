"""Is my model affected, and by how much? What native AdamW8bit does to it, without running it.

Geometry alone: which tensors FSDP1 would hand to the optimizer on each rank, what native bitsandbytes would
decide for each (`numel < min_8bit_size` of that tensor, blocks from its element 0), and what it decides for
the unwrapped model. A module on the meta device will do, and a world of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy

from ..fsdp import is_fsdp_parameter, read_layouts, wrapped_modules
from ..layout import BLOCK_SIZE, OriginalParam, ShardLayout, block_end, block_start, num_blocks

UNSHARDED = ("NO_SHARD",)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
ONE_UNIT = "one unit"
PER_LAYER = "per layer"

Array = Any  # of integers, one element a segment


@dataclass(frozen=True)
class ParamAudit:
    """What native AdamW8bit does to one original parameter, over all ranks."""

    fqn: str
    shape: tuple[int, ...]
    unwrapped: str
    """The dtype of its state on the unwrapped model, which is also that of the repairs."""
    native: tuple[str, ...]
    """The dtypes of its state over the ranks that hold a part of it: two if ranks disagree."""
    elements_of_other_precision: int
    """Elements whose state has another precision than unwrapped."""
    elements_in_other_blocks: int
    """Elements whose state is 8-bit in both, but shares its absmax with other elements."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def changes_precision(self) -> bool:
        """Whether any element's state has another precision than unwrapped."""
        return self.elements_of_other_precision > 0

    @property
    def ranks_disagree(self) -> bool:
        """Whether its state is FP32 on one rank and 8-bit on another."""
        return len(self.native) > 1

    @property
    def blocks_move(self) -> bool:
        """Whether any block that is 8-bit in both has other elements than unwrapped."""
        return self.elements_in_other_blocks > 0


@dataclass(frozen=True)
class TensorAudit:
    """One tensor that the optimizer sees, and the state native AdamW8bit allocates for it on one rank."""

    params: tuple[str, ...]
    numel: int
    dtype: str
    absmax_numel: int


@dataclass(frozen=True)
class Audit:
    """The audit of a model under one wrapping. Arrays have one element a rank."""

    wrapping: str
    world_size: int
    strategy: str
    use_orig_params: bool
    min_8bit_size: int
    units: tuple[ShardLayout, ...]
    frozen: frozenset[str]
    """Parameters that lie in these units but have no state."""
    params: tuple[ParamAudit, ...]
    native_bytes: Array
    """State bytes of native AdamW8bit, padding included."""
    original_bytes: Array
    """State bytes of the sharded repair: by original parameters, cut blocks complete."""
    cut_blocks: Array
    """Cut blocks of 8-bit state that the rank touches."""
    sent_elements: Array
    """Edge gradient elements that the sharded repair sends a step."""

    def native_tensors(self, rank: int) -> list[TensorAudit]:
        """The tensors of one rank and the native state of each; a tensor without elements has none."""
        found = []
        for unit in self.units:
            here = rank if unit.num_ranks > 1 else 0
            for fqns, numel in _tensors(unit, here, self.use_orig_params):
                if self.frozen.issuperset(fqns):
                    continue
                is_8bit = numel >= self.min_8bit_size
                absmax = num_blocks(numel) if is_8bit else 0
                found.append(TensorAudit(fqns, numel, _dtype(is_8bit), absmax))
        return found

    def summary(self) -> dict[str, Any]:
        """Totals, as plain numbers."""
        affected = [param for param in self.params if param.changes_precision or param.blocks_move]
        return {
            "wrapping": self.wrapping,
            "world_size": self.world_size,
            "strategy": self.strategy,
            "use_orig_params": self.use_orig_params,
            "min_8bit_size": self.min_8bit_size,
            "units": len(self.units),
            "params": len(self.params),
            "elements": sum(param.numel for param in self.params),
            "params_affected": len(affected),
            "params_of_other_precision": sum(param.changes_precision for param in self.params),
            "elements_of_other_precision": sum(p.elements_of_other_precision for p in self.params),
            "params_whose_ranks_disagree": sum(param.ranks_disagree for param in self.params),
            "params_whose_blocks_move": sum(param.blocks_move for param in self.params),
            "elements_in_other_blocks": sum(p.elements_in_other_blocks for p in self.params),
            "largest_rank": {
                "native_state_bytes": int(self.native_bytes.max()),
                "original_state_bytes": int(self.original_bytes.max()),
                "cut_blocks": int(self.cut_blocks.max()),
                "edge_elements_sent_a_step": int(self.sent_elements.max()),
            },
        }


def audit(
    model_or_shapes: nn.Module | Mapping[str, Sequence[int]],
    wrapping: Any = ONE_UNIT,
    world_size: int | None = None,
    strategy: str = "FULL_SHARD",
    use_orig_params: bool = False,
    min_8bit_size: int = 4096,
    *,
    forward_itemsize: int = 4,
    wrapping_name: str | None = None,
) -> Audit:
    """What native AdamW8bit would do to a model under FSDP1, by original parameter and by rank.

    Args:
        model_or_shapes: an unwrapped module, on the meta device or live; shapes by FQN; or a model that is
            wrapped by FSDP1 already, whose wrapping, world size and `use_orig_params` are then read from it.
        wrapping: a policy as for FSDP1's `auto_wrap_policy`; `"one unit"`; `"per layer"`, every module that
            has parameters of its own; or the names of the modules that are units beside the root.
        world_size: ranks that a unit is sharded over (under HYBRID_SHARD, of one shard group).
        strategy: a `ShardingStrategy` by name.
        use_orig_params: as for FSDP1.
        min_8bit_size: as for AdamW8bit.
        forward_itemsize: bytes of one element in the forward pass, 2 under bf16 mixed precision: with
            `use_orig_params=True`, FSDP1 aligns parameters to 16 bytes of it.
        wrapping_name: what to call the wrapping in tables.

    Raises `ValueError` for a nonsensical world size or threshold, an unknown strategy or module name.
    """
    if min_8bit_size < 1:
        raise ValueError(f"min_8bit_size must be at least 1, got {min_8bit_size}")
    if isinstance(model_or_shapes, nn.Module) and _is_wrapped(model_or_shapes):
        return _audit_wrapped(model_or_shapes, min_8bit_size)
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got '{strategy}'")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    ranks = 1 if strategy in UNSHARDED else world_size
    align = 16 // forward_itemsize if use_orig_params else 0
    members = [each for each in units_of(model_or_shapes, wrapping, use_orig_params) if each]
    if not use_orig_params:
        members = [each for each in members if _is_trainable(each)]
    units = tuple(lay_out(each, ranks, align) for each in members)
    frozen = frozenset(member.fqn for each in members for member in each if not member.trainable)
    return _audit_units(
        units, frozen, wrapping_name or _name_of(wrapping), ranks, strategy, use_orig_params, min_8bit_size
    )


class Member(NamedTuple):
    """One parameter of a unit."""

    fqn: str
    shape: tuple[int, ...]
    trainable: bool = True


def _is_trainable(members: Sequence[Member]) -> bool:
    """Whether a unit has optimizer state. Refuses, as FSDP1 does, to flatten frozen with trainable."""
    trainable = [member for member in members if member.trainable]
    if trainable and len(trainable) < len(members):
        frozen = next(member for member in members if not member.trainable)
        raise ValueError(
            f"'{frozen.fqn}' is frozen and '{trainable[0].fqn}' is not, and both are in one unit: FSDP1"
            " refuses that unless use_orig_params=True"
        )
    return bool(trainable)


def units_of(
    model_or_shapes: nn.Module | Mapping[str, Sequence[int]], wrapping: Any, use_orig_params: bool
) -> list[list[Member]]:
    """The members of every unit as (FQN, shape), in flat order; the root unit last, as FSDP1 builds them."""
    if isinstance(model_or_shapes, nn.Module):
        return _units_of_module(model_or_shapes, wrapping, use_orig_params)
    names = _unit_names(model_or_shapes, wrapping)
    members: dict[str, list[Member]] = {name: [] for name in names}
    for fqn, shape in model_or_shapes.items():
        inside = [name for name in names if name == "" or fqn.startswith(f"{name}.")]
        members[max(inside, key=len)].append(Member(fqn, tuple(shape)))
    return list(members.values())


def _unit_names(shapes: Mapping[str, Any], wrapping: Any) -> list[str]:
    """Names of unit modules, the root (an empty name) last."""
    if wrapping == ONE_UNIT:
        return [""]
    if wrapping == PER_LAYER:
        return [*dict.fromkeys(fqn.rpartition(".")[0] for fqn in shapes if "." in fqn), ""]
    if isinstance(wrapping, str) or not isinstance(wrapping, Iterable):
        raise ValueError(f"shapes cannot be wrapped by {wrapping!r}: name the modules that are units")
    names = list(wrapping)
    for name in names:
        if not any(fqn.startswith(f"{name}.") for fqn in shapes):
            raise ValueError(f"no parameter lies in a module '{name}'")
    return [*names, ""]


def _units_of_module(model: nn.Module, wrapping: Any, use_orig_params: bool) -> list[list[Member]]:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    if wrapping == ONE_UNIT:
        wrapping = ()
    if wrapping == PER_LAYER:
        chosen = {module for module in names if any(True for _ in module.parameters(recurse=False))}
    elif isinstance(wrapping, str):
        raise ValueError(f"wrapping must be a policy, '{ONE_UNIT}', '{PER_LAYER}' or names, got '{wrapping}'")
    elif isinstance(wrapping, Iterable):
        known = {name: module for module, name in names.items()}
        for name in wrapping:
            if name not in known:
                raise ValueError(f"the model has no module '{name}'")
        chosen = {known[name] for name in wrapping}
    by_name = isinstance(wrapping, Iterable)
    policy = CustomPolicy(lambda module: module in chosen) if by_name else wrapping
    taken: set[Any] = set()
    units = []
    for module in [*wrapped_modules(model, policy), model]:
        members: dict[nn.Parameter, Member] = {}
        for name, child in module.named_modules(prefix=names[module], remove_duplicate=False):
            for key, param in child.named_parameters(recurse=False):
                # A weight tied across units is flattened by each of them, except with
                # use_orig_params=True, which knows a parameter when it meets it again.
                mark = param if use_orig_params else (child, key)
                if mark not in taken or param in members:
                    taken.add(mark)
                    fqn = f"{name}.{key}".lstrip(".")
                    members.setdefault(param, Member(fqn, tuple(param.shape), param.requires_grad))
        units.append(list(members.values()))
    return units


def lay_out(members: Sequence[Member], ranks: int, align: int) -> ShardLayout:
    """One unit as FSDP1 lays it out: parameters end to end, aligned if `align`, in equal shards."""
    params, end = [], 0
    for fqn, shape, _ in members:
        start = end + (-end % align if align else 0)
        params.append(OriginalParam(fqn, shape, start))
        end = params[-1].flat_end
    shard = max(1, -(-end // ranks))
    return ShardLayout(tuple(params), range(0, shard * ranks + 1, shard))


def _is_wrapped(model: nn.Module) -> bool:
    return any(is_fsdp_parameter(param) for param in model.parameters())


def _audit_wrapped(model: nn.Module, min_8bit_size: int) -> Audit:
    """A model that FSDP1 has wrapped: its layouts are read, not computed."""
    layouts = {tensor: each for tensor, each in read_layouts(model).items() if tensor.requires_grad}
    orig = not any(isinstance(layout.bounds, range) for layout in layouts.values())
    ranks = max(layout.num_ranks for layout in layouts.values())
    strategies = sorted({unit.sharding_strategy.name for unit in FSDP.fsdp_modules(model)})
    units, strategy = tuple(layouts.values()), ", ".join(strategies)
    return _audit_units(units, frozenset(), "as wrapped", ranks, strategy, orig, min_8bit_size)


def _audit_units(
    units: Sequence[ShardLayout],
    frozen: frozenset[str],
    wrapping: str,
    ranks: int,
    strategy: str,
    use_orig_params: bool,
    min_8bit_size: int,
) -> Audit:
    params: list[ParamAudit] = []
    totals = {name: np.zeros(ranks, dtype=np.int64) for name in ("native", "original", "cuts", "sent")}
    for unit in units:
        table = _Segments(unit, frozen, use_orig_params, min_8bit_size)
        params += table.params()
        for name, values in table.by_rank(ranks).items():
            totals[name] += values if unit.num_ranks > 1 else values[0]  # unsharded: on every rank
    return Audit(
        wrapping,
        ranks,
        strategy,
        use_orig_params,
        min_8bit_size,
        tuple(units),
        frozen,
        tuple(params),
        totals["native"],
        totals["original"],
        totals["cuts"],
        totals["sent"],
    )


class _Segments:
    """All segments of one unit on all ranks, as arrays: a world of 16,384 ranks at once."""

    def __init__(
        self, unit: ShardLayout, frozen: frozenset[str], use_orig_params: bool, min_8bit_size: int
    ) -> None:
        self.unit, self.orig, self.threshold = unit, use_orig_params, min_8bit_size
        bounds = np.asarray(unit.bounds, dtype=np.int64)
        starts = np.array([param.flat_start for param in unit.params], dtype=np.int64)
        ends = np.array([param.flat_end for param in unit.params], dtype=np.int64)
        cuts = np.unique(np.concatenate([bounds, starts, ends]))
        low, high = cuts[:-1], cuts[1:]
        index = np.searchsorted(starts, low, side="right") - 1
        inside = (index >= 0) & (low < ends[np.maximum(index, 0)])
        self.trainable = np.array([param.fqn not in frozen for param in unit.params])
        inside &= self.trainable[np.maximum(index, 0)]
        self.index, low, high = index[inside], low[inside], high[inside]
        self.rank = np.searchsorted(bounds, low, side="right") - 1
        self.start: Array = low - starts[self.index]
        self.end: Array = high - starts[self.index]
        self.numel = (ends - starts)[self.index]
        self.shard_start = low - bounds[self.rank]
        self.shard_numel = (bounds[1:] - bounds[:-1])[self.rank]
        self.bounds = bounds
        self.native_8bit = self._local_numel() >= min_8bit_size
        self.unwrapped_8bit = self.numel >= min_8bit_size

    def _local_numel(self) -> Array:
        """Of the tensor that native AdamW8bit is handed: the part of the parameter, or the whole shard."""
        return self.end - self.start if self.orig else self.shard_numel

    def params(self) -> list[ParamAudit]:
        """Every parameter of the unit, over all ranks."""
        count = len(self.unit.params)
        other = np.where(self.native_8bit != self.unwrapped_8bit, self.end - self.start, 0)
        precision = np.bincount(self.index, other, count).astype(np.int64)
        moved = np.bincount(self.index, self._moved(), count).astype(np.int64)
        is_8bit = np.bincount(self.index, self.native_8bit, count)
        is_32bit = np.bincount(self.index, ~self.native_8bit, count)
        return [
            ParamAudit(
                param.fqn,
                tuple(param.shape),
                _dtype(param.numel >= self.threshold),
                tuple(_dtype(bool(each)) for each in (0, 1) if (is_32bit, is_8bit)[each][number]),
                int(precision[number]),
                int(moved[number]),
            )
            for number, param in enumerate(self.unit.params)
            if self.trainable[number]
        ]

    def _moved(self) -> Array:
        """Elements of each segment that are 8-bit in both, in a native block of other elements."""
        tensor_start = np.zeros_like(self.start) if self.orig else self.shard_start
        in_step = (tensor_start - self.start) % BLOCK_SIZE == 0
        head = -self.start % BLOCK_SIZE  # elements up to the first block that begins here
        tail = np.where(self._tail_is_whole(), 0, self.end % BLOCK_SIZE)
        length = self.end - self.start
        moved = np.where(in_step, np.minimum(head + tail, length), length)
        return np.where(self.native_8bit & self.unwrapped_8bit, moved, 0)

    def _tail_is_whole(self) -> Array:
        """Whether the last block ends where the parameter does, with nothing but padding behind it.

        Padding in a native block is zero, and changes no absmax.
        """
        complete = self.end == self.numel
        if self.orig:
            return complete
        following = np.full(len(self.index), False)
        following[:-1] = (self.rank[1:] == self.rank[:-1]) & (
            self.shard_start[1:] // BLOCK_SIZE
            == (self.shard_start + self.end - self.start - 1)[:-1] // BLOCK_SIZE
        )
        return complete & ~following

    def by_rank(self, ranks: int) -> dict[str, Array]:
        """Bytes, cut blocks and traffic of each rank."""
        total = self._total(ranks)
        start, end = self.start, self.end
        whole = np.minimum(block_end(end), self.numel) - block_start(start)
        original = state_bytes(np.where(self.unwrapped_8bit, whole, end - start), self.unwrapped_8bit)
        head = self.unwrapped_8bit & (start % BLOCK_SIZE != 0)
        tail = self.unwrapped_8bit & (end % BLOCK_SIZE != 0) & (end != self.numel)
        same = head & tail & (start // BLOCK_SIZE == end // BLOCK_SIZE)
        cuts = head.astype(np.int64) + tail - same
        sent = self._sent(head, tail, same)
        return {
            "native": self._native_bytes(ranks),
            "original": total(original),
            "cuts": total(cuts),
            "sent": total(sent),
        }

    def _total(self, ranks: int) -> Any:
        return lambda values: np.bincount(self.rank, values, ranks).astype(np.int64)

    def _native_bytes(self, ranks: int) -> Array:
        if self.orig:
            local = self._local_numel()
            return self._total(ranks)(state_bytes(local, local >= self.threshold))
        shards = self.bounds[1:] - self.bounds[:-1]
        padded = np.zeros(ranks, dtype=np.int64)
        padded[: len(shards)] = state_bytes(shards, shards >= self.threshold)
        return padded

    def _sent(self, head: Array, tail: Array, same: Array) -> Array:
        """Own elements of each cut block, once for every other rank that touches it."""
        starts = np.array([param.flat_start for param in self.unit.params], dtype=np.int64)[self.index]

        def others(position: Array) -> Array:
            block = block_start(position)
            block_end = np.minimum(block + BLOCK_SIZE, self.numel)
            lowest = np.searchsorted(self.bounds, starts + block, side="right") - 1
            highest = np.searchsorted(self.bounds, starts + block_end, side="left") - 1
            return highest - lowest

        head_end = np.minimum(self.end, block_end(self.start))
        tail_start = np.maximum(self.start, block_start(self.end))
        sent_head = np.where(head, (head_end - self.start) * others(self.start), 0)
        sent_tail = np.where(tail & ~same, (self.end - tail_start) * others(self.end), 0)
        return sent_head + sent_tail


def state_bytes(numel: Array, is_8bit: Array) -> Array:
    """Bytes that native AdamW8bit allocates for tensors of `numel` elements."""
    return np.where(is_8bit, 2 * numel + 8 * num_blocks(numel), 8 * numel)


def _tensors(unit: ShardLayout, rank: int, orig: bool) -> Iterable[tuple[tuple[str, ...], int]]:
    """What the optimizer sees of one unit on one rank: names and local elements of each tensor."""
    if not orig:
        yield tuple(param.fqn for param in unit.params), unit.bounds[rank + 1] - unit.bounds[rank]
        return
    held = {segment.index: segment for segment in unit.segments_of(rank)}
    for index, param in enumerate(unit.params):
        numel = held[index].param_end - held[index].param_start if index in held else 0
        yield (param.fqn,), numel


def _dtype(is_8bit: bool) -> str:
    return "uint8" if is_8bit else "float32"


def _name_of(wrapping: Any) -> str:
    if isinstance(wrapping, str):
        return wrapping
    if isinstance(wrapping, Iterable):
        return "named modules"
    inner = getattr(wrapping, "func", wrapping)
    return getattr(inner, "__name__", type(wrapping).__name__)


# ---- for reading


def table(results: Sequence[Audit], top: int = 0) -> str:
    """One line a result, and the `top` most affected parameters of the last, for a terminal."""
    rows = [_row(result.summary()) for result in results]
    lines = _aligned([COLUMNS, *rows])
    if top:
        lines += ["", *_aligned([PARAM_COLUMNS, *_param_rows(results[-1], top)])]
    return "\n".join([*lines, "", *NOTES])


def markdown(results: Sequence[Audit]) -> str:
    """The same lines as a table to paste into an issue."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(_row(result.summary()) for result in results)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", *NOTES])


COLUMNS = [
    "wrapping",
    "ranks",
    "use_orig_params",
    "parameters",
    "other precision",
    "elements",
    "ranks disagree",
    "blocks move",
    "elements",
    "state MB",
    "by original",
    "sent B/step",
]
PARAM_COLUMNS = ["parameter", "elements", "unwrapped", "native", "other precision", "other blocks"]
NOTES = [
    "other precision: parameters, and elements, whose AdamW8bit state is FP32 instead of 8-bit or 8-bit",
    "instead of FP32, compared with the unwrapped model. ranks disagree: FP32 on one rank, 8-bit on another.",
    "blocks move: 8-bit all the same, but quantized together with other elements. state MB: largest rank,",
    "native, and by original parameters. sent: edge gradients that keep blocks whole.",
]


def _row(summary: Mapping[str, Any]) -> list[str]:
    rank = summary["largest_rank"]
    return [
        summary["wrapping"],
        f"{summary['world_size']:,}",
        str(summary["use_orig_params"]),
        f"{summary['params']:,}",
        f"{summary['params_of_other_precision']:,}",
        f"{summary['elements_of_other_precision']:,}",
        f"{summary['params_whose_ranks_disagree']:,}",
        f"{summary['params_whose_blocks_move']:,}",
        f"{summary['elements_in_other_blocks']:,}",
        f"{rank['native_state_bytes'] / 1e6:,.1f}",
        f"{rank['original_state_bytes'] / 1e6:,.1f}",
        f"{4 * rank['edge_elements_sent_a_step']:,}",
    ]


def _param_rows(result: Audit, top: int) -> list[list[str]]:
    affected = sorted(
        (param for param in result.params if param.changes_precision or param.blocks_move),
        key=lambda param: -(param.elements_of_other_precision + param.elements_in_other_blocks),
    )
    return [
        [
            param.fqn,
            f"{param.numel:,}",
            param.unwrapped,
            " and ".join(param.native),
            f"{param.elements_of_other_precision:,}",
            f"{param.elements_in_other_blocks:,}",
        ]
        for param in affected[:top]
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
