"""docs/notebook.ipynb, executed as a user would: cell by cell, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.ddp_run import PATIENCE

# In a process of its own: what Jupyter's parts warn of is not ours.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=float(sys.argv[2]), kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("nbclient") is None, reason="nbclient is not installed (pip install nbclient ipykernel)")
def test_the_notebook_trains_is_killed_goes_on_and_shows_its_figures(tmp_path: Path) -> None:
    words = [sys.executable, "-c", EXECUTE, str(ROOT / "docs/notebook.ipynb"), str(PATIENCE)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    shown = ["".join(json.dumps(output) for output in cell.get("outputs", [])) for cell in cells]
    everything = "\n".join(shown)
    assert "phase='Succeeded'" in everything
    assert "srcdoc" in everything  # the report
    assert "image/png" in everything or "[" in shown[-5]  # the losses, plotted or printed
    assert "a object is not plain data" in everything
    assert "UserError" in everything
    assert "TypeError" in everything
    resumed = "".join(log.read_text() for log in tmp_path.glob("ddp-runs/digits-*/logs/*.log"))
    assert resumed.count("going on from step") >= 4  # two ranks, after the kill and after the suspension
