"""The stored notebooks are as a reader should find them. That they are true, `--nbval` checks."""

from __future__ import annotations

import base64
import json
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = [
    "01_flattening",
    "02_threshold",
    "03_block_boundaries",
    "04_repairs",
    "05_checkpoints",
    "06_stability",
]
LOCAL_PATH = re.compile(r"(/(tmp|root|home|work|usr|opt|Users|content|private|var)/|site-packages|[A-Z]:\\)")
ALLOWED = {"text/plain", "image/png", "image/svg+xml"}
LARGEST = 300_000

each_notebook = pytest.mark.parametrize("name", NAMES)


def test_these_are_all() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(name: str) -> list[Any]:
    return [cell for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(value)


@each_notebook
def test_it_was_run_in_order_by_the_ordinary_kernel(name: str) -> None:
    numbers = [cell["execution_count"] for cell in code_cells(name)]
    assert numbers == list(range(1, len(numbers) + 1))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert read(name)["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}
    cells = read(name)["cells"]
    assert [cell["id"] for cell in cells] == [f"cell-{n:02}" for n in range(1, len(cells) + 1)]
    assert all(cell["metadata"] == {} for cell in cells)


@each_notebook
def test_its_code_is_plain_and_short(name: str) -> None:
    for cell in code_cells(name):
        lines = text(cell["source"]).splitlines()
        assert 0 < len(lines) <= 15, lines
        assert not [line for line in lines if line.lstrip().startswith(("!", "%"))]
        assert not lines[-1].rstrip().endswith(";")
        assert max(len(line) for line in lines) <= 80, max(lines, key=len)


@each_notebook
def test_its_outputs_are_text_and_pictures(name: str) -> None:
    for cell in code_cells(name):
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data", "execute_result")
            assert output.get("name", "stdout") == "stdout"
            assert output.get("metadata", {}) == {}
            data = output.get("data", {"text/plain": output.get("text")})
            assert set(data) <= ALLOWED
            assert all(len(text(value)) < LARGEST for value in data.values())
            shown = [text(value) for kind, value in data.items() if kind != "image/png"]
            assert not any(LOCAL_PATH.search(value) for value in shown), shown


def png_description(data: bytes) -> str:
    """What the PNG file says of itself in its Description."""
    position, found = 8, ""
    while position < len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        body = data[position + 8 : position + 8 + length]
        if kind in (b"tEXt", b"iTXt") and body.startswith(b"Description\0"):
            found = body.split(b"\0")[-1].decode("utf-8" if kind == b"iTXt" else "latin-1")
        position += 12 + length
    return found


@each_notebook
def test_a_picture_and_the_fact_beside_it_belong_together(name: str) -> None:
    """`--nbval` compares the fact, not a PNG; the file carries the fact it was drawn with."""
    for cell in code_cells(name):
        printed = "".join(text(each["text"]) for each in cell["outputs"] if "text" in each)
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                found = png_description(base64.b64decode(text(data["image/png"])))
            elif "image/svg+xml" in data:
                found = text(data["image/svg+xml"]).partition("<title>")[2].partition("</title>")[0]
            else:
                continue
            assert text(data["text/plain"]) == found
            assert f"{found}\n" in printed


@each_notebook
def test_it_asks_one_question_and_ends_with_the_rules(name: str) -> None:
    cells = read(name)["cells"]
    title = text(cells[0]["source"]).splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert cells[-1]["cell_type"] == "markdown"
    assert re.search(r"\[`[a-z0-9.-]+`\]\(\.\./docs/contract\.md#[a-z0-9.-]+\)", text(cells[-1]["source"]))
    assert not [one for one, two in pairwise(cells) if one["cell_type"] == two["cell_type"] == "code"]
    for label, target in re.findall(r"\[`([a-z0-9.-]+)`\]\([^)]*#([a-z0-9.-]+)\)", text(cells[-1]["source"])):
        assert label == target


def test_no_function_is_written_twice() -> None:
    """What two notebooks need belongs into the package."""
    owners: dict[str, str] = {}
    for name in NAMES:
        for cell in code_cells(name):
            for body in re.findall(r"^def .*?(?=^\S|\Z)", text(cell["source"]), re.DOTALL | re.MULTILINE):
                assert owners.setdefault(body.split(":", 1)[1], name) == name, body
