"""What each rule of the contract measures, on any optimizer: the material of the conformance matrix.

Every implementation trains under FSDP1 on real ranks and is compared with ITS OWN optimizer on the
unwrapped model, bit for bit. A check answers passed, failed or unsupported, and with what it measured.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from against_native import Case, graded, hybrid_options, override_native
from routes import ROUTES, save_fsdp, steps
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard

from refimpl import ShadowAdamW8bit, ShardedAdamW8bit, read_layouts
from refimpl.checkpoint import from_bitsandbytes, to_bitsandbytes
from refimpl.layout import BLOCK_SIZE, OriginalParam, ShardLayout, block_end, block_start
from refimpl.tools.fixture import Model, full_parameters, wrap
from refimpl.tools.world import World

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"
Result = tuple[str, str]
Worlds = Callable[[int], World]


@dataclass(frozen=True)
class Implementation:
    """An optimizer and the way its model is wrapped."""

    key: str
    label: str
    optimizer: str
    wrapping: str = "coarse"
    orig: bool = False

    @property
    def is_ours(self) -> bool:
        return self.optimizer in ("shadow", "sharded")

    @property
    def reference(self) -> str:
        """What runs on the unwrapped model to compare with."""
        return "native" if self.is_ours else self.optimizer

    @property
    def has_8bit_state(self) -> bool:
        return self.optimizer != "adamw"


IMPLEMENTATIONS = [
    Implementation("native-fine", "native, fine", "native", wrapping="fine"),
    Implementation("native-coarse", "native, coarse", "native"),
    Implementation("native-orig", "native, `use_orig_params=True`", "native", orig=True),
    Implementation("adamw", "FP32 AdamW", "adamw"),
    Implementation("torchao", "torchao AdamW8bit", "torchao"),
    Implementation("shadow", "`ShadowAdamW8bit`", "shadow"),
    Implementation("sharded", "`ShardedAdamW8bit`", "sharded"),
]

THRESHOLD = Case({"p": (63, 65), "q": (64, 64), "r": (17, 241)})
ALIGNED = Case({"a": (6, 1024)})
FLIP = Case({**dict.fromkeys("abcd", (48, 48)), "e": (64, 128)})
STRADDLING = Case({"x": (3000,), "y": (96, 96), "z": (500,)})
UNEVEN = Case({"x": (3000,), "y": (97, 99), "z": (500,)}, change_gradients=graded)
MAIN = (UNEVEN, STRADDLING)  # torchao has 8-bit state only in the second, whose sizes are whole blocks
# for torchao: 8-bit shards, moved blocks
SHIFTED = Case({"norm": (100,), "u": (8192,), "bias": (412,)}, change_gradients=graded)
# every shard on two ranks is 8-bit: only blocks move
LARGE = Case({"u": (9001,), "v": (9013,), "w": (8705,)}, change_gradients=graded)
OVERRIDE = Case(
    {"emb": (160, 64), "w": (100, 64)},
    overrides={"emb*": {"optim_bits": 32, "lr": 1e-2, "weight_decay": 0.0}},
)
TINY = Case({"a": (4097,), "b": (1,)})
PAIR = Case({"x": (5001,), "y": (5001,)}, change_gradients=graded)  # of four ranks, two hold none of `x`


def loud_start(step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `graded`, and every parameter but the first begins with gradients 64 times as large."""
    found = graded(step, grads)
    for gradient in list(found.values())[1:]:
        gradient.view(-1)[:100].mul_(64.0)
    return found


LOUD = replace(LARGE, change_gradients=loud_start)
VECTORS = {
    "FLIP": FLIP,
    "ALIGNED": ALIGNED,
    "THRESHOLD": THRESHOLD,
    "STRADDLING": STRADDLING,
    "UNEVEN": UNEVEN,
    "LARGE": LARGE,
    "OVERRIDE": OVERRIDE,
    "TINY": TINY,
    "PAIR": PAIR,
    "SHIFTED": SHIFTED,
}


# ---- one run


def make_optimizer(name: str, model: nn.Module, layouts: Mapping[Any, Any], case: Case) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), weight_decay=1e-2, **case.hyper)
    if name == "torchao":
        logging.disable(logging.WARNING)  # of kernels for other devices that do not load
        from torchao.optim import AdamW8bit

        torch.compiler.set_stance("force_eager")  # the same arithmetic without minutes of compilation
        return AdamW8bit(model.parameters(), **case.hyper)
    if name == "native":
        return bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=case.min_8bit_size, **case.hyper)
    twin = {"shadow": ShadowAdamW8bit, "sharded": ShardedAdamW8bit}[name]
    return twin(model.named_parameters(), layouts=layouts, overrides=case.overrides, **case.hyper)


