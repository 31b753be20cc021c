from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # two cores and up to four ranks

import torch

from refimpl.tools.world import World

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(n)`: n CPU ranks that live as long as the test session."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        return worlds.setdefault(size, World(size, device="cpu", timeout=120))

    yield get
    for each in worlds.values():
        each.close()
