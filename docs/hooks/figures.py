"""Numbers in the text come from files: `{{ reproduce.implementations.native.x:.2e }}`.

The first word is a file `docs/data/WORD.json`, the rest a path into it (keys, or positions in a
list), and what follows a colon a Python format. A path that is not there fails the build.
`{{ lines refimpl/layout.py refimpl/fsdp.py }}` is how many lines these files have.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
LINES = re.compile(r"\{\{ *lines ([^}]+?) *\}\}")
PLACE = re.compile(r"\{\{ *(?P<file>[\w-]+)\.(?P<path>[^:}]+?)(?::(?P<format>[^}]*?))? *\}\}")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the places of a page that is written by hand."""
    if page.file.generated_by:
        return markdown
    markdown = LINES.sub(lambda found: f"{sum(map(lines_of, found[1].split())):,}", markdown)
    return PLACE.sub(lambda found: figure(page.file.src_uri, found), markdown)


def lines_of(name: str) -> int:
    """How many lines a file of the repository has."""
    return len((DATA.parents[1] / name).read_text(encoding="utf-8").splitlines())


def figure(page: str, found: re.Match[str]) -> str:
    """One number as text."""
    value = read(found["file"])
    try:
        for key in found["path"].split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return format(value, found["format"] or "")
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ValueError(f"{page}: {found[0]} is not in docs/data: {error!r}") from error


@functools.cache
def read(name: str) -> Any:
    """A data file."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
