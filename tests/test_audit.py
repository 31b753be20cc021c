"""The audit's predictions against what native bitsandbytes allocates on real FSDP1 shards."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from refimpl import read_layouts
from refimpl.__main__ import main
from refimpl.fsdp import wrapped_modules
from refimpl.layout import ShardLayout
from refimpl.tools import impact, models
from refimpl.tools.audit import ONE_UNIT, PER_LAYER, Audit, audit
from refimpl.tools.world import World

GetWorld = Callable[[int], World]


class Net(nn.Module):
    """Not a model the audit was written for: a conv stem, an encoder, an odd head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.emb = nn.Embedding(211, 36)
        self.stem = nn.Sequential(nn.Conv1d(36, 36, 3), nn.GroupNorm(4, 36))
        layer = nn.TransformerEncoderLayer(36, 4, 91, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.wide = nn.Linear(36, 150, bias=False)
        self.head = nn.Linear(36, 211, bias=False)
        self.head.weight = self.emb.weight


POLICIES: dict[str, Any] = {
    "one unit": None,
    "module": ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    "nested modules": ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.Linear, nn.Sequential}),
    "custom": CustomPolicy(lambda module: isinstance(module, (nn.Conv1d, nn.LayerNorm))),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=5000),
    "transformer": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    ),
}


