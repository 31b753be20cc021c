"""Checkpoints: compact and sharded through torch.distributed.checkpoint, and conversions.

`save_sharded` writes, for each stretch of an original parameter that a rank owns, its codes and absmax as
they are, under keys like

    state/NAME/START/state1

and one tensor `header`, the UTF-8 text of a JSON object: the full form without state
(`named_state`), and a digest of every other tensor. So a checkpoint is tensors and nothing else,
readable with torch alone; and it is complete or it is refused, since what appears last, atomically,
is the file that names all others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from .convert import from_bitsandbytes, to_bitsandbytes, to_torch_adamw
from .named_state import (
    CheckpointError,
    HoldsState,
    NamedParam,
    State,
    States,
    agree,
    agree_on_steps,
    check_header,
    copy_state,
    cut_state,
    describe,
    empty_state,
    first_problem,
    of_everyone,
    refuse_equal_names,
)

__all__ = [
    "CheckpointError",
    "from_bitsandbytes",
    "load_sharded",
    "save_sharded",
    "to_bitsandbytes",
    "to_torch_adamw",
]


def save_sharded(optimizer: HoldsState, path: str | os.PathLike[str], *, process_group: Any = None) -> None:
    """Save `optimizer`'s state under the folder `path`, each rank its own part. Collective.

    Replicas (HYBRID_SHARD, NO_SHARD) are written once. An earlier checkpoint in the same folder stays
    loadable until the new one is complete, and is then replaced. `process_group` (default: all ranks)
    must contain every rank that holds part of the model.

    Raises `CheckpointError` if ranks that hold copies of one parameter disagree on its state, or the folder
    holds a checkpoint of something else; `torch.distributed.checkpoint.CheckpointException` on every rank
    if one of them cannot write.
    """
    group = [process_group or dist.group.WORLD] if dist.is_initialized() else []
    agree(first_problem(lambda: _foreign(path), lambda: refuse_equal_names(optimizer)), group)
    steps = agree_on_steps(optimizer)
    tensors = {
        f"state/{param.fqn}/{start}/{name}": value
        for param in optimizer.named_params()
        if steps[param.fqn] > 0
        for start, end in param.owned_stretches(param.layout.rank)
        for name, value in optimizer.read_state(param, start, end).items()
    }
    digests = _gathered({key: _digest(value) for key, value in tensors.items()}, process_group)
    header = json.dumps({**describe(optimizer, steps), "digests": digests}).encode()
    header = _of_first_rank(header, process_group)
    tensors["header"] = _as_tensor(header)
    tensors["header_digest"] = _as_tensor(hashlib.blake2b(header, digest_size=16).digest())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # see _Writer
        warnings.filterwarnings("ignore", "torch.distributed is (disabled, )?unavailable")
        save(tensors, storage_writer=_Writer(path), process_group=process_group)


def load_sharded(optimizer: HoldsState, path: str | os.PathLike[str], *, process_group: Any = None) -> None:
    """Replace `optimizer`'s state and hyperparameters by what `save_sharded` wrote to `path`. Collective.

    The wrapping, number of ranks, strategy and `use_orig_params` may be others. Overrides by name
    stay as the optimizer was constructed. Each rank reads what it needs.

    Raises `CheckpointError` on every rank, with nothing changed, if the checkpoint is missing, incomplete,
    damaged or does not fit (`refuse.checkpoint`).
    """
    header: dict[str, Any] = {}
    states: States = {}

    def read() -> str | None:
        reader = _Reader(path)
        header.update(_read_header(reader))
        problem = check_header(optimizer, header)
        if problem is None:
            states.update(_read_states(optimizer, reader, header))
        return problem

    problem = first_problem(read)
    agree(problem, [process_group or dist.group.WORLD] if dist.is_initialized() else [])
    optimizer.write_states(states)
    optimizer.restore_hyperparameters(header["params"])


def _gathered(digests: dict[str, str], process_group: Any) -> dict[str, str]:
    if dist.is_initialized():
        everyone = of_everyone(digests, process_group)
        digests = {}
        for key, digest in (item for each in everyone for item in each.items()):
            if digests.setdefault(key, digest) != digest:
                raise CheckpointError(
                    f"'{key}' differs between ranks that should hold copies of it: replicas have drifted"
                    " apart, or its gradients were not reduced, as under ignored_states"
                )
    return dict(sorted(digests.items()))


def _foreign(path: str | os.PathLike[str]) -> str | None:
    """Whether saving to `path` would replace a checkpoint of something else."""
    file = Path(path) / ".metadata"
    try:
        ours = not file.exists() or "header" in _Reader(path).sizes()
    except CheckpointError:
        ours = False
    if ours:
        return None
    return f"saving would replace {file}, which save_sharded has not written, or is damaged: remove it first"


def _of_first_rank(header: bytes, process_group: Any) -> bytes:
    """One header for all: step counts of parameters that are not sharded may differ by rank."""
    headers = [header]
    if dist.is_initialized():
        group: Any = process_group or dist.group.WORLD
        dist.broadcast_object_list(headers, src=dist.get_global_rank(group, 0), group=group)
    return headers[0]


def _digest(value: Tensor) -> str:
    data = value.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


OWN_FILE = re.compile(r"[0-9a-f]{12}__\d+_\d+\.distcp$")
"""What `_Writer` names its files; those of another checkpoint in the folder are left alone."""


class _AtomicFileSystem(FileSystem):
    """Renames over the file that is there, instead of removing that first."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass


class _Writer(FileSystemWriter):
    """Writes new files beside those of an earlier checkpoint, and removes these at the very end.

    Torch's own writer reuses file names, so a save that is killed would spoil the earlier checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, overwrite=True)
        self.fs = _AtomicFileSystem()

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Give the files of every rank a prefix that no earlier save has used."""
        unique = os.urandom(6).hex()
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{unique}{plan.storage_data.prefix}"
                ),
            )
            for plan in super().prepare_global_plan(plans)
        ]

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Make the new checkpoint the one there is, then clear away what it does not name."""
        super().finish(metadata, results)
        named = {each.relative_path for each in metadata.storage_data.values()}
        for file in Path(self.path).glob("*.distcp"):
            if file.name not in named and OWN_FILE.match(file.name):
                file.unlink(missing_ok=True)


class _Reader(FileSystemReader):
    """Reads the list of files without letting it run code."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None
        self._files: dict[str, Path] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Torch's own reader unpickles this file, whatever it says. Read once."""
        if self._metadata is None:
            file = Path(self.path) / ".metadata"
            try:
                self._metadata = _rebuild(_InertUnpickler(io.BytesIO(file.read_bytes())).load())
            except FileNotFoundError:
                raise CheckpointError(f"there is no complete checkpoint in {self.path}: no {file}") from None
            except Exception as error:
                raise CheckpointError(f"{file} is damaged: {error!r}") from None
        return self._metadata

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read each tensor by its key: what torch's `load` does, but never together with other ranks."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(tensors, self.read_metadata(), is_coordinator=True)
        self.set_up_storage_reader(self.read_metadata(), is_coordinator=True)
        (plan,) = planner.create_global_plan([self.prepare_local_plan(planner.create_local_plan())])
        (plan,) = self.prepare_global_plan([plan])
        self.read_data(planner.finish_plan(plan), planner).wait()

    def sizes(self) -> dict[str, TensorStorageMetadata]:
        """What is known of each tensor by its key."""
        found = self.read_metadata().state_dict_metadata
        return {key: each for key, each in found.items() if isinstance(each, TensorStorageMetadata)}

    def file_of(self, key: str) -> Path:
        """The file that a tensor lies in."""
        if not self._files:
            places = self.read_metadata().storage_data.items()
            self._files = {index.fqn: Path(self.path) / info.relative_path for index, info in places}
        return self._files.get(key, Path(self.path))


class _Record:
    """What a pickle says of one object: how it was called, and its state. Nothing is done with it."""

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle._Unpickler):
    """Makes a record of every object, whatever its class, and touches nothing of torch's or anyone's.

    Of all names only those of the two dtypes that checkpoints here consist of mean something. It is the
    unpickler written in Python: that in C takes memory by the gigabyte if a flipped bit says so.
    """

    DTYPES: ClassVar = {"float32": torch.float32, "uint8": torch.uint8}

    def find_class(self, module: str, name: str) -> Any:
        """A class of its own for every mention, so that a pickle can spoil no other."""
        if module == "torch" and name in self.DTYPES:
            return self.DTYPES[name]
        return type(name, (_Record,), {})