def build(
    case: Case, optimizer: str, wrapping: str | None, orig: bool = False, **options: Any
) -> tuple[nn.Module, Any, Mapping[Any, Any]]:
    """A wrapped model (unwrapped if `wrapping` is None), its optimizer and layouts, on this rank."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # FSDP1's, of strategies that are being deprecated
    model: nn.Module = case.model()
    asked = dict(model.named_parameters())
    if wrapping is not None:
        units = list(case.shapes) if wrapping == "fine" else []
        model = wrap(model, units, use_orig_params=orig, **options)
    override_native(case, asked if optimizer == "native" else {})
    if wrapping is None:
        layouts = {param: whole_layout(name, param) for name, param in model.named_parameters()}
    else:
        layouts = read_layouts(model)
    return model, make_optimizer(optimizer, model, layouts, case), layouts


def whole_layout(name: str, param: Tensor) -> ShardLayout:
    return ShardLayout((OriginalParam(name, tuple(param.shape)),), (0, param.numel()))


@dataclass
class Part:
    """State of the elements `start..end` of one original parameter, as one rank keeps it."""

    start: int
    end: int
    step: int
    values: dict[str, Tensor]

    @property
    def precision(self) -> str:
        return "8-bit" if self.values["state1"].dtype == torch.uint8 else "FP32"


@dataclass
class Seen:
    """What one rank shows after its last step."""

    params: dict[str, Tensor]
    parts: dict[str, list[Part]]
    state_bytes: int
    collectives: list[tuple[str, int]] = field(default_factory=list)
    padding: float = 0.0


def run(
    case: Case, optimizer: str, wrapping: str | None, orig: bool = False, steps: int = 4, **options: Any
) -> Seen:
    """Train on this rank; what it shows afterwards."""
    model, opt, layouts = build(case, optimizer, wrapping, orig, **options)
    before: list[Tensor] = []
    for step in range(1, steps + 1):
        model(case.gradients(step)).backward()
        before = before or padding_of(layouts)  # FSDP has put everything in its place by now
        entered = counting_collectives(opt.step)
        opt.zero_grad()
    moved = [float((one - two).abs().max()) for one, two in zip(before, padding_of(layouts), strict=True)]
    return replace(see(model, opt, layouts, entered), padding=max(moved, default=0.0))


def padding_of(layouts: Mapping[Any, Any]) -> list[Tensor]:
    """What no parameter covers in each flat shard, alignment padding between views of it included."""
    shards: dict[int, tuple[Tensor, Tensor]] = {}
    for tensor, layout in layouts.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shards and storage.size():
            raw = tensor.detach().new_empty(0).set_(storage)
            shards[storage.data_ptr()] = (raw, torch.ones(raw.numel(), dtype=torch.bool))
        for segment in layout.segments:
            start = tensor.storage_offset() + segment.shard_start
            length = segment.param_end - segment.param_start
            shards[storage.data_ptr()][1][start : start + length] = False
    return [raw[is_padding].clone() for raw, is_padding in shards.values() if bool(is_padding.any())]


def hybrid_run(case: Case, optimizer: str, wrapping: str, orig: bool) -> Seen:
    return run(case, optimizer, wrapping, orig, **hybrid_options())


def see(model: nn.Module, opt: Any, layouts: Mapping[Any, Any], entered: Any = ()) -> Seen:
    named = {} if not hasattr(opt, "full_state_dict") else opt.full_state_dict()["state"]
    parts: dict[str, list[Part]] = {}
    for tensor, layout in layouts.items():
        for segment in layout.segments:
            fqn = layout.params[segment.index].fqn
            if named:
                kept, first = by_element(named.get(fqn, {})), segment.param_start
            else:
                kept, first = by_element(opt.state.get(tensor, {})), segment.shard_start
            if kept:
                last = first + segment.param_end - segment.param_start
                values = {name: value[first:last].clone() for name, value in kept.items() if name != "step"}
                step = int(kept["step"])
                parts.setdefault(fqn, []).append(Part(segment.param_start, segment.param_end, step, values))
    return Seen(full_parameters(model), parts, sum(each.nbytes for each in state_of(opt)), list(entered))


def by_element(entry: Mapping[str, Any]) -> dict[str, Any]:
    """`step`, both moments (codes if 8-bit) and the scale of each element's block; empty without state."""
    if not entry:
        return {}
    found: dict[str, Any] = {"step": entry["step"]}
    for moment, torch_name in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        value = entry.get(f"state{moment}", entry.get(torch_name))
        if hasattr(value, "codes"):  # torchao
            value, scale = value.codes.flatten(), value.scale
        else:
            value, scale = value.flatten(), entry.get(f"absmax{moment}")
        found[f"state{moment}"] = value
        if value.dtype == torch.uint8:
            found[f"scale{moment}"] = scale.repeat_interleave(BLOCK_SIZE)[: value.numel()]
    return found


