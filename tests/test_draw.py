from __future__ import annotations

from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from refimpl.layout import OriginalParam, ShardLayout
from refimpl.tools import draw

LAYOUT = ShardLayout(
    (OriginalParam("x", (3000,)), OriginalParam("y", (96, 96), 3000), OriginalParam("z", (500,), 12216)),
    (0, 6358, 12716),
)


def test_the_strip_says_what_lies_where() -> None:
    ranks, params, blocks, *legend = draw.strip(LAYOUT, [False, True, False]).split("\n")
    assert ranks == "ranks   |0                      |1"
    assert params == "params  " + "x" * 12 + "y" * 36 + "z" * 2
    assert blocks.count("'") + blocks.count("X") == 36
    assert blocks.index("X") - 8 == 6358 // 256
    assert "x = x (3,000); y = y (9,216); z = z (500)" in legend[0]
    assert max(len(line) for line in legend) <= 80


def test_padding_and_bounds_that_cut_nothing() -> None:
    layout = ShardLayout((OriginalParam("a", (512,)),), range(0, 1025, 256))
    ranks, params, blocks, *_ = draw.strip(layout, scale=64).split("\n")
    assert params == "params  " + "a" * 8 + "." * 8
    assert ranks == "ranks   |0  |1  |2  |3"
    assert blocks == "blocks  '   '"
    assert "X" not in blocks


def test_the_picture_shows_the_same() -> None:
    picture = draw.svg(LAYOUT, [False, True, False])
    root = ElementTree.fromstring(picture)
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("rect") == 1 + 3
    assert picture.count('stroke="#d00"') == 1
    assert picture.count('stroke="#555"') == 36
    assert picture.count('stroke="#000"') == 3
    assert "y = y, 9,216 elements" in picture


def test_a_picture_carries_the_fact_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = draw.picture(LAYOUT, [False, True, False])
    assert capsys.readouterr().out == "2 ranks, 3 parameters, 36 blocks; bounds that cut a block: 1\n"
    assert repr(found) in str(found._repr_svg_())
    figure = Figure(figsize=(2, 1))
    figure.subplots().bar([0, 1], [3, 5])
    found = draw.plot(figure, "the higher bar: 5")
    assert capsys.readouterr().out == "the higher bar: 5\n"
    assert repr(found).encode() in (found._repr_png_() or b"")


def test_letters_are_initials_where_these_differ() -> None:
    same = ShardLayout((OriginalParam("h.0", (256,)), OriginalParam("h.1", (256,), 256)), (0, 512))
    assert "params  ab" in draw.strip(same)
    assert "a = h.0 (256); b = h.1 (256)" in draw.strip(same)


def test_names_are_escaped() -> None:
    layout = ShardLayout((OriginalParam("<a&b>", (10,)),), (0, 10))
    ElementTree.fromstring(draw.svg(layout, title="a < b"))
