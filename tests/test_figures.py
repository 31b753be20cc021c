"""The numbers of the site are those that its commands make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_every_package_that_was_measured_is_named() -> None:
    for name in ("reproduce.json", "bench-cpu.json"):
        where = read(name)["environment"]
        assert {"torch", "bitsandbytes", "python", "processor", "device", "backend"} <= set(where)
        assert where["torch"].startswith(read("conformance.json")["versions"]["torch"])