def state_of(opt: Any) -> list[Tensor]:
    """The tensors of this rank's state, without the code tables that all share, and without step counts."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if hasattr(value, "codes"):
            yield from (value.codes, value.scale)
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from chain.from_iterable(
                tensors(v) for k, v in value.items() if not str(k).startswith("qmap")
            )
        elif isinstance(value, (list, tuple)):
            yield from chain.from_iterable(map(tensors, value))

    kept: Any = dict(opt.state)
    if isinstance(opt, ShadowAdamW8bit):
        kept = [opt.read_state(param, 0, param.numel) for param in opt.named_params()]
    return [each for each in tensors(kept) if each.numel() > 1]


COLLECTIVES = [
    "all_to_all_single", "all_to_all", "all_reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "broadcast", "reduce_scatter", "reduce_scatter_tensor", "barrier", "send", "recv",
]  # fmt: skip


def counting_collectives(action: Callable[[], Any]) -> list[tuple[str, int]]:
    """Call `action`; the collectives it entered, and how many elements this rank put in."""
    with ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
            for name in COLLECTIVES
        }
        action()
    return [(name, _numel_sent(*call.args)) for name, spy in spies.items() for call in spy.call_args_list]


def _numel_sent(*args: Any) -> int:
    """The tensor that a rank puts in is the last one that a collective is given."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    return tensors[-1].numel() if tensors else 0


# ---- comparing


@dataclass
class Whole:
    """One original parameter, put together from all ranks."""

    precisions: list[str]
    steps: set[int]
    values: dict[str, Tensor] | None

    @classmethod
    def of(cls, parts: list[Part]) -> Whole:
        """From parts that tile it, in any order; replicas of one part count once."""
        parts = sorted({each.start: each for each in reversed(parts)}.values(), key=lambda part: part.start)
        assert parts[0].start == 0
        assert all(one.end == two.start for one, two in pairwise(parts))
        values = None
        if len({part.precision for part in parts}) == 1:
            values = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
        return cls([part.precision for part in parts], {part.step for part in parts}, values)


def wholes(ranks: list[Seen]) -> dict[str, Whole]:
    names = {name for seen in ranks for name in seen.parts}
    return {name: Whole.of([p for seen in ranks for p in seen.parts.get(name, [])]) for name in sorted(names)}


class Bench:
    """Runs implementations, each run once."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self._seen: dict[Any, list[Seen]] = {}

    def __call__(self, it: Implementation, case: Case, ranks: int = 2, **change: Any) -> list[Seen]:
        wrapping = change.pop("wrapping", it.wrapping)
        orig = change.pop("orig", it.orig)
        key = (id(case), it.optimizer, wrapping, orig, ranks, tuple(sorted(change.items(), key=str)))
        if key not in self._seen:
            self._seen[key] = self.worlds(ranks).run(run, case, it.optimizer, wrapping, orig, **change)
        return self._seen[key]

    def hybrid(self, it: Implementation, case: Case) -> list[Seen]:
        return self.worlds(4).run(hybrid_run, case, it.optimizer, it.wrapping, it.orig)

    def unwrapped(self, it: Implementation, case: Case) -> list[Seen]:
        return self(replace(it, optimizer=it.reference), case, ranks=1, wrapping=None)


@dataclass(frozen=True)
class Problem:
    """What differs, in words, and by how much."""

    size: float
    text: str


def worst(problems: Iterable[Problem | None]) -> Problem | None:
    return max(filter(None, problems), key=lambda each: each.size, default=None)


def words(name: str, whole: Whole) -> str:
    kinds = sorted(set(whole.precisions))
    return f"{name.removesuffix('.weight')} {' and '.join(kinds)}"


def precision_problem(found: list[Seen], expected: list[Seen]) -> str | None:
    theirs = wholes(expected)
    wrong = [
        (name, whole)
        for name, whole in wholes(found).items()
        if set(whole.precisions) != set(theirs[name].precisions)
    ]
    if not wrong:
        return None
    return ", ".join(f"{words(n, w)} instead of {'/'.join(set(theirs[n].precisions))}" for n, w in wrong[:4])


def update_problem(found: list[Seen], expected: list[Seen]) -> Problem | None:
    largest = 0.0
    for seen in found:
        for name, value in expected[0].params.items():
            if not torch.equal(seen.params[name], value):
                difference = (seen.params[name] - value).abs().max()
                largest = max(largest, float(difference))
    return Problem(largest, f"parameters differ by up to {largest:.1e}") if largest else None


def state_problem(
    found: list[Seen], expected: list[Seen], where: Callable[[str, int], Tensor] | None = None
) -> Problem | None:
    """How many parameters' state differs; `where(name, numel)` picks the elements to look at."""
    wrong, elements = [], 0
    theirs = wholes(expected)
    for name, whole in wholes(found).items():
        other, numel = theirs[name], expected[0].params[name].numel()
        if whole.values is None or other.values is None or whole.values.keys() != other.values.keys():
            differ = torch.ones(numel, dtype=torch.bool)
        else:
            pairs = [(whole.values[key], value) for key, value in other.values.items()]
            differ = torch.stack([one != two for one, two in pairs]).any(0)
        if where is not None:
            differ &= where(name, numel)
        if bool(differ.any()) or whole.steps != other.steps:
            wrong.append(name)
            elements += int(differ.sum())
    text = f"state of {elements:,} elements in {len(wrong)} of {len(theirs)} parameters differs"
    return Problem(elements, text) if wrong else None


