from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import rules

os.environ["OMP_NUM_THREADS"] = "1"  # two cores and up to four ranks

import torch

from refimpl.tools.world import World

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the conformance matrix of the site")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(id, ...): the rules of docs/contract.md that a test holds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = set(rules.contract_ids())
    for item in items:
        for mark in item.iter_markers("rule"):
            for rule_id in mark.args:
                if rule_id not in known:
                    raise pytest.UsageError(f"{item.nodeid}: {rule_id} is not a rule of docs/contract.md")


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)`: n CPU ranks that live as long as the test session."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        return worlds.setdefault(size, World(size, device="cpu", timeout=120))

    yield get
    for each in worlds.values():
        each.close()
