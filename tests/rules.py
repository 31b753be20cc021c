"""The rule ids: from the headings of the contract, and from the marks of the tests that hold them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADING = re.compile(r"^### (?P<title>\S+) \{#(?P<id>[^}]+)\}$", re.MULTILINE)


def contract_ids() -> list[str]:
    """The ids of all rules, in the order of the page."""
    return [found["id"] for found in HEADING.finditer((ROOT / "docs/contract.md").read_text())]


def is_rule(rule_id: str) -> bool:
    """Headings under `scope.` say what is no rule."""
    return not rule_id.startswith("scope.")


def tests_by_rule() -> dict[str, list[tuple[str, str]]]:
    """Rule id -> (test file, test function) of each test marked `@pytest.mark.rule("id", ...)`."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function, ids in marked_functions(path):
            for rule_id in ids:
                found.setdefault(rule_id, []).append((path.relative_to(ROOT).as_posix(), function))
    return found


def marked_functions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each test function of a file that is marked, and with what."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rule":
                yield node.name, [ast.literal_eval(argument) for argument in decorator.args]
