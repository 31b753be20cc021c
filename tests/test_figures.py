"""The numbers of the site are those that its commands make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conformance import VECTORS

from refimpl.tools import bench, reproduce
from refimpl.tools.world import World

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs/data"


def read(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def test_the_report_is_what_the_command_makes_today(world: Callable[[int], World]) -> None:
    """As printed: the last bits of a sum over many elements may depend on the processor."""
    stored, found = read("reproduce.json"), world(2).run(reproduce.report)[0]
    found["environment"] = stored["environment"]
    assert reproduce.render(found) == reproduce.render(stored)
    assert found["layouts"] == stored["layouts"]


def test_the_texts_are_those_of_the_figures() -> None:
    assert (DATA / "reproduce.txt").read_text() == reproduce.render(read("reproduce.json")) + "\n"
    assert (DATA / "bench-cpu.txt").read_text() == bench.render(read("bench-cpu.json")) + "\n"


def test_the_readme_shows_the_same() -> None:
    readme = (ROOT / "README.md").read_text()
    assert (DATA / "reproduce.txt").read_text() in readme
    assert (DATA / "bench-cpu.txt").read_text() in readme


def test_the_best_and_worst_of_the_benchmarks_are_those_that_the_pages_pick() -> None:
    results = read("bench-cpu.json")["results"]
    native = [each["sharded / native"]["median"] for each in results]
    shadow = [each["shadow / sharded"]["median"] for each in results]
    for page in ("how-it-works.md", "for-upstream.md"):
        text = (ROOT / "docs" / page).read_text()
        best, worst = re.findall(r"bench-cpu\.results\.(\d+)\.sharded / native", text)
        assert f"{native[int(best)]:.2f}" == f"{min(native):.2f}"
        assert f"{native[int(worst)]:.2f}" == f"{max(native):.2f}"
    least, most = re.findall(
        r"bench-cpu\.results\.(\d+)\.shadow / sharded", (ROOT / "docs/how-it-works.md").read_text()
    )
    text = (ROOT / "docs/benchmarks.md").read_text()
    adamw = [each["sharded / adamw"]["median"] for each in results]
    one, two = re.findall(r"bench-cpu\.results\.(\d+)\.sharded / adamw", text)
    assert [adamw[int(one)], adamw[int(two)]] == [min(adamw), max(adamw)]
    text = (ROOT / "docs/for-upstream.md").read_text()
    bare = [each["sharded / bare"]["median"] for each in results]
    one, two = re.findall(r"bench-cpu\.results\.(\d+)\.sharded / bare", text)
    assert [bare[int(one)], bare[int(two)]] == [min(bare), max(bare)]
    assert f"{shadow[int(least)]:.1f}" == f"{min(shadow):.1f}"
    assert f"{shadow[int(most)]:.1f}" == f"{max(shadow):.1f}"


def test_the_numbers_of_the_examples_follow_from_the_vectors() -> None:
    """What the contract and the page on the method say of the vectors, worked out again."""
    numel = {
        (vector, name): torch.Size(shape).numel()
        for vector, case in VECTORS.items()
        for name, shape in case.shapes.items()
    }
    aligned, x, y = numel["ALIGNED", "a"], numel["UNEVEN", "x"], numel["UNEVEN", "y"]
    half, bound = aligned // 2, -(-y // 2)
    coarse = -(-sum(n for (vector, _), n in numel.items() if vector == "UNEVEN") // 2)
    large = numel["LARGE", "u"]
    statements = [
        f"one parameter of {aligned:,} elements",
        f"is handed {half:,}",
        f"four parameters of {numel['FLIP', 'a']:,} elements",
        f"begins at flat element {large:,}, {large % 256} elements into a block",
        f"{large:,} - {large // 256} x 256 = {large % 256} elements",
        f"`y` has {y:,} elements, the bound falls at {bound:,}, {bound % 256} elements into a block",
        f"FP32 state of {half:,} elements, {8 * half:,} bytes,",
        f"where 8-bit state takes {2 * half + 8 * (half // 256):,};",
        f"two cut blocks of slack would add {2 * (2 * 256 + 8):,}",
        f"`x` ({x:,} elements) is saved as this rank's whole shard of {coarse:,} elements",
    ]
    contract = " ".join((ROOT / "docs/contract.md").read_text().split())
    assert not [each for each in statements if each not in contract]
    x, y, z = (numel["STRADDLING", name] for name in "xyz")
    place = (x + y + z) // 2 - x
    method = " ".join((ROOT / "docs/how-it-works.md").read_text().split())
    for statement in (
        f"{place:,} elements into `y`. It cuts one block,",
        f"{place % 256} elements on rank 0 and {-place % 256} on rank 1",
        f"`x` ({x:,} elements)",
        f"`y` ({y:,} elements)",
        f"`z` ({z:,} elements)",
    ):
        assert statement in method


def test_every_package_that_was_measured_is_named() -> None:
    for name in ("reproduce.json", "bench-cpu.json"):
        where = read(name)["environment"]
        assert {"torch", "bitsandbytes", "python", "processor", "device", "backend"} <= set(where)
        assert where["torch"].startswith(read("conformance.json")["versions"]["torch"])
