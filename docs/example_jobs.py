"""A cluster with jobs in different states, for the pictures of `ddp ui`: people ask about each of them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

from ddp_cli.client.api import Api, Object, api_path, job_path
from ddp_cli.client.errors import ApiError
from ddp_cli.features.ui.server import Server
from ddp_cli.features.ui.sources import ClusterJobs
from ddp_operator.api import constants
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.kubeobjects import format_time, utc_now
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import to_json
from ddp_pod.contract.report import PodReport

NAMESPACE = "vision"
NOW = utc_now().replace(microsecond=0)
SLOW_RANK = 11
RANKS = 16


def at(minutes: float) -> str:
    """Return a time before now; negative minutes: after it."""
    return format_time(NOW - timedelta(minutes=minutes))


@dataclass(frozen=True)
class Training:
    """A training whose numbers all follow from these. Times in minutes before now, ``step`` and ``slow`` in seconds."""

    total: int
    batch: int
    step: float
    first: float
    floor: float
    pace: float = 5.0
    rate: float = 1e-3
    last: float = 0.0
    killed: float = 0.0
    """When a rank was killed; afterwards a step takes ``slow``, because one rank is slow."""

    pause: float = 4.0
    lost: int = 400
    slow: float = 0.0

    @property
    def killed_step(self) -> int:
        """The last step before the kill."""
        return round(60 * (self.first - self.killed) / self.step)

    def is_slow(self, minutes: float) -> bool:
        """Return whether the job was restarted by then."""
        return minutes < self.killed - self.pause / 2

    def count(self, minutes: float) -> int:
        """Return the steps that are done."""
        if not self.is_slow(minutes):
            return max(1, round(60 * (self.first - minutes) / self.step))
        return self.killed_step - self.lost + round(60 * (self.killed - self.pause - minutes) / self.slow)

    @property
    def step_seconds(self) -> float:
        """The time of a step now."""
        return self.slow if self.killed else self.step

    @property
    def rows(self) -> list[str]:
        """The rows of a status."""
        random = Random(self.total + self.batch)
        rows = []
        parts = [(self.first, self.killed or self.last)]
        parts += [(self.killed - self.pause, self.last)] if self.killed else []
        times = [start + (end - start) * number / 29 for start, end in parts for number in range(30)]
        for minutes in times:
            done = self.count(minutes)
            loss = self.floor + (2.6 * math.exp(-self.pace * done / self.total) + 0.3) * random.uniform(0.94, 1.06)
            is_slow = self.is_slow(minutes)
            speed = self.batch / (self.slow if is_slow else self.step) * random.uniform(0.97, 1.02)
            decay = self.rate * (1 + math.cos(math.pi * done / self.total)) / 2
            time = (NOW - timedelta(minutes=minutes)).timestamp()
            rows.append(f"{time:.0f},{int(is_slow)},{done},{loss:.4g},{speed:.0f},{decay:.5f}")
        return rows

    def describe(self) -> dict[str, Any]:
        """Return the fields of a status."""
        done = self.count(self.last)
        loss, speed = self.rows[-1].split(",")[3:5]
        left = round((self.total - done) * self.step_seconds)
        progress = {
            "step": done, "totalSteps": self.total, "percent": f"{100 * done / self.total:.1f}%", "loss": loss,
            "throughput": f"{speed} samples/s",
            "stepsPerSecond": f"{1 / self.step_seconds:.3g}", "lastStepTime": at(self.last),
            **({"eta": format_duration(left)} if left else {}),
        }  # fmt: skip
        columns = "time,restarts,step,loss,samples_per_second,learning_rate"
        return {"progress": progress, "points": [columns, *self.rows]}


SLOWED = Training(45_000, 512, 0.56, 236, 0.4, pace=6, killed=129, slow=0.93)


def condition(kind: str, status: str, reason: str, message: str, minutes: float) -> dict[str, str]:
    """Return a condition since some minutes."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(minutes)}


def trains(first: float, since: float = 0.0) -> list[dict[str, str]]:
    """Return the conditions of a job that trains since its ``first`` step, or since a restart."""
    return [
        condition("Accepted", "True", "Valid", "the job is valid", first + 4),
        condition("Scheduled", "True", "PodsRunning", "4/4 pods scheduled", first + 3),
        condition("Rendezvoused", "True", "Joined", "all pods joined", first + 1),
        condition("Progressing", "True", "Training", "training", since or first),
    ]