def native_allocation(
    policy_name: str, orig: bool, strategy: str, threshold: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Of this rank: what native allocates; what is predicted from the model, and from the wrapped one."""
    policy = POLICIES[policy_name]
    model = FSDP(
        Net(),
        auto_wrap_policy=policy,
        use_orig_params=orig,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )
    layouts = read_layouts(model)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=threshold)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        absmax = state["absmax1"].numel() if "absmax1" in state else 0
        fqns = tuple(each.fqn for each in layouts[param].params)
        found.append((fqns, param.numel(), str(state["state1"].dtype).removeprefix("torch."), absmax))
    with torch.device("meta"):
        unwrapped = Net()
        unwrapped.head.weight = unwrapped.emb.weight
    predicted = audit(
        unwrapped, policy or ONE_UNIT, dist.get_world_size(), strategy, orig, threshold
    ).native_tensors(dist.get_rank())
    read = audit(model, min_8bit_size=threshold).native_tensors(dist.get_rank())
    as_tuples = [[(t.params, t.numel, t.dtype, t.absmax_numel) for t in each] for each in (predicted, read)]
    return (sorted(found), *map(sorted, as_tuples))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_predictions_are_what_native_allocates(policy: str, size: int, world: GetWorld) -> None:
    for orig in (False, True):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            for found, predicted, read in world(size).run(native_allocation, policy, orig, strategy, 1000):
                assert found == predicted == read


def brute_force(result: Audit) -> dict[str, Any]:
    """Element by element, from the definition of a block: which elements it has."""
    precision: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    cuts, sent = [0] * result.world_size, [0] * result.world_size
    for unit in result.units:
        native, unwrapped = blocks_of(unit, result)
        for element, block in native.items():
            fqn = element[0]
            if block[0] != unwrapped[element][0]:
                precision[fqn] += 1
            elif block[0] and block[1] != unwrapped[element][1]:
                moved[fqn] += 1
        for rank in range(unit.num_ranks):
            for cut in unit.cut_blocks_of(rank):
                if unit.params[cut.index].numel >= result.min_8bit_size:
                    own = next(piece for piece in cut.pieces if piece.rank == rank)
                    cuts[rank] += 1
                    sent[rank] += own.numel * (len(cut.pieces) - 1)
    return {"precision": precision, "moved": moved, "cuts": cuts, "sent": sent}


Element = tuple[str, int]


def blocks_of(unit: ShardLayout, result: Audit) -> tuple[dict[Element, Any], dict[Element, Any]]:
    """For each element: whether its state is 8-bit, and the elements of its block; natively and unwrapped."""
    native: dict[Element, Any] = {}
    unwrapped: dict[Element, Any] = {}
    for param in unit.params:
        for position in range(param.numel):
            start = position - position % 256
            members = frozenset(range(start, min(start + 256, param.numel)))
            is_8bit = param.numel >= result.min_8bit_size
            unwrapped[param.fqn, position] = (is_8bit, frozenset((param.fqn, each) for each in members))
    for rank in range(unit.num_ranks):
        shard: dict[Any, list[Any]] = {}
        for segment in unit.segments_of(rank):
            param = unit.params[segment.index]
            key = param.fqn if result.use_orig_params else ""
            origin = segment.shard_start if result.use_orig_params else 0
            for position in range(segment.param_start, segment.param_end):
                place = segment.shard_start + position - segment.param_start - origin
                shard.setdefault((key, place // 256), []).append((param.fqn, position))
        sizes: Counter[str] = Counter()
        for (key, _), members in shard.items():
            sizes[key] += len(members)
        for (key, _), members in shard.items():
            local = sizes[key] if result.use_orig_params else unit.bounds[rank + 1] - unit.bounds[rank]
            for element in members:
                native[element] = (local >= result.min_8bit_size, frozenset(members))
    return native, unwrapped


shapes = st.lists(st.integers(1, 900), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(1, 7), st.booleans(), st.sampled_from([1, 200, 400]), st.booleans())
def test_counts_by_brute_force(
    sizes: list[int], ranks: int, orig: bool, threshold: int, per_layer: bool
) -> None:
    model = {f"m{number % 3}.p{number}": (numel,) for number, numel in enumerate(sizes)}
    result = audit(model, PER_LAYER if per_layer else ONE_UNIT, ranks, "FULL_SHARD", orig, threshold)
    expected = brute_force(result)
    for param in result.params:
        assert param.elements_of_other_precision == expected["precision"][param.fqn]
        assert param.elements_in_other_blocks == expected["moved"][param.fqn]
    assert result.cut_blocks.tolist() == expected["cuts"]
    assert result.sent_elements.tolist() == expected["sent"]


LLAMA_405B_UNITS = 126


def llama_405b() -> dict[str, Sequence[int]]:
    width, inner, heads, vocabulary = 16384, 53248, 8 * 128, 128256
    layer: Mapping[str, Sequence[int]] = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (heads, width),
        "self_attn.v_proj.weight": (heads, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    found: dict[str, Sequence[int]] = {"embed_tokens.weight": (vocabulary, width)}
    for number in range(LLAMA_405B_UNITS):
        found.update({f"layers.{number}.{name}": shape for name, shape in layer.items()})
    return {**found, "norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


@pytest.mark.parametrize("orig", [False, True])
def test_a_405b_model_at_16384_ranks(orig: bool) -> None:
    """Feasible at all; no timing."""
    blocks = [f"layers.{number}" for number in range(LLAMA_405B_UNITS)]
    for wrapping in (blocks, PER_LAYER):
        result = audit(llama_405b(), wrapping, 16384, "FULL_SHARD", orig)
        assert result.summary()["elements"] == 405_853_388_800
        assert len(result.native_bytes) == 16384


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1, got 0"),
        ({"world_size": None}, "world_size must be a whole number of at least 1, got None"),
        ({"world_size": 2.0}, "world_size must be a whole number"),
        ({"world_size": 2, "strategy": "SHARD"}, "strategy must be one of FULL_SHARD"),
        ({"world_size": 2, "min_8bit_size": 0}, "min_8bit_size must be at least 1"),
        ({"world_size": 2, "wrapping": ["none"]}, "no parameter lies in a module 'none'"),
        ({"world_size": 2, "wrapping": "everything"}, "name the modules that are units"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audit({"a.weight": (10,)}, **arguments)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="the model has no module 'nowhere'"):
        audit(nn.Linear(3, 3), ["nowhere"], 2)


def make_net() -> nn.Module:
    return Net()


def run_audit(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["audit", *arguments])
    return status, out.getvalue(), err.getvalue()


def test_the_command_line_for_a_function(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    status, out, err = run_audit(
        "test_audit:make_net", "--wrap", "TransformerEncoderLayer", "--world-size", "2,8", "--json", str(path)
    )
    assert (status, err) == (0, "")
    found = json.loads(path.read_text())
    assert [each["world_size"] for each in found] == [2, 8]
    assert found[0]["params"] == len(found[0]["by_parameter"])
    assert out.splitlines()[0].split()[:3] == ["wrapping", "ranks", "use_orig_params"]
    markdown = run_audit("test_audit:make_net", "--wrap", "per-layer", "--markdown")[1]
    assert markdown.splitlines()[1] == "| " + " | ".join(["---"] * 12) + " |"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test_audit:nothing"], "'test_audit' has no 'nothing'"),
        (["no.such.module:f"], "cannot import 'no.such.module'"),
        (["test_audit:llama_405b"], "returned a dict, not a module"),
        (["missing.json"], "cannot read the configuration missing.json"),
        (
            ["test_audit:make_net", "--world-size", "0"],
            "takes whole numbers of at least 1, got '0'",
        ),
        (["test_audit:make_net", "--world-size", "two"], "got 'two'"),
        (["test_audit:make_net", "--wrap", "Nope"], "the model has no module of class 'Nope'; it has "),
        (["test_audit:make_net", "--wrap", "size:big"], "--wrap size:NUMEL takes a whole number"),
        (["test_audit:make_net", "--lora", "r=0"], "--lora takes r=RANK"),
        (["test_audit:make_net", "--json", "/no/such/folder/x.json"], "No such file or directory"),
    ],
)
def test_what_cannot_be_audited_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    status, out, err = run_audit(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_frozen_parameters() -> None:
    """A frozen unit has no state; frozen and trainable in one unit is what FSDP1 refuses itself."""
    model = Net()
    model.encoder.requires_grad_(False)
    result = audit(model, ["encoder"], 2)
    assert not any(param.fqn.startswith("encoder") for param in result.params)
    with pytest.raises(ValueError, match=r"is frozen and .* is not, and both are in one unit"):
        audit(model, ONE_UNIT, 2)
    with_orig = audit(model, ONE_UNIT, 2, use_orig_params=True)
    assert {param.fqn for param in with_orig.params} == {param.fqn for param in result.params}


DATA = Path(__file__).parent.parent / "docs" / "data"


def test_the_impact_table_is_what_its_command_makes(tmp_path: Path) -> None:
    """To the byte, in a process of its own: transformers and peft warn as they like."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    path = tmp_path / "impact.json"
    command = [sys.executable, "-m", "refimpl", "impact", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert path.read_bytes() == (DATA / "impact.json").read_bytes()
    assert done.stdout == (DATA / "impact.md").read_text()


def test_public_models_have_their_published_sizes() -> None:
    rows = json.loads((DATA / "impact.json").read_text())["rows"]
    elements = {(row["model"], row["use_orig_params"]): row["elements"] for row in rows}
    assert elements["GPT-2", True] == 124_439_808
    assert elements["BERT-base", True] == 109_482_240
    assert elements["Llama-3-8B", True] == 8_030_261_248
    assert elements["Llama-3-70B", True] == 70_553_706_496
    assert elements["Llama-3-405B", True] == 405_853_388_800
    assert elements["Qwen3-8B", True] == 8_190_735_360


def test_lora_memory_of_one_state() -> None:
    """Of Qwen3-8B at rank 16, in MB: 174.6 against 44.3 for all seven linear layers."""
    found = json.loads((DATA / "impact.json").read_text())["lora_bytes_per_state"]
    megabytes = {name: (each["fp32"] / 1e6, each["8bit"] / 1e6) for name, each in found.items()}
    assert {name: (round(a, 1), round(b, 1)) for name, (a, b) in megabytes.items()} == {
        "q, v": (30.7, 7.8),
        "q, k, v, o": (61.3, 15.6),
        "all seven": (174.6, 44.3),
    }


@pytest.mark.filterwarnings("ignore")
def test_per_tensor_units_are_those_of_pefts_own_policy() -> None:
    pytest.importorskip("transformers")
    other = pytest.importorskip("peft.utils.other")
    small = {**impact.CONFIGURATIONS["Qwen3-8B"], "num_hidden_layers": 2}
    model = models.with_lora(models.from_config(small), 16)
    names = {module: name for name, module in model.named_modules()}
    expected = [names[module] for module in wrapped_modules(model, other.fsdp_auto_wrap_policy(model))]
    assert len(expected) == 2 * (7 * 2 + 1)
    assert sorted(models.wrapping(model, "per-tensor")) == sorted(expected)
