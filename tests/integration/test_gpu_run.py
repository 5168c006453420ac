"""The rehearsal of the checks on a GPU: all steps on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.gpu.plan import PRECISIONS, SYSTEMS, choose_loops
from tests.support import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.process, pytest.mark.timeout(2400)]


def test_every_step_runs_on_cpu_and_its_results_are_measured(tmp_path: Path) -> None:
    # Beside other tests it needs much more than its four minutes.
    command = [str(ROOT / "tests" / "gpu" / "run"), "--device", "cpu", "--quick", "--seconds", "2300"]
    env = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    names = {"summary.json", "tests.json", "seeds.json", "costs.json", "floor.json", "log.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    results: dict[str, Any] = {
        name: json.loads((tmp_path / name).read_text()) for name in sorted(names) if name.endswith(".json")
    }
    assert all(step["state"] == "passed" for step in results["summary.json"]["steps"]), ended.stdout
    outcomes = {test["outcome"] for test in results["tests.json"]}
    assert outcomes == {"passed", "skipped"}, results["tests.json"]

    for system in SYSTEMS:
        for precision in PRECISIONS:
            loops = choose_loops(system, precision, "cpu")
            if loops is not None:
                check_loops(results["seeds.json"][system.name]["precisions"][precision], loops.names)
                assert f"\n{system.name} " in ended.stdout
    assert results["floor.json"]["floorSeconds"] > 0
    assert all(share > 0 for share in results["floor.json"]["shares"].values())
    assert min(results["costs.json"]["hook"]["withSeconds"]) > 0
    assert [copy["setting"] for copy in results["costs.json"]["copies"]] == ["automatic", "1"]
    check_loops({"results": results["costs.json"]["loop"]}, ["ours:preset", "bare:preset"])


def check_loops(about: dict[str, Any], names: list[str]) -> None:
    assert set(about["results"]) == set(names)
    for result in about["results"].values():
        assert len(result["rates"]) == result["turns"] == 2
        assert result["images_per_second"] == median(result["rates"]) > 0
