"""A layout as a strip of text, and as a picture, from the same object.

The strip is readable without colour. One character stands for `scale` elements:

    ranks   |0             |1             |
    params  aaaaaabbbbbbbbbbbbbbbbbbccc...
    blocks  ' ' ' ' ' ' X ' ' ' '
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase
from textwrap import fill
from typing import Any

from ..layout import BLOCK_SIZE, OriginalParam, ShardLayout

LETTERS = ascii_lowercase + ascii_uppercase
PADDING = "."
LINE = 80
# white on each: WCAG AA
COLOURS = (
    "#2f5d9b",
    "#b3541e",
    "#2e7d46",
    "#a8323e",
    "#62509c",
    "#6b5340",
    "#a04585",
    "#5f5f5f",
)


def strip(layout: ShardLayout, is_8bit: Sequence[bool] | None = None, *, scale: int = BLOCK_SIZE) -> str:
    """Lines of text: ranks, parameters, blocks, and what the letters mean.

    In the line of blocks, `'` marks where a block of 8-bit state begins and `X` where a rank bound cuts
    one. `is_8bit[i]` says which parameters have blocks (default: all). A character shows what lies at
    its first element, and marks of anything that falls into it.
    """
    total = layout.bounds[-1]
    columns = range(0, total, scale)
    ranks = [" "] * len(columns)
    for rank, bound in enumerate(layout.bounds[:-1]):
        label = f"|{rank}"
        for place, letter in enumerate(label, bound // scale):
            if place < len(ranks) and (place == bound // scale or ranks[place] == " "):
                ranks[place] = letter
    blocks = [" "] * len(columns)
    for start in _blocks(layout, is_8bit):
        blocks[start // scale] = "'"
    for bound in _cutting_bounds(layout, is_8bit):
        blocks[bound // scale] = "X"
    lettered = list(zip(_letters(layout), layout.params, strict=True))
    params = "".join(_letter_at(lettered, position) for position in columns)
    legend = [f"{letter} = {param.fqn} ({param.numel:,})" for letter, param in lettered]
    legend.append(f"{PADDING} = padding, one character = {scale:,} element{'s' * (scale > 1)}")
    return "\n".join(
        [
            f"ranks   {''.join(ranks)}".rstrip(),
            f"params  {params}",
            f"blocks  {''.join(blocks)}".rstrip(),
            fill("; ".join(legend), LINE, initial_indent=" " * 8, subsequent_indent=" " * 8),
        ]
    )


def svg(
    layout: ShardLayout,
    is_8bit: Sequence[bool] | None = None,
    *,
    width: int = 720,
    title: str = "Layout of one FSDP unit",
) -> str:
    """The same as a picture: parameters as bars, rank bounds as tall lines, blocks as ticks, cut ones red."""
    total = max(1, layout.bounds[-1])

    def at(position: int) -> str:
        return f"{10 + position * (width - 20) / total:.2f}"

    shapes = []
    letters = _letters(layout)
    for index, param in enumerate(layout.params):
        length = param.numel * (width - 20) / total
        shapes.append(
            f'<rect x="{at(param.flat_start)}" y="30" width="{length:.2f}" height="34"'
            f' fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        start, end = _longest_segment(layout, index)
        if (end - start) * (width - 20) / total > 14:
            shapes.append(
                f'<text x="{at((start + end) // 2)}" y="52" fill="#fff" text-anchor="middle">'
                f"{escape(letters[index])}</text>"
            )
    for start in _blocks(layout, is_8bit):
        shapes.append(f'<path d="M{at(start)} 64v7" stroke="#555"/>')
    for rank, bound in enumerate(layout.bounds):
        shapes.append(f'<path d="M{at(bound)} 22v56" stroke="#000" stroke-width="1.5"/>')
        if rank < layout.num_ranks:
            shapes.append(f'<text x="{at(bound)}" y="16" dx="3">rank {rank}</text>')
    for bound in _cutting_bounds(layout, is_8bit):
        shapes.append(f'<path d="M{at(bound)} 64v18" stroke="#d00" stroke-width="4"/>')
    for index, param in enumerate(layout.params):
        label = escape(f"{letters[index]} = {param.fqn}, {param.numel:,} elements")
        shapes.append(f'<text x="10" y="{104 + 18 * index}">{label}</text>')
    height = 104 + 18 * len(layout.params)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="sans-serif" font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


class Picture:
    """A picture as a notebook shows it, which carries the fact that is printed beside it.

    Comparisons of notebooks skip PNG. The fact is the picture's text form, which they do compare, and
    lies in the PNG file too, so that a picture and a text that do not belong together can be told.
    """

    def __init__(self, fact: str, *, svg: str | None = None, png: bytes | None = None) -> None:
        self.fact, self._svg, self._png = fact, svg, png

    def __repr__(self) -> str:
        return self.fact

    def _repr_svg_(self) -> str | None:
        return self._svg

    def _repr_png_(self) -> bytes | None:
        return self._png


def picture(layout: ShardLayout, is_8bit: Sequence[bool] | None = None, *, width: int = 720) -> Picture:
    """`svg` of a layout as a picture whose fact is counted from what is drawn, and printed."""
    cuts = len(_cutting_bounds(layout, is_8bit))
    fact = (
        f"{layout.num_ranks} ranks, {len(layout.params)} parameters,"
        f" {len(_blocks(layout, is_8bit))} blocks; bounds that cut a block: {cuts}"
    )
    print(fact)
    return Picture(fact, svg=svg(layout, is_8bit, width=width, title=fact))


def plot(figure: Any, fact: str) -> Picture:
    """A matplotlib figure as a PNG picture. `fact`, read off what is drawn, is printed."""
    file = io.BytesIO()
    metadata = {"Software": None, "Description": fact}
    figure.savefig(file, format="png", dpi=100, facecolor="white", bbox_inches="tight", metadata=metadata)
    print(fact)
    return Picture(fact, png=file.getvalue())


def _letters(layout: ShardLayout) -> str:
    """One for each parameter: the first of its name if all of these differ, else a, b, c and so on."""
    initials = "".join(param.fqn[:1] for param in layout.params)
    if initials.isalpha() and len(set(initials)) == len(layout.params):
        return initials
    return "".join(LETTERS[index % len(LETTERS)] for index in range(len(layout.params)))


def _letter_at(lettered: Sequence[tuple[str, OriginalParam]], position: int) -> str:
    for letter, param in lettered:
        if param.flat_start <= position < param.flat_end:
            return letter
    return PADDING


def _longest_segment(layout: ShardLayout, index: int) -> tuple[int, int]:
    """Where most of a parameter lies undivided, in flat coordinates: the place for its letter."""
    param = layout.params[index]
    inside = [bound for bound in layout.bounds if param.flat_start < bound < param.flat_end]
    return max(
        pairwise([param.flat_start, *inside, param.flat_end]), key=lambda range_: range_[1] - range_[0]
    )


def _with_blocks(layout: ShardLayout, is_8bit: Sequence[bool] | None) -> list[OriginalParam]:
    return [param for index, param in enumerate(layout.params) if is_8bit is None or is_8bit[index]]


def _blocks(layout: ShardLayout, is_8bit: Sequence[bool] | None) -> list[int]:
    """Where the blocks of 8-bit parameters begin, in flat coordinates."""
    return [
        start
        for param in _with_blocks(layout, is_8bit)
        for start in range(param.flat_start, param.flat_end, BLOCK_SIZE)
    ]


def _cutting_bounds(layout: ShardLayout, is_8bit: Sequence[bool] | None) -> list[int]:
    """The rank bounds that lie strictly inside a block."""
    return [
        bound
        for bound in layout.bounds
        for param in _with_blocks(layout, is_8bit)
        if param.flat_start < bound < param.flat_end and (bound - param.flat_start) % BLOCK_SIZE
    ]