def job(name: str, phase: str, started: float, *, arguments: tuple[str, ...] = (), **status: Any) -> Object:
    """Return a job that was started some minutes ago."""
    container = {
        "name": "trainer",
        "image": "registry.example/vision:7",
        "command": ["python", "train.py", *arguments],
        "resources": {"limits": {"nvidia.com/gpu": "4"}},
    }
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {**metadata, "creationTimestamp": at(started)},
        "spec": {"nodes": 4, "template": {"spec": {"containers": [container]}}},
        "status": {
            "phase": phase,
            "observedGeneration": 1,
            "attempt": 1,
            "nodes": {"desired": 4, "ready": 4 * (phase == "Running"), "succeeded": 4 * (phase == "Succeeded")},
            "startTime": at(started),
            **status,
        },
    }


def make_jobs() -> list[Object]:
    """Return the jobs."""
    memory = {
        "attempt": 1, "rank": 5, "pod": "detr-large-1-1-x7k2p", "node": "gpu-13", "exitCode": 137,
        "category": "OOMKilled", "message": "the kernel killed rank 5 at its container memory limit of 80 GiB",
        "remedy": "raise resources.limits.memory, or use fewer workers of the DataLoader", "time": at(SLOWED.killed),
    }  # fmt: skip
    label = {
        "attempt": 1, "rank": 3, "pod": "vit-b16-1-3-7dmzq", "node": "gpu-04", "exitCode": 1, "category": "UserError",
        "message": "ValueError: label 1000 is out of range for 1000 classes", "time": at(14),
        "traceback": 'File "train.py", line 88, in step\n    loss = criterion(model(images), labels)\nValueError: …',
        "remedy": "fix the line of the script that the traceback points to",
    }  # fmt: skip
    lost = {
        "attempt": 1, "level": "SamePods", "cause": "OOMKilled", "time": at(SLOWED.killed),
        "step": SLOWED.killed_step, "stepsLost": SLOWED.lost, "recoverySeconds": round(60 * SLOWED.pause),
    }  # fmt: skip
    productive = 1 - (4 + SLOWED.pause + SLOWED.lost * SLOWED.step / 60) / 240
    queue = {"clusterQueue": "gpu-h100", "position": 3, "of": 17, "waitsFor": "nvidia.com/gpu"}
    hang = "no step for 420 s: rank 6 on gpu-12 waits for data (train.py:61), its 15 peers wait for it"
    succeeded = ("Complete", "True", "Succeeded", "all pods have succeeded")
    return [
        job(
            "vit-b16", "Failed", 42, completionTime=at(14), lastFailure=label,
            **Training(90_000, 1024, 1.19, 38, 4.2, pace=400, last=14).describe(),
            conditions=[condition("Failed", "True", "UserError", str(label["message"]), 14)],
        ),
        job(
            "clip-base", "Running", 190, **Training(60_000, 2048, 0.34, 186, 1.4, pace=4, last=7).describe(),
            conditions=[*trains(186)[:3], condition("Progressing", "False", "Stalled", hang, 6)],
        ),
        job(
            "segformer", "Pending", 35, startTime=None,
            queue={**queue, "startP50": at(-40), "startP90": at(-80)},
            conditions=[condition("Scheduled", "False", "QuotaPending", "position 3/17 in gpu-h100", 35)],
        ),
        job(
            "detr-large", "Running", 240, restarts={"all": 1, "inPlace": 1}, lastFailure=memory, lastRestart=lost,
            goodput=f"{productive:.3f}", **SLOWED.describe(),
            stragglers=[{"rank": SLOW_RANK, "ratio": "1.7", "cause": "compute"}],
            conditions=trains(SLOWED.first, SLOWED.killed - SLOWED.pause),
        ),
        job(
            "resnet50-lr3", "Running", 65, arguments=("--lr", "0.3"), conditions=trains(61),
            **Training(30_000, 256, 0.166, 61, 0.95, pace=5, rate=0.3).describe(),
        ),
        job(
            "resnet50-lr1", "Succeeded", 1500, arguments=("--lr", "0.1"), completionTime=at(1411),
            **Training(30_000, 256, 0.168, 1496, 1.2, pace=3.5, rate=0.1, last=1412).describe(),
            conditions=[condition(*succeeded, 1411)],
        ),
        job(
            "mae-huge", "Suspended", 900, **Training(40_000, 4096, 6.2, 890, 0.2, pace=9, last=60).describe(),
            conditions=[condition("Suspended", "True", "SuspendedBySpec", "spec.suspend is true", 60)],
        ),
        job(
            "yolo-nightly", "Succeeded", 700, completionTime=at(520), conditions=[condition(*succeeded, 520)],
            **Training(50_000, 128, 0.21, 696, 0.55, pace=6, last=521).describe(),
        ),
    ]  # fmt: skip


