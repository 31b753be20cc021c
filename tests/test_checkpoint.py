"""Save with one layout, resume in another, through every route: equal to the uninterrupted native run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from against_native import TWINS, Case, differences, native_run
from routes import ROUTES, load_and_train, train_and_save, values_of

from refimpl.tools.world import World

GetWorld = Callable[[int], World]

LAYOUTS = [(wrapping, orig) for wrapping in ("coarse", "fine") for orig in (False, True)]
SIZES = [1, 2, 3, 4]


def without_w_at_first(step: int, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`late` is used from step 2 on and `never` not at all: steps differ, and one has no state."""
    unused = {"never"} | ({"late"} if step == 1 else set())
    return {name: grad for name, grad in grads.items() if name not in unused}


CASE = Case({"x": (3000,), "y": (97, 99), "z": (500,), "w": (5001,)}, steps=4)
UNEVEN = Case(
    {"x": (3000,), "late": (97, 99), "z": (500,), "never": (4100,)},
    steps=4,
    change_gradients=without_w_at_first,
)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_layout_into_every_other(route: str, twin: str, world: GetWorld, tmp_path: Path) -> None:
    """World sizes 1 to 4, two wrappings, both `use_orig_params`: saved after step 2 of 4."""
    native = native_run(CASE)
    folders = []
    sizes = SIZES if twin == "sharded" else [1, 3]  # for the twin that is not for use
    for size in sizes:
        path = tmp_path / str(size)
        for found in world(size).run(train_and_save, CASE, LAYOUTS, twin, route, path, 2):
            assert differences([found], native[1:2]) == []
        folders += [path / str(number) for number in range(len(LAYOUTS))]
    values = values_of(native[1])
    expected = [native[1], native[3]] * len(folders) * len(LAYOUTS)
    for size in sizes:
        for found in world(size).run(load_and_train, CASE, LAYOUTS, twin, route, folders, values, 3):
            assert differences(found, expected) == [], f"into {size} ranks"
