"""The cost of an idle operator: its memory, and the time from its start to its first reconcile.

It runs as a separate process against the stand-in API server. ``python -c 'import kopf'`` alternates with it as the
baseline: in this environment, where Kopf finds and imports the official client, and in an environment without that
client, as the operator starts. Asserts nothing. ``make bench`` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddp_operator.api import constants
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.features import SCHEMA
from tests.bench.figures import ratio, table
from tests.support.standin import StandIn

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "digits.yaml"
BASELINES = {
    "python -c 'import kopf'": "import kopf",
    "the same without the official client": "import sys; sys.modules['kubernetes'] = None; import kopf",
}


def create_sample(server: StandIn) -> None:
    """Apply the sample as a user would, before the operator runs."""
    body = json.dumps(parse_manifest(SAMPLE.read_text(encoding="utf-8"), SCHEMA).resource).encode()
    where = f"{server.url}/apis/{constants.API_VERSION}/namespaces/default/{constants.PLURAL}"
    request = urllib.request.Request(where, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def run_operator(server: StandIn, settle: float, *, with_job: bool) -> tuple[float, float]:
    """Return seconds from the start to the first Job (0 without one) and MiB resident ``settle`` seconds later."""
    if with_job:
        create_sample(server)
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "KUBECONFIG": str(server.write_kubeconfig(Path(folder))),
            "DDP_OPERATOR_HEALTH_PORT": "0",
        }
        since = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "ddp_operator"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            expected = ("create", "jobs") if with_job else ("watch", constants.PLURAL)
            while not any(call[:2] == expected for call in server.calls):
                if process.poll() is not None or time.perf_counter() - since > 60:
                    process.kill()
                    raise SystemExit(f"no {' '.join(expected)} came: {process.communicate()[1].decode()[-2000:]}")
                time.sleep(0.002)
            first = time.perf_counter() - since
            time.sleep(settle)
            resident = psutil.Process(process.pid).memory_info().rss / 2**20
        finally:
            process.terminate()
            process.communicate(timeout=30)
        return first, resident


def run_python(code: str) -> float:
    """Return the seconds that a baseline takes."""
    since = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - since


def main(argv: Sequence[str] | None = None) -> None:
    """Measure alternately and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5, help="measured starts, after one that is thrown away")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds of rest before memory is read")
    arguments = parser.parse_args(argv)
    starts: dict[str, list[float]] = {"operator, to its first Job": [], **{name: [] for name in BASELINES}}
    memory: dict[str, list[float]] = {"without a job": [], "with one job": []}
    for repeat in range(arguments.repeats + 1):
        with StandIn() as server:
            first, with_job = run_operator(server, arguments.settle, with_job=True)
        with StandIn() as server:
            _, without = run_operator(server, arguments.settle, with_job=False)
        seconds = [first, *map(run_python, BASELINES.values())]
        if repeat:
            for column, value in zip([*starts.values(), *memory.values()], [*seconds, without, with_job], strict=True):
                column.append(value)
    print(table("start", starts))
    ours, *theirs = starts
    for name in theirs:
        print(ratio(f"first Job / {name}", starts[ours], starts[name]))
    print(table("resident memory", memory, "MiB", 1))


if __name__ == "__main__":
    main()
