"""`python -m tests.drills.soak`: run many jobs, and measure which values grow with their number.

Short jobs run one after another and many at once on the local cluster, in one process; then jobs on an API server
(the stand-in) with the operator in a separate process. After each interval of jobs it measures resident memory, open
files, threads, child processes and temporary files, and prints the slopes per 1,000 jobs. It asserts nothing about
them. A job that does not succeed, or a remaining process, ends it with an error. The pods of the local jobs run the
training command without launcher and torchrun, unless ``--torch`` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ddp_cli.local.local_cluster import LocalCluster
from ddp_cli.local.ports import hold_port
from ddp_operator.api import constants
from ddp_operator.api.cluster import Key
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import FEATURES
from ddp_operator.reconcile import Reconciler
from ddp_operator.reconcile.fair_turns import FairTurns
from ddp_operator.reconcile.workqueue import WorkQueue
from tests.drills.scene import MARK, PATIENCE, describe_process, find_marked
from tests.support.builders import job_manifest
from tests.support.control_plane import free_ports
from tests.support.operator_process import OperatorProcess
from tests.support.standin import ClusterActors, StandIn

TRAINING = ["python", "-c", "print('done')"]
WARM_UP = 0.25
"""Share of the first samples that is dropped, because imports, pools and caches fill then."""
ENDED = ("Succeeded", "Failed")
WAVE = 25
"""Jobs at once on the API server."""


@dataclass
class Samples:
    """The resources of a process, by its number of finished jobs."""

    title: str
    jobs: list[int] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def take(self, jobs: int, process: psutil.Process, **more: float) -> None:
        """Measure a process."""
        results = {
            "RSS, KiB": process.memory_info().rss / 1024,
            "open files": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "processes": float(len(process.children(recursive=True))),
            **more,
        }
        self.jobs.append(jobs)
        for name, value in results.items():
            self.figures.setdefault(name, []).append(value)

    def table(self) -> str:
        """Return first value, last value and slope of each measurement."""
        kept = int(len(self.jobs) * WARM_UP)
        lines = [f"{self.title}: {self.jobs[-1]} jobs, {len(self.jobs)} samples, the first {kept} not counted"]
        for name, values in self.figures.items():
            jobs = self.jobs[kept:]
            rest = values[kept:]
            slope = statistics.linear_regression(jobs, rest).slope * 1000 if len(set(jobs)) > 1 else float("nan")
            lines.append(f"  {name:15} {rest[0]:10.0f} -> {rest[-1]:10.0f}   {slope:+10.2f} for each 1,000 jobs")
        return "\n".join(lines)


class Farm(LocalCluster):
    """A local cluster with many jobs, each reconciled when one of its objects changes."""

    def __init__(self, folder: Path, environ: Mapping[str, str], *, with_launcher: bool) -> None:
        super().__init__(folder, folder / "claims", environ=environ, gpu_ids=())
        self._with_launcher = with_launcher
        reconciler = Reconciler(self, turns=FairTurns(), hooks=Hooks(FEATURES))
        self.queue: WorkQueue[Key] = WorkQueue(reconciler.reconcile, workers=16)
        self._waiting: dict[str, asyncio.Event] = {}
        self._logs = folder / "logs"

    async def run_job(self, manifest: Mapping[str, Any]) -> None:
        """Run a job to its end, delete it, and wait until none of its objects is left. Raises: AssertionError."""
        name = manifest["metadata"]["name"]
        changed = self._waiting[name] = asyncio.Event()
        self.add(manifest)
        key = Key("default", name)
        while True:
            resource = self.store.get(constants.KIND, key.namespace, name)
            assert resource is not None
            if (phase := (resource.get("status") or {}).get("phase")) in ENDED:
                break
            await self._next(changed, f"{name} to end; it is {phase}")
        assert phase == "Succeeded", resource["status"]
        await self.delete_resource(key, uid=resource["metadata"]["uid"])
        while self.store.list("Pod", "default", {constants.LABEL_JOB_NAME: name}):
            await self._next(changed, f"the end of {name}'s pods")
        del self._waiting[name]

    async def _next(self, changed: asyncio.Event, event: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await changed.wait()
        except TimeoutError:
            logs = [f"--- {path.name} ---\n{path.read_text()[-2000:]}" for path in self._logs.glob("*.log")]
            raise AssertionError("\n".join([f"waited in vain for {event}", *logs[-4:]])) from None
        changed.clear()

    def _run_pod(self, pod: Mapping[str, Any]) -> None:
        super()._run_pod(pod if self._with_launcher else _remove_launcher(pod))

    def _changed(self, item: Mapping[str, Any], gone: bool) -> None:
        super()._changed(item, gone)
        metadata = item["metadata"]
        name = (metadata.get("labels") or {}).get(constants.LABEL_JOB_NAME, metadata["name"])
        self.queue.add(Key(metadata.get("namespace", "default"), name))
        if name in self._waiting:
            self._waiting[name].set()


def _remove_launcher(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod that runs the training command itself."""
    (container,) = pod["spec"]["containers"]
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "command": TRAINING, "args": []}]}}