def answer(problem: str | Problem | None, good: str = "") -> Result:
    text = problem.text if isinstance(problem, Problem) else problem
    return (FAILED, text) if text else (PASSED, good)


# ---- the checks, one a rule

Check = Callable[[Bench, Implementation], Result]
CHECKS: dict[str, Check] = {}


def rule(*ids: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(ids, check))
        return check

    return register


def for_8bit_state(check: Check) -> Check:
    def guarded(bench: Bench, it: Implementation) -> Result:
        return check(bench, it) if it.has_8bit_state else (UNSUPPORTED, "has no 8-bit state")

    return guarded


@rule("precision.original-size")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    problems = [precision_problem(bench(it, c), bench.unwrapped(it, c)) for c in (FLIP, ALIGNED)]
    return answer("; ".join(filter(None, problems)), "2,304: FP32, 8,192 and 6,144: 8-bit")


@rule("precision.strict-less")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    """On one rank, each parameter a unit of its own: only the comparison is looked at."""
    found = wholes(bench(it, THRESHOLD, ranks=1, wrapping="fine"))
    kinds = [found[f"{name}.weight"].precisions[0] for name in "pq"]
    return answer(None if kinds == ["FP32", "8-bit"] else f"4,095: {kinds[0]}, 4,096: {kinds[1]}")


@rule("precision.same-on-every-rank")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    mixed = [words(n, w) for n, w in wholes(bench(it, STRADDLING)).items() if len(set(w.precisions)) > 1]
    return answer(", ".join(mixed))


@rule("override.by-name")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    if it.optimizer == "torchao":
        return UNSUPPORTED, "has no overrides"
    ranks = bench(it, OVERRIDE)
    found = wholes(ranks)["emb.weight"]
    if set(found.precisions) != {"FP32"}:
        return FAILED, f"{words('emb', found)} although 32 bits were asked for"
    (expected,) = bench.unwrapped(it, OVERRIDE)
    same = all(torch.equal(seen.params["emb.weight"], expected.params["emb.weight"]) for seen in ranks)
    return answer(None if same else "emb has FP32 state, but not the learning rate and decay asked for")


def uncut(bounds: Any) -> Callable[[str, int], Tensor]:
    """Elements of blocks that no rank bound cuts."""
    return lambda name, numel: ~cut(bounds)(name, numel)


def cut(bounds: Any) -> Callable[[str, int], Tensor]:
    """Elements of blocks that a rank bound cuts; `bounds[name]` are positions in the parameter."""

    def where(name: str, numel: int) -> Tensor:
        chosen = torch.zeros(numel, dtype=torch.bool)
        for bound in bounds[name]:
            chosen[block_start(bound) : block_end(bound)] = True
        return chosen

    return where


def tail(name: str, numel: int) -> Tensor:
    """Elements of the short last block."""
    return torch.arange(numel) >= block_start(numel)


def bounds_inside(ranks: list[Seen]) -> dict[str, list[int]]:
    return {
        name: [part.start for seen in ranks for part in seen.parts.get(name, []) if part.start]
        for name in ranks[0].params
    }


def block_problem(
    bench: Bench, it: Implementation, choose: Callable[[Any], Callable[[str, int], Tensor]]
) -> Problem | None:
    """Of the state of 8-bit parameters, in the blocks that `choose` (cut or uncut) picks."""
    case = SHIFTED if it.optimizer == "torchao" else LARGE
    found = bench(it, case)
    where = choose(bounds_inside(found))

    def of_8bit(name: str, numel: int) -> Tensor:
        return where(name, numel) & (numel >= case.min_8bit_size)

    return state_problem(found, bench.unwrapped(it, case), of_8bit)


@rule("block.restart")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    return answer(block_problem(bench, it, uncut))


@rule("block.tail")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    if it.optimizer == "torchao":
        return UNSUPPORTED, "has 8-bit state only where all blocks are whole"
    quiet, loud = bench(it, LARGE), bench(it, LOUD)

    def of_first(name: str, numel: int) -> Tensor:
        return tail(name, numel) & (name == "u.weight")

    problem = state_problem(loud, quiet, of_first)
    return answer(problem and f"state of {problem.size:.0f} of the 41 elements follows the next parameter")


@rule("block.cut-by-rank")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    return answer(block_problem(bench, it, cut))


@rule("padding.inert")
def _(bench: Bench, it: Implementation) -> Result:
    runs = (bench(it, LARGE), bench(it, UNEVEN, ranks=3), bench(it, TINY, ranks=4, wrapping="fine"))
    largest = max(seen.padding for ranks in runs for seen in ranks)
    return answer(f"padding has moved to {largest:.1e}" if largest else None)


