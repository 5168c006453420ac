"""docs/notebook.ipynb as Jupyter runs it, with other values for its parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import ROOT

# In a separate process, because Jupyter's packages emit warnings.
_EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
path, seconds, parameters = sys.argv[1:]
notebook = nbformat.read(path, 4)
place = next(n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(parameters))  # as papermill does
NotebookClient(notebook, timeout=float(seconds), kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


def start_notebook(
    folder: Path, seconds: float, environment: Mapping[str, str] | None = None, **parameters: str
) -> subprocess.Popen[str]:
    """Execute every cell in this folder; none may take longer than ``seconds``."""
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    words = [sys.executable, "-c", _EXECUTE, str(ROOT / "docs/notebook.ipynb"), str(seconds), source]
    return subprocess.Popen(
        words, cwd=folder, env={**os.environ, **(environment or {})}, stderr=subprocess.PIPE, text=True
    )


def check_notebook(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for its end, and check in the cells that it trained, was killed, resumed and showed its plots."""
    _, message = process.communicate()
    assert process.returncode == 0, message
    cells = json.loads((folder / "executed.ipynb").read_text())["cells"]
    shown = {cell["id"]: json.dumps(cell.get("outputs", [])) for cell in cells}
    assert "phase='Succeeded'" in shown["cell-9"]
    assert shown["cell-16"].count("going on from step") >= 2  # each rank, and more in a pod that stayed
    assert "going on from step 0" not in shown["cell-16"]
    assert "image/png" in shown["cell-11"] or "[" in shown["cell-11"]  # the losses, plotted or printed
    assert "srcdoc" in shown["cell-12"]  # the report
    assert "a object is not plain data" in shown["cell-14"]
    assert "UserError" in shown["cell-14"]
    assert "TypeError" in shown["cell-14"]
    assert "points: Succeeded" in shown["cell-15"]
