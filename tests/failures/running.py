"""A planted failure as a local run, and what a user gets to know of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.failures.planted import Planted

RANKS: Final = 2
SECONDS: Final = 300  # for one failure on a busy machine
# The paths are not in the environment: ranks inherit it, and would find there what a user's ranks do not.
_CODE: Final = f"import sys; sys.path[:0] = {sys.path!r}; from ddp_cli.__main__ import main; sys.exit(main())"


class Answer(NamedTuple):
    """Which parts of the answer were right, and how many restarts were useless."""

    cause: bool
    place: bool
    remedy: bool
    useless: int


def run_planted(failure: Planted, folder: Path) -> Mapping[str, Any]:
    """Run a job that fails; return its status."""
    (folder / "train.py").write_text(failure.write())
    for name, content in failure.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    container = {
        "name": "trainer",
        "image": "example.com/train:1",
        "command": [*failure.command],
        "env": [{"name": name, "value": value} for name, value in (("OMP_NUM_THREADS", "1"), *failure.env)],
    }
    spec = {
        "nodes": failure.pods,
        "procPerNode": RANKS // failure.pods,
        "watchdog": {"startSeconds": 60, "stallSeconds": 15, "checkpointSeconds": 40},
        "recovery": {"maxRestarts": 3},
        "template": {"spec": {"containers": [container]}},
    }
    document = {
        "apiVersion": "ddp-operator.dev/v1alpha1",
        "kind": "DDPTrainingJob",
        "metadata": {"name": "planted"},
        "spec": spec,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with (folder / "out.txt").open("w") as output:
        subprocess.run(
            [sys.executable, "-c", _CODE, "run", "job.yaml", "--plain", "--cpu"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
    (path,) = folder.glob("ddp-runs/*/status.yaml")
    status: Mapping[str, Any] = yaml.safe_load(path.read_text())["status"]
    return status


def judge(failure: Planted, status: Mapping[str, Any]) -> Answer:
    """Compare the status of a failed job with the answer that was expected."""
    found = status.get("lastFailure", {})
    message = found.get("message", "")
    remedy = found.get("remedy", "")
    # PyTorch's text is part of the message, so the category, the rank, the line and the remedy decide.
    traceback = found.get("traceback", "")
    is_named = f"train.py:{failure.line}" in message or f'train.py", line {failure.line}' in traceback
    restarts = status.get("restarts", {}).get("all", 0)
    return Answer(
        cause=found.get("category") == failure.category and all(re.search(word, message) for word in failure.cause),
        place=found.get("rank") in failure.ranks and (failure.line is None or is_named),
        remedy=bool(re.search(failure.remedy, remedy)) and not re.search(failure.never, message + remedy),
        useless=max(0, restarts - failure.restarts),
    )
