"""A checkpoint is whole or it is refused: after kills, full disks, damage, and files made to do harm."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from against_native import TWINS, Case, hybrid_options
from routes import Layout, build, steps
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import ShardingStrategy

from refimpl import checkpoint
from refimpl.checkpoint import CheckpointError, load_sharded, save_sharded
from refimpl.named_state import FORMAT
from refimpl.tools.world import RankError, World

GetWorld = Callable[[int], World]
Full = dict[str, Any]
Load = Callable[[Any], None]

SHAPES = {"x": (3000,), "y": (97, 99), "z": (500,), "w": (5001,)}  # shard edges cut blocks of y and w
CASE = Case(SHAPES)
COARSE: Layout = ("coarse", False)
FINE: Layout = ("fine", True)
LOADED = "loaded"


# ---- what the ranks do


def trained(
    last: int, case: Case = CASE, layout: Layout = COARSE, twin: str = "sharded", **options: Any
) -> Any:
    """A model and its optimizer after step `last`, with a learning rate that tells which step that was."""
    model, optimizer = build(case, layout, twin, **options)
    steps(case, model, optimizer, 1, last)
    optimizer.param_groups[0]["lr"] = last / 8
    return model, optimizer


def save_at(path: Path, last: int, *args: Any, **options: Any) -> Full:
    _, optimizer = trained(last, *args, **options)
    save_sharded(optimizer, path)
    return optimizer.full_state_dict()


def save_hybrid(path: Path) -> Full:
    return save_at(path, 2, **hybrid_options())


def load_fresh(path: Path, layout: Layout = COARSE) -> Full:
    _, optimizer = build(CASE, layout, "sharded")
    load_sharded(optimizer, path)
    return optimizer.full_state_dict()


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that a refused load must leave as it was, on this rank."""
    return {
        "full": optimizer.full_state_dict(),
        "values": [param.detach().clone() for param in model.parameters()],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def outcome(load: Callable[[], None], what: str) -> str:
    """How a load ended. An error of another type fails the test, and says in which case it came."""
    try:
        load()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}, not CheckpointError: {error}") from error
    return LOADED


def try_each(loads: Mapping[str, Load], layout: Layout = COARSE, twin: str = "sharded") -> dict[str, Any]:
    """How each load ended, and whether all was as before."""
    model, optimizer = trained(1, CASE, layout, twin)
    before = everything(model, optimizer)
    found = {}
    for name, load in loads.items():
        message = outcome(partial(load, optimizer), name)
        found[name] = (message, same(everything(model, optimizer), before))
    return found


def from_folder(path: Path) -> Load:
    return lambda optimizer: load_sharded(optimizer, path)


def from_dict(full: Any, only_rank: int | None = None, others: Any = None) -> Load:
    """The load of a dict: the same on every rank, or `full` on one and `others` elsewhere."""
    return lambda optimizer: optimizer.load_full_state_dict(
        full if only_rank in (None, dist.get_rank()) else others
    )


def check_refused(world: World, loads: Mapping[str, Load], messages: Mapping[str, str], *how: Any) -> None:
    """Every rank refuses each load, in a sentence that has `messages[name]` in it, and changes nothing."""
    for rank, found in enumerate(world.run(try_each, loads, *how)):
        for name, (message, unchanged) in found.items():
            assert re.search(messages[name], message), f"{name}, rank {rank}: {message}"
            assert "(refuse.checkpoint); nothing was changed" in message, f"{name}, rank {rank}: {message}"
            assert unchanged, f"{name}, rank {rank}"


# ---- what the test process does


@pytest.fixture(scope="module")
def good(world: GetWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Full]:
    """A folder that two ranks saved after step 2, and the same in full form. Not to be changed."""
    path = tmp_path_factory.mktemp("good")
    return path, world(2).run(save_at, path, 2)[0]