@rule("update.equals-unwrapped")
def _(bench: Bench, it: Implementation) -> Result:
    return answer(worst(update_problem(bench(it, case), bench.unwrapped(it, case)) for case in MAIN))


@rule("state.equals-unwrapped")
def _(bench: Bench, it: Implementation) -> Result:
    return answer(worst(state_problem(bench(it, case), bench.unwrapped(it, case)) for case in MAIN))


def invariant(bench: Bench, it: Implementation, runs: Mapping[str, Callable[[Case], list[Seen]]]) -> Result:
    """`runs` by what is varied. The updates, and then the state, must be those of the unwrapped model."""
    wrong: dict[str, list[str]] = {}
    for name, of in runs.items():
        pairs = [(of(case), bench.unwrapped(it, case)) for case in MAIN]
        problem = worst(update_problem(*pair) for pair in pairs) or worst(state_problem(*p) for p in pairs)
        if problem:
            wrong.setdefault(problem.text, []).append(name)
    problems = "; ".join(f"{', '.join(names)}: {problem}" for problem, names in wrong.items())
    return answer(problems, ", ".join(runs))


@rule("wrap.invariant")
def _(bench: Bench, it: Implementation) -> Result:
    return invariant(bench, it, {w: partial(bench, it, wrapping=w) for w in ("coarse", "fine")})


@rule("world.invariant")
def _(bench: Bench, it: Implementation) -> Result:
    runs = {f"{n} rank{'s' * (n > 1)}": partial(bench, it, ranks=n) for n in (1, 2, 3, 4)}
    return invariant(bench, it, runs)


@rule("strategy.invariant")
def _(bench: Bench, it: Implementation) -> Result:
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    runs = {s: partial(bench, it, sharding_strategy=ShardingStrategy[s]) for s in strategies}
    return invariant(bench, it, {**runs, "HYBRID_SHARD": partial(bench.hybrid, it)})


@rule("orig-params.invariant")
def _(bench: Bench, it: Implementation) -> Result:
    return invariant(bench, it, {str(orig): partial(bench, it, orig=orig) for orig in (False, True)})


