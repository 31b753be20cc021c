from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refimpl.tools.world import RankError, RankTimeoutError, World, choose_device


def total(start: int) -> tuple[int, torch.Tensor]:
    print("this goes to the rank's log")
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    return dist.get_rank(), value


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("just before")
        raise ValueError("a made-up mistake")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_by_value(size: int) -> None:
    with World(size, device="cpu") as world:
        results = world.run(total, 10)
        assert [rank for rank, _ in results] == list(range(size))
        assert all(value.item() == sum(10 + rank for rank in range(size)) for _, value in results)


def test_ranks_stay_alive_between_calls() -> None:
    with World(2, device="cpu") as world:
        assert world.run(os.getpid) == world.run(os.getpid)


def test_functions_may_be_local() -> None:
    offset = 5
    with World(2, device="cpu") as world:
        assert world.run(lambda: dist.get_rank() + offset) == [5, 6]


def test_ranks_print_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    with World(2, device="cpu") as world:
        world.run(total, 0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_raised_is_blamed_and_the_next_call_works(rank: int) -> None:
    with World(2, device="cpu") as world:
        before = world.run(os.getpid)
        start = time.monotonic()
        with pytest.raises(RankError, match="a made-up mistake") as caught:
            world.run(raise_on, rank)
        assert time.monotonic() - start < 10
        assert str(caught.value).startswith(f"rank {rank} failed")
        assert "in raise_on" in str(caught.value)
        assert "just before" in str(caught.value)
        assert not any(_alive(pid) for pid in before)
        assert world.run(dist.get_rank) == [0, 1]


def test_a_rank_that_dies_ends_the_call() -> None:
    with World(2, device="cpu") as world:
        with pytest.raises(RankError, match=r"rank 1 failed.*\n.*died \(exit status 7\)"):
            world.run(die_on, 1)
        assert world.run(dist.get_rank) == [0, 1]


def test_a_hang_says_where_each_rank_stood() -> None:
    with World(3, device="cpu") as world:
        world.run(dist.get_rank)
        world.timeout = 3
        with pytest.raises(RankTimeoutError) as caught:
            world.run(hang_on, 1)
        message = str(caught.value)
        assert "ranks [0, 2] did not finish within 3 s" in message
        assert message.count("in hang_on") == 2
        world.timeout = 60
        assert world.run(dist.get_rank) == [0, 1, 2]


def test_a_script_without_a_main_guard_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from refimpl.tools.world import World\n"
        "print('once')\n"
        "world = World(2, device='cpu')\n"
        "print(*world.run(os.getpid))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    once, pids = done.stdout.splitlines()
    assert once == "once"
    assert done.stderr == ""
    time.sleep(0.5)
    assert not any(_alive(int(pid)) for pid in pids.split())


def test_ranks_end_with_a_killed_caller(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from refimpl.tools.world import World\n"
        "print(*World(2, device='cpu').run(os.getpid), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    time.sleep(1.0)
    assert not any(_alive(int(pid)) for pid in done.stdout.split())


def test_the_environment_chooses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(2) == "cuda"
    assert choose_device(3) == "cpu"
    monkeypatch.setenv("REFIMPL_DEVICE", "cpu")
    assert choose_device(2) == "cpu"
    with pytest.raises(ValueError, match="GPU for each of 3 ranks; this machine has 2"):
        choose_device(3, "cuda")
    with pytest.raises(ValueError, match="must be auto, cpu or cuda"):
        choose_device(2, "tpu")


def test_a_world_has_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        World(0)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
