"""The cost of `ddp check` on a small script, beside that of one `ddp run` of it.

Prints medians of wall and CPU time, and their ratios. A check has three runs or more. Asserts nothing:

    python -m tests.bench.check_cost [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.bench.figures import ratio, table
from tests.support import ROOT
from tests.unit.test_docs import fenced


class Cost(NamedTuple):
    """Seconds of a command: wall time, and CPU time of its processes that were waited for."""

    wall: float
    cpu: float


def measure(command: str, folder: Path) -> Cost:
    """Run a command of `ddp` on the script in a folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    since = time.perf_counter()
    words = [sys.executable, "-m", "ddp_cli", command, "train.py", "--nodes=2", "--cpu", "--plain"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - since, cpu)


def main() -> None:
    """Measure both alternately, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    (script,) = fenced((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), "python")
    costs: dict[str, list[Cost]] = {"check": [], "run": []}
    for _ in range(rounds):
        for command in costs:
            with tempfile.TemporaryDirectory() as name:
                (Path(name) / "train.py").write_text(script)
                costs[command].append(measure(command, Path(name)))
    for index, kind in enumerate(Cost._fields):
        seconds = {f"ddp {command}": [cost[index] for cost in taken] for command, taken in costs.items()}
        print(table(f"{kind} time", seconds))
        print(ratio("ddp check / ddp run", seconds["ddp check"], seconds["ddp run"]))


if __name__ == "__main__":
    main()
