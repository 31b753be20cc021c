"""The conformance matrix: every rule on every implementation, measured, and as it is recorded.

`pytest tests/test_conformance.py --record` (make conformance) writes what the site shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import rules
from conformance import (
    CHECKS,
    FAILED,
    IMPLEMENTATIONS,
    PASSED,
    UNSUPPORTED,
    VECTORS,
    Bench,
    Implementation,
    graded,
)

from refimpl.tools.world import World

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
DATA = HERE.parent / "docs/data"
EXPECTED = tomllib.loads((HERE / "expected_failures.toml").read_text())["failure"]
PACKAGES = ("torch", "bitsandbytes", "torchao")
KEYS = [each.key for each in IMPLEMENTATIONS]


def listed(rule_id: str, key: str) -> dict[str, Any] | None:
    found = [each for each in EXPECTED if rule_id in each["rules"] and key in each["implementations"]]
    assert len(found) <= 1, f"{rule_id} of {key} is listed twice"
    return found[0] if found else None


@pytest.fixture(scope="module")
def bench(world: Callable[[int], World]) -> Bench:
    return Bench(world)


@pytest.fixture(scope="module")
def measured(pytestconfig: pytest.Config) -> Iterator[dict[str, dict[str, list[str]]]]:
    """Filled by the tests below, rule by rule; written if that was asked for and nothing is missing."""
    found: dict[str, dict[str, list[str]]] = {}
    yield found
    if pytestconfig.getoption("--record"):
        assert all(list(found.get(rule_id, ())) == KEYS for rule_id in CHECKS), "record the whole matrix"
        write(found)


EACH_RULE = [pytest.param(rule_id, marks=pytest.mark.rule(rule_id)) for rule_id in CHECKS]


@pytest.mark.parametrize("it", IMPLEMENTATIONS, ids=KEYS)
@pytest.mark.parametrize("rule_id", EACH_RULE)
def test_rule(rule_id: str, it: Implementation, bench: Bench, measured: Any) -> None:
    verdict, measure = CHECKS[rule_id](bench, it)
    measured.setdefault(rule_id, {})[it.key] = [verdict, measure]
    failure = listed(rule_id, it.key)
    assert verdict in (PASSED, FAILED, UNSUPPORTED)
    if failure is None:
        assert verdict != FAILED, measure
    else:
        assert verdict == FAILED, f"{rule_id} was listed as a failure of {it.key}: take it off the list"


def test_every_rule_has_a_check() -> None:
    assert sorted(CHECKS) == sorted(filter(rules.is_rule, rules.contract_ids()))


def test_the_list_of_failures_knows_its_rules_and_implementations() -> None:
    for failure in EXPECTED:
        assert set(failure) == {"implementations", "rules", "reason", "link"}
        assert set(failure["rules"]) <= set(CHECKS)
        assert set(failure["implementations"]) <= set(KEYS)


def test_the_site_shows_what_was_measured(measured: Any, pytestconfig: pytest.Config) -> None:
    """Exact, measures too, where the versions are those that were recorded; else the verdicts."""
    if pytestconfig.getoption("--record"):
        return
    if set(measured) != set(CHECKS):
        pytest.skip("only some of the rules were checked in this run")
    stored = json.loads((DATA / "conformance.json").read_text())
    same_versions = stored["versions"] == versions()
    for rule_id, by_key in measured.items():
        for key, (verdict, measure) in by_key.items():
            assert verdict == stored["results"][rule_id][key][0]
            if same_versions:
                assert measure == stored["results"][rule_id][key][1], (rule_id, key)


@pytest.mark.parametrize("name", ["conformance.md", "vectors.md"])
def test_the_tables_are_those_of_the_record(name: str, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--record"):
        return
    stored = json.loads((DATA / "conformance.json").read_text())
    assert (DATA / name).read_text() == {"conformance.md": matrix(stored), "vectors.md": vectors()}[name]


# ---- writing


def versions() -> dict[str, str]:
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def write(found: dict[str, Any]) -> None:
    in_order = [rule_id for rule_id in rules.contract_ids() if rule_id in found]
    record = {"versions": versions(), "results": {rule_id: found[rule_id] for rule_id in in_order}}
    (DATA / "conformance.json").write_text(json.dumps(record, indent=1) + "\n")
    (DATA / "conformance.md").write_text(matrix(record))
    (DATA / "vectors.md").write_text(vectors())


def vectors() -> str:
    """The test vectors as a table."""
    lines = ["| vector | parameters, in order | gradients |", "|---|---|---|"]
    for name, case in VECTORS.items():
        shapes = "; ".join(f"`{param}` {tuple(shape)}" for param, shape in case.shapes.items())
        kind = "another scale every 100 elements" if case.change_gradients is graded else "one scale"
        lines.append(f"| `{name}` | {shapes} | {kind} |")
    return "\n".join(lines) + "\n"


WORDS = {PASSED: "passed", FAILED: "**failed**", UNSUPPORTED: "n/a"}


def matrix(record: dict[str, Any]) -> str:
    """The verdicts as a table, then what failed and by how much, rule by rule."""
    where = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    lines = [
        f"Measured with {where}, on CPU ranks (Gloo).",
        "",
        "| rule | " + " | ".join(each.label for each in IMPLEMENTATIONS) + " |",
        "|---|" + "---|" * len(IMPLEMENTATIONS),
    ]
    for rule_id, by_key in record["results"].items():
        words = " | ".join(WORDS[by_key[key][0]] for key in KEYS)
        lines.append(f"| [`{rule_id}`](contract.md#{rule_id}) | {words} |")
    lines += ["", "## What failed, and by how much", ""]
    lines += ["| rule | implementation | measured | because |", "|---|---|---|---|"]
    for rule_id, by_key in record["results"].items():
        rows: dict[str, list[str]] = {}
        for each in IMPLEMENTATIONS:
            verdict, measure = by_key[each.key]
            if verdict == FAILED:
                failure = listed(rule_id, each.key)
                assert failure is not None
                because = f"{failure['reason']} ([link]({failure['link']}))"
                rows.setdefault(f"{measure} | {because}", []).append(each.label)
        lines += [f"| `{rule_id}` | {'; '.join(labels)} | {row} |" for row, labels in rows.items()]
    return "\n".join(lines) + "\n"
