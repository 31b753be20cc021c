"""The pictures of the site's pages, drawn from layouts and from measured data at every build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from refimpl.layout import OriginalParam, ShardLayout
from refimpl.tools import draw

DATA = Path(__file__).parents[1] / "data"
BLUE, ORANGE = "#2f5d9b", "#b3541e"


def on_files(files: Files, config: Any) -> Files:
    """`pictures/*.svg` beside the pages."""
    for name, content in (("threshold.svg", threshold()), ("geometry.svg", geometry())):
        files.append(File.generated(config, f"pictures/{name}", content=content))
    return files


def threshold() -> str:
    """What the native optimizer is handed of four small parameters, against its threshold."""
    found = json.loads((DATA / "reproduce.json").read_text(encoding="utf-8"))
    limit, states = found["layouts"]["min_8bit_size"], found["implementations"]["native"]["states"]
    rows = []
    for wrapping in ("fine", "coarse"):
        for unit in found["layouts"][wrapping]:
            names = [fqn.split(".")[1] for fqn in unit["params"] if fqn.startswith("small.")]
            if names:
                state = "8-bit" if states[wrapping][unit["params"][0]] == "uint8" else "FP32"
                label = f"{names[0]} alone" if len(names) == 1 else f"{', '.join(names)} together"
                rows.append((label, unit["local_numel"], state))
    shapes = []
    for row, (label, numel, state) in enumerate(rows):
        y, length = 24 + 24 * row, 210 * numel / limit
        colour = ORANGE if state == "8-bit" else BLUE
        shapes += [
            f'<text x="124" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect x="132" y="{y}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{138 + length:.1f}" y="{y + 14}">{numel:,}: {state} state</text>',
        ]
    height = 30 + 24 * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 470 {height}" role="img"'
        ' font-family="sans-serif" font-size="13"><title>Local elements that AdamW8bit is handed, against its'
        f' threshold</title><rect width="470" height="{height}" fill="#fff"/>'
        f'<path d="M342 18V{height - 4}" stroke="#333" stroke-dasharray="4 3"/>'
        f'<text x="342" y="13" text-anchor="middle">min_8bit_size = {limit:,}</text>{"".join(shapes)}</svg>\n'
    )


def geometry() -> str:
    """The unit of three parameters that the page on the method explains, with numbers."""
    params = (
        OriginalParam("x", (3000,)),
        OriginalParam("y", (96, 96), 3000),
        OriginalParam("z", (500,), 12216),
    )
    layout = ShardLayout(params, (0, 6358, 12716))
    base = draw.svg(layout, [False, True, False], title="Three parameters on two ranks, blocks and cut block")
    marks = [(0, 44), (3000, 84), (6358, 94), (6358 + 1200, 84), (12216, 84)]
    circles = []
    for number, (position, y) in enumerate(marks, 1):
        x = 10 + position * 700 / layout.bounds[-1]
        circles.append(
            f'<circle cx="{x:.1f}" cy="{y}" r="9" fill="#fff" stroke="#000"/>'
            f'<text x="{x:.1f}" y="{y + 5}" text-anchor="middle">{number}</text>'
        )
    return base.replace("</svg>", f"{''.join(circles)}</svg>")
