"""N ranks on this machine that stay alive between calls, for tests, notebooks and the report.

    with World(2) as world:
        world.run(torch.distributed.get_rank)  # [0, 1]

The function may be written in a notebook cell: it travels by cloudpickle. Each rank's result
comes back by value, on CPU, in rank order. What the ranks print goes to a file each, never into
the caller's output.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

GRACE_SECONDS = 1.0
"""After a first error, how long to wait for the other ranks' reports before blaming one."""
SECONDARY = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "SIGKILL")
"""What a rank reports when another one has failed first."""


class RankError(RuntimeError):
    """A rank raised or died. The message holds that rank's own traceback and its last output."""


class RankTimeoutError(RankError):
    """A call did not end in time. The message says where each rank stood."""


def choose_device(size: int, device: str = "auto") -> str:
    """`"cuda"` where there is a GPU for each of `size` ranks, else `"cpu"`.

    `device`, or else the environment variable `REFIMPL_DEVICE`, asks for one of them by name.
    Raises `ValueError` if it is unknown or cannot be had.
    """
    if device == "auto":
        device = os.environ.get("REFIMPL_DEVICE", "auto")
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if gpus >= size else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got '{device}'")
    if device == "cuda" and gpus < size:
        raise ValueError(f"device cuda needs a GPU for each of {size} ranks; this machine has {gpus}")
    return device


def rank_device() -> torch.device:
    """Where this rank's tensors belong: its own GPU under NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class World:
    """`size` ranks with one default process group: NCCL on a GPU each, else Gloo on the CPU.

    Ranks start with the first call. If one raises, dies or hangs, the call ends within seconds, all
    ranks are killed, and the next call starts new ones.

    Args:
        size: number of ranks.
        device: see `choose_device`.
        timeout: seconds that one call may take.
    """

    def __init__(self, size: int = 2, *, device: str = "auto", timeout: float = 120.0) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least one rank, got {size}")
        self.size = size
        self.device = choose_device(size, device)
        self.timeout = timeout
        self._ranks: _Ranks | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; the results in rank order.

        Raises `RankError` if a rank raises or dies, `RankTimeoutError` if the call takes too long.
        """
        if self._ranks is None:
            self._ranks = _Ranks(self.size, self.device, self.timeout)
        try:
            return self._ranks.run(cloudpickle.dumps((function, args, kwargs)), self.timeout)
        except BaseException:
            self._ranks.kill()
            self._ranks = None
            raise

    def close(self) -> None:
        """End the ranks. A later call starts new ones."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ranks:
    """The processes of one world, from start to end."""

    def __init__(self, size: int, device: str, timeout: float) -> None:
        # A fork server imports the package once and forks ranks in a tenth of a second. CUDA does
        # not survive a fork, and importing bitsandbytes may initialise it: spawn there.
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(["refimpl"])
        self.folder = Path(tempfile.mkdtemp(prefix="refimpl-world-"))
        self.logs = [self.folder / f"rank{rank}.log" for rank in range(size)]
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, size, device, timeout, str(self.folder), theirs),
                daemon=True,
            )
            with _hidden_main():
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._finalizer = weakref.finalize(self, _kill, self.processes, self.folder)

    def run(self, payload: bytes, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead rank is reported below
                pipe.send_bytes(payload)
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < len(self.pipes):
            pending = [rank for rank in range(len(self.pipes)) if rank not in results and rank not in errors]
            ready = connection.wait(
                [self.pipes[rank] for rank in pending], max(0.0, deadline - time.monotonic())
            )
            for rank in pending:
                if self.pipes[rank] in ready:
                    self._receive(rank, results, errors)
            if errors and deadline > time.monotonic() + GRACE_SECONDS:
                deadline = time.monotonic() + GRACE_SECONDS
            if not ready and time.monotonic() >= deadline:
                break
        if errors:
            raise RankError(self._blame(errors))
        if len(results) < len(self.pipes):
            waiting = [rank for rank in range(len(self.pipes)) if rank not in results]
            raise RankTimeoutError(self._where(waiting, timeout))
        return [results[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int, results: dict[int, Any], errors: dict[int, str]) -> None:
        try:
            succeeded, value = cloudpickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(GRACE_SECONDS)
            code = self.processes[rank].exitcode
            cause = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
            errors[rank] = f"the process died ({cause})"
            return
        (results if succeeded else errors)[rank] = value

    def _blame(self, errors: dict[int, str]) -> str:
        secondary = {rank: any(sign in error for sign in SECONDARY) for rank, error in errors.items()}
        rank = min(errors, key=lambda rank: (secondary[rank], rank))
        others = [other for other in sorted(errors) if other != rank]
        also = f" (ranks {others} failed too)" if others else ""
        return f"rank {rank} failed{also}:\n{errors[rank]}{self._output(rank)}"

    def _where(self, waiting: list[int], timeout: float) -> str:
        sizes = {rank: self.logs[rank].stat().st_size for rank in waiting}
        for rank in waiting:  # faulthandler writes where the rank stands, even inside a collective
            with contextlib.suppress(OSError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(GRACE_SECONDS / 2)
        lines = [f"ranks {waiting} did not finish within {timeout:g} s"]
        for rank in waiting:
            stack = self.logs[rank].read_bytes()[sizes[rank] :].decode(errors="replace")
            lines.append(f"rank {rank} stood at:\n{stack.rstrip()}")
        return "\n".join(lines)

    def _output(self, rank: int) -> str:
        text = self.logs[rank].read_text(errors="replace").strip()
        return f"\nlast output of rank {rank}:\n{text[-2000:]}" if text else ""

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        deadline = time.monotonic() + 10.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        self._finalizer()


def _kill(processes: list[Any], folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5.0)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a new process from importing the caller's main module again.

    multiprocessing does that for pickle's sake, which would run a script without a
    `__name__ == "__main__"` guard once more in every rank; cloudpickle does not need it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _rank_main(
    rank: int, size: int, device: str, timeout: float, folder: str, pipe: connection.Connection
) -> None:
    """What a rank does: join the process group, answer calls, leave."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)
    _exit_with_parent()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        # longer than a call may take: the caller then says where every rank stood
        timeout=datetime.timedelta(seconds=2 * timeout),
    )
    while payload := _receive_call(pipe):
        pipe.send_bytes(_answer(payload))
    leave(0)


def _receive_call(pipe: connection.Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return b""


def _answer(payload: bytes) -> bytes:
    try:
        function, args, kwargs = cloudpickle.loads(payload)
        answer = _dumps_on_cpu((True, function(*args, **kwargs)))
    except BaseException:
        answer = cloudpickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


class _CpuPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by value, from whatever device, as CPU tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def _dumps_on_cpu(value: Any) -> bytes:
    buffer = io.BytesIO()
    _CpuPickler(buffer).dump(value)
    return buffer.getvalue()


def _exit_with_parent() -> None:
    """Children of a fork server outlive a killed caller: watch it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave(status: int) -> None:
    """End a rank: wait for the others, close the process group, exit without clean-up.

    After FSDP1 on Gloo an interpreter that shuts down normally can abort with SIGABRT, also under
    torchrun and after a correct result; an early exit breaks the other ranks' connections.
    """
    with contextlib.suppress(Exception):
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