@pytest.fixture(scope="module")
def earlier(world: GetWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Full]:
    """The same after step 1."""
    path = tmp_path_factory.mktemp("earlier")
    return path, world(2).run(save_at, path, 1)[0]


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"), key=lambda file: file.name[-12:])  # by rank


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def read_all(folder: Path) -> dict[str, Tensor]:
    """A whole checkpoint, with nothing but torch."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in described.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def save_plain(tensors: Mapping[str, Any], folder: Path) -> None:
    """With torch's own writer, into a new folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


def with_header(source: Path, target: Path, header: Any) -> Path:
    """A copy of a checkpoint that has another header, whose digest is right."""
    data = json.dumps(header).encode()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    changed = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        for name, value in (("header", data), ("header_digest", digest))
    }
    save_plain({**read_all(source), **changed}, target)
    return target


def header_of(folder: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(bytes(read_all(folder)["header"].tolist()))
    return header


# ---- a save that does not end


class LimitedFile(io.FileIO):
    """A file that `at_limit` is called for when it would grow beyond `limit` bytes, which it holds then."""

    def __init__(self, path: Any, limit: int, at_limit: Callable[[], None]) -> None:
        super().__init__(path, "w")
        self.limit, self.at_limit = limit, at_limit

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        room = max(0, self.limit - self.tell())
        if len(data) > room:
            super().write(data[:room])
            self.at_limit()
        return super().write(data)


def limited_open(kind: str, limit: int, at_limit: Callable[[], None]) -> Callable[..., Any]:
    """`open`, with a limit for the files written whose names contain `kind`."""
    real = io.open

    def replacement(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode and kind in Path(str(path)).name:
            return io.BufferedWriter(LimitedFile(path, limit, at_limit))
        return real(path, mode, *args, **options)

    return replacement


def die() -> None:
    Path(f"killed{dist.get_rank()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(name: str, calls: int = 1) -> None:
    """At the given call of a function of `os`."""
    real, counted = getattr(os, name), iter(range(1, calls))

    def replacement(*args: Any, **options: Any) -> Any:
        if next(counted, None) is None:
            die()
        return real(*args, **options)

    setattr(os, name, replacement)


def die_at(point: str) -> None:
    """Arrange for this rank to be killed at a point of the save to come."""
    where, _, number = point.rpartition(" ")
    if where in (".distcp", ".metadata"):
        io.open = builtins.open = limited_open(where, int(number), die)  # type: ignore[assignment]
        return
    for name in {"fsync": ["fsync"], "rename": ["rename", "replace"], "unlink": ["unlink", "remove"]}[where]:
        die_before(name, int(number))


def killed_save(folder: Path, point: str, ranks: tuple[int, ...]) -> None:
    _, optimizer = trained(2)
    os.chdir(folder.parent)
    if dist.get_rank() in ranks:
        die_at(point)
    save_sharded(optimizer, folder)


KILLS = [
    (".distcp 0", (1,)),
    (".distcp 0", (0, 1)),
    (".distcp 9000", (0,)),
    (".distcp 9000", (1,)),
    (".distcp 9000", (0, 1)),
    ("fsync 1", (1,)),  # all data of rank 1 is written
    ("fsync 1", (0, 1)),
    (".metadata 0", (0,)),
    (".metadata 1000", (0,)),
    ("fsync 2", (0,)),
    ("rename 1", (0,)),
    ("unlink 1", (0,)),
    ("unlink 2", (0,)),
]


def what_is_there(folder: Path, olds: list[Full]) -> tuple[str, bool]:
    """Which of `olds` the folder holds, or why it is refused; and whether a good save mends all."""
    _, optimizer = trained(3)
    _, other = build(CASE, FINE, "sharded")
    message = outcome(partial(load_sharded, other, folder), str(folder))
    if message == LOADED:
        found = other.full_state_dict()
        message = next((f"step {number}" for number, old in enumerate(olds, 1) if same(old, found)), "wrong")
    save_sharded(optimizer, folder)
    mended = same(load_fresh(folder, FINE), optimizer.full_state_dict())
    return message, mended


def check_folder(world: World, folder: Path, olds: list[Full], expected: str) -> None:
    """Every rank finds what is `expected`; a good save afterwards leaves itself and nothing else."""
    for message, mended in world.run(what_is_there, folder, olds):
        assert re.search(expected, message), message
        assert mended
    infos = FileSystemReader(folder).read_metadata().storage_data.values()
    assert {file.name for file in folder.iterdir()} == {".metadata", *(info.relative_path for info in infos)}


@pytest.mark.parametrize(
    ("point", "ranks", "folder_holds"),
    [
        (point, ranks, folder_holds)
        for point, ranks in KILLS
        for folder_holds in ("earlier", "nothing")
        if folder_holds == "earlier" or not point.startswith("unlink")
    ],
    ids=str,
)
def test_a_save_that_is_killed(
    point: str,
    ranks: tuple[int, ...],
    folder_holds: str,
    world: GetWorld,
    good: Any,
    earlier: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    if folder_holds == "earlier":
        copied(earlier[0], folder)
    with World(2, device="cpu", timeout=30) as own, pytest.raises(RankError):
        own.run(killed_save, folder, point, ranks)
    assert {file.name for file in tmp_path.glob("killed*")} == {f"killed{rank}" for rank in ranks}
    refused = "there is no complete checkpoint in .*folder"
    expected = {"earlier": "^step 1$", "nothing": refused}[folder_holds]
    if point.startswith("unlink"):  # after the new one is complete
        expected = "^step 2$"
    check_folder(world(2), folder, [earlier[1], good[1]], expected)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_on_full_disk(folder: Path, kind: str, limit: int, rank: int) -> str:
    _, optimizer = trained(2)
    opener = limited_open(kind, limit, full_disk) if dist.get_rank() == rank else io.open
    with mock.patch("io.open", opener), mock.patch("builtins.open", opener):
        try:
            save_sharded(optimizer, folder)
        except dcp.CheckpointException as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize("folder_holds", ["earlier", "nothing"])
def test_a_disk_that_fills_up(
    folder_holds: str, world: GetWorld, good: Any, earlier: Any, tmp_path: Path
) -> None:
    for kind, limit, rank in [(".distcp", 0, 0), (".distcp", 9000, 1), (".metadata", 1000, 0)]:
        folder = tmp_path / f"{kind}{rank}"
        if folder_holds == "earlier":
            copied(earlier[0], folder)
        for message in world(2).run(save_on_full_disk, folder, kind, limit, rank):
            assert "No space left on device" in message
        expected = {"earlier": "^step 1$", "nothing": "there is no complete checkpoint in "}[folder_holds]
        check_folder(world(2), folder, [earlier[1], good[1]], expected)


# ---- damage


def flip(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1 << bit]))


def try_flips(file: Path, flips: list[tuple[int, int]], saved: Full) -> list[str]:
    """How a load ended with each single bit flipped; loaded is right or "wrong"."""
    model, optimizer = trained(1)
    before = everything(model, optimizer)
    messages = []
    for position, bit in flips:
        if dist.get_rank() == 0:
            flip(file, position, bit)
        dist.barrier()
        message = outcome(partial(load_sharded, optimizer, file.parent), f"{file.name}: {position}, {bit}")
        now = everything(model, optimizer)
        if message == LOADED:
            right = same(now["full"], saved) and same(now["values"], before["values"])
            optimizer.load_full_state_dict(before["full"])
        else:
            right = same(now, before)
        messages.append(message if right else f"wrong after {message}")
        dist.barrier()
        if dist.get_rank() == 0:
            flip(file, position, bit)
    return messages


def chosen_flips(size: int, seed: int) -> list[tuple[int, int]]:
    """One bit of each of the first 64 bytes, and 40 anywhere."""
    choose = random.Random(seed)
    positions = [*range(64), *(choose.randrange(size) for _ in range(40))]
    return [(position, choose.randrange(8)) for position in positions]


@pytest.mark.rule("refuse.checkpoint")
@pytest.mark.parametrize("number", [0, 1, 2], ids=["data of rank 0", "data of rank 1", "metadata"])
def test_a_flipped_bit(number: int, world: GetWorld, good: Any, tmp_path: Path) -> None:
    folder = copied(good[0], tmp_path / "folder")
    file = [*data_files(folder), folder / ".metadata"][number]
    flips = chosen_flips(file.stat().st_size, seed=number)
    for found in world(2).run(try_flips, file, flips, good[1]):
        for place, message in zip(flips, found, strict=True):
            named = re.search(rf"{re.escape(str(folder))}|\.weight'", message)
            assert message == LOADED or (named and not message.startswith("wrong")), (place, message)
        assert (
            sum(message != LOADED for message in found) > len(flips) / 4
        )  # the rest is zip's padding and the like


def shorter(which: int, part: float) -> Callable[[Path], None]:
    """Cut file `which`: data files by rank, then the list of files."""

    def damage(folder: Path) -> None:
        file = [*data_files(folder), folder / ".metadata"][which]
        os.truncate(file, int(file.stat().st_size * part) if part < 1 else file.stat().st_size - 1)

    return damage


def foreign(tensors: Mapping[str, Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        save_plain(tensors, folder)

    return damage


def swap_data(folder: Path) -> None:
    first, second = data_files(folder)
    first.rename(folder / "spare")
    second.rename(first)
    (folder / "spare").rename(second)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def make_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "data 0 empty": (shorter(0, 0.0), r"__0_0\.distcp"),
    "data 1 empty": (shorter(1, 0.0), r"__1_0\.distcp"),
    "data 0 cut": (shorter(0, 0.5), r"__0_0\.distcp"),
    "data 1 cut": (shorter(1, 0.5), r"__1_0\.distcp"),
    "data 0 cut by a byte": (shorter(0, 1), r"__0_0\.distcp"),
    "data 1 cut by a byte": (shorter(1, 1), r"__1_0\.distcp"),
    "data 0 missing": (lambda folder: data_files(folder)[0].unlink(), r"__0_0\.distcp"),
    "data 1 missing": (lambda folder: data_files(folder)[1].unlink(), r"__1_0\.distcp"),
    "data swapped": (swap_data, r"\.distcp"),
    "metadata empty": (shorter(2, 0.0), r"\.metadata is damaged"),
    "metadata cut": (shorter(2, 0.5), r"\.metadata is damaged"),
    "metadata cut by a byte": (shorter(2, 1), r"\.metadata is damaged"),
    "metadata missing": (
        lambda folder: (folder / ".metadata").unlink(),
        "no complete checkpoint in .*missing",
    ),
    "empty folder": (make_empty, "no complete checkpoint in .*empty folder"),
    "no folder": (shutil.rmtree, "no complete checkpoint in .*no folder"),
    "a file": (make_file, "a file"),
    "foreign": (foreign({"a": torch.ones(3)}), "lacks 'header'"),
    "foreign header": (foreign({"header": torch.ones(3)}), "lacks 'header_digest'"),
    "foreign headers": (foreign({"header": torch.ones(3), "header_digest": torch.ones(3)}), "is damaged"),
    "foreign objects": (foreign({"header": "text", "header_digest": "text"}), "foreign objects"),
}


@pytest.mark.rule("refuse.checkpoint")
@pytest.mark.parametrize(("twin", "layout"), [(twin, layout) for twin in TWINS for layout in (COARSE, FINE)])
def test_damage(twin: str, layout: Layout, world: GetWorld, good: Any, tmp_path: Path) -> None:
    loads = {}
    for name, (damage, _) in DAMAGES.items():
        damage(copied(good[0], tmp_path / name))
        loads[name] = from_folder(tmp_path / name)
    check_refused(world(2), loads, {name: each[1] for name, each in DAMAGES.items()}, layout, twin)


OTHERS = {
    "names": (Case({"other": (3000,), **SHAPES}), "it has 'other.weight', which this optimizer has not"),
    "fewer": (Case({"x": (3000,), "y": (97, 99), "z": (500,)}), "it lacks 'w.weight'"),
    "shape": (Case({**SHAPES, "y": (99, 97)}), r"'y.weight' has shape \(99, 97\) in the checkpoint"),
    "bits": (Case(SHAPES, min_8bit_size=8192), "'w.weight' has 32-bit state in the checkpoint, 8-bit here"),
    "override": (Case(SHAPES, overrides={"y*": {"optim_bits": 32}}), "'y.weight' has 32-bit state"),
}


@pytest.mark.rule("refuse.checkpoint")
@pytest.mark.parametrize("twin", TWINS)
def test_a_checkpoint_of_something_else(twin: str, world: GetWorld, tmp_path: Path) -> None:
    """In both forms."""
    loads, messages = {}, {}
    for name, (case, message) in OTHERS.items():
        full = world(2).run(save_at, tmp_path / name, 2, case)[0]
        loads |= {name: from_folder(tmp_path / name), f"{name}, full": from_dict(full)}
        messages |= {name: message, f"{name}, full": message}
    check_refused(world(2), loads, messages, COARSE, twin)


@pytest.mark.rule("refuse.checkpoint")
def test_another_version_or_block_size(world: GetWorld, good: Any, tmp_path: Path) -> None:
    """In both forms."""
    folder, full = good
    loads, messages = {}, {}
    for key, value, message in (
        ("version", 2, "format version 2, newer than version 1"),
        ("block_size", 2048, "has blocks of 2048 elements, this release has blocks of 256"),
        ("format", "other", "its format is 'other'"),
    ):
        changed = with_header(folder, tmp_path / key, {**header_of(folder), key: value})
        loads |= {key: from_folder(changed), f"{key}, full": from_dict({**full, key: value})}
        messages |= {key: message, f"{key}, full": message}
    check_refused(world(2), loads, messages)


def without(entry: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


def odd_headers(header: dict[str, Any]) -> dict[str, Any]:
    """Headers that say they are ours and are not."""
    y = header["params"]["y.weight"]
    found: dict[str, Any] = {
        f"{key} missing": without(header, key) for key in ("version", "block_size", "params")
    }
    found |= {
        f"{key} of y missing": {**header, "params": {**header["params"], "y.weight": without(y, key)}}
        for key in ("shape", "bits", "step", "lr", "betas")
    }
    found |= {"version is text": {**header, "version": "1"}, "params is a list": {**header, "params": []}}
    found["params of text"] = {**header, "params": {"y.weight": "8-bit"}}
    return found


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_header_that_is_none(form: str, world: GetWorld, good: Any, tmp_path: Path) -> None:
    """Its digest is right: written by something else that calls itself the same."""
    folder, full = good
    loads = {}
    if form == "full":
        loads = {name: from_dict(each) for name, each in odd_headers(full).items()}
    else:
        odd = {"list": [], "number": 7, "empty": {}, "only a name": {"format": FORMAT}}
        odd |= {"no digests": without(header_of(folder), "digests"), **odd_headers(header_of(folder))}
        for name, header in odd.items():
            loads[name] = from_folder(with_header(folder, tmp_path / name, header))
    problems = {}
    for name, load in loads.items():  # one by one: without a sentence, ranks are left waiting
        try:
            check_refused(world(2), {name: load}, {name: "checkpoint"})
        except (AssertionError, RankError) as error:
            problems[name] = re.findall(r".*AssertionError: (.*)", str(error))[:1] or str(error)
    assert problems == {}


# ---- the full form


def with_entry(full: Full, name: str, **values: Any) -> Full:
    return {**full, "state": {**full["state"], name: {**full["state"][name], **values}}}


def native_state_dict() -> dict[str, Any]:
    model = CASE.model()
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    steps(CASE, model, optimizer, 1, 1)
    found: dict[str, Any] = optimizer.state_dict()
    return found


def bad_dicts(full: Full) -> dict[str, tuple[Any, str]]:
    y = full["state"]["y.weight"]
    other_blocks = y["absmax2"][: -(-97 * 99 // 2048)]
    return {
        "no entry": ({**full, "state": without(full["state"], "y.weight")}, "no state of 'y.weight'"),
        "dtype": (with_entry(full, "y.weight", state1=y["state1"].to(torch.int8)), "state1 of 'y.weight' is"),
        "half": (with_entry(full, "x.weight", state2=torch.zeros(3000).half()), "state2 of 'x.weight' is"),
        "shape": (with_entry(full, "y.weight", state2=y["state2"].view(-1)), "state2 of 'y.weight' is"),
        "blocks": (with_entry(full, "y.weight", absmax2=other_blocks), "absmax2 of 'y.weight' is"),
        "no tensor": (with_entry(full, "y.weight", state1=[1, 2]), "'y.weight' has no state1"),
        "no absmax": (with_entry(full, "y.weight", absmax1=None), "'y.weight' has no absmax1"),
        "native": (native_state_dict(), "is not a refimpl.AdamW8bit checkpoint"),
        "garbage": ({"epoch": 3, "model": {}}, "is not a refimpl.AdamW8bit checkpoint"),
    }


@pytest.mark.rule("refuse.checkpoint")
@pytest.mark.parametrize("twin", TWINS)
def test_a_dict_that_does_not_fit(twin: str, world: GetWorld, good: Any) -> None:
    """On all ranks, or on one of them alone."""
    full = good[1]
    bad = bad_dicts(full)
    loads = {"empty": from_dict({}), "empty 0": from_dict({}, 0, full)}
    messages = dict.fromkeys(loads, "the checkpoint is empty")
    for name, (each, message) in bad.items():
        for label, load in (
            (name, from_dict(each)),
            (f"{name} 0", from_dict(each, 0, full)),
            (f"{name} 1", from_dict(each, 1, full)),
            (f"{name}, rank0_only", from_dict(each, 0, {})),
        ):
            loads[label], messages[label] = load, message
    check_refused(world(2), loads, messages, COARSE, twin)


@pytest.mark.parametrize("what", ["no state", "state of text", "entry of text", "None", "list"])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_dict_that_is_none(what: str, rank: int | None, world: GetWorld, good: Any) -> None:
    full = good[1]
    odd = {
        "no state": without(full, "state"),
        "state of text": {**full, "state": "gone"},
        "entry of text": {**full, "state": {**full["state"], "y.weight": "gone"}},
        "None": None,
        "list": [full],
    }[what]
    check_refused(world(2), {what: from_dict(odd, rank, full)}, {what: "checkpoint"})


def stock_dict(change: Callable[[dict[str, Any]], Any], only_rank: int | None) -> Load:
    """`load_state_dict` of the optimizer's own state dict with something changed, on one rank or all."""

    def load(optimizer: Any) -> None:
        found = optimizer.state_dict()
        changed = only_rank is None or dist.get_rank() == only_rank
        optimizer.load_state_dict(change(found) if changed else found)

    return load


def with_packed(found: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**found, "state": {0: {**found["state"][0], **values}}}


STOCK: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "native": (lambda found: native_state_dict(), "native bitsandbytes state"),
    "no absmax": (lambda found: with_packed(found, absmax1=None), "no tensor 'absmax1'"),
    "shape": (lambda found: with_packed(found, state1=torch.zeros(7)), "state1 of 'x.weight' has shape"),
    "codes": (
        lambda found: with_packed(found, state1=found["state"][0]["state1"] + 0.5),
        "codes from 0 to 255",
    ),
    "bits": (
        lambda found: with_packed(found, absmax1=-torch.ones_like(found["state"][0]["steps"])),
        "32-bit",
    ),
    "no groups": (lambda found: without(found, "param_groups"), "checkpoint"),
    "no state": (lambda found: without(found, "state"), "checkpoint"),
    "more groups": (lambda found: {**found, "param_groups": found["param_groups"] * 2}, "checkpoint"),
    "empty": (lambda found: {}, "checkpoint"),
}


@pytest.mark.rule("refuse.checkpoint")
@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("what", STOCK)
def test_a_state_dict_that_does_not_fit(what: str, rank: int | None, world: GetWorld) -> None:
    change, message = STOCK[what]
    check_refused(world(2), {what: stock_dict(change, rank)}, {what: message})


# ---- one rank alone


def load_with_one_bad_reader(path: Path, bad_rank: int) -> tuple[str, bool]:
    def cannot_read(*_: Any) -> None:
        raise CheckpointError("the disk of this node is gone")

    model, optimizer = trained(1)
    before = everything(model, optimizer)
    read = cannot_read if dist.get_rank() == bad_rank else checkpoint._read
    with mock.patch.object(checkpoint, "_read", read):
        message = outcome(lambda: load_sharded(optimizer, path), "one bad rank")
    return message, same(everything(model, optimizer), before)


@pytest.mark.rule("refuse.checkpoint", "collective.unconditional")
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_a_problem_of_one_rank_is_raised_on_all(bad_rank: int, world: GetWorld, good: Any) -> None:
    for rank, (message, unchanged) in enumerate(world(3).run(load_with_one_bad_reader, good[0], bad_rank)):
        start = "" if rank == bad_rank else f"rank {bad_rank} of 3 cannot load: "
        assert message.startswith(f"{start}the disk of this node is gone (refuse.checkpoint)")
        assert unchanged


# ---- files that are made to do harm


class Harm:
    """What calls `function(*arguments)` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def harms(mark: Path) -> dict[str, Harm]:
    """Each makes the file `mark` if it is let."""
    code = f"open({str(mark)!r}, 'w').close()"
    inner = mark.with_suffix(".pt")
    torch.save(Harm(exec, code), inner)
    return {
        "system": Harm(os.system, f"touch {mark}"),
        "exec": Harm(exec, code),
        "eval": Harm(eval, code),
        "load": Harm(partial(torch.load, weights_only=False), inner),
        "touch": Harm(Path.touch, mark),
        "attribute": Harm(getattr(pickle, "loads"), pickle.dumps(Harm(exec, code))),  # noqa: B009
    }


POISON = (  # (None, {"poisoned": 1}) as the state of the class itself: pickle sets attributes from it
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00poisonedK\x01s\x86b."
)


def is_poisoned() -> bool:
    try:
        return hasattr(Metadata, "poisoned")
    finally:
        if hasattr(Metadata, "poisoned"):
            del Metadata.poisoned


def test_a_list_of_files_cannot_run_code(world: GetWorld, good: Any, tmp_path: Path) -> None:
    loads = {}
    mark = tmp_path / "mark"
    true = FileSystemReader(good[0]).read_metadata()
    for name, harm in harms(mark).items():
        for depth, thing in (("alone", harm), ("inside", Metadata(true.state_dict_metadata, harm))):
            folder = copied(good[0], tmp_path / f"{name} {depth}")
            (folder / ".metadata").write_bytes(pickle.dumps(thing))
            loads[folder.name] = from_folder(folder)
    check_refused(world(2), loads, dict.fromkeys(loads, r"\.metadata is damaged: "))
    assert not mark.exists()
    exec(f"open({str(mark)!r}, 'w').close()")
    assert mark.exists()  # it would have shown


def test_a_list_of_files_cannot_change_a_class(world: GetWorld, good: Any, tmp_path: Path) -> None:
    folder = copied(good[0], tmp_path / "poison")
    (folder / ".metadata").write_bytes(POISON)
    check_refused(world(2), {"poison": from_folder(folder)}, {"poison": r"\.metadata is damaged"})
    assert world(2).run(is_poisoned) == [False, False]


GREEDY = b"\x80\x04Nr\xff\xff\xff\x03."  # None, memorized as number 2^26 - 1: one flipped bit can ask for it


def memory_for_refusal(path: Path) -> int:
    """By how many bytes this process's highest use of memory has grown."""
    _, optimizer = trained(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is damaged" in outcome(partial(load_sharded, optimizer, path), "greedy")
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_a_list_of_files_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(GREEDY)
    with World(1, device="cpu") as own:
        assert own.run(memory_for_refusal, tmp_path)[0] < 100e6


def test_a_data_file_cannot_run_code(world: GetWorld, good: Any, tmp_path: Path) -> None:
    """In place of the header, and in place of some state."""
    loads = {}
    mark = tmp_path / "mark"
    for name, harm in without(harms(mark), "load").items():
        for key in ("header", "state/y.weight/0/state1"):
            folder = copied(good[0], tmp_path / f"{name} {key.replace('/', ' ')}")
            metadata = FileSystemReader(folder).read_metadata()
            info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
            data = io.BytesIO()
            torch.save(harm, data)
            info.offset, info.length = 0, len(data.getvalue())
            info.relative_path = "harm.distcp"
            (folder / "harm.distcp").write_bytes(data.getvalue())
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
            loads[folder.name] = from_folder(folder)
    check_refused(world(2), loads, dict.fromkeys(loads, r"in .*harm\.distcp cannot be read"))
    assert not mark.exists()


# ---- what is in the files


def rebuilt(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The header, and the state by name as the full form has it, with torch and json alone."""
    tensors = read_all(folder)
    header = json.loads(bytes(tensors["header"].tolist()))
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for key, value in tensors.items():
        if key not in ("header", "header_digest"):
            fqn, start, name = key.removeprefix("state/").rsplit("/", 2)
            parts.setdefault((fqn, name), {})[int(start)] = value
    state: dict[str, dict[str, Tensor]] = {}
    for (fqn, name), pieces in parts.items():
        whole = torch.cat([pieces[start] for start in sorted(pieces)])
        shape = header["params"][fqn]["shape"]
        state.setdefault(fqn, {})[name] = whole if name.startswith("absmax") else whole.view(shape)
    return header, state


def check_contents(folder: Path, full: Full) -> None:
    """Everything of the full form is there, once, and nothing else."""
    header, state = rebuilt(folder)
    assert same(state, {name: without(entry, "step") for name, entry in full["state"].items()})
    assert without(header, "digests") == json.loads(json.dumps(without(full, "state")))
    metadata = FileSystemReader(folder).read_metadata()
    assert all(type(each) is TensorStorageMetadata for each in metadata.state_dict_metadata.values())
    assert set(header["digests"]) == set(metadata.state_dict_metadata) - {"header", "header_digest"}
    written = sum(
        each.size.numel() * each.properties.dtype.itemsize
        for key, each in metadata.state_dict_metadata.items()
        if key.startswith("state/")
    )
    assert written == sum(value.nbytes for entry in state.values() for value in entry.values())
    lengths = sum(info.length for info in metadata.storage_data.values())
    assert lengths == sum(file.stat().st_size for file in data_files(folder))


@pytest.mark.rule("checkpoint.by-name")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_writes_its_part_once(strategy: str, size: int, world: GetWorld, tmp_path: Path) -> None:
    for layout in (COARSE, FINE):
        folder = tmp_path / layout[0]
        options = {"sharding_strategy": ShardingStrategy[strategy]}
        fulls = world(size).run(save_at, folder, 2, CASE, layout, **options)
        check_contents(folder, fulls[0])
        assert all(same(full, fulls[0]) for full in fulls)
        if strategy != "NO_SHARD":
            assert len(data_files(folder)) == size


@pytest.mark.rule("checkpoint.reshard", "strategy.invariant")
def test_hybrid_writes_replicas_once_and_loads_into_three_ranks(world: GetWorld, tmp_path: Path) -> None:
    full = world(4).run(save_hybrid, tmp_path)[0]
    check_contents(tmp_path, full)
    for layout in (COARSE, FINE):
        assert all(same(found, full) for found in world(3).run(load_fresh, tmp_path, layout))


def test_all_of_it_loads_with_weights_only(good: Any) -> None:
    folder, full = good
    tensors = read_all(folder)
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert same(torch.load(io.BytesIO(data), weights_only=True), tensors[index.fqn])
    saved = io.BytesIO()
    torch.save(full, saved)
    saved.seek(0)
    assert same(torch.load(saved, weights_only=True), full)
