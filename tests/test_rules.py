"""The contract, the tests and the error messages speak of the same rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import rules
from conformance import CHECKS

from refimpl import layout

ROOT = rules.ROOT
MESSAGE_ID = re.compile(r"refuse\.[a-z0-9]+(?:-[a-z0-9]+)*")


def test_ids_are_unique_and_headings_show_them() -> None:
    ids = rules.contract_ids()
    assert len(ids) == len(set(ids)) > 30
    assert all(found["title"] == found["id"] for found in rules.HEADING.finditer(contract()))
    assert contract().count("\n### ") == len(ids)


def test_every_rule_has_one_sentence_with_must_a_reason_and_an_example() -> None:
    sections = re.split(r"^##+ ", contract(), flags=re.MULTILINE)
    by_id = {section.split()[0]: section for section in sections if section.strip()}
    for rule_id in filter(rules.is_rule, rules.contract_ids()):
        section = by_id[rule_id]
        statement = section.partition("\n\n")[2].partition("\n\n")[0]
        assert "MUST" in statement, rule_id
        assert "*Why:*" in section, rule_id
        assert "*Example:*" in section, rule_id
        assert "<!-- tests -->" in section, rule_id


def test_every_rule_is_held_by_a_test_of_its_own() -> None:
    """Beside the conformance matrix, which has them all."""
    marked = rules.tests_by_rule()
    assert not set(marked) - set(rules.contract_ids())
    assert not [each for each in rules.contract_ids() if rules.is_rule(each) and each not in marked]


def test_error_messages_name_rules_of_the_contract() -> None:
    named = {
        found
        for path in Path(layout.__file__).parent.glob("*.py")
        for found in MESSAGE_ID.findall(path.read_text())
    }
    assert named == {each for each in CHECKS if each.startswith("refuse.")}


def test_a_mark_that_is_no_rule_stops_the_tests(pytester: pytest.Pytester) -> None:
    for name in ("tests/conftest.py", "tests/rules.py", "docs/contract.md"):
        copy = pytester.path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((ROOT / name).read_text())
    marked = 'import pytest\n\n@pytest.mark.rule("block.unheard-of")\ndef test_it():\n    pass\n'
    (pytester.path / "tests/test_marked.py").write_text(marked)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*block.unheard-of is not a rule of docs/contract.md*"])


def contract() -> str:
    return (ROOT / "docs/contract.md").read_text()