@rule("memory.sharded")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    """Allowed: 2 bytes an element and 8 a block touched, 8 bytes an FP32 element, two cut blocks a unit."""
    ratio = 0.0
    for case in (ALIGNED, UNEVEN):
        numels = {f"{name}.weight": torch.Size(shape).numel() for name, shape in case.shapes.items()}
        for seen in bench(it, case):
            allowed = 2 * (2 * BLOCK_SIZE + 8) * (len(numels) if it.wrapping == "fine" else 1)
            for name, parts in seen.parts.items():
                held = sum(part.end - part.start for part in parts)
                is_8bit = numels[name] >= case.min_8bit_size
                allowed += held * 2 + 8 * (held // BLOCK_SIZE + 2) if is_8bit else held * 8
            ratio = max(ratio, seen.state_bytes / allowed)
    return answer(f"a rank keeps {ratio:.1f} times the bytes that are allowed" if ratio > 1 else None)


@rule("traffic.edges-only")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    sides = 2 * (3 if it.wrapping == "fine" else 1)
    most = max((sum(n for _, n in seen.collectives), len(seen.collectives)) for seen in bench(it, UNEVEN))
    if not most[1]:
        return UNSUPPORTED, "sends nothing"
    sent = f"a rank puts {most[0]:,} elements into {most[1]} collective{'s' * (most[1] > 1)}"
    return answer(None if most[0] <= sides * BLOCK_SIZE and most[1] == 1 else sent, sent)


@rule("collective.unconditional")
def _(bench: Bench, it: Implementation) -> Result:
    """Of four ranks, two hold none of `x` and, with the original parameters, have no gradient of it."""
    counts = [
        [len(seen.collectives) for seen in bench(it, PAIR, ranks=4, orig=orig, wrapping="coarse")]
        for orig in (False, True)
    ]
    differ = [each for each in counts if len(set(each)) > 1]
    if not counts[0][0] and not differ:
        return UNSUPPORTED, "enters none"
    return answer(f"collectives entered by rank: {differ}" if differ else None, "as many on every rank")


@rule("control.fp32")
def _(bench: Bench, it: Implementation) -> Result:
    if it.optimizer != "adamw":
        return UNSUPPORTED, "is not the control"
    runs = [bench(it, case, wrapping=w) for case in (FLIP, UNEVEN) for w in ("fine", "coarse")]
    expected = [bench.unwrapped(it, case) for case in (FLIP, UNEVEN) for _ in range(2)]
    problems = [update_problem(*pair) or state_problem(*pair) for pair in zip(runs, expected, strict=True)]
    return answer(next(filter(None, problems), None), "zero difference")


# ---- checkpoints


def attempt(action: Callable[[], Any]) -> str | None:
    """The error in one line, or None."""
    try:
        action()
    except Exception as error:
        text = " ".join(str(error).split())
        if len(text) > 60:
            text = f"{text[:57].rpartition(' ')[0]} ..."
        return f"{type(error).__name__}: {text}"
    return None


def trained(case: Case, it: Implementation, last: int) -> tuple[nn.Module, Any, Any]:
    model, opt, layouts = build(case, it.optimizer, it.wrapping, it.orig)
    steps(case, model, opt, 1, last)
    return model, opt, layouts


def starting_at(case: Case, values: Mapping[str, Tensor]) -> Case:
    """`case` with other start values."""
    return replace(case, prepare=lambda model: model.load_state_dict(values))


def resumed(case: Case, built: tuple[nn.Module, Any, Any], load: Callable[[nn.Module, Any], Any]) -> Any:
    """Load state into the optimizer of a model that has made two steps, make two more; or the error."""
    model, opt, layouts = built
    error = attempt(lambda: load(model, opt))
    if error:
        return f"loading raises {error}"
    error = attempt(lambda: steps(case, model, opt, 3, 4))
    return f"the first step after loading raises {error}" if error else see(model, opt, layouts)


def case_of(it: Implementation) -> Case:
    """A model of which the wrapped optimizer has 8-bit state."""
    return SHIFTED if it.optimizer == "torchao" else UNEVEN


NAMES_OF_MOMENTS = {"exp_avg": "state1", "exp_avg_sq": "state2"}


def saved_by_name(it: Implementation, folder: Path) -> Any:
    """What is saved under the original names after two steps, or the error."""
    model, opt, _ = trained(case_of(it), it, 2)
    if it.is_ours:
        return opt.full_state_dict()["state"]
    error = attempt(lambda: save_fsdp(model, opt, folder))
    if error:
        return error
    dist.barrier()
    saved = torch.load(folder / "optimizer.pt", weights_only=False)["state"]
    return {
        name: {
            NAMES_OF_MOMENTS.get(key, key): value
            for key, value in {**entry, **entry.get("__bnb_optimizer_quant_state__", {})}.items()
        }
        for name, entry in saved.items()
    }


@rule("checkpoint.by-name")
def _(bench: Bench, it: Implementation) -> Result:
    """What is saved is, name by name, what this very run holds: whole, and with its codes."""
    with tempfile.TemporaryDirectory() as folder:
        saved = bench.worlds(2).run(saved_by_name, it, Path(folder))[0]
    if isinstance(saved, str):
        return FAILED, f"saving raises {saved}"
    held = bench(it, case_of(it), steps=2)
    for name, whole in wholes(held).items():
        shape, entry = held[0].params[name].shape, saved[name]
        for moment in ("state1", "state2"):
            if entry[moment].shape != shape:
                return (
                    FAILED,
                    f"{name} of {tuple(shape)} is saved as {moment} of {tuple(entry[moment].shape)}",
                )
        for key, value in (whole.values or {}).items():
            if key not in (kept := by_element(entry)):
                return FAILED, f"{name} is saved dequantized"
            if not torch.equal(kept[key], value):
                return FAILED, f"{key} of {name} is not what was saved"
    return PASSED, ""


def route_of(it: Implementation) -> Any:
    """How to save and load for another number of ranks."""
    return ROUTES["compact" if it.is_ours else "FSDP full"]


def save_for_others(it: Implementation, folder: Path) -> str | None:
    model, opt, _ = trained(case_of(it), it, 2)
    values = full_parameters(model)
    if dist.get_rank() == 0:
        torch.save(values, folder / "model.pt")
    return attempt(lambda: route_of(it)[0](model, opt, folder))


def load_from_others(it: Implementation, folder: Path) -> Any:
    """On other ranks, in another wrapping: load and train to the end."""
    case = starting_at(case_of(it), torch.load(folder / "model.pt"))
    built = build(case, it.optimizer, "fine", it.orig)
    return resumed(case, built, lambda model, opt: route_of(it)[1](model, opt, folder))


@rule("checkpoint.reshard")
def _(bench: Bench, it: Implementation) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        error = next(filter(None, bench.worlds(2).run(save_for_others, it, Path(folder))), None)
        if error:
            return FAILED, f"saving raises {error}"
        found = bench.worlds(3).run(load_from_others, it, Path(folder))
    if isinstance(found[0], str):
        return FAILED, found[0]
    expected = bench.unwrapped(it, case_of(it))
    return answer(update_problem(found, expected) or state_problem(found, expected), "2 ranks to 3")


STOCK = ("FSDP full", "DSD full", "DSD sharded")


def through_stock(it: Implementation, route: str, folder: Path) -> Any:
    """Train, save, load into a new model and optimizer, train on; what there is then, or the error."""
    case, (save, load) = case_of(it), ROUTES[route]
    model, opt, _ = trained(case, it, 2)
    error = attempt(lambda: save(model, opt, folder))
    if error:
        return f"saving raises {error}"
    dist.barrier()
    case = starting_at(case, full_parameters(model))
    built = build(case, it.optimizer, it.wrapping, it.orig)
    return resumed(case, built, lambda model, opt: load(model, opt, folder))


@rule("checkpoint.stock-apis")
def _(bench: Bench, it: Implementation) -> Result:
    """Compared with what the same wrapping gives without the interruption."""
    expected, wrong = bench(it, case_of(it)), {}
    for route in STOCK:
        with tempfile.TemporaryDirectory() as folder:
            found = bench.worlds(2).run(through_stock, it, route, Path(folder))
        if isinstance(found[0], str):
            wrong.setdefault(found[0], []).append(route)
        elif problem := update_problem(found, expected) or state_problem(found, expected):
            wrong.setdefault(problem.text, []).append(route)
    return answer(
        "; ".join(f"{', '.join(routes)}: {text}" for text, routes in wrong.items()), ", ".join(STOCK)
    )


def into_native(it: Implementation) -> Any:
    """The state of a wrapped run, after two steps, into bitsandbytes' optimizer on the unwrapped model."""
    model, opt, _ = trained(case_of(it), it, 2)
    case = starting_at(case_of(it), values := full_parameters(model))
    state = to_bitsandbytes(opt.full_state_dict(), list(values)) if it.is_ours else opt.state_dict()
    found = resumed(case, build(case, "native", None), lambda _, native: native.load_state_dict(state))
    return f"to unwrapped: {found}" if isinstance(found, str) else found


def from_native(it: Implementation) -> Any:
    """The other way: from the unwrapped model, after two steps, to the wrapped one."""
    plain, native, _ = build(case_of(it), "native", None)
    steps(case_of(it), plain, native, 1, 2)
    case, state = starting_at(case_of(it), values := full_parameters(plain)), native.state_dict()

    def load(_: nn.Module, opt: Any) -> None:
        if it.is_ours:
            shapes = [tuple(value.shape) for value in values.values()]
            opt.load_full_state_dict(from_bitsandbytes(state, list(values), shapes))
        else:
            opt.load_state_dict(state)

    found = resumed(case, build(case, it.optimizer, it.wrapping, it.orig), load)
    return f"from unwrapped: {found}" if isinstance(found, str) else found


@rule("checkpoint.interchange")
@for_8bit_state
def _(bench: Bench, it: Implementation) -> Result:
    if it.optimizer == "torchao":
        return UNSUPPORTED, "another state format"
    expected = bench.unwrapped(it, case_of(it))
    problems = []
    for way, count in ((into_native, 1), (from_native, 2)):
        found = bench.worlds(2).run(way, it)[:count]
        if isinstance(found[0], str):
            problems.append(found[0])
        elif problem := update_problem(found, expected) or state_problem(found, expected):
            problems.append(problem.text)
    return answer("; ".join(problems), "both ways")


# ---- refusals: an error, on every rank, before anything changed


def refusal(it: Implementation, situation: str) -> Result:
    """Passed, with the error, if it is refused on this rank and neither parameters nor state have changed."""
    try:
        model, opt, step = SITUATIONS[situation](it)
    except (ValueError, TypeError) as error:  # at construction: nothing is there to be changed
        return PASSED, f"{type(error).__name__} at construction"
    before = [each.detach().clone() for each in (*local(model.parameters()), *state_of(opt))]
    error = attempt(step)
    after = [each.detach() for each in (*local(model.parameters()), *state_of(opt))]
    # state that was not there before is not a change of state
    changed = not all(torch.equal(one, two) for one, two in zip(before, after, strict=False))
    if error is None:
        return FAILED, "is not refused"
    return (FAILED, f"raises {error}, after something has changed") if changed else (PASSED, error)


def local(tensors: Iterable[Any]) -> list[Tensor]:
    return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]


