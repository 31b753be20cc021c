"""Under each rule of the contract, the tests that hold it; and these tests as pages, to be read."""

from __future__ import annotations

import ast
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import rules  # noqa: E402

PLACE = "<!-- tests -->"
ALSO_SHOWN = ("tests/against_native.py", "tests/conformance.py", "tests/routes.py", "tests/test_audit.py")


def on_files(files: Files, config: Any) -> Files:
    """A page for every test file that holds a rule."""
    marked = {name for tests in rules.tests_by_rule().values() for name, _ in tests}
    for name in sorted(marked | set(ALSO_SHOWN)):
        files.append(File.generated(config, page_of(name), content=as_markdown(ROOT / name, name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the places of the contract."""
    if page.file.src_uri != "contract.md":
        return markdown
    tests = rules.tests_by_rule()
    parts = markdown.split(PLACE)
    filled = [parts[0]]
    for before, after in pairwise(parts):
        rule_id = rules.HEADING.findall(before)[-1][0]
        filled.append(f"{held_by(rule_id, tests.get(rule_id, []))}{after}")
    return "".join(filled)


def held_by(rule_id: str, tests: list[tuple[str, str]]) -> str:
    """A line of links."""
    links = [f"[`{function}`]({page_of(name)}#{function})" for name, function in tests]
    if rules.is_rule(rule_id):
        links.append("the [conformance matrix](conformance.md)")
    return f"*Tests:* {', '.join(links)}.\n"


def page_of(name: str) -> str:
    """Where the page of a test file lies in the site's sources."""
    return name.removesuffix(".py") + ".md"


def as_markdown(path: Path, name: str) -> str:
    """A Python file with a heading before each test function."""
    text = path.read_text(encoding="utf-8")
    lines, nodes = text.splitlines(), ast.parse(text).body
    out = ["---", "search:", "  exclude: true", "---", "", f"# {name}", ""]
    start = 0
    for node in nodes:
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        out += [*code(lines[start:first]), f"## {node.name} {{#{node.name}}}", ""]
        assert node.end_lineno is not None
        out += code(lines[first : node.end_lineno])
        start = node.end_lineno
    return "\n".join([*out, *code(lines[start:])])


def code(lines: list[str]) -> list[str]:
    """A fenced block, or nothing."""
    text = "\n".join(lines).strip("\n")
    return ["```python", text, "```", ""] if text else []