def make_pods(name: str) -> list[Object]:
    """Return the running pods of a job."""
    return [
        {
            "metadata": {
                "name": f"{name}-1-{index}-x7k2p",
                "namespace": NAMESPACE,
                "uid": f"{name}-{index}",
                "creationTimestamp": at(240),
                "labels": {constants.LABEL_JOB_NAME: name, constants.LABEL_ATTEMPT: "1"},
                "annotations": {constants.ANNOTATION_COMPLETION_INDEX: str(index)},
            },
            "spec": {"nodeName": f"gpu-{12 + index}", "containers": [{"name": "trainer"}]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]},
        }
        for index in range(4)
    ]


def make_report(index: int) -> bytes:
    """Return the report of a pod, one of whose ranks is slow, since the processes started again."""
    done = SLOWED.count(0.0)
    steps = done - SLOWED.killed_step + SLOWED.lost
    ranks = []
    for rank in range(4 * index, 4 * index + 4):
        compute = 0.88 if rank == SLOW_RANK else 0.50 + 0.01 * math.sin(rank)
        counters = RankProgress(rank, step=float(done), steps=float(steps), step_seconds=steps * SLOWED.slow)
        counters.update({"compute_seconds": steps * compute, "data_seconds": steps * (0.030 + 0.002 * math.cos(rank))})
        counters.last_step_time = NOW.timestamp() - 0.1 * rank / RANKS
        ranks.append(counters)
    return json.dumps(to_json(PodReport(phase="Running", ranks=tuple(ranks)))).encode()


class ExampleApi(Api):
    """An API server with these jobs, and the pods of one, which never changes."""

    def __init__(self) -> None:
        self.namespace = self.home = NAMESPACE
        self._chosen = True
        self.host = "https://kubernetes.example"

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Object:
        """Return a list. Raises: ApiError, for one that is not here."""
        lists = {
            job_path(NAMESPACE): make_jobs(),
            api_path("v1", "pods", NAMESPACE): make_pods(str((query or {}).get("labelSelector")).rpartition("=")[2]),
            api_path("v1", "events", NAMESPACE): [],
        }
        if path not in lists:
            raise ApiError(f"{path}: not found", 404)
        return {"items": lists[path], "metadata": {"resourceVersion": "1"}}

    def lines(self, path: str, query: Any = None, *, timeout: float = 30.0) -> Iterator[str]:
        """Yield no change. Logs have a line for each rank."""
        if (query or {}).get("watch") or (query or {}).get("follow") == "true":
            time.sleep(3600)
        index = int(path.split("/")[-2].split("-")[-2]) if path.endswith("/log") else 0
        loss = SLOWED.describe()["progress"]["loss"]
        for rank in range(4 * index, 4 * index + 4):
            yield f"{at(0)[:-1]}.{rank:03}Z [rank{rank}]: step {SLOWED.count(0.0)} loss {float(loss) + rank / 1000:.3f}"

    def read(self, path: str, limit: int, seconds: float) -> bytes:
        """Return the report of a pod. Raises: ApiError, for other pages."""
        pod = re.search(r"-(\d)-x7k2p:9400/proxy/report$", path)
        if pod is None:
            raise ApiError(f"{path}: not found", 404)
        return make_report(int(pod[1]))


def open_server() -> Server:
    """Return the server of the pages about these jobs."""
    jobs = ClusterJobs(ExampleApi(), everywhere=False)
    jobs.start()
    return Server([jobs], f"namespace {NAMESPACE} of https://kubernetes.example")