def low_precision_gradient(it: Implementation) -> Any:
    mixed = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model, opt, _ = build(UNEVEN, it.optimizer, it.wrapping, it.orig, mixed_precision=mixed)
    model(UNEVEN.gradients(1, torch.bfloat16)).backward()
    return model, opt, opt.step


def gradient_in_no_sync(it: Implementation) -> Any:
    model, opt, _ = build(UNEVEN, it.optimizer, it.wrapping, it.orig)
    with model.no_sync():
        model(UNEVEN.gradients(1)).backward()
    return model, opt, opt.step


def sparse_gradient(it: Implementation) -> Any:
    model = nn.Embedding(100, 50, sparse=True)
    opt = make_optimizer(it.optimizer, model, {}, UNEVEN)
    model(torch.tensor([1, 2])).sum().backward()
    return model, opt, opt.step


def gradient_missing_on_one_rank(it: Implementation) -> Any:
    model, opt, _ = build(UNEVEN, it.optimizer, it.wrapping, it.orig)
    model(UNEVEN.gradients(1)).backward()
    if dist.get_rank() == 1:
        for param in model.parameters():
            param.grad = None
    return model, opt, opt.step


def channels_last(it: Implementation) -> Any:
    model = wrap(nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last), use_orig_params=it.orig)
    opt = make_optimizer(it.optimizer, model, read_layouts(model) if it.is_ours else {}, UNEVEN)
    model(torch.ones(1, 8, 8, 8)).sum().backward()
    return model, opt, opt.step


