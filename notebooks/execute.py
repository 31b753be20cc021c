"""Run the notebooks and store what they show, the same way every time.

    python notebooks/execute.py            # run all, store outputs in place (make notebooks)
    python notebooks/execute.py --check    # run all, compare with what is stored, pictures included

What is stored depends on nothing but the code: no times, no versions, fixed cell ids, one stream for
what a cell prints.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

CELL_SECONDS = 90
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main() -> int:
    """Exit status 0 if all notebooks ran, and with `--check` showed what is stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored outputs, write nothing")
    parser.add_argument(
        "notebooks", nargs="*", type=Path, default=sorted(Path(__file__).parent.glob("*.ipynb"))
    )
    options = parser.parse_args()
    # the kernel leaves what child processes print alone only where it sees this; nbval always sets it
    os.environ["PYTEST_CURRENT_TEST"] = "notebooks/execute.py"
    changed = []
    for path in options.notebooks:
        text = executed(path)
        if text != path.read_text(encoding="utf-8"):
            changed.append(path.name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {'changed' if path.name in changed[-1:] else 'as stored'}", flush=True)
    return 1 if options.check and changed else 0


def executed(path: Path) -> str:
    """The notebook at `path` as it is after a run, as text. Raises what nbclient raises if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name=KERNEL["name"],
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number:02}", {}
        if cell.cell_type == "code":
            cell.outputs = merged_streams(cell.outputs)
    return str(nbformat.writes(notebook, version=nbformat.NO_CONVERT)) + "\n"


def merged_streams(outputs: list[Any]) -> list[Any]:
    """Pieces of one stream that follow each other, as one: where they are split is chance."""
    merged: list[Any] = []
    for output in copy.deepcopy(outputs):
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


if __name__ == "__main__":
    sys.exit(main())