def build_job(name: str, nodes: int) -> dict[str, Any]:
    """Return a job with minimal work."""
    container = {"name": "trainer", "image": "x", "command": TRAINING}
    with hold_port() as holder:  # no longer: the soak counts the resources that each of very many jobs leaves open
        port = holder.getsockname()[1]
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodes": nodes,
            "preflight": {"mode": "Off"},
            "rendezvous": {"port": port},
            "template": {"spec": {"containers": [container]}},
        },
    }


async def soak_local(folder: Path, in_sequence: int, at_once: int, *, with_launcher: bool) -> list[Samples]:
    """Run jobs of two pods one after another, then several rounds of many jobs of one pod at once."""
    mark = uuid.uuid4().hex
    temporary = folder / "tmp"
    temporary.mkdir()
    farm = Farm(folder, os.environ | {MARK: mark, "TMPDIR": str(temporary)}, with_launcher=with_launcher)
    farm.queue.start()
    me = psutil.Process()

    def look(samples: Samples, jobs: int) -> None:
        gc.collect()
        kept = sum(not path.is_dir() for path in temporary.rglob("*"))
        samples.take(jobs, me, **{"temporary files": kept, "objects kept": len(farm.store.list("Pod"))})

    results = []
    try:
        if in_sequence:
            results.append(Samples("one after another"))
            every = max(1, in_sequence // 40)
            for number in range(in_sequence):
                await farm.run_job(build_job(f"one-{number}", nodes=2))
                if number % every == 0:
                    look(results[-1], number + 1)
        if at_once:
            results.append(Samples(f"{at_once} at once"))
            for turn in range(4):
                await asyncio.gather(*(farm.run_job(build_job(f"many-{turn}-{n}", nodes=1)) for n in range(at_once)))
                look(results[-1], (turn + 1) * at_once)
    finally:
        await farm.queue.stop()
        await farm.close()
    if marked := find_marked(mark):
        raise AssertionError("left running: " + "; ".join(map(describe_process, marked)))
    return results


async def soak_operator(folder: Path, count: int) -> Samples:
    """Run and delete so many jobs on the stand-in in waves; measure the operator after each."""
    samples = Samples("operator, jobs created, run and deleted")
    with StandIn() as server:
        kubeconfig = server.write_kubeconfig(folder)
        (port,) = free_ports(1)
        with OperatorProcess(kubeconfig, folder / "operator.log", port=port) as operator:
            assert operator.process is not None
            process = psutil.Process(operator.process.pid)
            async with ClusterActors(kubeconfig) as actors:
                for first in range(0, count, WAVE):
                    names = [f"job-{number}" for number in range(first, min(first + WAVE, count))]
                    await _run_wave(server, actors, names)
                    samples.take(first + len(names), process)
    return samples


async def _run_wave(server: StandIn, actors: ClusterActors, names: Sequence[str]) -> None:
    """Run and delete jobs of one pod. It reads the stand-in's storage: calls would take most of the CPU time."""
    await asyncio.gather(*(actors.create(job_manifest(name, nodes=1)) for name in names))
    await _until(lambda: len(server.list("Pod")) == len(names), "all pods")
    await asyncio.gather(*(actors.run_pod(f"{name}-1", 0) for name in names))
    await asyncio.gather(*(actors.finish_pod(f"{name}-1", 0) for name in names))

    def have_succeeded() -> bool:
        return all((job.get("status") or {}).get("phase") == "Succeeded" for job in server.list(constants.KIND))

    await _until(have_succeeded, "the success of all jobs")
    await asyncio.gather(*(actors.delete(constants.KIND, name) for name in names))
    await _until(lambda: not server.list("Job") and not server.list("Pod"), "garbage collection")


async def _until(probe: Callable[[], object], event: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not probe():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {event}")
        await asyncio.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.soak", description=__doc__)
    parser.add_argument("--in-sequence", type=int, default=200, metavar="N", help="local jobs one after another; 200")
    parser.add_argument("--at-once", type=int, default=50, metavar="N", help="local jobs at once, four times; 50")
    parser.add_argument("--operator", type=int, default=1000, metavar="N", help="jobs on the API server; 1000")
    parser.add_argument(
        "--torch", action="store_true", help="with launcher and torchrun in every pod, about five CPU seconds each"
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ddp-soak-") as name:
        folder = Path(name)
        if arguments.in_sequence or arguments.at_once:
            local = soak_local(folder, arguments.in_sequence, arguments.at_once, with_launcher=arguments.torch)
            for samples in asyncio.run(local):
                print(samples.table(), flush=True)
        if arguments.operator:
            print(asyncio.run(soak_operator(folder, arguments.operator)).table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