def _rebuild(found: _Record) -> Metadata:
    """The list of files from its record: what tensors there are, and where each lies."""
    tensors = {}
    for key, each in found.state["state_dict_metadata"].items():
        dtype = each.state["properties"].state[0]
        if dtype not in _InertUnpickler.DTYPES.values():
            raise ValueError(f"it gives '{key}' another dtype than state has")
        size = _size(each.state["size"])
        chunks = [
            ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
            for chunk in each.state["chunks"]
        ]
        tensors[str(key)] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    places = {}
    for index, info in found.state["storage_data"].items():
        name = str(info.state["relative_path"])
        if Path(name).name != name:
            raise ValueError(f"it names the file {name}, outside the folder")
        where = MetadataIndex(str(index.state["fqn"]), _size(index.state["offset"]), index.state.get("index"))
        places[where] = _StorageInfo(name, int(info.state["offset"]), int(info.state["length"]))
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def _size(record: _Record) -> torch.Size:
    (numbers,) = record.args
    return torch.Size(int(number) for number in numbers)


def _read_header(reader: _Reader) -> dict[str, Any]:
    found = _read(reader, ["header", "header_digest"])
    data = found["header"].numpy().tobytes()
    if hashlib.blake2b(data, digest_size=16).digest() != found["header_digest"].numpy().tobytes():
        raise CheckpointError(f"the header of the checkpoint in {reader.path} is damaged")
    header: dict[str, Any] = json.loads(data)
    return header


def _read_states(optimizer: HoldsState, reader: _Reader, header: Mapping[str, Any]) -> States:
    """What this rank needs, parameter by parameter, so that what it reads too much of is soon freed."""
    stretches: dict[str, list[int]] = {}
    for key in header["digests"]:
        fqn, first, name = key.removeprefix("state/").rsplit("/", 2)
        if name == "state1":
            stretches.setdefault(fqn, []).append(int(first))
    states: States = {}
    for param in optimizer.named_params():
        step = header["params"].get(param.fqn, {"step": 0})["step"]
        start, end = optimizer.needed_range(param) if step > 0 else (0, 0)
        states[param.key] = (step, {})
        if start < end:
            starts = sorted(stretches.get(param.fqn, []))
            states[param.key] = (step, _read_range(reader, header, param, starts, start, end))
    return states


def _read_range(
    reader: _Reader,
    header: Mapping[str, Any],
    param: NamedParam,
    starts: list[int],
    start: int,
    end: int,
) -> State:
    """The state of elements `start..end` of one parameter, from the stretches that begin at `starts`."""
    state = empty_state(end - start, param.is_8bit)
    covered = start
    for first, last in pairwise([*starts, param.numel]):
        if first >= end or last <= start:
            continue
        keys = [f"state/{param.fqn}/{first}/{name}" for name in state]
        found = _read(reader, keys)
        for key, value in found.items():
            if _digest(value) != header["digests"].get(key):
                raise CheckpointError(f"'{key}' in {reader.file_of(key)} is damaged: its digest is another")
        stretch = dict(zip(state, (found[key] for key in keys), strict=True))
        length = stretch["state1"].numel()
        low, high = max(start, first), min(end, first + length)
        if low > covered:
            break
        target = cut_state(state, low - start, high - start)
        copy_state(target, cut_state(stretch, low - first, high - first))
        covered = high
    if covered < end:
        raise CheckpointError(f"the checkpoint lacks state of '{param.fqn}' from element {covered} on")
    return state


def _read(reader: _Reader, keys: list[str]) -> dict[str, Tensor]:
    """The tensors of these keys. No other rank takes part, so that none can be left waiting."""
    sizes = reader.sizes()
    for key in keys:
        if key not in sizes:
            raise CheckpointError(f"the checkpoint in {reader.path} lacks '{key}'")
    for key in keys:  # before memory is asked for: a damaged size may be anything
        numel, file = sizes[key].size.numel(), reader.file_of(key)
        if not file.exists() or numel * sizes[key].properties.dtype.itemsize > file.stat().st_size:
            raise CheckpointError(f"'{key}' in {file} cannot be read: the file is missing or too short")
    tensors = {key: torch.empty(sizes[key].size, dtype=sizes[key].properties.dtype) for key in keys}
    try:
        reader.fill(tensors)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        raise CheckpointError(f"'{keys[0]}' in {reader.file_of(keys[0])} cannot be read: {reason}") from None
    return tensors
