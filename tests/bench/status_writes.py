"""The cost of each write of a status for an API server: CPU time with and without the CRD's rules and metrics.

Real etcd and kube-apiserver from $KUBEBUILDER_ASSETS. The definitions exist side by side, each in a separate group,
and alternate within one run; ``figures`` is ours with full status.points. ``--against`` adds another definition,
such as that of an earlier commit. Asserts nothing:

    KUBEBUILDER_ASSETS=… python -m tests.bench.status_writes --against former.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from msgspec.structs import replace

from ddp_operator.api.constants import KIND, PLURAL, VERSION
from ddp_operator.api.crd import build_crd
from ddp_operator.api.status import CheckpointStatus, Progress, Status
from ddp_operator.features import SCHEMA
from ddp_operator.features.points import MAX_ROWS, extend_points
from ddp_operator.kube.client import ResponseError
from tests.bench.figures import ratio, table
from tests.support.control_plane import ControlPlane
from tests.support.standin import ClusterActors
from tests.support.strategies import FULL

PARALLEL: Final = 16
STATUS: Final = {
    "phase": "Running", "attempt": 1, "jobName": "job-1", "selector": "a=b",
    "startTime": "2026-01-01T00:00:00Z", "attemptTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    "nodes": {"desired": 2, "ready": 2, "succeeded": 0, "failed": 0},
    "progress": {"step": 1, "totalSteps": 10000, "percent": "1.0%", "loss": "2.3", "samplesPerSecond": "1000"},
    "conditions": [
        {"type": kind, "status": "True", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind in ("Accepted", "Scheduled", "Rendezvoused", "Progressing")
    ],
}  # fmt: skip


class Subject:
    """One definition and its jobs; ``turn`` writes their statuses."""

    def __init__(self, name: str, crd: Any, status: Mapping[str, Any] = STATUS) -> None:
        self.name = name
        self.status = status
        self.group = f"{name}.example.com"
        self.where = f"/apis/{self.group}/{VERSION}/namespaces/default/{PLURAL}"
        self.crd = copy.deepcopy(crd)
        self.crd["metadata"]["name"] = f"{PLURAL}.{self.group}"
        self.crd["spec"]["group"] = self.group
        self.crd["spec"]["names"].pop("categories")
        self._jobs: list[Any] = []
        self._step = 0

    async def install(self, plane: ControlPlane, actors: ClusterActors) -> None:
        """Create the definition and its jobs."""
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(self.crd))
        plane.kubectl("wait", "--for=condition=Established", f"crd/{PLURAL}.{self.group}")
        body = FULL | {"apiVersion": f"{self.group}/{VERSION}"}

        async def make() -> bool:
            try:
                metadata = {"name": f"job-{len(self._jobs)}"}
                self._jobs.append(await actors.client.request("POST", self.where, body=body | {"metadata": metadata}))
            except ResponseError as error:
                if error.status != 404:  # it is not served yet
                    raise
            return len(self._jobs) == PARALLEL

        await actors.until(make, f"{self.name} is served")

    async def turn(self, actors: ClusterActors, writes: int) -> None:
        """Write this many statuses, all jobs at the same time."""
        await asyncio.gather(*(self._write(actors, index, writes // PARALLEL) for index in range(PARALLEL)))

    async def _write(self, actors: ClusterActors, index: int, writes: int) -> None:
        for _ in range(writes):
            self._step += 1
            old = self._jobs[index]
            metadata = {key: old["metadata"][key] for key in ("name", "resourceVersion")}
            status = {**self.status, "progress": {"step": self._step, "totalSteps": 10**6}}
            body = {"apiVersion": old["apiVersion"], "kind": KIND, "metadata": metadata, "status": status}
            where = f"{self.where}/{metadata['name']}/status"
            self._jobs[index] = await actors.client.request("PUT", where, body=body)


def full_points() -> list[str]:
    """Return as many rows as a status may have, of a job of the bundled trainer."""
    status = Status(phase="Running")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for minute in range(MAX_ROWS):
        progress = Progress(
            epoch=minute // 60,
            step=minute * 7000,
            loss=f"{2.3 / (1 + minute):.4f}",
            throughput=f"{9000 + minute % 700 / 10:.1f} samples/s",
            steps_per_second=f"{1.16 + minute % 70 / 1e4:.3f}",
            learning_rate=f"{0.001 / (1 + minute):.3g}",
            val_accuracy=f"{0.9 + minute / 1e5:.4f}",
            val_loss=f"{1 / (1 + minute):.4f}",
        )
        checkpoint = CheckpointStatus(step=minute * 7000)
        moment = start + timedelta(minutes=minute)
        status = extend_points(replace(status, progress=progress, checkpoint=checkpoint), moment)
    return list(status.points)


def without_rules(node: Any) -> Any:
    """Return a definition without its CEL rules."""
    if isinstance(node, dict):
        return {key: without_rules(value) for key, value in node.items() if key != "x-kubernetes-validations"}
    return [without_rules(item) for item in node] if isinstance(node, list) else node


async def measure(options: argparse.Namespace) -> None:
    """Write the table and the ratios."""
    ours = Subject("ours", build_crd(SCHEMA))
    figures = Subject("figures", build_crd(SCHEMA), {**STATUS, "points": full_points()})
    subjects = [ours, Subject("bare", without_rules(build_crd(SCHEMA))), figures]
    subjects += [Subject(path.stem.lower(), yaml.safe_load(path.read_text())) for path in options.against]
    spent: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    with tempfile.TemporaryDirectory() as folder, ControlPlane(Path(folder), controllers=False) as plane:
        (server,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "kube-apiserver")
        async with ClusterActors(plane.admin) as actors:
            for subject in subjects:
                await subject.install(plane, actors)
                await subject.turn(actors, 10 * PARALLEL)
            for number in range(options.turns):
                for subject in subjects if number % 2 else subjects[::-1]:
                    before = sum(server.cpu_times()[:2])
                    await subject.turn(actors, options.writes)
                    spent[subject.name].append((sum(server.cpu_times()[:2]) - before) / options.writes * 1000)
    for subject in (ours, figures):
        print(f"a status of {subject.name}: {len(json.dumps(subject.status, separators=(',', ':'))):,} bytes")
    print(table("the API server's CPU for 1,000 writes of a status", spent))
    for subject in subjects[1:]:
        print(ratio(f"{subject.name} : ours", spent[subject.name], spent[ours.name]))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="FILE", help="another definition")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--writes", type=int, default=480, help=f"in a turn; a multiple of {PARALLEL}")
    asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
