"""The notebooks as pages of the site, with the outputs that are stored in them.

python docs/hooks/notebook_pages.py NOTEBOOK            prints the page
python docs/hooks/notebook_pages.py NOTEBOOK FOLDER     writes the page and its pictures
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LINK = re.compile(r"(\]\(|^\[[^\]]+\]:[ ]+)([^)\s]+)", re.MULTILINE)
# where a link that holds in the repository, from notebooks/, leads on the site
LEADS_TO = (
    (re.compile(r"^\.\./docs/"), "../"),
    (re.compile(r"^(\w+)\.ipynb(?=#|$)"), r"\1.md"),
    (re.compile(r"^\.\./tests/(\w+)\.py$"), r"../tests/\1.md"),
    (re.compile(r"^\.\./refimpl/(?:(\w+)/)?(\w+)\.py$"), r"../api.md#refimpl.\1.\2"),
)


def on_files(files: Any, config: Any) -> Any:
    """`notebooks/NN_name.md` with its pictures, and the notebook itself to download."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            page, pictures = as_page(path)
        except ValueError as error:
            raise PluginError(str(error)) from error
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook's page, and the files of its pictures."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    pictures: dict[str, bytes] = {}
    parts = []
    for number, cell in enumerate(notebook["cells"], 1):
        source = text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(LINK.sub(lambda found: found[1] + site_target(found[2]), source))
        elif cell["cell_type"] == "code":
            if cell["execution_count"] is None:
                raise ValueError(f"{path.name}, cell {number}: was not run")
            parts.append(fenced(source, "python"))
            for output in cell["outputs"]:
                try:
                    parts += shown(output, path.stem, pictures)
                except ValueError as error:
                    raise ValueError(f"{path.name}, cell {number}: {error}") from error
    title, _, rest = parts[0].partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"{path.name}: begins with {title!r}, not with a title")
    note = (
        f"*The notebook [`{path.name}`]({path.name}){{ download={path.name} }},"
        " with the outputs that are stored in it.*"
    )
    return "\n\n".join([title, note, rest.strip("\n"), *parts[1:]]) + "\n", pictures


def shown(output: Any, stem: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Markdown for one output of a cell. A picture is added to `pictures`."""
    if output["output_type"] == "error":
        raise ValueError(f"stored with an error, {output['ename']}: {output['evalue']}")
    data = output.get("data", {"text/plain": output.get("text", "")})
    plain = text(data.get("text/plain", ""))
    if "image/svg+xml" in data:
        svg = text(data["image/svg+xml"])
        title = re.search(r"<title>(.*?)</title>", svg, re.DOTALL)
        yield picture(f"{stem}_{len(pictures) + 1}.svg", svg.encode(), title[1] if title else plain, pictures)
    elif "image/png" in data:
        png = base64.b64decode(text(data["image/png"]))
        yield picture(f"{stem}_{len(pictures) + 1}.png", png, plain, pictures)
    elif "text/plain" in data:
        yield fenced(plain.rstrip("\n"), "{ .text .output .no-copy }")
    else:
        raise ValueError(f"an output of {', '.join(data)}: neither text nor a picture")


def picture(name: str, content: bytes, alt: str, pictures: dict[str, bytes]) -> str:
    """A Markdown image. Its alternative text says what it shows, which no repr does."""
    if not alt or alt.startswith("<"):
        raise ValueError(f"a picture whose text is {alt!r}")
    pictures[name] = content
    escaped = re.sub(r"([][`*_\\])", r"\\\1", " ".join(alt.split()))
    return f"![{escaped}]({name})"


def fenced(source: str, language: str) -> str:
    """A code block, fenced by more backticks than are inside."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", source))])
    return f"{fence}{language}\n{source}\n{fence}" if source.strip() else ""


def site_target(target: str) -> str:
    """A link's target as it is on the site."""
    for pattern, replacement in LEADS_TO:
        target = pattern.sub(replacement, target).replace("#refimpl..", "#refimpl.")
    return target


def text(value: str | list[str]) -> str:
    """A multi-line string of a notebook, which may be stored as a list."""
    return value if isinstance(value, str) else "".join(value)


if __name__ == "__main__":
    source, *folder = map(Path, sys.argv[1:])
    page, pictures = as_page(source)
    if folder:
        files = {f"{source.stem}.md": page.encode(), **pictures}
        for name, content in files.items():
            (folder[0] / name).write_bytes(content)
    else:
        sys.stdout.write(page)
