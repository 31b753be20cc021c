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
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .convert import from_bitsandbytes, to_bitsandbytes, to_torch_adamw
from .named_state import (
    CheckpointError,
    HoldsState,
    NamedParam,
    State,
    agree,
    agree_on_steps,
    check_header,
    copy_state,
    cut_state,
    describe,
    empty_state,
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

    Raises `torch.distributed.checkpoint.CheckpointException` on every rank if one of them cannot write.
    """
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
    tensors["header"] = _as_tensor(header)
    tensors["header_digest"] = _as_tensor(hashlib.blake2b(header, digest_size=16).digest())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # see _Writer
        warnings.filterwarnings("ignore", "torch.distributed is (disabled, )?unavailable")
        save(
            tensors,
            storage_writer=_Writer(path),
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def load_sharded(optimizer: HoldsState, path: str | os.PathLike[str], *, process_group: Any = None) -> None:
    """Replace `optimizer`'s state and hyperparameters by what `save_sharded` wrote to `path`. Collective.

    The wrapping, number of ranks, strategy and `use_orig_params` may be others. Overrides by name
    stay as the optimizer was constructed. Each rank reads what it needs.

    Raises `CheckpointError` on every rank, with nothing changed, if the checkpoint is missing, incomplete,
    damaged or does not fit (`refuse.checkpoint`).
    """
    problem, header, states = None, {}, {}
    try:
        reader = _Reader(path)
        header = _read_header(reader)
        problem = check_header(optimizer, header)
        if problem is None:
            states = _read_states(optimizer, reader, header)
    except CheckpointError as error:
        problem = str(error)
    agree([problem], [process_group or dist.group.WORLD] if dist.is_initialized() else [])
    optimizer.write_states(states)
    optimizer.restore_hyperparameters(header["params"])


def _gathered(digests: dict[str, str], process_group: Any) -> dict[str, str]:
    if dist.is_initialized():
        everyone: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(everyone, digests, group=process_group)
        digests = {key: digest for each in everyone for key, digest in each.items()}
    return dict(sorted(digests.items()))


def _digest(value: Tensor) -> str:
    data = value.detach().cpu().contiguous().view(torch.uint8).numpy().data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
            if file.name not in named:
                file.unlink(missing_ok=True)


class _Reader(FileSystemReader):
    """Reads the list of files without letting it run code."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Torch's own reader unpickles this file, whatever it says. Read once."""
        if self._metadata is None:
            file = Path(self.path) / ".metadata"
            try:
                metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
                if not isinstance(metadata, Metadata):
                    raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
            except FileNotFoundError:
                raise CheckpointError(f"there is no complete checkpoint in {self.path}: no {file}") from None
            except Exception as error:
                raise CheckpointError(f"{file} is damaged: {error}") from None
            self._metadata = metadata
        return self._metadata

    def sizes(self) -> dict[str, TensorStorageMetadata]:
        """What is known of each tensor by its key."""
        found = self.read_metadata().state_dict_metadata
        return {key: each for key, each in found.items() if isinstance(each, TensorStorageMetadata)}

    def file_of(self, key: str) -> Path:
        """The file that a tensor lies in."""
        for index, info in self.read_metadata().storage_data.items():
            if index.fqn == key:
                return Path(self.path) / str(info.relative_path)
        return Path(self.path)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that torch.distributed.checkpoint describes tensors with, and no others."""

    CLASSES = (
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch", "uint8"),
        ("torch.serialization", "_get_layout"),
        *(
            (module, f"{kind}{system}Path")
            for module in ("pathlib", "pathlib._local")
            for kind in ("", "Pure")
            for system in ("Posix", "Windows")
        ),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Raises `UnpicklingError` for anything but `CLASSES`."""
        if (module, name) not in self.CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def _read_header(reader: _Reader) -> dict[str, Any]:
    found = _read(reader, ["header", "header_digest"])
    data = found["header"].numpy().tobytes()
    if hashlib.blake2b(data, digest_size=16).digest() != found["header_digest"].numpy().tobytes():
        raise CheckpointError(f"the header of the checkpoint in {reader.path} is damaged")
    header: dict[str, Any] = json.loads(data)
    return header


def _read_states(
    optimizer: HoldsState, reader: _Reader, header: Mapping[str, Any]
) -> dict[str, tuple[int, State]]:
    """What this rank needs, parameter by parameter, so that what it reads too much of is soon freed."""
    stretches: dict[str, list[int]] = {}
    for key in header["digests"]:
        fqn, first, name = key.removeprefix("state/").rsplit("/", 2)
        if name == "state1":
            stretches.setdefault(fqn, []).append(int(first))
    states: dict[str, tuple[int, State]] = {}
    for param in optimizer.named_params():
        step = header["params"].get(param.fqn, {"step": 0})["step"]
        start, end = optimizer.needed_range(param) if step > 0 else (0, 0)
        states[param.fqn] = (step, {})
        if start < end:
            starts = sorted(stretches.get(param.fqn, []))
            states[param.fqn] = (step, _read_range(reader, header, param, starts, start, end))
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
    tensors = {key: torch.empty(sizes[key].size, dtype=sizes[key].properties.dtype) for key in keys}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is (disabled, )?unavailable")
            load(tensors, storage_reader=reader, no_dist=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        raise CheckpointError(f"'{keys[0]}' in {reader.file_of(keys[0])} cannot be read: {reason}") from None
    return tensors
