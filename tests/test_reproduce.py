from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refimpl.__main__ import main
from refimpl.tools import reproduce

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SMALL = [f"small.{name}.weight" for name in "abcd"]


@pytest.mark.rule("control.fp32", "precision.original-size", "update.equals-unwrapped", "wrap.invariant")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_report_under_torchrun(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [*TORCHRUN, str(ranks), "-m", "refimpl", "reproduce", "--device", "cpu", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "AS EXPECTED" in done.stdout
    _check_facts(json.loads(path.read_text()), ranks)


def test_alone_it_starts_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "refimpl", "reproduce", "--device", "cpu", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{'native AdamW8bit':24}{'FP32':^12}{'8-bit':^13}" in done.stdout
    _check_facts(json.loads(path.read_text()), 2)


def _check_facts(result: dict[str, object], ranks: int) -> None:
    where, layouts = result["environment"], result["layouts"]
    assert where["world_size"] == ranks
    assert {"torch", "bitsandbytes", "python", "os", "processor", "device", "backend"} <= set(where)
    assert layouts["original_numels"]["small.a.weight"] == 1024 * ranks
    assert [unit["local_numel"] for unit in layouts["fine"]] == [1024] * 4 + [4096]
    assert [unit["local_numel"] for unit in layouts["coarse"]] == [4096, 4096]
    assert layouts["coarse"][0]["params"] == SMALL
    implementations = result["implementations"]
    native = implementations.pop("native")
    assert native["states"]["fine"] == {**dict.fromkeys(SMALL, "float32"), "large.weight": "uint8"}
    assert native["states"]["coarse"] == {**dict.fromkeys(SMALL, "uint8"), "large.weight": "uint8"}
    assert not native["state_precision_equal"]
    assert native["projection_relative_l2"] > 1e-4
    assert native["max_abs_update_difference"] > 1e-5
    assert set(implementations["adamw_fp32"]["states"]["coarse"].values()) == {"float32"}
    assert set(implementations) >= {"adamw_fp32", "shadow"}
    published = result["max_abs_update_difference_with_published_values"]
    assert f"{published.pop('native'):.2e}" == "6.15e-05" or ranks != 2  # the figure of #2081
    assert set(published.values()) == {0.0}
    for each in implementations.values():
        comparisons = [each, each["against_unwrapped"]["fine"], each["against_unwrapped"]["coarse"]]
        for comparison in comparisons:
            assert comparison["state_precision_equal"] is True
            assert comparison["projection_relative_l2"] == 0.0
            assert comparison["max_abs_update_difference"] == 0.0


def _result(**changes: dict[str, object]) -> dict[str, object]:
    equal = {
        "state_precision_equal": True,
        "projection_relative_l2": 0.0,
        "max_abs_update_difference": 0.0,
    }
    exact = {**equal, "against_unwrapped": {"fine": equal, "coarse": equal}}
    native = {**exact, "state_precision_equal": False, "max_abs_update_difference": 1e-3}
    implementations = {"native": native, "adamw_fp32": exact, "shadow": exact}
    for name, change in changes.items():
        implementations[name] = {**implementations[name], **change}
    published = {"native": 1e-4, "adamw_fp32": 0.0, "shadow": 0.0}
    return {
        "implementations": implementations,
        "max_abs_update_difference_with_published_values": published,
    }


def test_only_the_fault_with_exact_repairs_is_as_expected() -> None:
    unequal = {
        "state_precision_equal": True,
        "projection_relative_l2": 0.0,
        "max_abs_update_difference": 1e-9,
    }
    assert reproduce.is_as_expected(_result())
    assert not reproduce.is_as_expected(_result(native={"state_precision_equal": True}))
    assert not reproduce.is_as_expected(_result(native={"max_abs_update_difference": 0.0}))
    for key in ("native", "shadow"):
        result = _result()
        published = result["max_abs_update_difference_with_published_values"]
        published[key] = 1e-4 - published[key]
        assert not reproduce.is_as_expected(result)
    assert not reproduce.is_as_expected(_result(adamw_fp32={"max_abs_update_difference": 1e-9}))
    assert not reproduce.is_as_expected(
        _result(shadow={"against_unwrapped": {"fine": unequal, "coarse": unequal}})
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "device cuda needs a GPU for each of 2 ranks; this machine has 0"),
        (["--ranks", "1"], "needs at least 2 ranks, got 1"),
        (["--ranks", "0"], "needs at least 2 ranks, got 0"),
        (["--json", "/no/such/folder/out.json"], "cannot write /no/such/folder/out.json: No such file"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["reproduce", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_one_rank_under_torchrun_is_refused() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "refimpl", "reproduce"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs at least 2 ranks, got 1" in done.stderr
