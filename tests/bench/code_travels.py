"""The cost of packing a folder: beside `tar | zstd`, and in a run's time to the first step.

python -m tests.bench.code_travels
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddp_cli.client.packing.archive import format_size, pack
from tests.support import ROOT

ROUNDS = 7
SCRIPT = "import time\nprint('first step at', time.time(), flush=True)\n"
JOB = """
apiVersion: ddp-operator.dev/v1alpha1
kind: DDPTrainingJob
metadata: {name: bench}
spec:
  recovery: {warmStart: "Off"}
  template: {spec: {containers: [{name: trainer, image: none, command: [python, train.py]}]}}
"""


def write_tree(folder: Path, files: int, size: int) -> None:
    """Write modules of Python sources, in folders of a hundred files."""
    source = b"".join(path.read_bytes() for path in sorted((ROOT / "operator").rglob("*.py")))
    draw = random.Random(1)
    for number in range(files):
        place = folder / f"package{number // 100}" / f"module{number}.py"
        place.parent.mkdir(exist_ok=True)
        begin = draw.randrange(len(source) - size)
        place.write_bytes(source[begin : begin + size])
    (folder / ".gitignore").write_text(
        "__pycache__/\n*.py[cod]\nbuild/\ndist/\n*.egg-info/\n.env\n/data/\n*.log\nruns/\n"
    )


def measure_packing(folder: Path, size: int) -> None:
    """Print how long packing takes, alternately with tar and zstd."""
    write_tree(folder, 10_000, size)
    ours = []
    theirs = []
    packed = b""
    for _ in range(ROUNDS):
        since = time.perf_counter()
        packed = pack(folder, limit=sys.maxsize).data
        ours.append(time.perf_counter() - since)
        since = time.perf_counter()
        line = f"tar -C {folder} -cf - . | zstd -q -o {folder}.zst -f"
        subprocess.run(line, shell=True, check=True)
        theirs.append(time.perf_counter() - since)
    ratio = statistics.median(item / second for item, second in zip(ours, theirs, strict=True))
    print(
        f"10,000 files of {size} bytes: {min(ours):.2f} s, tar | zstd {min(theirs):.2f} s, ratio {ratio:.2f} (median)"
    )
    since = time.perf_counter()
    smaller = len(pack(folder).data)
    if smaller < len(packed):
        print(f"  packed anew by xz for a ConfigMap: {time.perf_counter() - since:.2f} s, {format_size(smaller)}")
    print(f"  packed {format_size(len(packed))}, by zstd {format_size(Path(f'{folder}.zst').stat().st_size)}")


def measure_first_step(folder: Path) -> None:
    """Print the time from `ddp run` to the script's first line, alternately with and without a packed folder."""
    write_tree(folder, 1250, 4096)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(JOB)
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for travels in took:
            options = ["--workdir", "."] if travels else []
            since = time.time()
            line = [sys.executable, "-m", "ddp_cli", "run", "job.yaml", "--plain", *options]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True)
            result = re.search(r"first step at ([0-9.]+)", done.stdout)
            assert result, done.stdout
            took[travels].append(float(result[1]) - since)
    packed = pack(folder)
    added = statistics.median(item - second for item, second in zip(took[True], took[False], strict=True))
    print(
        f"a folder of {format_size(packed.size)}, {format_size(len(packed.data))} packed, adds {added:.2f} s (median)"
    )
    print(f"  without it {min(took[False]):.2f} s, with it {min(took[True]):.2f} s from the command to the script")


def main() -> None:
    """Print all values."""
    with tempfile.TemporaryDirectory() as place:
        for name, size in (("small", 300), ("usual", 2000)):
            (Path(place) / name).mkdir()
            measure_packing(Path(place) / name, size)
        (Path(place) / "run").mkdir()
        measure_first_step(Path(place) / "run")


if __name__ == "__main__":
    main()
