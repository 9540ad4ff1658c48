"""The notebooks run from top to bottom, and are committed without outputs."""

import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
# What each of them must print, to show what it is about.
SHOWN = {
    "shop": ("differential privacy for one user", "would fit"),
    "my_model": ("differential privacy", "one number for each person", "one backward pass"),
    "audit": ("counted by hand: 8.0", "recount of epsilon", "fail", "which refutes the claim"),
}


def text_of(notebook) -> str:
    parts = []
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        parts += [output.get("text", ""), *(str(value) for value in output.get("data", {}).values())]
    return "\n".join(parts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), f"clear the outputs of {path.name}"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(path.parent))
    shown = text_of(notebook)
    for words in SHOWN[path.stem]:
        assert words in shown, shown[-3000:]


def test_there_are_three():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)
