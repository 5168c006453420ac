"""docs/notebook.ipynb, executed as a user would: cell by cell, on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.notebook import check_notebook, start_notebook


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("nbclient") is None, reason="nbclient is not installed (pip install nbclient ipykernel)")
def test_notebook_trains_resumes_after_kill_and_shows_plots(tmp_path: Path) -> None:
    check_notebook(start_notebook(tmp_path, PATIENCE, name="points"), tmp_path)
    resumed = "".join(log.read_text() for log in tmp_path.glob("ddp-runs/points-*/logs/*.log"))
    assert resumed.count("going on from step") >= 4  # two ranks, after the kill and after the suspension
