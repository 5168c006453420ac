"""The cost of ``ddp run``: the sample against the same two torchrun commands started by hand, alternately.

Prints medians and ratios of the wall time from start to end, and of the time to the first training step, which is when
the first line with a step reaches a log file. Asserts nothing. ``make bench`` runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from tests.bench.figures import ratio, table
from tests.support import ROOT

SAMPLE = ROOT / "deploy" / "samples" / "digits.yaml"
STEP = re.compile(rb"\bstep [1-9]\d*/")
Start = Callable[[Path], list["subprocess.Popen[bytes]"]]


def ddp_run(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start ``ddp run`` on the sample, in a separate folder."""
    return [start([str(Path(sys.executable).with_name("ddp")), "run", str(SAMPLE)], folder, "ddp")]


def by_hand(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start torchrun once for each node, with the sample's command line and number of threads."""
    job = parse_manifest(SAMPLE.read_text(encoding="utf-8"), SCHEMA).job
    (container,) = job.spec.template.spec["containers"]
    interpreter, *script = [*container["command"], *container["args"]]
    assert interpreter == "python"
    nodes = job.spec.nodes
    endpoint = f"127.0.0.1:{free_port()}"
    threads = int(container["resources"]["limits"]["cpu"])
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        f"--nnodes={nodes}", f"--nproc-per-node={job.spec.proc_per_node}",
        "--rdzv-backend=c10d", "--rdzv-id=by-hand", f"--rdzv-endpoint={endpoint}",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return [start([*torchrun, f"--node-rank={rank}", *script], folder, f"node-{rank}", env) for rank in range(nodes)]


def start(
    command: Sequence[str], folder: Path, name: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file in the folder."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def measure(begin: Start) -> tuple[float, float]:
    """Return seconds to the first step and to the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        since = time.perf_counter()
        processes = begin(folder)
        first: float | None = None
        while any(process.poll() is None for process in processes):
            if first is None and said_step(folder):
                first = time.perf_counter() - since
            time.sleep(0.01 if first is None else 0.002)
        wall = time.perf_counter() - since
        failed = [process.args for process in processes if process.returncode != 0]
        if failed or first is None:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"did not train: {failed or 'no step was seen'}\n{logs}")
        return first, wall


def said_step(folder: Path) -> bool:
    """Return whether any log has a line about a step."""
    return any(STEP.search(path.read_bytes()) for path in folder.glob("**/*.log"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run both alternately and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each, after one that is thrown away")
    arguments = parser.parse_args(argv)
    ways: dict[str, Start] = {"ddp run": ddp_run, "torchrun by hand": by_hand}
    taken: dict[str, Any] = {name: ([], []) for name in ways}
    for repeat in range(arguments.repeats + 1):
        for name, begin in ways.items():
            first, wall = measure(begin)
            if repeat:
                taken[name][0].append(first)
                taken[name][1].append(wall)
            print(f"{name}: first step {first:.2f} s, end {wall:.2f} s{'' if repeat else ' (warm-up)'}", flush=True)
    for index, interval in enumerate(("time to the first step", "wall time")):
        print(table(interval, {name: figures[index] for name, figures in taken.items()}))
        print(ratio("ddp run / by hand", taken["ddp run"][index], taken["torchrun by hand"][index]))


if __name__ == "__main__":
    main()