def dtensor(it: Implementation) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    model = Model({"a": (64, 128)})
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = make_optimizer(it.optimizer, model, {}, UNEVEN)
    model.a.weight.grad = torch.ones_like(model.a.weight)
    return model, opt, opt.step


def without_metadata(it: Implementation) -> Any:
    model = wrap(UNEVEN.model(), use_orig_params=it.orig)
    opt = make_optimizer(it.optimizer, model, {}, UNEVEN)
    return model, opt, lambda: None


def foreign_layout(it: Implementation) -> Any:
    model = wrap(UNEVEN.model(), use_orig_params=it.orig)
    other = wrap(ALIGNED.model(), use_orig_params=it.orig)
    layouts = dict(zip(model.parameters(), read_layouts(other).values(), strict=False))
    return model, make_optimizer(it.optimizer, model, layouts, UNEVEN), lambda: None


def unmatched_override(it: Implementation) -> Any:
    case = replace(UNEVEN, overrides={"nothing.*": {"lr": 0.0}})
    model, opt, _ = build(case, it.optimizer, it.wrapping, it.orig)
    return model, opt, lambda: None


def nonsensical_lr(it: Implementation) -> Any:
    case = replace(UNEVEN, hyper={"lr": -1.0})
    model, opt, _ = build(case, it.optimizer, it.wrapping, it.orig)
    return model, opt, lambda: None


def amsgrad(it: Implementation) -> Any:
    case = replace(UNEVEN, hyper={"lr": 1e-3, "amsgrad": True})
    model, opt, _ = build(case, it.optimizer, it.wrapping, it.orig)
    return model, opt, lambda: None


def state_of_another_shape(it: Implementation) -> Any:
    """State saved for a model of which one parameter has another size, into one that has been trained."""
    other = Case({**UNEVEN.shapes, "y": (96, 128)})
    model, opt, _ = trained(UNEVEN, it, 1)
    source_model, source, _ = trained(other, it, 1)
    if it.is_ours:
        full = source.full_state_dict()
        return model, opt, lambda: opt.load_full_state_dict(full)
    if it.optimizer == "native":  # FSDP's own calls raise whatever the shapes: checkpoint.stock-apis
        return model, opt, lambda: opt.load_state_dict(source.state_dict())
    saved = FSDP.optim_state_dict(source_model, source)
    return model, opt, lambda: opt.load_state_dict(FSDP.optim_state_dict_to_load(model, opt, saved))


SITUATIONS: dict[str, Callable[[Implementation], Any]] = {
    "refuse.gradient-dtype": low_precision_gradient,
    "refuse.unsharded-gradient": gradient_in_no_sync,
    "refuse.sparse-gradient": sparse_gradient,
    "refuse.missing-gradient": gradient_missing_on_one_rank,
    "refuse.memory-order": channels_last,
    "refuse.dtensor": dtensor,
    "refuse.no-metadata": without_metadata,
    "refuse.layout": foreign_layout,
    "refuse.override": unmatched_override,
    "refuse.hyperparameter": nonsensical_lr,
    "refuse.amsgrad": amsgrad,
    "refuse.checkpoint": state_of_another_shape,
}
OURS_ALONE = {"refuse.no-metadata": "takes no metadata", "refuse.layout": "takes no layouts"}


def check_refusal(rule_id: str) -> Check:
    def check(bench: Bench, it: Implementation) -> Result:
        if not it.is_ours and rule_id in OURS_ALONE:
            return UNSUPPORTED, OURS_ALONE[rule_id]
        if not it.is_ours and rule_id == "refuse.override":
            return UNSUPPORTED, "has no overrides by name"
        if it.optimizer in ("adamw", "torchao") and rule_id == "refuse.dtensor":
            return UNSUPPORTED, "takes DTensors"
        if it.optimizer in ("adamw", "torchao") and rule_id == "refuse.amsgrad":
            return UNSUPPORTED, "has amsgrad"
        if it.optimizer == "adamw" and rule_id == "refuse.memory-order":
            return UNSUPPORTED, "has no blocks"
        if not it.is_ours and rule_id == "refuse.missing-gradient":
            return UNSUPPORTED, "shares no blocks between ranks"
        found = bench.worlds(2).run(refusal, it, rule_id)
        return next((each for each in found if each[0] == FAILED), found[0])

    return check


CHECKS.update({rule_id: check_refusal(rule_id) for rule_id in SITUATIONS})
