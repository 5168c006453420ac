"""Training loops as users write them, unchanged in a cluster: what `kubectl get ddp` shows of them, and how soon."""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support.ddp_run import manifest
from tests.support.unchanged_loops import LOOPS, UNCHANGED_LOOPS

from .conftest import UserNamespace, adapt
from .test_code import ddp

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS_UNTIL_SHOWN = 100
"""The loops take at most ten steps a second."""


def write_project(folder: Path, loop: str, options: list[str]) -> None:
    """Write the loops, the package that they import beside torch, and a job that runs one of them."""
    shutil.copy(LOOPS, folder / "train.py")
    package = find_spec("tqdm")
    assert package is not None
    assert package.submodule_search_locations is not None
    shutil.copytree(
        package.submodule_search_locations[0], folder / "tqdm", ignore=shutil.ignore_patterns("__pycache__")
    )
    job = yaml.safe_load(manifest(["python", "train.py", loop, *options], nodes=2, recovery={"maxRestarts": 0}))
    adapted = adapt(job, loop.replace("_", "-"))
    container = adapted["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"requests": {"cpu": "100m"}}
    (folder / "job.yaml").write_text(yaml.safe_dump(adapted))


def read_columns(cluster: UserNamespace, name: str) -> dict[str, str]:
    """Return the columns that `kubectl get ddp` shows of a job; an empty one is left out."""
    output = cluster.kubectl("get", "ddp", name).stdout.splitlines()
    if len(output) != 2:
        return {}
    header, row = output
    titles = header.split()
    starts = [header.index(title) for title in titles]
    ends = [*starts[1:], len(row)]
    cells = {title: row[start:end].strip() for title, start, end in zip(titles, starts, ends, strict=True)}
    return {title: cell for title, cell in cells.items() if cell}


@pytest.mark.parametrize(("loop", "options", "steps", "has_total"), UNCHANGED_LOOPS)
def test_unchanged_loop_shows_steps_rate_loss_and_total(
    cluster: UserNamespace, tmp_path: Path, loop: str, options: list[str], steps: int, has_total: bool
) -> None:
    name = loop.replace("_", "-")
    write_project(tmp_path, loop, options)
    ddp(cluster, tmp_path, "submit", "job.yaml", "--workdir", ".")
    cluster.until(lambda: "Rendezvoused" in str(cluster.status(name).get("conditions")), f"{name} starts")
    seen: dict[str, tuple[float, int]] = {}
    began = 0.0
    while cluster.status(name).get("phase") not in ("Succeeded", "Failed"):
        status = cluster.status(name)
        joined = [item for item in status["conditions"] if (item["type"], item["status"]) == ("Rendezvoused", "True")]
        began = began or (time.monotonic() if joined else 0.0)
        columns = read_columns(cluster, name)
        step = int(status.get("progress", {}).get("step") or 0)
        for title in ("PROGRESS", "ETA", "THROUGHPUT", "LOSS"):
            if began and title in columns:
                seen.setdefault(title, (time.monotonic() - began, step))
        if began and step:
            seen.setdefault("step", (time.monotonic() - began, step))
        time.sleep(0.3)
    print(name, ", ".join(f"{title} after {at:.1f} s (step {step})" for title, (at, step) in seen.items()))

    status = cluster.status(name)
    progress = status["progress"]
    assert status["phase"] == "Succeeded", status
    assert (progress["step"], progress.get("percent")) == (steps, "100.0%"), progress
    assert "eta" not in progress
    assert float(progress["loss"]) > 0
    for title in ("step", "THROUGHPUT", "LOSS"):
        assert title in seen, seen
        assert seen[title][1] <= STEPS_UNTIL_SHOWN, seen
    assert ("ETA" in seen) == has_total, seen
